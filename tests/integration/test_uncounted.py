"""Optimizers that step past Lightning: what is said, and what waits for the copy of a snapshot."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.errors import SettingsError
from tests.support.said import said, said_about
from tests.support.snapshots import serverless
from tests.support.trainer import Net, data, trainer
from tests.support.waiting import new_process


class Manual(Net):
    """Steps its optimizers itself."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(width)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.step(batch_idx)

    def step(self, batch_idx: int) -> None:
        """Do what is tried."""


def in_backward(module: Net) -> list[torch.optim.Optimizer]:
    """One for each parameter, which step in hooks of backward."""
    made = {parameter: torch.optim.Adam([parameter], lr=0.01) for parameter in module.parameters()}

    def step(parameter: torch.Tensor) -> None:
        made[parameter].step()
        if not module.automatic_optimization:
            made[parameter].zero_grad()

    for parameter in made:
        parameter.register_post_accumulate_grad_hook(step)
    return list(made.values())


class InBackward(Manual):
    """One for each parameter, in hooks of backward."""

    def configure_optimizers(self) -> Any:
        return in_backward(self)


class Unwrapped(Manual):
    """The one that Lightning was given, without what it wraps that in."""

    def step(self, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.step()
        optimizer.zero_grad()


class OfItsOwn(Manual):
    """One that Lightning was not given."""

    def configure_optimizers(self) -> None:
        self._raw = [torch.optim.Adam(self.parameters(), lr=0.01)]

    def step(self, batch_idx: int) -> None:
        self._raw[0].step()
        self._raw[0].zero_grad()


class Seldom(Manual):
    """A critic without Lightning in each batch, and the rest with it in every fifth."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net[index].parameters(), lr=0.01) for index in (0, 3)]

    def step(self, batch_idx: int) -> None:
        critic, rest = self.optimizers()
        critic.optimizer.step()
        if batch_idx % 5 == 4:
            rest.step()
        self.zero_grad()


class InnerLoop(Net):
    """Steps on a copy, as in meta-learning, with gradients accumulated over many batches outside."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inner = copy.deepcopy(self.net)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        inner(batch[0]).sum().backward()
        optimizer.step()
        return self.loss(batch)


def spot(root: Path, **more: Any) -> SpotCheckpoint:
    return serverless(root / "run", interval=EverySteps(1), **more)


@pytest.mark.parametrize(
    ("kind", "batches", "steps", "warns"),
    [
        (InBackward, 12, 0, True),
        (InBackward, 3, 0, True),  # fewer than it waits for: at the end
        (Unwrapped, 12, 0, True),
        (OfItsOwn, 12, 0, True),
        (Seldom, 12, 2, False),
        (InnerLoop, 24, 2, False),
    ],
)
def test_steps_that_lightning_does_not_count_are_named(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    kind: type[Net],
    batches: int,
    steps: int,
    warns: bool,
) -> None:
    """No snapshot was ever taken, each start began anew, and not a word was said."""
    new_process()
    more: dict[str, Any] = {"accumulate_grad_batches": 12} if kind is InnerLoop else {}
    lightning = trainer(spot(tmp_path), max_epochs=1, **more)
    lightning.fit(kind(), data(batches))
    assert lightning.global_step == steps
    assert len(said(caplog, "steps-not-counted")) == warns
    assert "step 0" not in capfd.readouterr().err


def test_it_is_an_error_where_snapshots_must_be_taken(tmp_path: Path) -> None:
    new_process()
    with pytest.raises(SettingsError, match=r"\b8\b"):
        trainer(spot(tmp_path, on_error="raise"), max_epochs=1).fit(InBackward(), data(12))


class OnlyCounts(Net):
    """Lightning steps an optimizer that does nothing; others step in hooks of backward, while a snapshot is copied."""

    def configure_optimizers(self) -> Any:
        in_backward(self)
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("copy_mode", ["eager", "backward", "asymmetric"])
def test_a_step_within_backward_waits_for_the_copy(
    tmp_path: Path, copy_mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Each snapshot was torn, and dropped."""
    new_process()
    callback = spot(tmp_path, copy_mode=copy_mode)
    trainer(callback, max_epochs=1).fit(OnlyCounts(100_000), data(6))
    assert said_about(caplog, "optimizer-not-returned") == ["Adam"]
    assert callback.num_dropped == 0
    assert callback.last_committed_step == 6


class Wraps(torch.optim.SGD):
    """An optimizer that is made of another one, whose state it has."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=0.01)
        self.inner = torch.optim.SGD(parameters, lr=0.01)

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self.inner.step()
        return loss


class Wrapped(Net):
    def configure_optimizers(self) -> Any:
        return Wraps(self.parameters())


class SavesItself(OnlyCounts):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """It would save its optimizers here."""


@pytest.mark.parametrize("kind", [Net, Manual, Seldom, InnerLoop, Wrapped, SavesItself])
def test_optimizers_that_lightning_has_are_not_named(
    tmp_path: Path, kind: type[Net], caplog: pytest.LogCaptureFixture
) -> None:
    new_process()
    trainer(spot(tmp_path, on_error="raise"), max_epochs=1).fit(kind(), data(5))
    assert not said(caplog, "optimizer-not-returned")
