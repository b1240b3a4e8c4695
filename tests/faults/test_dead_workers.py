"""A worker of a loader that dies of its own is told apart from a signal to the whole process group."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_spot.errors import PreemptedError
from lightning_spot.goodput.records import read_records
from tests.support.said import informed, said
from tests.support.snapshots import manifests, spot
from tests.support.trainer import At, Net, data, trainer
from tests.support.waiting import new_process, until

pytestmark = pytest.mark.guarantee("G26")


WAITS_AT = 10


class Signalled(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Its worker has signals in a batch that training waits for: some for the parent, too, and some alone."""

    def __init__(self, waits: Path, both: Sequence[signal.Signals], alone: Sequence[signal.Signals]) -> None:
        self.waits, self.both, self.alone = waits, both, alone

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 2 * WAITS_AT:
            until(self.waits.exists, "training to have no batch left")
            time.sleep(1.0)  # it comes to wait for this one
            for number in self.both:
                os.kill(os.getppid(), number)
            for number in (*self.both, *self.alone):
                os.kill(os.getpid(), number)
        return torch.ones(16), torch.ones(1)


def fit(
    tmp_path: Path,
    *,
    both: Sequence[signal.Signals] = (),
    alone: Sequence[signal.Signals] = (),
    notices: str | None = "signal",
) -> None:
    waits = tmp_path / "waits"
    loader = DataLoader(Signalled(waits, both, alone), batch_size=2, num_workers=1, prefetch_factor=1)
    trainer(spot(tmp_path, notices=notices), At(WAITS_AT, waits.touch, "on_train_batch_end")).fit(Net(), loader)


def test_a_signal_to_the_group_is_a_preemption(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It ended the run with torch's error, and counted as a start that had failed."""
    caplog.set_level("INFO")
    with pytest.raises(PreemptedError) as ended:
        fit(tmp_path, both=[signal.SIGTERM])
    assert ended.value.code == 143
    assert read_records(str(tmp_path / "run-1"))[0].end == "preempted"
    assert len(said(caplog, "workers-ended")) == 1
    told = informed(caplog)["run-interrupted"]
    assert (told["error"], told["step"]) == ("a signal to the process group", WAITS_AT)
    new_process()
    again = spot(tmp_path, notices=None)
    trainer(again, max_epochs=2).fit(Net(), data())
    assert again.resumed_from.step == 9


def test_workers_outlive_the_signal_of_a_scheduler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SLURM sends SIGUSR1 to all processes of a step: without its worker's batch, training could not stop in order."""
    with pytest.raises(PreemptedError):
        fit(tmp_path, both=[signal.SIGUSR1])
    assert not said(caplog, "workers-ended")
    assert manifests(tmp_path)[0].step == WAITS_AT + 1


@pytest.mark.parametrize("notices", ["signal", None])
def test_a_worker_that_dies_of_its_own_is_a_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, notices: str | None
) -> None:
    caplog.set_level("INFO")
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        fit(tmp_path, alone=[signal.SIGKILL], notices=notices)
    assert informed(caplog)["run-interrupted"]["error"] == "a DataLoader worker that died"
    assert not said(caplog, "workers-ended")
    assert read_records(str(tmp_path / "run-1"))[0].end == "failed"
