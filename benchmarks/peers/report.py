"""Tables and pictures of a comparison. Pure but for the files it writes."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.peers.plan import Found
from benchmarks.peers.results import NONE, Cells, Key, Spread, Times

MIB = 2**20
BEGIN, END = "<!-- peers: made by `python -m benchmarks peers --docs` -->", "<!-- peers: end -->"
NOT_EXACT = ("asymcheck-topk", "ours+node topk")
_DETAILS = "waits | CPU | still to do | safe: host / peer / durable | memory | sent | written | restore | remarks"
_ALONE = "in a process of its own (memory, sent, written, restore)"


class Table:
    """Ways against the same training without checkpoints: one row each, a column for each model and interval.

    Args:
        found: a comparison.
        columns: of it; of one model where ``details`` are wanted.
        detailed: the column of which there is more.
    """

    def __init__(self, found: Found, columns: list[Key], detailed: Key | None = None) -> None:
        self._times = {key: Times.of(found, key) for key in columns}
        self._detailed = detailed
        self._cells = Cells(found, detailed) if detailed is not None else None

    def ways(self) -> list[str]:
        """The cheapest first, by their median in the first column that has them."""
        known = dict.fromkeys(way for times in self._times.values() for way in times.ways)
        cost = {way: [s.longer(way).median for s in self._times.values() if s.longer(way).values] for way in known}
        if self._detailed is not None:
            most = self._times[self._detailed]
            cost |= {way: [most.longer(way).median] for way in known if most.longer(way).values}
        return sorted((way for way in known if way != NONE), key=lambda way: cost[way][0] if cost[way] else 1e9)

    def lines(self) -> list[str]:
        heads = ["way", *(_title(key, times) for key, times in self._times.items())]
        heads += _DETAILS.split(" | ") if self._detailed is not None else []
        none = [NONE, *(_step(times) for times in self._times.values())]
        none += self._none_details() if self._detailed is not None else []
        return [_row(heads), _row(["---"] * len(heads)), _row(none), *(_row(self._line(way)) for way in self.ways())]

    def _line(self, way: str) -> list[str]:
        found = [way + (" (not exact)" if way in NOT_EXACT else "")]
        found += [_cost(times, way) for times in self._times.values()]
        return found + self._details(way) if self._detailed is not None else found

    def _details(self, way: str) -> list[str]:
        assert self._detailed is not None
        assert self._cells is not None
        times, cells = self._times[self._detailed], self._cells
        return [
            times.waits(way).median_text(_ms),
            times.cpu(way).median_text(_s),
            times.left(way).median_text(_s),
            " / ".join(times.safe_after(way, tier).median_text(_s) for tier in ("host", "peer", "durable")),
            cells.memory(way).median_text(lambda nbytes: f"{nbytes / MIB:+.0f} MiB"),
            cells.sent(way).median_text(_mib),
            cells.written(way).median_text(_mib),
            cells.restore(way).median_text(_s),
            "; ".join([*times.remarks(way), *cells.remarks(way, exact=way not in NOT_EXACT)]),
        ]

    def _none_details(self) -> list[str]:
        assert self._cells is not None
        found = ["–"] * len(_DETAILS.split(" | "))
        found[4], found[-1] = Spread([c["peak_bytes"] for c in self._cells.of(NONE)]).median_text(_mib), ""
        return found


def _row(columns: list[str]) -> str:
    return "| " + " | ".join(columns) + " |"


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.0f} MiB"


def _title(key: Key, times: Times) -> str:
    model, interval = key
    steps = "step" if interval == 1 else f"{interval} steps"
    return f"{model}, {_mib(times.state_bytes)}, every {steps}"


def _step(times: Times) -> str:
    rounds = len(times.rounds)
    return f"{times.step_s:.3f} s a step, {rounds} round{'s' if rounds != 1 else ''}"


def _cost(times: Times, way: str) -> str:
    longer = times.longer(way).text(lambda share: f"{100 * share:+.1f}")
    if longer == "–":
        return longer
    return f"{longer} %; {times.added(way).median_text(_s)}"


def groups(found: Found) -> list[list[Key]]:
    """What goes into one table: models that were measured at one interval; each other one at all of its own."""
    intervals: dict[str, list[int]] = {}
    for model, interval in sorted({(turn["model"], turn["interval"]) for turn in found.turns}):
        intervals.setdefault(model, []).append(interval)
    several = [[(model, interval) for interval in own] for model, own in intervals.items() if len(own) > 1]
    single: dict[int, list[Key]] = {}
    for model, own in intervals.items():
        if len(own) == 1:
            single.setdefault(own[0], []).append((model, own[0]))
    return several + list(single.values())


def report(found: Found) -> str:
    """The section for the documentation, in Markdown."""
    about = found.about
    lines = [
        f"**Models of scale `{about['scale']}`**, measured {about['when']} at commit {about['commit']} on"
        f" {about['cpus']} CPUs and {about['memory_bytes'] / 2**30:.0f} GiB, {about['system']}, torch {about['torch']},"
        f" Lightning {about['lightning']}, {about['device']} with {about['threads']} threads for torch. Load of the"
        f" machine before {about['load_before']:.1f}, after {about['load_after']:.1f}. {about['note']}".rstrip(),
    ]
    for columns in groups(found):
        alone = len({model for model, _ in columns}) == 1
        lines += ["", *Table(found, columns, columns[0] if alone else None).lines()]
    cells = [one for one in found.missing if "round" in one]
    trainings = [one for one in found.missing if "round" not in one]
    lines += _not_measured("Not measured within the budget", trainings)
    lines += _not_measured(f"Not measured within the budget {_ALONE}", cells)
    lines += _not_measured("Failed", found.failed)
    return "\n".join(lines) + "\n"


def details(found: Found) -> str:
    """All that was measured: a table for each model and interval."""
    lines = []
    for key in [key for columns in groups(found) for key in columns]:
        lines += [*Table(found, [key], key).lines(), ""]
    return "\n".join(lines)


def _not_measured(what: str, missed: list[dict[str, Any]]) -> list[str]:
    if not missed:
        return []
    rounds = Counter((one["model"], one["interval"], one["way"], one.get("error", "")) for one in missed)
    listed: dict[tuple[str, int], list[str]] = {}
    for (model, interval, way, error), count in sorted(rounds.items()):
        times = f" ({count} times)" if count > 1 else ""
        listed.setdefault((model, interval), []).append(f"{way}{times}{f': {error}' if error else ''}")
    lines = [f"- {model}, every {interval}: {', '.join(ways)}" for (model, interval), ways in listed.items()]
    return ["", f"{what}:", "", *lines]


def write_report(comparisons: list[Found], folder: Path) -> str:
    """Write ``peers.md``, ``details.md`` and, with matplotlib, a picture for each model and interval.

    Returns:
        the text of ``peers.md``.
    """
    text = "\n".join(map(report, comparisons))
    (folder / "peers.md").write_text(text)
    (folder / "details.md").write_text("\n".join(map(details, comparisons)))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no pictures: matplotlib is not installed (extra `bench`)")
        return text
    for found in comparisons:
        for model, interval in [key for columns in groups(found) for key in columns]:
            scale = found.about["scale"]
            picture = folder / f"peers-{scale}-{model}-{interval}.svg"
            _draw(Times.of(found, (model, interval)), f"{model} ({scale}), every {interval}", picture)
    return text


def _draw(times: Times, what: str, picture: Path) -> None:
    from matplotlib.figure import Figure

    ways = [way for way in times.ways if way != NONE and times.longer(way).values]
    ways.sort(key=lambda way: -times.longer(way).median)
    figure = Figure(figsize=(7, 1 + 0.28 * len(ways)), layout="constrained")
    axes = figure.subplots()
    for row, way in enumerate(ways):
        values = [100 * value for value in times.longer(way).values]
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
