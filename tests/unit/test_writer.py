"""The writer: snapshots of a state whose structure changes, guards, and a ring that comes and goes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spot.capture import slot_pool
from lightning_spot.capture.copier import Copier
from lightning_spot.capture.schedule import Schedule
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.errors import FailureReason, NotSerializableError, SnapshotFailedError
from lightning_spot.snapshot import layout
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from tests.support.fake_device import FakeDevice
from tests.support.ranks import Desk, same
from tests.support.said import said_about
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G9")


def test_a_snapshot_nobody_asks_about_leaves_nothing_in_memory(desk: Desk) -> None:
    """Files that a user saves: the pickled part of each was kept until training ended."""
    for step in range(4):
        desk.begin(step, desk.checkpoint()).result(120)
    assert len(desk.writer._pending) == 1


def test_what_cannot_be_laid_out_is_saved_plainly(
    desk: Desk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(3):
        with monkeypatch.context() as patch:
            if step < 2:
                patch.setattr(layout, "reduced", None)  # which torch may name otherwise one day
            desk.begin(step, desk.checkpoint()).result(120)
        assert same(desk.saved(step), desk.weights, desk.buffer)
    (about,) = said_about(caplog, "saved-slowly")
    assert "NoneType" in about


def test_what_torch_refuses_is_refused(desk: Desk) -> None:
    class Refuses:
        def __reduce__(self) -> str:
            raise RuntimeError("not me")

    with pytest.raises(NotSerializableError, match="not me"):
        desk.begin(0, desk.checkpoint(it=Refuses()))
    desk.begin(1, desk.checkpoint()).result(120)
    assert same(desk.saved(1), desk.weights, desk.buffer)


def test_too_large_leaves_the_writer_usable(tmp_path: Path) -> None:
    desk = Desk(tmp_path, memory_bytes=2**22)
    with pytest.raises(SnapshotFailedError, check=FailureReason.TOO_LARGE.caused):
        desk.begin(0, desk.checkpoint(extra=torch.ones(2**21)))
    desk.begin(1, desk.checkpoint()).result(120)
    assert same(desk.saved(1), desk.weights, desk.buffer)
    desk.writer.close()
    desk.host.leave(complete=True)


def test_while_snapshots_follow_closely_none_asks_the_ring(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_pool, "AHEAD_S", 30.0)
    for step in range(2):
        desk.begin(step, desk.checkpoint()).result(120)
    until(lambda: desk.writer._slots.idle_s, "a slot leased ahead")
    asked = []
    lease = desk.host.lease

    def counted(*args: Any, **more: Any) -> Any:
        asked.append(threading.current_thread())
        return lease(*args, **more)

    monkeypatch.setattr(desk.host, "lease", counted)
    for step in range(2, 5):
        desk.begin(step, desk.checkpoint()).result(120)
        assert same(desk.saved(step), desk.weights, desk.buffer)
        until(lambda: desk.writer._slots.idle_s, "a slot leased ahead")
    assert threading.current_thread() not in asked
    larger = desk.checkpoint(extra=torch.ones(3_000_000))
    desk.begin(5, larger).result(120)  # needs a larger slot
    assert same(desk.saved(5), desk.weights, desk.buffer)


def test_a_slot_that_is_not_used_is_given_back(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    states = lambda: [slot["state"] for slot in desk.host._server.status()["slots"]]  # noqa: E731
    for step in range(2):
        desk.begin(step, desk.checkpoint()).result(120)
    until(lambda: "filling" not in states(), "no slot held")
    for step in range(2, 4):
        desk.begin(step, desk.checkpoint()).result(120)
    desk.writer.wait_all(30)
    until(lambda: "filling" not in states(), "no slot held at the end")


def test_a_gpu_start_waits_only_for_tensors_that_forward_changes(desk: Desk) -> None:
    device = FakeDevice()
    device.own([*desk.weights, desk.buffer])
    desk.writer.close()
    copier = Copier(buffer_bytes=1, device=device)
    desk.writer = SnapshotWriter(desk.host, copier=copier, schedule=Schedule("eager"))
    done = desk.begin(0, desk.checkpoint())
    forward = len(device.training.work)
    device.do(lambda: desk.buffer.add_(1))
    side = device.streams[1]
    while device.training.done <= forward:
        (device.training if device.training.is_ready else side).advance()
    weights = [weight.clone() for weight in desk.weights]
    assert side.done < len(side.work) - 3, "forward has waited for the weights"
    (pending,) = desk.writer._pending
    desk.writer.copied()
    done.result(120)
    assert pending.first.pieces == pending.job.pieces == []  # both are waited for, and kept alive until then
    assert same(desk.saved(0), weights, torch.zeros(10))


def test_running_gpu_transfers_are_awaited_if_no_step_follows(desk: Desk) -> None:
    """As where a user's checkpoint is saved, whose tensors are all copied at once."""
    device = FakeDevice()
    device.own([*desk.weights, desk.buffer])
    desk.writer.close()
    desk.writer = SnapshotWriter(desk.host, copier=Copier(device=device))
    manifest = Manifest(run="run", name=snapshot_name(0, 1), step=0, attempt=1, nbytes=0)
    desk.writer.begin(desk.checkpoint(), manifest, wait_s=30.0).result(120)
    assert same(desk.saved(0), desk.weights, desk.buffer)
