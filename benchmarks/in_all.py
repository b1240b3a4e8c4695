"""What a snapshot costs a whole training: wall time and CPU seconds of trainer and server, by process and thread.

The same model is fitted with and without snapshots, in turn, each time in a process of its own. Steady state is what
lies between two marks of equal phase; what the first minute loses beyond that goes to making slots.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.in_all_trainer import OURS, Plan
from benchmarks.measure import GIB, Result, scratch

LARGE = {"width": 2064, "layers": 22, "batch": 64}  # 1.13 GB with AdamW's moments, about 1 s a step on 2 cores
SMALL = {"width": 640, "layers": 20, "batch": 64}  # 0.1 GB
EACH = "each"
"""Ours with each snapshot brought to the disk, as the others' are; without, of those that follow each other in moments
some are."""

PEERS = {"async": "AsyncCheckpointIO", "plain": "plain ModelCheckpoint save"}

Fit = dict[str, Any]


def fit(mode: str, sizes: dict[str, int]) -> Fit:
    """Train once, in a process and a folder of its own; what it used."""
    with scratch() as folder:
        pace = {"mode": "spot", "min_upload_interval_s": 0.0} if mode == EACH else {"mode": mode}
        plan = Plan(**pace, folder=str(folder), **sizes)
        command = [sys.executable, "-m", "benchmarks.in_all_trainer", json.dumps(asdict(plan))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the trainer with {mode!r} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found: Fit = json.loads(done.stdout.strip().split("\n")[-1])
        return {**found, "snapshots": plan.snapshots, "early": plan.early}


def between(found: Fit, since: str, until: str, what: str) -> float:
    """How much of something was used between two marks."""
    return float(found["used"][until][what] - found["used"][since][what])


def by_place(found: Fit) -> dict[str, float]:
    """CPU seconds per GiB of snapshots, in the steady state: of the server, in the hooks, of each thread of ours.

    Of the server's, what it spends in the kernel is apart: nearly all of that is the write.
    """
    gib = found["snapshots"] * found["nbytes"] / GIB
    first, second = (found["used"][mark]["threads"] for mark in ("first", "second"))
    kernel_s = between(found, "first", "second", "node_kernel_s")
    places = {"server": between(found, "first", "second", "node_s") - kernel_s, "server's kernel": kernel_s}
    places["hooks"] = between(found, "first", "second", "hooks_s")
    for name in second:
        if name.startswith(OURS):
            places[name] = second[name] - first.get(name, 0.0)
    return {name: used_s / gib for name, used_s in places.items()}


def added_s(found: Fit, base: Fit) -> float:
    """Wall seconds that training loses for each snapshot in the steady state."""
    return (between(found, "first", "second", "wall_s") - between(base, "first", "second", "wall_s")) / (
        found["snapshots"]
    )


def run(quick: bool) -> list[Result]:
    sizes = SMALL if quick else LARGE
    modes = ["none", "spot", EACH] if quick else ["none", "spot", EACH, *PEERS]
    rounds: list[dict[str, Fit]] = []
    for _ in range(2 if quick else 3):
        rounds.append({mode: fit(mode, sizes) for mode in modes})
        _say(rounds[-1])
    first = [
        between(fits["spot"], "start", "first", "wall_s")
        - between(fits["none"], "start", "first", "wall_s")
        - fits["spot"]["early"] * max(0.0, added_s(fits["spot"], fits["none"]))
        for fits in rounds
    ]
    results = [Result("what the first minute loses to making slots", first, 2.0, unit="s")]
    for mode, how in (("spot", "durable at its own pace"), (EACH, "each to the disk")):
        cpu = [sum(by_place(fits[mode]).values()) for fits in rounds]
        copies = [added_s(fits[mode], fits["none"]) / fits[mode]["copy_s"] for fits in rounds]
        results += [
            Result(f"CPU of trainer and server for snapshots, per GiB, {how}", cpu, 0.25, unit="s"),
            Result(f"wall time a snapshot adds to training, every 4 steps, {how} / one warm copy", copies, 2.0),
        ]
    for mode, target in zip(PEERS, (10.0, 20.0), strict=True):
        if mode in modes:
            ratios = [
                added_s(fits[mode], fits["none"]) / max(1e-3, added_s(fits[EACH], fits["none"])) for fits in rounds
            ]
            results.append(Result(f"{PEERS[mode]}'s added wall time / ours", ratios, target, at_most=False))
    return results


def _say(fits: dict[str, Fit]) -> None:
    ours, base = fits["spot"], fits["none"]
    gib = ours["nbytes"] / GIB
    print(f"  {gib:.2f} GiB, a step of {statistics.median(base['step_s']):.2f} s;"
          f" one warm copy {ours['copy_s']:.3f} s, {ours['copy_cpu_s'] / gib:.3f} CPU s/GiB")  # fmt: skip
    for mode in ("spot", EACH):
        split = ", ".join(f"{name} {used_s:.3f}" for name, used_s in by_place(fits[mode]).items() if used_s >= 0.0005)
        print(f"  {mode}: CPU s/GiB: {split}")
    for mode, found in fits.items():
        if mode != "none":
            used = [between(each, "first", "second", "trainer_s") for each in (found, base)]
            extra_s = (used[0] - used[1]) / found["snapshots"] / gib
            print(f"  {mode}: {added_s(found, base):.2f} s of wall a snapshot;"
                  f" the trainer's CPU differs by {extra_s:.2f} s/GiB from that without", flush=True)  # fmt: skip
