"""Frozen parameters on a GPU: left out, looked at while the host does not wait, copied where something writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_spot import EverySteps
from tests.gpus import NEEDS_GPU, ON_GPU, copied
from tests.models import EachDurable, Net, Probe, data, trainer
from tests.test_fit import check_all, manifests, spot

__all__ = ["copied"]

pytestmark = NEEDS_GPU
FROZEN = 4 << 20


class Adapted(Net):
    """With three frozen parameters of 4 MiB each, which forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ParameterList(nn.Parameter(torch.rand(1 << 20), requires_grad=False) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0.0 * sum(weight.sum() for weight in self.frozen)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([weight for weight in self.parameters() if weight.requires_grad], fused=True)


class Writes(pl.Callback):
    """Writes to a frozen parameter: by the counts, or past them, in some batches or in each."""

    def __init__(self, *steps: int, counted: bool) -> None:
        self.steps, self.counted = steps, counted

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step in self.steps:
            with torch.no_grad():
                weight = module.frozen[1]
                (weight if self.counted else weight.data).mul_(1.5)


def fit(tmp_path: Path, *callbacks: pl.Callback, torn: int = 0) -> None:
    """Train with a snapshot at every step, each of which is what the state of its step was."""
    probe, callback = Probe(), spot(tmp_path, interval=EverySteps(1), device_buffer="1KiB")
    trainer(*callbacks, callback, probe, EachDurable(tmp_path / "run-1", 5), **ON_GPU).fit(Adapted(), data())
    assert len(check_all(tmp_path, probe)) >= 8
    assert callback.torn == torn


def test_what_is_frozen_is_left_out(tmp_path: Path, copied: list[int]) -> None:
    fit(tmp_path)
    assert median(copied) < FROZEN  # a slot that is made late is filled whole
    assert copied[-1] > 3 * FROZEN


def test_what_was_written_is_copied(tmp_path: Path, copied: list[int]) -> None:
    fit(tmp_path, Writes(12, counted=True))
    assert median(copied) < FROZEN


def test_what_is_written_past_the_counts_each_time_costs_no_snapshot(tmp_path: Path, copied: list[int]) -> None:
    fit(tmp_path, Writes(*range(1000), counted=False))
    assert FROZEN < median(copied) < 2 * FROZEN


def test_a_write_past_the_counts_costs_one_snapshot(tmp_path: Path, copied: list[int]) -> None:
    fit(tmp_path, Writes(12, counted=False), torn=1)
    assert min(copied[14:]) > 3 * FROZEN


class Strict(pl.Callback):
    """From its eighth step on, whatever has the host wait for the device is an error, on all threads."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 8:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def lenient_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("lenient_again")
def test_the_host_waits_for_no_look(tmp_path: Path, copied: list[int]) -> None:
    callback = spot(tmp_path, interval=EverySteps(2), on_full="skip", device_buffer="1KiB")
    run = trainer(Strict(), callback, max_epochs=4, **ON_GPU)
    run.fit(Adapted(), data())
    assert run.global_step == 80
    assert manifests(tmp_path)
    assert min(copied) < FROZEN
