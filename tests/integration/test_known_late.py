"""Classes that a program makes known to torch only after a resume has read its snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spot import EverySteps
from lightning_spot.errors import NotSerializableError
from tests.support.said import said_about
from tests.support.snapshots import serverless
from tests.support.trainer import Net, Stop, StopAt, data, trainer
from tests.support.waiting import new_process


class Coded(torch.Tensor):
    """What optimizers of 8 bits keep their moments in."""


class Codes(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("moment", torch.zeros_like(parameter).as_subclass(Coded))
        return loss


class ImportsLate(Net):
    """Its optimizer's package makes its class known to torch where it is imported."""

    def configure_optimizers(self) -> Any:
        torch.serialization.add_safe_globals([Coded])
        return Codes(self.parameters(), lr=0.01)


def test_a_class_torch_knows_only_in_training_is_named_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first start said nothing; each resume was refused, and named a function of torch."""
    known = torch.serialization.get_safe_globals()

    def fit(stop: int) -> None:
        new_process()
        torch.serialization.clear_safe_globals()
        trainer(StopAt(stop), serverless(tmp_path / "run", interval=EverySteps(2))).fit(ImportsLate(), data(8))

    try:
        with pytest.raises(Stop):
            fit(7)
        (about,) = said_about(caplog, "not-resumable")
        assert "Coded is known to torch only since training has begun" in about
        with pytest.raises(NotSerializableError, match=r"not loaded: tests\.integration\.test_known_late\.Coded"):
            fit(9)
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(known)
