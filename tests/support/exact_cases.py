"""Ways to train that a resume must get right to the bit. A case can be trained in this process or as a program."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_spot import EverySteps, PreemptionGuard, SpotCheckpoint
from lightning_spot.store.local import LocalStore
from tests.support.trainer import trainer as quiet
from tests.support.waiting import new_process, until

SAMPLES = 96
BATCH = 4


class Augmented(Dataset[Any]):
    """Samples with noise from all three generators, drawn where the sample is loaded (maybe in a worker)."""

    def __init__(self, noise: bool = True, samples: int = SAMPLES) -> None:
        self.x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index]
        y = x.sum().unsqueeze(0)
        if self.noise:
            x = x + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return x, y


class StatefulLoader:
    """What torchdata's ``StatefulDataLoader`` is to Lightning: a loader with ``state_dict`` and no length."""

    def __init__(self) -> None:
        self.data = Augmented()
        self.place = 0

    def __iter__(self) -> Any:
        while self.place < SAMPLES:
            self.place += BATCH
            rows = [self.data[index] for index in range(self.place - BATCH, self.place)]
            yield torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Lean(pl.LightningModule):
    """Dropout, BatchNorm, an epoch's mean, a non-persistent buffer, numbers drawn in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("drift", torch.zeros(3), persistent=False)

    def measure(self, out: torch.Tensor, y: torch.Tensor) -> None:
        """What is done with the output besides the loss."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        out = self.net(x + 0.01 * float(np.random.rand()) + 0.01 * random.random())
        self.measure(out, y)
        self.drift += torch.rand(3, device=self.drift.device)
        return nn.functional.mse_loss(out, y) + 0 * self.drift.sum()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x + 0.01 * torch.randn_like(x)), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5), "interval": "step"}]


class Model(Lean):
    """Logs a metric and an epoch's maximum besides: a third of what a run of it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanAbsoluteError()
        self.correlation = torchmetrics.PearsonCorrCoef()

    def measure(self, out: torch.Tensor, y: torch.Tensor) -> None:
        self.error(out, y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.log("worst", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("error", self.error, on_step=False, on_epoch=True)
        return loss


class Estimated(Model):
    """Asks in some hook for the length of the run, which makes Lightning set up the data then, before it loads."""

    def __init__(self, hook: str = "configure_optimizers") -> None:
        super().__init__()
        self.hook, self.steps = hook, 0

    def setup(self, stage: str) -> None:
        self._estimate("setup")

    def configure_model(self) -> None:
        self._estimate("configure_model")

    def _estimate(self, hook: str) -> None:
        if hook == self.hook and not self.steps:
            self.steps = int(self.trainer.estimated_stepping_batches)

    def configure_optimizers(self) -> Any:
        self._estimate("configure_optimizers")
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=self.steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Gan(Model):
    """Two optimizers by hand; the second one steps every third batch, on gradients that it gathers in between."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[misc]
        first.zero_grad()
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.manual_backward(loss)
        first.step()
        if batch_idx % 3 == 2:
            second.step()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net[0].parameters(), 0.01), torch.optim.SGD(self.net[4].parameters(), 0.01)


def loader(noise: bool = True, **more: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(noise), BATCH, **{"shuffle": True, **more})


Case = Callable[[], tuple[pl.LightningModule, Any, dict[str, Any]]]

CASES: dict[str, Case] = {
    "plain": lambda: (Model(), loader(), {}),
    "distributed-sampler-workers": lambda: (Model(), _distributed(), {"use_distributed_sampler": False}),
    "accumulation": lambda: (Model(), loader(), {"accumulate_grad_batches": 5}),
    "mid-epoch-validation": lambda: (Model(), loader(), {"val_check_interval": 7}),
    "estimated-steps": lambda: (Estimated(), loader(), {}),
    "stateful-stream": lambda: (Model(), StatefulLoader(), {}),
    "limited": lambda: (Model(), loader(), {"limit_train_batches": 9, "check_val_every_n_epoch": 2}),
}


