"""A snapshot at every step of a training on a GPU, copied in each way, against the same training without snapshots.

A transformer of a billion parameters in 32 bits with AdamW, computed in bfloat16: 12 GB for each snapshot, at steps of
about half a second; and one of 98 million, 1.2 GB, at steps of about a tenth. One training goes through all ways in
turn. The first step of each turn is left out; what a turn has begun is over before the next begins.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.blocking import writer_of
from benchmarks.measure import Result, bare_trainer, scratch
from benchmarks.turns import Turns
from lightning_spot import SpotCheckpoint
from lightning_spot.capture.partitions import BESIDE

STEPS = 9
WARM_UP = 1
NONE = "none"
WAYS = (NONE, *BESIDE)
WORDS, LENGTH = 8192, 1024
CASES = ((768, 12, 0.1, None), (2048, 19, 0.5, 3.0))
"""Width, layers, seconds of a step, and the target in percent."""


class Model(pl.LightningModule):
    """A transformer that learns to repeat its input."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, width // 128, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        said = self.head(self.layers(self.words(batch[0])))
        return nn.functional.cross_entropy(said.flatten(0, 1), batch[0].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)


@dataclass
class Turn:
    """What was found in a turn.

    Attributes:
        step_s: a step took.
        stall_s: of that in our hooks.
        skipped: snapshots that found no slot.
        behind: steps from the newest committed snapshot to the end of the turn.
        settle_s: until the last one was committed.
    """

    step_s: float
    stall_s: float
    skipped: int
    behind: int
    settle_s: float


class Clock(pl.Callback):
    """Notes what each turn took."""

    def __init__(self, spot: SpotCheckpoint, turns: Turns) -> None:
        self.turns: list[Turn] = []
        self._spot, self._turns = spot, turns
        self._before, self._skipped = self._now(), 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._turns.decide_for(self._spot)
        step = trainer.global_step
        if step % STEPS > 1:
            return
        torch.cuda.synchronize()
        if step % STEPS == 0:
            now, before = self._now(), self._before
            behind = step - (self._spot.last_committed_step or 0)
            writer = writer_of(self._spot)
            assert writer is not None
            writer.wait_all(60.0)
            per_step = [(later - earlier) / (STEPS - 1) for later, earlier in zip(now, before, strict=True)]
            skipped = self._spot.num_skipped - self._skipped
            self.turns.append(Turn(*per_step, skipped, behind, time.perf_counter() - now[0]))
        self._before, self._skipped = self._now(), self._spot.num_skipped

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), self._spot.blocked_s


def fitting_batch(model: Model, step_s: float) -> int:
    """Sequences that take about as long as a step shall take."""
    model.cuda()
    took: list[float] = []
    for _ in range(4):
        began_s = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            model.training_step((torch.randint(WORDS, (8, LENGTH), device="cuda"),), 0).backward()
        model.zero_grad()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began_s)
    return max(1, round(8 * step_s / min(took)))


def run(quick: bool) -> list[Result]:
    if not torch.cuda.is_available():
        print("  it needs a GPU")
        return []
    cases, rounds = CASES[: 1 if quick else None], 3 if quick else 5
    return [result for case in cases for result in measure(Model(*case[:2]), *case[2:], rounds)]


def measure(model: Model, step_s: float, target: float | None, rounds: int) -> list[Result]:
    """What each way adds to the steps of one model."""
    size = fitting_batch(model, step_s)
    draw = random.Random(0)
    order = [way for _ in range(WARM_UP + rounds) for way in draw.sample(WAYS, len(WAYS))]
    batches = DataLoader(TensorDataset(torch.randint(WORDS, (size * STEPS, LENGTH))), size)
    with scratch() as folder:
        turns = Turns(order, STEPS, 1)
        spot = SpotCheckpoint(str(folder / "run"), interval=turns, notices=None, min_upload_interval_s=3600.0)
        clock = Clock(spot, turns)
        trainer = bare_trainer(len(order) * STEPS, [clock, spot], accelerator="gpu", devices=1, precision="bf16-mixed")
        trainer.fit(model, batches)
    nbytes = 3 * sum(parameter.nbytes for parameter in model.parameters())  # with moments
    timed = list(zip(order, clock.turns, strict=True))[WARM_UP * len(WAYS) :]
    by_way = {way: [turn for whose, turn in timed if whose == way] for way in WAYS}
    return results(by_way, nbytes, size, target)


def results(turns: dict[str, list[Turn]], nbytes: int, size: int, target: float | None) -> list[Result]:
    """What each way added to the steps without snapshots of the same round."""
    plain = turns[NONE]
    step_s = median(turn.step_s for turn in plain)
    print(f"  {nbytes / 1e9:.1f} GB, {size} sequences of {LENGTH} a step, which takes {step_s:.3f} s")
    found = []
    for way in BESIDE:
        taken = turns[way]
        added = [100 * (turn.step_s / base.step_s - 1) for turn, base in zip(taken, plain, strict=True)]
        print(
            f"  {way}: {sum(turn.skipped for turn in taken)} of {len(taken) * STEPS} skipped; in hooks"
            f" {1000 * median(turn.stall_s for turn in taken):.1f} ms; newest committed {[t.behind for t in taken]}"
            f" steps before the end, which took {median(turn.settle_s for turn in taken):.2f} s more"
        )
        found.append(Result(f"a snapshot of {nbytes / 1e9:.1f} GB every step: {way} adds", added, target, unit="%"))
    return found
