"""What the training thread of rank 0 does for a snapshot of a sharded model (FSDP2, two ranks), by number of tensors.

What our hooks take at each step all the same is told apart. The tensors are so small that to copy them takes next to
nothing, and half of the snapshots are taken without any copies. Two ranks on two processors are in each other's way: so
it is the thread's own CPU time that counts. Machines differ by a factor of two, and so does one machine by the hour: so
torch's own way to the same state is timed in turn.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import Result, scratch

LAYERS = (0, 5, 12, 24)  # 0: as few tensors as a test has; 12: two parameters more than GPT-2 of 124 million has
_AIM_MS = 5.0


def run(quick: bool) -> list[Result]:
    results, least = [], {}
    for layers in LAYERS:
        found = _train(layers, rounds=5 if quick else 40)
        tensors = found["tensors"]
        for copies in (False, True):
            costs = [cost for cost in found["costs"] if cost["copies"] == copies]
            times = [1000 * cost["cpu_s"] for cost in costs]
            name = f"training thread for {tensors} tensors in shards, {'with copies' if copies else 'beside copying'}"
            results.append(Result(name, times, None if copies else _AIM_MS, unit="ms"))
            walls = [1000 * cost["wall_s"] for cost in costs]
            print(f"  {name}: least {min(times):.1f} ms, by the clock {min(walls):.1f}, median", end=" ")
            print(f"{statistics.median(walls):.1f}; hooks at a step without one:", end=" ")
            print(f"{1000 * statistics.median(cost['hooks_s'] for cost in costs):.2f} ms", flush=True)
            if not copies:
                least[tensors] = min(times)
                results.append(_beside_torch(tensors, times, found["torch_cpu_s"]))
    (few, few_ms), *_, (many, many_ms) = sorted(least.items())
    each_ms = (many_ms - few_ms) / (many - few)
    print(f"  beside copying, least: {few_ms - few * each_ms:.1f} ms + {1000 * each_ms:.1f} µs a tensor", flush=True)
    return results


def _beside_torch(tensors: int, ours_ms: list[float], torch_cpu_s: list[float]) -> Result:
    """Ours as a part of what ``get_state_dict`` and a rank's plan take, which is done in each ``dcp.async_save``."""
    torch_ms = 1000 * statistics.median(torch_cpu_s)
    print(f"  torch's state_dict and plan for {tensors} tensors: median {torch_ms:.1f} ms", flush=True)
    name = f"{tensors} tensors in shards / torch's own state_dict and plan"
    return Result(name, [ms / torch_ms for ms in ours_ms], None)


def _train(layers: int, rounds: int) -> dict[str, Any]:
    with scratch() as folder:
        plan = json.dumps({"folder": str(folder), "layers": layers, "rounds": rounds})
        command = [sys.executable, "-m", "benchmarks.thread_in_shards_trainer", plan]
        subprocess.run(command, check=True, timeout=600)
        found: dict[str, Any] = json.loads((Path(folder) / "costs.json").read_text())
        return found