class Clock(Model):
    """Cannot be repeated: what time it is goes into the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        x, y = batch
        return super().training_step((x + time.time() % 1, y), batch_idx)


INEXACT: dict[str, Case] = {"clock": lambda: (Clock(), loader(), {})}


def _distributed() -> DataLoader[Any]:
    sampler = DistributedSampler(Augmented(), num_replicas=1, rank=0, seed=3)
    return loader(sampler=sampler, shuffle=False, num_workers=2)


def train(
    case: str | Case,
    root: Path,
    *callbacks: pl.Callback,
    seed: int,
    spot: pl.Callback | None = None,
    notices: Any = "signal",
    ckpt_path: str | None = None,
    **more: Any,
) -> pl.Trainer:
    """Train a case to its end, or go on with it. Every process begins with another ``seed``."""
    new_process()
    pl.seed_everything(11, verbose=False)
    module, loaders, settings = {**CASES, **INEXACT}[case]() if isinstance(case, str) else case()
    fresh = ckpt_path is None and not LocalStore(root / "run").survey().manifests
    pl.seed_everything(11 if fresh else seed, verbose=False)
    spot = spot or SpotCheckpoint(
        str(root / "run"), local_server=False, interval=EverySteps(3), on_full="wait", keep=100, notices=notices
    )
    checks = [
        LearningRateMonitor("step"),
        EarlyStopping("val_loss", patience=50, check_on_train_epoch_end=False),
        ModelCheckpoint(str(root / "best"), monitor="val_loss", save_top_k=2, save_last=False),
        ModelCheckpoint(str(root / "steps"), every_n_train_steps=4, save_top_k=-1),
    ]
    usual = {"max_epochs": 3, "log_every_n_steps": 1, "logger": CSVLogger(str(root), name="logs")}
    trainer = quiet(*callbacks, *checks, spot, **{**usual, **settings, **more})
    trainer.fit(module, loaders, DataLoader(Augmented(), 16), ckpt_path=ckpt_path)
    return trainer


class Diary(pl.Callback):
    """Tells where each rank is, one line for each phase, in a file that outlives it; each takes some time."""

    def __init__(self, path: Path, pace_s: float) -> None:
        self.path, self.pace_s = path, pace_s

    def setup(self, trainer: pl.Trainer, *_: object, **__: object) -> None:
        self.file = os.open(f"{self.path}-{trainer.global_rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.say("pid", os.getpid())

    def say(self, phase: str, number: int) -> None:
        os.write(self.file, f"{phase} {number}\n".encode())
        time.sleep(self.pace_s)

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


class KillAt(pl.Callback):
    """Sends its process a signal in a batch, once something of ``run`` is durable."""

    def __init__(self, batch: int, run: Path | None = None, number: int = signal.SIGKILL) -> None:
        self.batch, self.run, self.number = batch, run, number

    def on_before_backward(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            if self.run is not None:
                store = LocalStore(self.run)
                until(lambda: store.survey().manifests, "a snapshot to be durable")
            os.kill(os.getpid(), self.number)


def train_ranks(
    root: Path, seed: int = 11, ranks: int = 2, pace_s: float = 0.0, kill_at: int = -1, guard: bool = False
) -> None:
    """Train the plain case on several ranks (gloo), with a diary; all are killed in a batch, if one is given.

    With ``guard`` there is a ``PreemptionGuard`` and no snapshots of ours; what it saved is where the next one goes on.
    """
    data = DataLoader(Augmented(samples=48), BATCH, shuffle=True)  # epochs of 6 batches at two ranks
    where = {"strategy": DDPStrategy(process_group_backend="gloo", broadcast_buffers=False), "devices": ranks}
    callbacks = KillAt(kill_at, root / "run"), Diary(root / "diary", pace_s)
    alone: dict[str, Any] = {"spot": PreemptionGuard("signal")} if guard else {}
    if (root / "best" / "last-preempted.ckpt").exists():
        alone["ckpt_path"] = "last"
    trainer = train(lambda: (Model(), data, where), root, *callbacks, seed=seed, **alone)
    if guard:
        trainer.save_checkpoint(root / "final.ckpt")


def train_case(root: Path, case: str, seed: int = 11, pace_s: float = 0.0, notice: str = "/nonexistent") -> None:
    """Train a case to its end, every batch for some seconds; ``notice`` is a file that stands for one."""
    diary = Diary(root / "diary", pace_s)
    train(case, root, diary, seed=seed, notices=["signal", f"file:{notice}"])
