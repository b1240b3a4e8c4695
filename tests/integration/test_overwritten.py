"""What hooks at the start of training, and a conversion to half precision, do to restored weights and buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_spot import EverySteps
from tests.support.said import listening
from tests.support.snapshots import serverless
from tests.support.trainer import Net, Stop, StopAt, data, trainer
from tests.support.waiting import new_process

pytestmark = pytest.mark.guarantee("G9")


class Initialises(Net):
    """In a hook at the start of training, as some projects do."""

    def on_train_start(self) -> None:
        for parameter in self.net[0].parameters():
            nn.init.normal_(parameter, std=0.1)


class InitialisesEarlier(Initialises):
    def on_fit_start(self) -> None:
        self.net[3].weight.data.normal_(std=0.1)  # past torch's counts

    def on_train_start(self) -> None:
        """Nothing."""


class LoadsItsOwn(Net):
    """A resume of the project's own: a file of weights, if there is one."""

    def on_train_start(self) -> None:
        self.load_state_dict(Net().state_dict())


class KeepsFull(Net):
    """Sums in full precision, whatever the module is converted to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def on_fit_start(self) -> None:
        self.total = self.total.float()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.total += torch.tensor([0.1, 1e-4, 3.3])
        return self.loss([part.bfloat16() for part in batch])


class KeepsFullLater(KeepsFull):
    """It decides on that at its first step."""

    def on_fit_start(self) -> None:
        """Nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 0:
            self.total = self.total.float()
        return super().training_step(batch, batch_idx)


def fit(run: Path, kind: type[Net], *callbacks: pl.Callback, **more: Any) -> tuple[Net, list[str]]:
    new_process()
    pl.seed_everything(1, verbose=False)
    net = kind()
    fits = trainer(*callbacks, serverless(run, interval=EverySteps(1)), **more)
    with listening() as logged:
        fits.fit(net, data(6))
    return net, [item.spot_facts["about"] for item in logged if item.spot_key == "weights-put-back"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "names", "more"),
    [
        (Initialises, "net.0.bias, net.0.weight", {}),
        (InitialisesEarlier, "net.3.weight", {}),
        (LoadsItsOwn, "net.0.bias, net.0.weight, net.1.bias, net.1.num_batches_tracked", {}),
        (KeepsFull, "", {"precision": "bf16-true"}),
        (KeepsFullLater, "", {"precision": "bf16-true"}),
        (Net, "", {"precision": "64-true"}),
    ],
)
def test_a_resumed_run_has_the_values_of_its_snapshot(
    tmp_path: Path, kind: type[Net], names: str, more: dict[str, Any]
) -> None:
    """They were lost, or rounded, and nothing was said."""
    if more.get("precision") == "64-true":
        kind = type("Double", (kind,), {"loss": lambda self, batch: Net.loss(self, [part.double() for part in batch])})
    whole, said = fit(tmp_path / "whole", kind, **more)
    assert said == []
    with pytest.raises(Stop):
        fit(tmp_path / "run", kind, StopAt(5), **more)
    again, said = fit(tmp_path / "run", kind, **more)
    assert [names in text for text in said] == ([True] if names else [])
    for name, value in whole.state_dict().items():
        assert again.state_dict()[name].dtype == value.dtype, name
        assert torch.equal(value, again.state_dict()[name]), name
