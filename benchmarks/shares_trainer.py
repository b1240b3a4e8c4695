"""One training for ``shares``: ``python -m benchmarks.shares_trainer JSON`` fits on several ranks (gloo).

Its snapshots are written in three ways, in an order drawn anew each time around. Each rank writes what each has cost it
into ``FOLDER/rank-K.json``.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.blocking import Model, gpt_parameters
from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.session.coordinator import Decision
from lightning_spot.session.snapshotter import Snapshotter

BY_RANK_0 = "by rank 0 alone"
AT_ONCE = "by all ranks at once"
IN_TURN = "by all ranks, one after the other"
"""Each rank from where the snapshot begins until its optimizer steps: no other rank is in its way."""

WAYS = (BY_RANK_0, AT_ONCE, IN_TURN)
EARLY = 7  # snapshots in which slots are made, mapped and touched by all ranks
EVERY = 2  # steps: one that a snapshot holds up, one before the next


@dataclass(frozen=True)
class Cost:
    """What one snapshot has cost one rank.

    Attributes:
        way: in which it was written.
        round: the same for snapshots that are compared.
        waited_s: what training has waited for it.
        copied: bytes that this rank wrote.
    """

    way: str
    round: int
    waited_s: float
    copied: int


class Apart(DDPStrategy):
    """Ranks that hold the same, and do not wait for each other's gradients: there are none."""

    def configure_ddp(self) -> None:
        """Leave the module as it is."""


class Ways(pl.Callback):
    """Has each snapshot written in the way whose turn it is, and notes what it has cost this rank."""

    def __init__(self, folder: Path, spot: SpotCheckpoint, ways: Sequence[str], rounds: int) -> None:
        self.folder, self.spot = folder, spot
        self.ways, self.plan = ways, [AT_ONCE] * EARLY
        dice = random.Random(1)  # the same on all ranks
        for _ in range(rounds):
            self.plan += dice.sample(ways, len(ways))
        self.costs: list[Cost] = []
        self.number, self.how = 0, Decision()
        self.open = False
        self.before = (0.0, 0)

    @property
    def steps(self) -> int:
        """Of the training."""
        return EVERY * len(self.plan) + EVERY - 1

    @property
    def way(self) -> str:
        """Of the snapshot at hand, or the next one."""
        return self.plan[min(self.number, len(self.plan) - 1)]

    @property
    def snapshotter(self) -> Snapshotter:
        found = self.spot.snapshots.snapshotter
        assert found is not None
        return found

    def so_far(self) -> tuple[float, int]:
        """Seconds that training has waited, and bytes that this rank has written."""
        snapshotter, attempt = self.snapshotter, self.snapshotter.writing.attempt
        return snapshotter.pacing.stall_s, attempt.writer.copied_bytes if attempt is not None else 0

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        snapshotter, rank = self.snapshotter, trainer.global_rank
        # Lightning's word about SIGTERM in each step: ranks would meet there, which are to come one after the other.
        vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = lambda: None
        take, before_step, usual = snapshotter._take, snapshotter.before_step, snapshotter.writing._ranges

        def in_turn(how: Decision, **kwargs: Any) -> None:
            if how.complete:
                take(how, **kwargs)
                return
            self.how, self.open = how, True
            for _ in range(self._ranks_before(rank)):
                torch.distributed.barrier()
            take(how, **kwargs)

        def turn_ends() -> None:
            before_step()
            if self.open:
                self.open = False
                for _ in range(trainer.world_size - self._ranks_before(rank)):
                    torch.distributed.barrier()
                self._note()

        snapshotter._take = in_turn  # type: ignore[method-assign]
        snapshotter.before_step = turn_ends  # type: ignore[method-assign]
        snapshotter.writing._ranges = lambda at: (0,) if self.way == BY_RANK_0 else usual(at)  # type: ignore[method-assign]

    def _ranks_before(self, rank: int) -> int:
        """How many ranks come before this one, each up to its optimizer step; by rank 0 alone, others come with it."""
        return rank if self.way == IN_TURN and len(self.how.ranges) > 1 else 0

    def _note(self) -> None:
        now = self.so_far()
        if self.number >= EARLY and (self.way == BY_RANK_0) == (len(self.how.ranges) == 1):
            round_ = (self.number - EARLY) // len(self.ways)
            self.costs.append(Cost(self.way, round_, now[0] - self.before[0], now[1] - self.before[1]))
        self.number += 1

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """In front of the next snapshot: nothing of the last one goes on."""
        if self.open or trainer.global_step == 0:
            return
        writing = self.snapshotter.writing
        if writing.attempt is not None:
            writing.attempt.writer.wait_all(60.0)
            if self.number < EARLY and writing.attempt.writer.host is not None:
                writing.attempt.writer.host.flush(120.0)
        torch.distributed.barrier()
        self.before = self.so_far()

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        (self.folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(list(map(asdict, self.costs))))


def main() -> int:
    plan = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    SnapshotWriter.next_comes = lambda _: None  # type: ignore[method-assign] # as where they are more than a second apart
    folder = Path(plan["folder"])
    spot = SpotCheckpoint(
        str(folder / "snapshots"),
        interval=EverySteps(EVERY),
        on_full="wait",
        copy_mode="eager",
        min_upload_interval_s=3600,
        slots=3,
    )
    ways = Ways(folder, spot, plan["ways"], plan["rounds"])
    model = Model(gpt_parameters(**plan["sizes"]))
    model.busy_s = plan["busy_s"]
    trainer = pl.Trainer(
        max_steps=ways.steps,
        accelerator="cpu",
        devices=plan["ranks"],
        strategy=Apart(process_group_backend="gloo"),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        callbacks=[ways, spot],
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.zeros(2 * plan["ranks"] * ways.steps, 1)), 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
