"""``lightning-spot report``: where the time of a real run went, attempt by attempt."""

from __future__ import annotations

import argparse
import html
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from lightning_spot.cli.arguments import add_run, location_of
from lightning_spot.cli.output import add_output, plain_table, print_answer
from lightning_spot.client.stores import open_store
from lightning_spot.config import format_count, format_seconds
from lightning_spot.errors import SettingsError, SnapshotNotFoundError
from lightning_spot.goodput.ledger import AttemptRecord, Spent, lost_steps, spent
from lightning_spot.goodput.records import completed, newest_record
from lightning_spot.untrusted import LONGEST_TEXT, plain

_COLOURS = {
    "startup_s": "#8c8c8c",
    "restore_s": "#e0a000",
    "productive_s": "#2a9d4a",
    "blocked_s": "#d4602c",
    "lost_s": "#c2283a",
    "down_s": "#8884",
}
"""What the time of an attempt goes to, as it is drawn."""
_HEADINGS = ("ATTEMPT", "BEGUN", "STEPS", "LASTED", "SNAPSHOTS", "BLOCKED", "LOST", "DOWN AFTER", "END")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    add_run(parser, servers=False, stored=True)
    parser.add_argument("--plot", metavar="FILE.svg", help="draw where the time of each attempt went")
    parser.add_argument("--html", metavar="FILE", help="write the report as one HTML page, with that drawing")
    add_output(parser)


def report(arguments: argparse.Namespace) -> int:
    """Show the attempts of a run, and the whole."""
    if arguments.plot and Path(arguments.plot).suffix.lower() not in ("", ".svg"):
        raise SettingsError(f"--plot {arguments.plot}: the drawing is SVG. Give a file that ends in .svg")
    url = location_of(arguments.run).url
    newest = newest_record(url)
    if newest is None or newest.end == "running":  # what this host, and its snapshots, tell beyond that
        snapshots = open_store(url).survey().manifests  # a bucket that is not there is another error than no record
        newest = completed(url, newest, snapshots) if newest is not None else None
    if newest is None:
        raise SnapshotNotFoundError(
            f"{url} has no records of attempts: it is no run, or was trained without SpotCheckpoint or GoodputMonitor"
        )
    records, before = newest.known, newest.before
    parts, whole = spent(records), before.spent(newest)
    lines = []
    if before.attempts:
        gone = format_count(before.attempts, "attempt")
        lines.append(f"{gone} before these, {format_seconds(before.closed.total_s)} in all")
    goodput = f"goodput {100 * whole.goodput:.1f} % of {format_seconds(whole.total_s)}"
    goodput += "".join(f", {name.removesuffix('_s')} {format_seconds(getattr(whole, name))}" for name in _COLOURS)
    rows, drawing = _rows(records, parts), _timeline(records, parts)
    if arguments.plot:
        _write("--plot", arguments.plot, drawing)
    if arguments.html:
        _write("--html", arguments.html, _page(url, [goodput, *lines], rows, drawing))
    attempts = [
        {**asdict(replace(record, earlier=None)), "spent": _facts(part)}
        for record, part in zip(records, parts, strict=True)
    ]
    document = {"attempts": attempts, "attempts_before": before.attempts, "whole": _facts(whole)}
    table = plain_table(_HEADINGS, rows, left=("BEGUN", "END"))
    print_answer(arguments.output, document, [*lines, table, goodput])
    return 0


def _write(option: str, file: str, text: str) -> None:
    try:
        Path(file).write_text(text, "utf-8")
    except OSError as error:
        raise SettingsError(f"{option} {file} cannot be written: {error.strerror}") from error


def _rows(records: list[AttemptRecord], parts: list[Spent]) -> list[tuple[str, ...]]:
    """What a table has of each attempt."""
    return [
        (
            str(record.attempt),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.begun_unix_s)),
            f"{record.from_step} to {record.step}" if record.trained_unix_s is not None else "none",
            format_seconds(part.total_s - part.down_s),
            str(record.snapshots),
            format_seconds(part.blocked_s),
            f"{format_count(lost, 'step')}, {format_seconds(part.lost_s)}",
            format_seconds(part.down_s),
            record.end,
        )
        for record, part, lost in zip(records, parts, lost_steps(records), strict=True)
    ]


_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
figure { margin: 1.5rem 0; } svg { width: 100%; } svg text { font-size: 12px; fill: currentColor; }
div { overflow-x: auto; } table { border-collapse: collapse; white-space: nowrap; }
th, td { padding: .25rem .75rem .25rem 0; text-align: left; border-bottom: 1px solid #8884; }
"""
_DRAWN, _BAR, _SIDE = 1000, 22, 60


def _page(url: str, lines: Sequence[str], rows: Sequence[Sequence[str]], drawing: str) -> str:
    """The report as one page of HTML, which loads nothing and runs nothing."""

    def element(name: str, text: str) -> str:
        return f"<{name}>{html.escape(plain(text, LONGEST_TEXT))}</{name}>"

    head = "".join(element("th", heading.capitalize()) for heading in _HEADINGS)
    body = "".join(f"<tr>{''.join(element('td', cell) for cell in row)}</tr>\n" for row in rows)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{policy}">
{element("title", f"Report of {url}")}
<style>{_STYLE}</style>
</head>
<body>
{element("h1", url)}
{"".join(element("p", line) for line in lines)}
<figure>
{drawing}
<figcaption>Where the time of each attempt went. What was lost was trained again by the next attempt.</figcaption>
</figure>
<div><table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}</tbody>
</table></div>
</body>
</html>
"""


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


def _facts(part: Spent) -> dict[str, float]:
    return {**{name: getattr(part, name) for name in _COLOURS}, "total_s": part.total_s, "goodput": part.goodput}
