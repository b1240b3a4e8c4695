"""Four ranks of one host that write a snapshot together (DDP, gloo), against rank 0 alone: waiting, and bytes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import Result, scratch

RANKS = 4


def run(quick: bool) -> list[Result]:
    rounds = 2 if quick else 5
    waits: list[float] = []
    bytes_each: list[float] = []
    for _ in range(rounds):
        alone, together = _train(together=False, quick=quick), _train(together=True, quick=quick)
        slowest = max(statistics.median(rank["stalls"]) for rank in together)
        waits.append(slowest / statistics.median(alone[0]["stalls"]))
        copied = [statistics.median(rank["copied"]) for rank in together]
        bytes_each.append(max(copied) / statistics.median(alone[0]["copied"]) * RANKS)
    return [
        Result("waiting per rank, 4 ranks together / rank 0 alone", waits, 0.5),
        Result("bytes written by a rank, 4 together / a quarter of rank 0 alone", bytes_each, 1.05),
    ]


def _train(*, together: bool, quick: bool) -> list[dict[str, Any]]:
    with scratch() as folder:
        size = {"width": 1024, "layers": 4} if quick else {"width": 2048, "layers": 8}
        plan = {"folder": str(folder), "together": together, "ranks": RANKS, "snapshots": 12, **size}
        subprocess.run([sys.executable, "-m", "benchmarks.shares_trainer", json.dumps(plan)], check=True)
        return [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
