"""A GPU that is lost in mid-training: each call of CUDA fails from then on, also those that clear up."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_spot import SpotCheckpoint
from lightning_spot.capture import cuda
from tests.support.fake_device import Emulated
from tests.support.snapshots import manifests, spot
from tests.support.trainer import Net, data, trainer
from tests.support.waiting import new_process, until

UNKNOWN, ERROR = 999, "CUDA error: device-side assert triggered"


class Fallible(Emulated):
    """Fails once it is told that it is lost."""

    CALLS = ("record", "wait", "copy", "is_over", "seconds", "synchronize", "allocate", "is_capturing")

    def __init__(self) -> None:
        super().__init__()
        self.lost = False

    def __getattribute__(self, name: str) -> Any:
        if name in Fallible.CALLS and object.__getattribute__(self, "lost"):
            raise RuntimeError(ERROR)
        return object.__getattribute__(self, name)

    def unpin(self, slot: torch.Tensor) -> int:
        return UNKNOWN if self.lost else super().unpin(slot)


class LoseAt(pl.Callback):
    def __init__(self, device: Fallible, callback: SpotCheckpoint, step: int, hook: str) -> None:
        self.device, self.callback, self.step = device, callback, step
        setattr(self, hook, self.lose)

    def lose(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            until(lambda: self.callback.last_committed_step == 9, "the last snapshot")
            self.device.lost = True
            raise RuntimeError(ERROR)


@pytest.mark.parametrize("local_server", [True, False])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"])
def test_what_is_committed_is_safe_and_the_error_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_server: bool, hook: str
) -> None:
    threads = threading.active_count()
    device = Fallible()
    with monkeypatch.context() as patch:  # to undo all would undo where the servers of tests are
        patch.setattr(cuda, "Cuda", lambda: device)
        callback = spot(tmp_path, local_server=local_server)
        with pytest.raises(RuntimeError, match=ERROR) as raised:
            trainer(callback, LoseAt(device, callback, 10, hook)).fit(Net(), data())
    assert raised.traceback[-1].name == "lose"
    assert manifests(tmp_path)[0].step == 9
    assert callback.last_committed_step == 9
    new_process()
    again = spot(tmp_path, local_server=local_server)
    run = trainer(again)
    run.fit(Net(), data())
    assert again.resumed_from.step == 9
    assert threading.active_count() <= threads
