"""Four ranks of one host that write a snapshot together (DDP, gloo), against rank 0 alone: waiting, and bytes.

Where each rank has processors, and a way to memory, of its own, it does not matter to one what the others copy. Here
four share two processors, of which rank 0 alone uses both: so they also come one after the other, each up to its
optimizer step, which is what each would wait there.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import Result, scratch
from benchmarks.shares_trainer import AT_ONCE, BY_RANK_0, IN_TURN, WAYS

RANKS = 4
_BUSY_S = 0.3

Costs = list[list[dict[str, Any]]]


def run(quick: bool) -> list[Result]:
    alone = _train(WAYS, busy_s=0.0, quick=quick)
    beside = _train((BY_RANK_0, AT_ONCE), busy_s=_BUSY_S, quick=quick)
    waits = "waiting of the slowest of 4 ranks together / of rank 0 alone"
    copied = [RANKS * largest / whole for largest, whole in _pairs(alone, AT_ONCE, "copied")]
    return [
        Result(f"{waits}, nothing overlaps, each rank by itself", _ratios(alone, IN_TURN), 0.5),
        Result(f"{waits}, nothing overlaps, all at once on these processors", _ratios(alone, AT_ONCE), None),
        Result(f"{waits}, beside {_BUSY_S} s of compute a step, all at once", _ratios(beside, AT_ONCE), None),
        Result("bytes written by a rank, 4 together / a quarter of rank 0 alone", copied, 1.05),
    ]


def _train(ways: tuple[str, ...], *, busy_s: float, quick: bool) -> Costs:
    sizes = {"width": 256, "words": 8000} if quick else {"width": 512, "words": 16_000}
    with scratch() as folder:
        plan = {"folder": str(folder), "ranks": RANKS, "ways": ways, "busy_s": busy_s, "sizes": sizes}
        plan |= {"rounds": 3 if quick else 10}
        subprocess.run([sys.executable, "-m", "benchmarks.shares_trainer", json.dumps(plan)], check=True)
        found: Costs = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    for way in ways:
        medians = [statistics.median(cost["waited_s"] for cost in rank if cost["way"] == way) for rank in found]
        print(f"  {way}: ranks wait {[round(1000 * median, 1) for median in medians]} ms", flush=True)
    return found


def _ratios(costs: Costs, way: str) -> list[float]:
    return [slowest / alone for slowest, alone in _pairs(costs, way, "waited_s")]


def _pairs(costs: Costs, way: str, what: str) -> list[tuple[float, float]]:
    """Of each round: the most of all ranks in a way, and of rank 0 alone."""
    by_round = [{(cost["way"], cost["round"]): cost[what] for cost in rank} for rank in costs]
    rounds = [round_ for kind, round_ in by_round[0] if kind == way and (BY_RANK_0, round_) in by_round[0]]
    return [(max(rank[way, each] for rank in by_round), by_round[0][BY_RANK_0, each]) for each in rounds]
