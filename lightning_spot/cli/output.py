"""What commands print: a table for people, a JSON document for programs, or names for ``xargs``.

Tables are complete, in a pipe and on a narrow terminal. No text in them is obeyed. Diagnostics go to standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_spot.untrusted import LONGEST_TEXT, plain

INCOMPLETE = 3
"""Exit code of a command that did its work, although a server or the storage did not answer."""

_NARROWEST = 400  # columns: names and URLs are read by programs, and copied; a terminal breaks lines by itself


class PlainConsole(Console):  # type: ignore[misc]  # rich is not followed
    """Prints text as it is: a server or a bucket may have chosen any part of it."""

    def print(self, *objects: Any, **how: Any) -> None:
        """Print, see ``rich``; each text is one line without markup."""
        shown = (plain(item, LONGEST_TEXT) if isinstance(item, str) else item for item in objects)
        super().print(*shown, **{"markup": False, "highlight": False, **how})

    def on_broken_pipe(self) -> None:
        """Leave it to the command's end, which rich would make an error of the command."""
        raise BrokenPipeError


def add_output(parser: argparse.ArgumentParser, *, names: bool = False) -> None:
    """Add ``-o``.

    Args:
        parser: of the command.
        names: whether the command lists snapshots, which ``-o name`` names.
    """
    forms = {"table": "for people (default)", "json": "for programs"}
    if names:
        forms["name"] = "RUN@STEP lines, for xargs"
    texts = ", ".join(f"{form} {text}" for form, text in forms.items())
    parser.add_argument("-o", "--output", choices=forms, default="table", help=texts)


def print_answer(
    form: str, document: Mapping[str, object], shown: Iterable[Table | Text | str], names: Iterable[str] = ()
) -> None:
    """Print the answer of a command in the form that ``-o`` asks for.

    Args:
        form: what ``-o`` asks for.
        document: for ``json``.
        shown: tables and lines for people.
        names: ``RUN@STEP`` of each snapshot, for ``name``; each is printed once.
    """
    if form == "json":
        sys.stdout.write(f"{json.dumps(_finite(document), indent=1)}\n")
    elif form == "name":
        for name in dict.fromkeys(names):
            print_line(name)
    else:
        console = PlainConsole(soft_wrap=True, width=max(Console().width, _NARROWEST))
        for item in shown:
            console.print(item)


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def age(unix_s: float | None) -> str | None:
    """How long ago that was, for people."""
    if unix_s is None:
        return None
    seconds = max(0.0, time.time() - unix_s)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def warning(text: str) -> Text:
    """A line of an answer that names something wrong."""
    return Text(plain(text, LONGEST_TEXT), style="yellow")


def error_console() -> PlainConsole:
    """Standard error."""
    return PlainConsole(stderr=True, soft_wrap=True)


def incomplete(problems: Iterable[str]) -> int:
    """Name each server, or storage, that did not answer; the exit code for that."""
    code = 0
    for problem in problems:
        error_console().print(f"not asked: {problem}")
        code = INCOMPLETE
    return code


def print_line(text: str) -> None:
    """One line of the answer, on standard output."""
    sys.stdout.write(f"{plain(text, LONGEST_TEXT)}\n")


def table_of(keys: str, facts: Iterable[Mapping[str, Any]]) -> Table:
    """A table of what programs are told, with sizes and ages as people read them; numbers are aligned to the right.

    Args:
        keys: what is shown, in this order.
        facts: of each row.
    """
    from lightning_spot.config import format_bytes  # --help needs no settings

    rows, headings, columns, left = [*facts], list[str](), list[list[object]](), list[str]()
    for key in keys.split():
        cells = [each.get(key) for each in rows]
        heading = "SNAPSHOT" if key == "name" else key.partition("_")[0].upper()
        if any(isinstance(cell, str | list) for cell in cells):
            left.append(heading)
            cells = [", ".join(cell) if isinstance(cell, list) else cell for cell in cells]
        elif key.endswith("_unix_s"):
            heading, cells = "AGE", [age(cell) for cell in cells]
        elif key.endswith("bytes"):
            heading, cells = "SIZE", [format_bytes(each[key]) for each in rows]
        headings.append(heading)
        columns.append(cells)
    return plain_table(headings, zip(*columns, strict=True), left=left)


def plain_table(
    headings: Sequence[str], rows: Iterable[Iterable[object]], left: Sequence[str] = (), title: str | None = None
) -> Table:
    """A table without lines.

    Args:
        headings: of its columns.
        rows: of cells; ``None`` is an empty one.
        left: columns that are aligned to the left, default all; numbers are not.
        title: above it.
    """
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in (left or headings) else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text("" if cell is None else plain(cell)) for cell in row))
    return table
