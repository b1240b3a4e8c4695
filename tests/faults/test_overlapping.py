"""Snapshots that overlap: one is copied while the one before it is sealed, as on a GPU, a step behind its host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spot.capture import slot_pool
from lightning_spot.capture.copier import Copier
from lightning_spot.capture.tensors import by_storage
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.errors import FailureReason, SnapshotFailedError
from lightning_spot.protocol.slot import SlotMemory
from lightning_spot.server.host import InProcessHost
from lightning_spot.server.slots import Making
from lightning_spot.snapshot.manifest import Manifest
from tests.support.fake_device import FakeDevice
from tests.support.server import manifest_of, named_run
from tests.support.waiting import until

STEPS = 30


class Pipeline:
    """A training that takes a snapshot at every step, each of which is committed so many steps later.

    Args:
        lag: steps.
        beyond: whether the ring may have more than its three slots.
        gpu: whether the tensors count as a GPU's.
    """

    def __init__(self, lag: int, *, beyond: bool = True, gpu: bool = True) -> None:
        self.host = InProcessHost(slots=3, memory_bytes=2**28, open_store=lambda url: pytest.fail(url))
        self.host.open_run(named_run("run"))
        self.weights = [torch.zeros(1000, 100) for _ in range(4)]
        self.device = device = FakeDevice()
        if gpu:
            device.own(self.weights)
        self.writer = SnapshotWriter(self.host, copier=Copier(buffer_bytes=2**16, device=device))
        supply = self.writer._slots
        self.skipped: list[int] = []
        self.waited: list[int] = []
        self._lag, self._now, self._changed = lag, 0, threading.Condition()
        self._begun: dict[int, Future[Manifest]] = {}
        self._done = self._looked_ahead = 0
        self._look_ahead, supply.look_ahead = supply.look_ahead, self._have_looked  # type: ignore[method-assign]
        self._seal, self.host.seal = self.host.seal, self._sealed_late  # type: ignore[method-assign]
        self.writer.warm(sum(weight.nbytes for weight in self.weights), gpu=0 if gpu else None, beyond=beyond)
        self.idle()

    def _sealed_late(self, lease: Any, manifest: Manifest, *more: Any, **how: Any) -> bool:
        with self._changed:
            assert self._changed.wait_for(lambda: self._now >= manifest.step + self._lag, 30)
        return self._seal(lease, manifest, *more, **how)

    def _have_looked(self, *arguments: Any, **how: Any) -> None:
        try:
            self._look_ahead(*arguments, **how)
        finally:
            self._looked_ahead += 1

    def idle(self) -> None:
        until(lambda: self.writer.ready and self.writer._slots._requests.is_idle, "nothing is being made")

    def come_to(self, step: int) -> None:
        """Training has come to a step: what was begun long enough before is committed."""
        with self._changed:
            self._now = step
            self._changed.notify_all()
        for begun in [begun for begun in self._begun if begun <= step - self._lag]:
            self._begun.pop(begun).result(120)
            self._done += 1
        until(lambda: self._looked_ahead >= self._done, "the slot of the next one to be looked for")
        self.idle()

    def take(self, step: int, wait_s: float = 0.0) -> None:
        checkpoint = {"weights": self.weights}
        owned = by_storage(self.weights)
        self._begun[step] = self.writer.begin(checkpoint, manifest_of(step, run_id=""), owned=owned, wait_s=wait_s)
        self.writer.copied()

    def train(self, steps: int, wait_s: float = 0.0, begin: int = 1) -> None:
        for step in range(begin, begin + steps):
            self.come_to(step)
            try:
                self.take(step, wait_s)
            except SnapshotFailedError as error:
                if error.reason is not FailureReason.RING_FULL:
                    raise
                self.skipped.append(step)
            self.idle()

    @property
    def slots(self) -> int:
        return len(self.host._server.ring.slots)

    def close(self) -> None:
        self.come_to(10**6)
        self.writer.close()
        self.host.leave(complete=True)
        assert not self.device.pinned


@pytest.fixture
def pipelines() -> Iterator[list[Pipeline]]:
    made: list[Pipeline] = []
    yield made
    for pipeline in made:
        pipeline.close()


def test_overlapping_gpu_snapshots_get_a_slot_more_and_skip_none(
    monkeypatch: pytest.MonkeyPatch, pipelines: list[Pipeline]
) -> None:
    """A third was skipped, however fast they were sealed: two on the way, and the newest one, are three slots."""
    monkeypatch.setattr(slot_pool, "LEAST_BYTES", 1000)
    pipelines.append(pipeline := Pipeline(lag=3))
    pipeline.train(STEPS)
    assert 1 <= len(pipeline.skipped) <= 3  # one for each slot but the first, at most
    assert max(pipeline.skipped) < 8
    assert pipeline.slots == 4
    assert len(pipeline.device.pinned) == 4
    assert pipeline.device.pinned_by == {"spot-slots"}
    assert not pipeline.device.unpinned_copies


@pytest.mark.parametrize(("beyond", "gpu"), [(False, True), (True, False)])
def test_nobody_else_does(pipelines: list[Pipeline], beyond: bool, gpu: bool) -> None:
    """Who has said how many slots there are; and on a CPU they are sealed too slowly then: it would not help."""
    pipelines.append(pipeline := Pipeline(lag=3, beyond=beyond, gpu=gpu))
    pipeline.train(STEPS)
    assert pipeline.slots == 3
    assert STEPS // 4 <= len(pipeline.skipped) <= STEPS // 2


@pytest.mark.parametrize("wait_s", [0.0, 30.0])
@pytest.mark.parametrize("gpu", [True, False])
def test_training_never_makes_a_large_slot_itself(
    monkeypatch: pytest.MonkeyPatch, pipelines: list[Pipeline], gpu: bool, wait_s: float
) -> None:
    """It stood for as long as it takes to make and pin it. Where it did not wait, the server counted as lost."""
    monkeypatch.setattr(slot_pool, "LEAST_BYTES", 1000)
    made: list[str] = []

    def create(capacity: int, path: Path | None, real: Any = SlotMemory.create) -> SlotMemory:
        made.append(threading.current_thread().name)
        return real(capacity, path)  # type: ignore[no-any-return]

    monkeypatch.setattr(SlotMemory, "create", create)
    pipelines.append(pipeline := Pipeline(lag=2, gpu=gpu))
    pipeline.train(STEPS, wait_s)
    assert made == ["spot-slots"] * 3
    assert len(pipeline.skipped) <= (0 if wait_s else 2)
    assert pipeline.device.pinned_by == ({"spot-slots"} if gpu else set())


def test_a_slot_that_is_leased_ahead_is_one_that_is_made(
    monkeypatch: pytest.MonkeyPatch, pipelines: list[Pipeline]
) -> None:
    """To make one for the next step kept the thread that seals, and the server counted as lost."""
    monkeypatch.setattr(slot_pool, "LEAST_BYTES", 1000)
    pipelines.append(pipeline := Pipeline(lag=0))
    pipeline.take(1)
    pipeline.come_to(1)
    asked: list[Any] = []
    lease = pipeline.host.lease
    monkeypatch.setattr(pipeline.host, "lease", lambda *a, **m: asked.append(m.get("making")) or lease(*a, **m))
    pipeline.writer.next_comes()
    until(lambda: Making.NEVER in asked, "the next slot to be asked for")
