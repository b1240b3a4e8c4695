"""``lightning-spot report``: where the time of a real run went, attempt by attempt."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

from lightning_spot.cli.arguments import location_of
from lightning_spot.cli.output import plain_table, wide_console
from lightning_spot.client.stores import open_store
from lightning_spot.config import format_count, format_seconds, names_server
from lightning_spot.errors import SettingsError, SnapshotNotFoundError
from lightning_spot.goodput.ledger import AttemptRecord, Spent, history, lost_steps, spent, total
from lightning_spot.goodput.records import completed, read_records

_WIDE = 60
_PARTS = {"startup_s": "-", "restore_s": "r", "productive_s": "=", "blocked_s": "b", "lost_s": "x", "down_s": "."}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    parser.add_argument("url", metavar="RUN", help="the run's directory, or URL in a bucket")
    parser.add_argument("--plot", metavar="FILE", help="draw the run (.png, .svg, .pdf)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def report(arguments: argparse.Namespace) -> int:
    """Show the attempts of a run, and the whole."""
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
    if arguments.plot:
        from lightning_spot.simulation.plot import plot_run

        plot_run(records, arguments.plot)
    if arguments.json:
        print(json.dumps(_facts(records, parts, whole, before.attempts), indent=1))
        return 0
    console = wide_console()
    replicated = any(record.replicas > 1 for record in records)
    copies = ("REPLICAS",) if replicated else ()
    headings = ("ATTEMPT", "BEGUN", "STEPS", "LASTED", "SNAPSHOTS", *copies, "BLOCKED", "LOST", "DOWN AFTER", "END")
    table = plain_table(headings, left=("BEGUN", "END"))
    for record, part, lost in zip(records, parts, lost_steps(records), strict=True):
        table.add_row(
            str(record.attempt),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.begun_unix_s)),
            f"{record.from_step} to {record.step}" if record.trained_unix_s is not None else "none",
            format_seconds(part.total_s - part.down_s),
            str(len(record.snapshots)),
            *((str(record.replicas),) if replicated else ()),
            format_seconds(part.blocked_s),
            f"{format_count(lost, 'step')}, {format_seconds(part.lost_s)}",
            format_seconds(part.down_s),
            record.end,
        )
    if before.attempts:
        console.print(
            f"{format_count(before.attempts, 'attempt')} before these, {format_seconds(before.closed.total_s)} in all"
        )
    console.print(table)
    console.print(_line(parts, whole))
    console.print(f"goodput {100 * whole.goodput:.1f} % of {format_seconds(whole.total_s)}")
    return 0


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
        return {**{name: getattr(part, name) for name in _PARTS}, "total_s": part.total_s, "goodput": part.goodput}

    attempts = [
        {**replace(record, earlier=None).as_dict(), "spent": plain(part)}
        for record, part in zip(records, parts, strict=True)
    ]
    return {"attempts": attempts, "attempts_before": before, "whole": plain(whole)}


def _line(parts: list[Spent], whole: Spent) -> str:
    """The run on one line, to scale, and what the signs mean."""
    drawn = ""
    for part in parts:
        for name in _PARTS:
            share = getattr(part, name) / max(whole.total_s, 1e-9) * _WIDE
            drawn += _PARTS[name] * (round(share) or (1 if share > 0.05 else 0))
    meaning = ", ".join(f"{sign} {name.removesuffix('_s')}" for name, sign in _PARTS.items())
    return f"|{drawn}|  {meaning}"
