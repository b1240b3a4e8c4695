"""Training pauses within an iteration, for a validation or in a hook: what is on GPUs is safe all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_spot import EverySteps
from lightning_spot.capture import cuda, schedule
from tests.support.fake_device import Emulated
from tests.support.snapshots import EachDurable, check_all, spot
from tests.support.trainer import Net, Probe, data, trainer


@pytest.mark.parametrize(("copy_mode", "buffer"), [("eager", "64MiB"), ("asymmetric", "1KiB"), ("backward", None)])
def test_a_snapshot_is_committed_while_training_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy_mode: Any, buffer: str | None
) -> None:
    monkeypatch.setattr(schedule, "LEAST_BYTES", 64)
    monkeypatch.setattr(cuda, "Cuda", lambda: device)
    device, probe = Emulated(), Probe()
    callback = spot(tmp_path, interval=EverySteps(1), device_buffer=buffer, copy_mode=copy_mode)
    pauses = EachDurable(tmp_path / "run-1", 9)  # before the next optimizer step
    trainer(callback, probe, pauses).fit(Net(), data())
    assert len(check_all(tmp_path, probe)) >= 2
    snapshotter = callback.snapshots.snapshotter
    assert snapshotter.writing.dropped == 0
