"""``python -m benchmarks compare OLD_TREE [NAME ...]``: the same benchmarks of an older tree and of this one, in turn.

A round runs each benchmark with ``--quick`` in both trees, each by its own code and its own ``.venv``; which is first
changes from round to round. All values are kept in the file; one that is there gets more rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Result

WORSE = 1.25
"""A figure that is worse by more than that is named."""


@dataclass(frozen=True)
class Row:
    """One figure of both trees: medians, and in each round, if above zero, how many times worse the new one is."""

    benchmark: str
    what: str
    unit: str
    old: float
    new: float
    worse: list[float]

    def text(self) -> str:
        figures = f"| {self.benchmark} | {self.what} | {self.old:.3g} {self.unit} | {self.new:.3g} {self.unit} |"
        if not self.worse:
            return f"{figures} – | – | |"
        ratio = statistics.median(self.worse)
        spread = f"{min(self.worse):.2f}–{max(self.worse):.2f}, {len(self.worse)}"
        return f"{figures} {ratio:.2f} x | {spread} | {'**yes**' if ratio > WORSE else ''} |"


def matched(old: list[Result], new: list[Result]) -> list[tuple[Result, Result]]:
    """Pairs of the same figure: of one name, or, where it was reworded, the next of the same unit and direction."""
    names = {result.name for result in old}
    left = [result for result in new if result.name not in names]
    pairs = []
    for before in old:
        now = next((result for result in new if result.name == before.name), None)
        if now is None:
            now = next((each for each in left if (each.unit, each.at_most) == (before.unit, before.at_most)), None)
            left = [result for result in left if result is not now]
        if now is not None:
            pairs.append((before, now))
    return pairs


def worse(old: Result, new: Result) -> float | None:
    """How many times worse the new median is, whichever direction is the better one; None where that has no meaning."""
    if old.median <= 0 or new.median <= 0:
        return None
    return new.median / old.median if new.at_most else old.median / new.median


def rows(found: dict[str, Any]) -> list[Row]:
    """All figures that both trees gave in some round, of the rounds of each benchmark."""
    pairs: dict[tuple[str, str], list[tuple[Result, Result]]] = {}
    for benchmark, rounds in found.items():
        for each in rounds:
            both = [[Result(**result) for result in each[side]["results"]] for side in ("old", "new")]
            for pair in matched(*both):
                pairs.setdefault((benchmark, pair[1].name), []).append(pair)
    made = []
    for (benchmark, what), those in pairs.items():
        old, new = (statistics.median(each.median for each in side) for side in zip(*those, strict=True))
        ratios = [ratio for pair in those if (ratio := worse(*pair)) is not None]
        made.append(Row(benchmark, what, those[0][1].unit, old, new, ratios if len(ratios) == len(those) else []))
    return made


def as_json(found: dict[str, Any]) -> str:
    """The table, and the rounds of each benchmark; a line for each row, and for each round."""
    table = ",\n".join(json.dumps(asdict(row), ensure_ascii=False) for row in rows(found))
    rounds = [f'"{name}": [\n' + ",\n".join(map(json.dumps, each)) + "\n]" for name, each in found.items()]
    return f'{{"rows": [\n{table}\n],\n"rounds": {{\n' + ",\n".join(rounds) + "\n}}\n"


def measured(tree: Path, name: str) -> dict[str, Any]:
    """What one benchmark of a tree gives, in a process of its own; without results if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [str(tree / ".venv" / "bin" / "python"), "-m", "benchmarks", name, "--quick", "--json", str(path)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=tree, timeout=1800, check=False)
        found = json.loads(path.read_text()) if path.exists() else {"about": {}, "benchmarks": {name: {"results": []}}}
    return {"about": found["about"], "results": found["benchmarks"][name]["results"]}


def main(arguments: list[str], names: list[str]) -> int:
    """The command, of all benchmarks' ``names``; 1 if a figure became worse by more than ``WORSE``, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__)
    parser.add_argument("old", type=Path, help="another work tree, with a .venv")
    parser.add_argument("names", nargs="*", choices=[*names, []], help="which ones (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="of both trees (default: 3); 0 only prints the table")
    parser.add_argument("--json", type=Path, required=True, help="the file that keeps all values")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = json.loads(options.json.read_text())["rounds"] if options.json.exists() else {}
    trees = {"old": options.old.resolve(), "new": Path(__file__).parents[1]}
    for number in range(options.rounds):
        order = list(trees) if number % 2 == 0 else list(trees)[::-1]
        for name in options.names or names:
            each = {side: measured(trees[side], name) for side in order}
            found.setdefault(name, []).append(each)
            options.json.write_text(as_json(found))
    table = rows(found)
    head = f"| benchmark | what | old | new | new / old, worse is above 1 | min–max, rounds | over {WORSE} x |"
    print("\n".join([head, "|---" * 7 + "|", *(row.text() for row in table)]))
    return int(any(row.worse and statistics.median(row.worse) > WORSE for row in table))
