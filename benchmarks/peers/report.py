"""Tables and pictures of a comparison. Pure but for the files it writes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.plan import Found

MIB = 2**20
BEGIN, END = "<!-- peers: made by `python -m benchmarks peers --docs` -->", "<!-- peers: end -->"
TIERS = ("host", "peer", "durable")
NOT_EXACT = ("asymcheck-topk", "ours+node topk")
WITHOUT = ("none", "none again")
_HEAD = """\
| way | step time | waits, a snapshot | added, a snapshot | CPU, a snapshot | memory | safe: {tiers} | sent | written \
| restore | rounds |
|---|---|---|---|---|---|---|---|---|---|---|""".replace("{tiers}", " / ".join(TIERS))


@dataclass(frozen=True)
class Spread:
    """Values of several rounds."""

    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def text(self, form: Callable[[float], str]) -> str:
        """The median, with least and most where there are several values; a dash where there are none."""
        if not self.values:
            return "–"
        if len(self.values) == 1:
            return form(self.median)
        return f"{form(self.median)} ({form(min(self.values))} to {form(max(self.values))})"


class Table:
    """One model at one interval: every way against the rounds' own trainings without checkpoints.

    Args:
        cells: of this model and interval.
    """

    def __init__(self, cells: list[dict[str, Any]]) -> None:
        self._none = {cell["round"]: cell for cell in cells if cell["way"] == "none"}
        self._cells = cells
        self.ways = list(dict.fromkeys(sorted((cell["way"] for cell in cells), key=lambda way: way != "none")))

    def against_none(self, way: str, value: Callable[[dict[str, Any], dict[str, Any]], float | None]) -> Spread:
        """A value of each round in which both were measured, computed from both cells."""
        pairs = [(cell, self._none[cell["round"]]) for cell in self.of(way) if cell["round"] in self._none]
        values = [value(cell, base) for cell, base in pairs]
        return Spread([found for found in values if found is not None])

    def of(self, way: str) -> list[dict[str, Any]]:
        return [cell for cell in self._cells if cell["way"] == way]

    def overhead(self, way: str) -> Spread:
        """Share by which a step is longer than without checkpoints, everything included."""
        return self.against_none(way, lambda cell, none: cell["wall_s"] / none["wall_s"] - 1)

    def by_cost(self) -> list[str]:
        """The ways, the cheapest first; those that could not be compared last."""
        return sorted(self.ways, key=lambda way: self.overhead(way).median if self.overhead(way).values else 1e9)

    def lines(self) -> list[str]:
        return [_HEAD, *(self._line(way) for way in self.by_cost())]

    def _line(self, way: str) -> str:
        cells = self.of(way)
        own = lambda value: Spread([found for cell in cells if (found := value(cell)) is not None])  # noqa: E731
        if way == "none":
            step = own(lambda cell: cell["wall_s"] / _measured(cell)).text(lambda s: f"{s * 1000:.1f} ms")
            memory = own(lambda cell: cell["peak_bytes"] / MIB).text(lambda mib: f"{mib:.0f} MiB")
            return f"| none | {step} |" + " – |" * 3 + f" {memory} |" + " – |" * 4 + f" {len(cells)} |"
        seconds = lambda s: f"{s:.2f} s"  # noqa: E731
        columns = [
            way + (" (not exact)" if way in NOT_EXACT else ""),
            self.overhead(way).text(lambda share: f"{share:+.1%}"),
            own(lambda cell: _each(cell["blocked_s"], cell["inside"])).text(lambda s: f"{s * 1000:.1f} ms"),
            self.against_none(way, lambda cell, none: _each(cell["wall_s"] - none["wall_s"], cell["inside"])).text(
                seconds
            ),
            self.against_none(way, lambda cell, none: _each(cell["cpu_s"] - none["cpu_s"], cell["after_begin"])).text(
                seconds
            ),
            self.against_none(way, lambda cell, none: (cell["peak_bytes"] - none["peak_bytes"]) / MIB).text(
                lambda mib: f"{mib:+.0f} MiB"
            ),
            " / ".join(_safe_after(cells, tier) for tier in TIERS),
            self.against_none(way, _sent_more).text(lambda mib: f"{mib:.0f} MiB"),
            own(lambda cell: _each(cell["written_bytes"] / MIB, cell["snapshots"])).text(lambda mib: f"{mib:.0f} MiB"),
            own(lambda cell: cell["restore_s"]).text(seconds),
            f"{len(cells)}{_remarks(cells)}",
        ]
        return "| " + " | ".join(columns) + " |"


def _measured(cell: dict[str, Any]) -> int:
    return int(cell["measured_steps"])


def _each(value: float, count: int) -> float | None:
    return value / count if count else None


def _safe_after(cells: list[dict[str, Any]], tier: str) -> str:
    values = [value for cell in cells for value in cell["safe_after_s"][tier]]
    return f"{statistics.median(values):.2f} s" if values else "–"


def _sent_more(cell: dict[str, Any], none: dict[str, Any]) -> float | None:
    if cell["sent_bytes"] is None or none["sent_bytes"] is None:
        return None
    return _each((cell["sent_bytes"] - none["sent_bytes"]) / MIB, cell["after_begin"])


def _remarks(cells: list[dict[str, Any]]) -> str:
    due = sum(_measured(cell) // cell["interval"] for cell in cells)
    taken = sum(cell["inside"] for cell in cells)
    remarks = [f"{taken} of {due} snapshots taken"] if taken < due and cells[0]["way"] not in WITHOUT else []
    if taken and not any(cell["safe_after_s"][tier] for cell in cells for tier in TIERS):
        remarks.append("none seen safe")
    if any(cell["equal"] is False and cell["way"] not in NOT_EXACT for cell in cells):
        remarks.append("**restored another state**")
    if any(cell["killed"] for cell in cells):
        remarks.append("processes had to be killed")
    return "".join(f"; {remark}" for remark in remarks)


def tables(found: Found) -> dict[tuple[str, int], Table]:
    """A table for each model and interval that was measured."""
    keys = dict.fromkeys((cell["model"], cell["interval"]) for cell in found.cells)
    return {
        key: Table([cell for cell in found.cells if (cell["model"], cell["interval"]) == key]) for key in sorted(keys)
    }


def report(found: Found) -> str:
    """The section for the documentation, in Markdown."""
    about = found.about
    lines = [
        f"Measured {about['when']} at commit {about['commit']} on {about['cpus']} CPUs and"
        f" {about['memory_bytes'] / 2**30:.0f} GiB, {about['system']}, torch {about['torch']}, Lightning"
        f" {about['lightning']}, {about['device']} with {about['threads']} threads for torch, models of scale"
        f" `{about['scale']}`. Load of the machine before {about['load_before']:.1f}, after"
        f" {about['load_after']:.1f}. {about['note']}".rstrip(),
    ]
    incomplete = {(cell["model"], cell["interval"]) for cell in found.missing}
    for (model, interval), table in tables(found).items():
        state = max(cell["state_bytes"] for cell in table.of(table.ways[0])) / MIB
        steps = "step" if interval == 1 else f"{interval} steps"
        partial = " (incomplete: see below)" if (model, interval) in incomplete else ""
        title = f"**{model}, a snapshot every {steps}, {state:.0f} MiB of weights and moments{partial}**"
        lines += ["", title, "", *table.lines()]
    lines += _not_measured("Not measured within the budget", found.missing)
    lines += _not_measured("Failed", found.failed)
    return "\n".join(lines) + "\n"


def _not_measured(what: str, cells: list[dict[str, Any]]) -> list[str]:
    if not cells:
        return []
    rounds = Counter((cell["model"], cell["interval"], cell["way"], cell.get("error", "")) for cell in cells)
    listed: dict[tuple[str, int], list[str]] = {}
    for (model, interval, way, error), count in sorted(rounds.items()):
        times = f" ({count} rounds)" if count > 1 else ""
        listed.setdefault((model, interval), []).append(f"{way}{times}{f': {error}' if error else ''}")
    lines = [f"- {model}, every {interval}: {', '.join(ways)}" for (model, interval), ways in listed.items()]
    return ["", f"{what}:", "", *lines]


def write_report(comparisons: list[Found], folder: Path) -> str:
    """Write ``peers.md`` and, with matplotlib, one picture for each table; returns the text."""
    text = "\n".join(map(report, comparisons))
    (folder / "peers.md").write_text(text)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no pictures: matplotlib is not installed (extra `plot`)")
        return text
    for found in comparisons:
        for (model, interval), table in tables(found).items():
            picture = folder / f"peers-{found.about['scale']}-{model}-{interval}.svg"
            _draw(table, f"{model} ({found.about['scale']}), every {interval}", picture)
    return text


def _draw(table: Table, what: str, picture: Path) -> None:
    from matplotlib.figure import Figure

    ways = [way for way in reversed(table.by_cost()) if way != "none" and table.overhead(way).values]
    figure = Figure(figsize=(7, 1 + 0.28 * len(ways)), layout="constrained")
    axes = figure.subplots()
    for row, way in enumerate(ways):
        values = [100 * value for value in table.overhead(way).values]
        axes.barh(row, statistics.median(values), color="tab:blue" if way.startswith("ours") else "lightgrey")
        axes.plot(values, [row] * len(values), "k.", markersize=3)
    axes.set_yticks(range(len(ways)), ways)
    axes.set_xlabel(f"longer than without checkpoints, % ({what})")
    figure.savefig(picture)


def write_docs(page: Path, text: str) -> None:
    """Put the text between the two marks of a page.

    Raises:
        ValueError: if the page does not have both.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no section for these tables: put {BEGIN} and {END} where they are to be")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")
