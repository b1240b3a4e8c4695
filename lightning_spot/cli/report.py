"""``lightning-spot report``: where the time of a real run went, attempt by attempt."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from lightning_spot.cli.arguments import location_of
from lightning_spot.cli.output import add_output, plain_table, print_answer
from lightning_spot.client.stores import open_store
from lightning_spot.config import format_count, format_seconds, names_server
from lightning_spot.errors import SettingsError, SnapshotNotFoundError
from lightning_spot.goodput.ledger import AttemptRecord, Spent, history, lost_steps, spent, total
from lightning_spot.goodput.records import completed, read_records

_COLOURS = {
    "startup_s": "#8c8c8c",
    "restore_s": "#e0a000",
    "productive_s": "#2a9d4a",
    "blocked_s": "#d4602c",
    "lost_s": "#c2283a",
    "down_s": "#8884",
}
"""What the time of an attempt goes to, as it is drawn."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    parser.add_argument("url", metavar="RUN", help="the run's directory, or URL in a bucket")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw where the time of each attempt went")
    add_output(parser)


def report(arguments: argparse.Namespace) -> int:
    """Show the attempts of a run, and the whole."""
    if arguments.plot and Path(arguments.plot).suffix.lower() not in ("", ".svg"):
        raise SettingsError(f"--plot {arguments.plot}: the drawing is SVG. Give a file that ends in .svg")
    if names_server(arguments.url):
        raise SettingsError(
            f"{arguments.url} names a snapshot server, which keeps no records of attempts: give the run's dirpath"
        )
    url = location_of(arguments.url, (), "report").url
    before, records = history(_records(url))
    if not records:
        open_store(url).survey()  # a bucket that is not there is another error than one without this run
        raise SnapshotNotFoundError(
            f"{url} has no records of attempts: it is no run, or was trained without SpotCheckpoint or GoodputMonitor"
        )
    parts = spent(records)
    whole = total([before.closed, *parts])
    lines = []
    if before.attempts:
        gone = format_count(before.attempts, "attempt")
        lines.append(f"{gone} before these, {format_seconds(before.closed.total_s)} in all")
    goodput = f"goodput {100 * whole.goodput:.1f} % of {format_seconds(whole.total_s)}"
    goodput += "".join(f", {name.removesuffix('_s')} {format_seconds(getattr(whole, name))}" for name in _COLOURS)
    if arguments.plot:
        try:
            Path(arguments.plot).write_text(_timeline(records, parts), "utf-8")
        except OSError as error:
            raise SettingsError(f"--plot {arguments.plot} cannot be written: {error.strerror}") from error
    document = _facts(records, parts, whole, before.attempts)
    print_answer(arguments.output, document, [*lines, _table(records, parts), goodput])
    return 0


def _table(records: list[AttemptRecord], parts: list[Spent]) -> Table:
    """A row for each attempt."""
    headings = ("ATTEMPT", "BEGUN", "STEPS", "LASTED", "SNAPSHOTS", "BLOCKED", "LOST", "DOWN AFTER", "END")
    table = plain_table(headings, left=("BEGUN", "END"))
    for record, part, lost in zip(records, parts, lost_steps(records), strict=True):
        table.add_row(
            str(record.attempt),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.begun_unix_s)),
            f"{record.from_step} to {record.step}" if record.trained_unix_s is not None else "none",
            format_seconds(part.total_s - part.down_s),
            str(len(record.snapshots)),
            format_seconds(part.blocked_s),
            f"{format_count(lost, 'step')}, {format_seconds(part.lost_s)}",
            format_seconds(part.down_s),
            record.end,
        )
    return table


_DRAWN, _BAR, _SIDE = 1000, 22, 60


def _timeline(records: Sequence[AttemptRecord], parts: Sequence[Spent]) -> str:
    """A bar for each attempt over the time of the run, to scale."""
    begun_s = records[0].begun_unix_s
    ends = [record.begun_unix_s + part.total_s for record, part in zip(records, parts, strict=True)]
    scale = (_DRAWN - _SIDE) / max(max(ends) - begun_s, 1e-9)
    drawn = []
    for number, (name, colour) in enumerate(_COLOURS.items()):
        left = _SIDE + 130 * number
        drawn.append(f'<rect x="{left}" y="4" width="12" height="12" fill="{colour}"/>')
        drawn.append(f'<text x="{left + 18}" y="14">{name.removesuffix("_s")}</text>')
    for row, (record, part) in enumerate(zip(records, parts, strict=True), 1):
        x, y = _SIDE + (record.begun_unix_s - begun_s) * scale, row * _BAR + 8
        drawn.append(f'<text x="0" y="{y + 12}">{record.attempt}</text>')
        for name, colour in _COLOURS.items():
            seconds = getattr(part, name)
            if (width := seconds * scale) > 0:
                title = f"<title>{name.removesuffix('_s')}: {format_seconds(seconds)}</title>"
                drawn.append(
                    f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="16" fill="{colour}">{title}</rect>'
                )
            x += width
    shapes = "\n".join(drawn)
    size = f"0 0 {_DRAWN} {(len(records) + 1) * _BAR + 8}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" font-size="12"'
    return f'{head} font-family="sans-serif" aria-label="The attempts over time">\n{shapes}\n</svg>\n'


def _records(url: str) -> list[AttemptRecord]:
    """The records in storage; of killed attempts with what this host and their snapshots tell beyond them."""
    records = read_records(url)
    if all(record.end != "running" for record in records):
        return records
    snapshots = open_store(url).survey().manifests
    return [
        completed(
            url, record, [(item.step, item.created_unix_s) for item in snapshots if item.attempt == record.attempt]
        )
        for record in records
    ]


def _facts(records: list[AttemptRecord], parts: list[Spent], whole: Spent, before: int) -> dict[str, object]:
    def plain(part: Spent) -> dict[str, float]:
        return {**{name: getattr(part, name) for name in _COLOURS}, "total_s": part.total_s, "goodput": part.goodput}

    attempts = [
        {**replace(record, earlier=None).as_dict(), "spent": plain(part)}
        for record, part in zip(records, parts, strict=True)
    ]
    return {"attempts": attempts, "attempts_before": before, "whole": plain(whole)}
