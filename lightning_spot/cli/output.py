"""What commands print with: tables that are whole, in a pipe and on a narrow terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

_NARROWEST = 400  # columns: names and URLs are read by programs, and copied; a terminal breaks lines by itself


def wide_console() -> Console:
    """Standard output."""
    console = Console(soft_wrap=True, highlight=False)
    return Console(soft_wrap=True, highlight=False, width=max(console.width, _NARROWEST))


def plain_table(headings: Sequence[str], *, left: Sequence[str], title: str | None = None) -> Table:
    """A table without lines.

    Args:
        headings: of its columns.
        left: those of them that are aligned to the left; numbers are not.
        title: above it.
    """
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return table
