"""One training for ``shares``: ``python -m benchmarks.shares_trainer JSON`` fits on several ranks (gloo).

Each rank writes what each snapshot has cost it into ``FOLDER/rank-K.json``.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.fit.together import Together

EARLY = 4  # snapshots in which slots are mapped and touched


class Layers(pl.LightningModule):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Meter(pl.Callback):
    """Notes for each snapshot how long this rank waited for it, and the bytes that it wrote."""

    def __init__(self, folder: Path, spot: SpotCheckpoint) -> None:
        self.folder, self.spot = folder, spot
        self.stalls: list[float] = []
        self.copied: list[int] = []
        self.seen = (0.0, 0)

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.05)  # as a loader's prefetch, or a GPU's step: the processor is free

    def on_train_batch_end(self, *_: Any) -> None:
        """What the optimizer step of this batch, and the end of the one before, have waited."""
        snapshotter = self.spot.snapshots.snapshotter
        assert snapshotter is not None
        writer = snapshotter.attempt.writer if snapshotter.attempt is not None else snapshotter.together.writer
        now = (snapshotter.pacing.stall_s, writer.copied_bytes if writer is not None else 0)
        self.stalls.append(now[0] - self.seen[0])
        self.copied.append(now[1] - self.seen[1])
        self.seen = now

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        told = {"stalls": self.stalls[EARLY:], "copied": self.copied[EARLY:]}
        (self.folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(told))


def main() -> int:
    plan = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if not plan["together"]:
        Together.begin = lambda *_: False  # type: ignore[method-assign] # rank 0 alone, as where ranks differ
    folder = Path(plan["folder"])
    spot = SpotCheckpoint(str(folder / "snapshots"), interval=EverySteps(1), on_full="wait", slots=3)
    trainer = pl.Trainer(
        max_steps=plan["snapshots"] + EARLY,
        accelerator="cpu",
        devices=plan["ranks"],
        strategy=DDPStrategy(process_group_backend="gloo"),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        callbacks=[Meter(folder, spot), spot],
    )
    data = TensorDataset(torch.randn(16 * plan["ranks"] * (plan["snapshots"] + EARLY), plan["width"]))
    trainer.fit(Layers(plan["width"], plan["layers"]), DataLoader(data, 16))
    return 0


if __name__ == "__main__":
    sys.exit(main())
