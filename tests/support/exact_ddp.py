"""Trains on several ranks (gloo) and can be made to die: ``python -m tests.support.exact_ddp ROOT --kill-at BATCH``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy

from lightning_spot import PreemptionGuard
from tests.support import exact_cases
from tests.support.elastic_trainer import KillAt
from tests.support.exact_cases import Model, loader, train


class Diary(pl.Callback):
    """Tells where each rank is, one line for each phase, in a file that outlives it."""

    def __init__(self, path: Path, pace_s: float) -> None:
        self.path, self.pace_s = path, pace_s

    def setup(self, trainer: pl.Trainer, *_: object, **__: object) -> None:
        self.file = os.open(f"{self.path}-{trainer.global_rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.say("pid", os.getpid())

    def say(self, phase: str, number: int) -> None:
        os.write(self.file, f"{phase} {number}\n".encode())
        time.sleep(self.pace_s)

    def on_sanity_check_start(self, trainer: pl.Trainer, *_: object) -> None:
        self.say("sanity", 0)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        self.say("forward", trainer.global_step)

    def on_before_backward(self, trainer: pl.Trainer, *_: object) -> None:
        self.say("backward", trainer.global_step)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: object) -> None:
        self.say("optimizer", trainer.global_step)

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        self.say("sanity-batch" if trainer.sanity_checking else "validation", trainer.global_step)

    def on_exception(self, trainer: pl.Trainer, module: object, exception: BaseException) -> None:
        self.say(f"stopped-by-{type(exception).__name__}", trainer.global_step)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds added to every batch")
    parser.add_argument("--kill-at", type=int, default=-1, help="os._exit of every rank in this batch")
    parser.add_argument("--guard", action="store_true", help="PreemptionGuard beside ModelCheckpoint, nothing else")
    arguments = parser.parse_args()

    exact_cases.SAMPLES = 48  # epochs of 6 batches at two ranks
    has_stopped = (arguments.root / "best" / "last-preempted.ckpt").exists()
    trainer = train(
        lambda: (Model(), loader(num_workers=arguments.workers), {}),
        arguments.root,
        KillAt(arguments.kill_at, arguments.root / "run"),
        Diary(arguments.root / "diary", arguments.pace),
        seed=arguments.seed,
        spot=PreemptionGuard("signal") if arguments.guard else None,
        ckpt_path="last" if has_stopped else None,
        strategy=DDPStrategy(process_group_backend="gloo", broadcast_buffers=False),
        devices=arguments.ranks,
    )
    trainer.save_checkpoint(arguments.root / "final.ckpt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
