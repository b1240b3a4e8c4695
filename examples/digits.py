"""A small CNN on scikit-learn's handwritten digits, made preemptible by one callback. Kill it and run it again.

    python examples/digits.py --dirpath checkpoints/digits

Not for measuring speed: the model is far too small for that. ``--pace-s`` makes each step last like a bigger model's.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

from lightning_spot import EverySteps, SpotCheckpoint

VALIDATION_IMAGES = 360


class DigitsData(L.LightningDataModule):
    """The 1,797 images of 8x8 pixels that come with scikit-learn, in one fixed split.

    Args:
        batch_size: images in a training batch.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Load and split; the split has a seed of its own, so that every attempt sees the same one."""
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
        labels = torch.tensor(digits.target, dtype=torch.long)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, validation = order[:-VALIDATION_IMAGES], order[-VALIDATION_IMAGES:]
        self.train_set = TensorDataset(images[train], labels[train])
        self.validation_set = TensorDataset(images[validation], labels[validation])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled training batches."""
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The validation images in one batch."""
        return DataLoader(self.validation_set, batch_size=VALIDATION_IMAGES)


class DigitsCNN(L.LightningModule):
    """Three convolutions with batch norm, and a classifier with dropout: about 70,000 parameters.

    Args:
        learning_rate: in the first epoch.
    """

    def __init__(self, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            _convolution(1, 32),
            _convolution(32, 64),
            nn.MaxPool2d(2),
            _convolution(64, 64),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(64 * 2 * 2, 10),
        )
        self.train_accuracy = Accuracy(task="multiclass", num_classes=10)
        self.val_accuracy = Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of one batch."""
        images, labels = batch
        logits = self.net(images)
        loss = F.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train_loss", loss)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Accuracy on the images held back."""
        images, labels = batch
        self.val_accuracy(self.net(images), labels)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Adam, with a learning rate that falls from epoch to epoch."""
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams["learning_rate"])
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.93)}


def _convolution(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


class Diary(L.Callback):
    """Writes what happened into a file, one JSON object per line, so that it can be read after a SIGKILL.

    Args:
        path: file to append to.
        spot: the callback whose snapshots are noted.
    """

    def __init__(self, path: str, spot: SpotCheckpoint) -> None:
        self.spot = spot
        # One write() per line and nothing kept in this process: what was written survives its death.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note where this attempt begins, and what it was resumed from."""
        resumed = self.spot.resumed_from
        source = {"name": resumed.name, "tier": resumed.tier, "step": resumed.step} if resumed is not None else None
        steps = trainer.estimated_stepping_batches
        self._write("start", trainer, resumed_from=source, total_steps=steps, epoch_steps=trainer.num_training_batches)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Note every step, and the newest snapshot that is committed by then."""
        self._write("step", trainer, committed_step=self.spot.last_committed_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the outcome."""
        self._write("end", trainer, val_accuracy=float(trainer.callback_metrics["val_accuracy"]))

    def _write(self, event: str, trainer: L.Trainer, **facts: Any) -> None:
        line = {"event": event, "attempt": self.spot.attempt, "step": trainer.global_step, "time_s": time.time()}
        os.write(self._file, (json.dumps({**line, **facts}) + "\n").encode())


class Pace(L.Callback):
    """Makes every step last longer, as a bigger model's would.

    Args:
        pace_s: seconds added to each step.
    """

    def __init__(self, pace_s: float) -> None:
        self.pace_s = pace_s

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Wait."""
        time.sleep(self.pace_s)


def main() -> None:
    """Train; the same command line starts the run and, after a preemption, carries on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dirpath", default="checkpoints/digits", help="durable directory or URL (%(default)s)")
    parser.add_argument("--server", action="append", metavar="URL", help="snapshot server, spot://host:port")
    parser.add_argument("--no-local-server", action="store_true", help="hold snapshots in this process only")
    parser.add_argument("--every-steps", type=int, default=50, help="steps between snapshots (%(default)s)")
    parser.add_argument("--epochs", type=int, default=30, help="epochs in all (%(default)s)")
    parser.add_argument("--pace-s", type=float, default=0.0, help="seconds added to each step (%(default)s)")
    parser.add_argument(
        "--server-idle-timeout-s", type=float, default=900.0, help="the local server ends after so long"
    )
    parser.add_argument("--diary", metavar="FILE", help="append what happens to this file, as JSON lines")
    arguments = parser.parse_args()

    # The data set is in memory already, so workers would only cost time; Lightning cannot know that.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    L.seed_everything(1, verbose=False)
    torch.set_num_threads(1)  # faster than more for images this small

    spot = SpotCheckpoint(
        arguments.dirpath,
        servers=arguments.server,
        local_server=not arguments.no_local_server,
        interval=EverySteps(arguments.every_steps),
        server_idle_timeout_s=arguments.server_idle_timeout_s,
    )
    callbacks: list[L.Callback] = [spot]
    if arguments.diary:
        callbacks.append(Diary(arguments.diary, spot))
    if arguments.pace_s:
        callbacks.append(Pace(arguments.pace_s))
    trainer = L.Trainer(
        max_epochs=arguments.epochs,
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = DigitsCNN(), DigitsData()
    trainer.fit(model, data)
    # Of a run that was complete already, fit() restores the weights and trains nothing: this works then, too.
    (measured,) = trainer.validate(model, data, verbose=False)
    print(f"accuracy on {VALIDATION_IMAGES} held-back digits: {measured['val_accuracy']:.4f}")


if __name__ == "__main__":
    main()
