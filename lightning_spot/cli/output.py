"""What commands print with: tables that are whole, in a pipe and on a narrow terminal; no text in them is obeyed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_spot.untrusted import LONGEST_TEXT, plain

_NARROWEST = 400  # columns: names and URLs are read by programs, and copied; a terminal breaks lines by itself


class PlainConsole(Console):  # type: ignore[misc]  # rich is not followed
    """Prints text as it is: a server or a bucket may have chosen any part of it."""

    def print(self, *objects: Any, **how: Any) -> None:
        """Print, see ``rich``; each text is one line without markup."""
        shown = (plain(item, LONGEST_TEXT) if isinstance(item, str) else item for item in objects)
        super().print(*shown, **{"markup": False, "highlight": False, **how})


class _PlainTable(Table):  # type: ignore[misc]  # likewise
    def add_row(self, *cells: Any, **how: Any) -> None:
        super().add_row(*(Text(plain(cell)) if isinstance(cell, str) else cell for cell in cells), **how)


def wide_console() -> PlainConsole:
    """Standard output."""
    console = Console(soft_wrap=True)
    return PlainConsole(soft_wrap=True, width=max(console.width, _NARROWEST))


def error_console() -> PlainConsole:
    """Standard error."""
    return PlainConsole(stderr=True, soft_wrap=True)


def print_line(text: str) -> None:
    """One line of the answer, on standard output."""
    sys.stdout.write(f"{plain(text, LONGEST_TEXT)}\n")


def plain_table(headings: Sequence[str], *, left: Sequence[str], title: str | None = None) -> Table:
    """A table without lines.

    Args:
        headings: of its columns.
        left: those of them that are aligned to the left; numbers are not.
        title: above it.
    """
    table = _PlainTable(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return table
