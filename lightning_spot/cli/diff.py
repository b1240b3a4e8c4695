"""``lightning-spot diff``: in which entries two snapshots, or checkpoints, differ, and how."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from lightning_spot.cli.arguments import add_servers
from lightning_spot.cli.output import add_output, plain_table, print_answer
from lightning_spot.cli.snapshots import ask, code_of_newest, copy_files, in_torch, open_selected
from lightning_spot.snapshot.files import MODEL_FILE
from lightning_spot.snapshot.manifest import MANIFEST_FILE
from lightning_spot.untrusted import LARGE_JSON_BYTES, LONGEST_TEXT, items, plain, read_object

_MOST = 10**7

Difference = tuple[str, str]
"""An entry of two states, and how they differ there."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How two states compare.

    Attributes:
        different: entries in which they differ, none if they are equal bit by bit.
        of_the_run: entries that differ since they are paths or times of the runs themselves.
    """

    different: list[Difference]
    of_the_run: list[Difference]

    def document(self) -> dict[str, object]:
        """The verdict for programs."""
        entries = {"differences": self.different, "of_the_run": self.of_the_run}
        listed = {name: [{"entry": path, "text": text} for path, text in each] for name, each in entries.items()}
        return {"equal": not self.different, **listed}

    def shown(self) -> Iterator[Table | str]:
        """The verdict for people."""
        yield plain_table(("ENTRY", "DIFFERENCE"), self.different) if self.different else "equal, bit by bit"
        if count := len(self.of_the_run):
            yield f"and {count} paths or times of the runs themselves"


def compare_states(first: Path, second: Path) -> Verdict:
    """Compare two checkpoints, files or directories.

    Raises:
        SpotError: if one cannot be read.
    """
    told = in_torch(f"{first} and {second} cannot be compared", "state.compare", str(first), str(second))
    found = read_object(told, LARGE_JSON_BYTES)
    different, of_the_run = (
        [(plain(path, LONGEST_TEXT), plain(text, LONGEST_TEXT)) for path, text in items(found, name, _MOST)]
        for name in ("different", "of_the_run")
    )
    return Verdict(different=different, of_the_run=of_the_run)


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``diff``."""
    for name in ("first", "second"):
        parser.add_argument(
            name, metavar="RUN[@STEP]", help=f"the {name}: a snapshot, or a checkpoint file or directory"
        )
    add_servers(parser, "also ask this snapshot server; may be given several times")
    add_output(parser)


def diff(arguments: argparse.Namespace) -> int:
    """Compare; 1 if the states differ."""
    with tempfile.TemporaryDirectory(prefix="lightning-spot-diff-") as folder:
        first, incomplete = _brought(arguments.first, arguments.server, Path(folder, "first"))
        second, also_incomplete = _brought(arguments.second, arguments.server, Path(folder, "second"))
        found = compare_states(first, second)
    print_answer(arguments.output, found.document(), found.shown())
    return 1 if found.different else incomplete or also_incomplete


def _brought(given: str, servers: list[str], folder: Path) -> tuple[Path, int]:
    """Where the files of a state are: those that were given, or copies of a snapshot's; and the exit code for that."""
    path = Path(given)
    if path.is_file() or any((path / name).is_file() for name in (MANIFEST_FILE, MODEL_FILE)):
        return path, 0
    found = ask(given, servers)
    with contextlib.closing(open_selected(found)) as snapshot:
        copy_files(snapshot, folder)
    return folder, code_of_newest(found)
