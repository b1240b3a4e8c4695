"""Time to lay a checkpoint of 1,000 tensors out."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.measure import Result, seconds
from lightning_spot.image.layout import lay_out


def run(quick: bool) -> list[Result]:
    state = {f"layer.{index}.weight": torch.zeros(1000) for index in range(1000)}
    times = [1000 * seconds(lambda: lay_out(state, Path("/dev/shm"))) for _ in range(5 if quick else 30)]
    return [Result("layout of 1,000 tensors", times[1:], 50, unit="ms")]
