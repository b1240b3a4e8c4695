"""Trainers: small modules and data, and what ends a training. Used where our package is not installed, too."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCHES = 20


def data(batches: int = BATCHES, batch_size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batches * batch_size, 16, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size)


class Net(pl.LightningModule):
    """A small network with BatchNorm (buffers that forward changes), Adam and a scheduler."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class TwoOptimizers(Net):
    """Manual optimisation with two optimizers, as in a GAN; one of them is stepped raw, past Lightning's wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first = self.optimizers()[0]
        second = self.optimizers(use_pl_optimizer=False)[1]
        loss = self.loss(batch)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net[0].parameters()), torch.optim.SGD(self.net[3].parameters(), 0.01, momentum=0.9)


class Unsteady(Net):
    """Changes its weights in the middle of forward: such a tensor is not the optimizer's alone."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            self.net[3].bias.mul_(0.999)
        return self.loss(batch)


def trainer(*callbacks: pl.Callback, **more: Any) -> pl.Trainer:
    return pl.Trainer(
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": any(isinstance(item, Checkpoint) for item in callbacks),
            "callbacks": list(callbacks),
            **more,
        }
    )


class Probe(pl.Callback):
    """Keeps copies of the true state after each optimizer step, the oracle that snapshots are compared with."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        # At the start of the next batch: after every hook of the last one.
        self._keep(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._keep(trainer, pl_module)

    def _keep(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        state = {key: value.detach().cpu().clone() for key, value in pl_module.state_dict().items()}
        for index, optimizer in enumerate(trainer.optimizers):
            for number, values in optimizer.state_dict()["state"].items():
                state.update(
                    {
                        f"opt.{index}.{number}.{key}": value.cpu().clone()
                        for key, value in values.items()
                        if torch.is_tensor(value)
                    }
                )
        self.states.setdefault(trainer.global_step, state)


def state_of(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same view of a checkpoint as :class:`Probe` keeps."""
    state = dict(checkpoint["state_dict"])
    for index, optimizer in enumerate(checkpoint["optimizer_states"]):
        for number, values in optimizer["state"].items():
            state.update(
                {f"opt.{index}.{number}.{key}": value for key, value in values.items() if torch.is_tensor(value)}
            )
    return state


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


class Stop(Exception):
    """Stands for whatever ends a training run before its end."""


class StopAt(pl.Callback):
    """Ends training in the middle of the forward pass after ``step``."""

    def __init__(self, step: int, error: type[BaseException] = Stop) -> None:
        self.step, self.error = step, error

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise self.error


class At(pl.Callback):
    """Does something after ``step``: in the middle of the next one, or in another hook of callbacks."""

    def __init__(self, step: int, act: Callable[[], Any], hook: str = "on_before_backward") -> None:
        self.step, self.act = step, act
        setattr(self, hook, self._look)

    def _look(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.act()


class Dies(pl.Callback):
    """Ends a training with its first batch, as what was restored for half does, and knows where it began."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error if error is not None else Stop()
        self.step = -1

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.step = trainer.global_step
        raise self.error


class StopAfter(pl.Callback):
    """Ends training after ``batch`` whole batches of this process: between forward and backward, or in validation."""

    def __init__(self, batch: int, *, in_validation: bool = False) -> None:
        self.left = batch
        self.in_validation = in_validation

    def on_before_backward(self, *_: Any) -> None:
        self._count(not self.in_validation)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._count(self.in_validation and not trainer.sanity_checking)

    def _count(self, counts: bool) -> None:
        self.left -= counts
        if counts and self.left < 0:
            raise Stop


class StopIn(pl.Callback):
    """Ends training in a hook of callbacks, when that has been called ``count`` times in this process."""

    def __init__(self, hook: str, count: int) -> None:
        self.left = count
        setattr(self, hook, self._count)

    def _count(self, trainer: pl.Trainer, *_: Any) -> None:
        self.left -= not trainer.sanity_checking
        if self.left == 0:
            raise Stop


def digest(state: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode())
        found.update(state[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digest_of(checkpoint: dict[str, Any]) -> str:
    """Of the state of its step: averaging callbacks save the averages as the model's."""
    checkpoint["state_dict"] = checkpoint.get("current_model_state", checkpoint["state_dict"])
    return digest(state_of(checkpoint))


class Unhurried(pl.Callback):
    """Hashes the state of every step, and waits for nothing."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._see(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._see(trainer, pl_module)

    def _see(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        checkpoint = {"state_dict": dict(pl_module.state_dict()), "optimizer_states": optimizers}
        self.digests.setdefault(trainer.global_step, digest(state_of(checkpoint)))
