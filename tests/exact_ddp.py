"""A program that trains on several ranks (gloo) and can be made to die: ``python -m tests.exact_ddp ROOT --kill-at 9``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy

from tests.exact_cases import Model, loader, train


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--kill-at", type=int, default=-1, help="os._exit of every rank in this batch")
    arguments = parser.parse_args()

    class KillAt(pl.Callback):
        def on_before_backward(self, trainer: pl.Trainer, *_: object) -> None:
            if trainer.fit_loop.total_batch_idx == arguments.kill_at:
                os._exit(9)

    train(
        lambda: (Model(), loader(num_workers=arguments.workers), {}),
        arguments.root,
        KillAt(),
        seed=arguments.seed,
        strategy=DDPStrategy(process_group_backend="gloo", broadcast_buffers=False),
        devices=arguments.ranks,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
