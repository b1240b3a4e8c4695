"""Time to lay a checkpoint of 1,000 tensors out again, after nothing but values changed."""

from __future__ import annotations

import torch

from benchmarks.measure import Result, seconds
from lightning_spot.snapshot.layout import lay_out


def run(quick: bool) -> list[Result]:
    weights = {f"layer.{index}.weight": torch.zeros(1000) for index in range(1000)}

    def again() -> None:
        lay_out({name: weight.detach() for name, weight in weights.items()})

    times = [1000 * seconds(again) for _ in range(5 if quick else 30)]
    return [Result("layout of 1,000 tensors", times[1:], 10, unit="ms")]
