"""What ``keep=`` keeps in storage of a training, and that it is given as users give it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonargparse
import lightning.pytorch as pl
import pytest
import torch

from lightning_spot import Keep, SpotCheckpoint
from lightning_spot.store.local import LocalStore
from tests.support.snapshots import EachDurable, spot
from tests.support.trainer import Net, data, trainer


class Scored(Net):
    """Its score is best after the fifth step; every second value of another metric is none."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        step = self.trainer.global_step
        self.log("score", float(abs(step - 5)))
        self.log("broken", torch.tensor(float("nan") if step % 2 else 1.0))


@pytest.mark.parametrize("local_server", [True, False], ids=["server", "in-process"])
@pytest.mark.guarantee("G14")
def test_the_best_and_every_nth_snapshot_stay(tmp_path: Path, local_server: bool) -> None:
    keep = Keep(newest=1, every_n_steps=4, best=1, monitor="score")
    callback = spot(tmp_path, keep=keep, local_server=local_server)
    checks = {"val_check_interval": 1, "limit_val_batches": 1, "max_steps": 10, "max_epochs": None}
    fits = trainer(callback, EachDurable(tmp_path / "run-1", 3), **checks)
    fits.fit(Scored(), data(), data())
    there = LocalStore(tmp_path / "run-1").survey().manifests
    # Snapshots of steps 3, 6 and 9, and of the end; each has the value that was logged last.
    assert {each.step: each.metrics["score"] for each in there} == {6: 0.0, 9: 3.0, 10: 5.0}
    assert all("broken" not in each.metrics or each.metrics["broken"] == 1.0 for each in there)


def test_metrics_of_a_device_are_read_once_for_each_value() -> None:
    """Reading one waits for the GPU; a stand-in for a GPU's tensor counts."""
    from lightning_spot.state.logged_values import LoggedNumbers

    reads: list[str] = []

    class OnDevice(torch.Tensor):
        @property
        def device(self) -> Any:
            return torch.device("cuda")

        def __float__(self) -> float:
            reads.append("read")
            return 2.0

    fits = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    value = torch.tensor(2.0).as_subclass(OnDevice)
    fits.callback_metrics.update({"a": value, "b": value, "c": torch.tensor([1.0, 2.0]), "d": 3, "e\n": 1.0})
    numbers = LoggedNumbers("a")
    assert numbers.now(fits) == numbers.now(fits) == {"a": 2.0, "d": 3.0}
    assert reads == ["read"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("keep: {newest: 3, newer_than: 2d}", {"keep": Keep(newest=3, newer_than=172800.0)}),
        ("keep: 3", {"keep": Keep(newest=3)}),
        ("keep: {best: 2, monitor: val_loss, mode: max}", {"keep": Keep(best=2, monitor="val_loss", mode="max")}),
        ("servers: [spot://a:1, spot://b:2]\n  replicas: 2", {"servers": "spot://a:1, spot://b:2", "replicas": 2}),
    ],
)
def test_in_yaml(tmp_path: Path, given: str, expected: dict[str, Any]) -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(SpotCheckpoint, "spot")
    (tmp_path / "c.yaml").write_text(f"spot:\n  dirpath: {tmp_path / 'run-1'}\n  {given}\n")
    read = parser.instantiate_classes(parser.parse_path(str(tmp_path / "c.yaml")))["spot"]
    assert expected.items() <= read.snapshots.in_common().items()
