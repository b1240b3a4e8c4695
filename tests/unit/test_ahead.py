"""The memory of a slot is made while an earlier snapshot is still received, not while a sender waits for it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lightning_spot.errors import TierError
from lightning_spot.protocol.slot import SlotMemory
from lightning_spot.server import ring
from lightning_spot.server.ring import Ring, SlotsAhead
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.parts import checksum
from tests.support.server import MIB, RUN, RUN_ID, Bench, MakeBench, image_of, manifest_of
from tests.support.waiting import until

AHEAD = "spot-slot-ahead"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each slot whose memory was made, in order: whether nobody waited for it."""
    monkeypatch.setattr(ring, "LEAST_BYTES", 1)
    noted: list[bool] = []
    create = SlotMemory.create.__func__  # type: ignore[attr-defined]

    def noting(cls: type[SlotMemory], capacity: int, path: Path | None) -> SlotMemory:
        noted.append(threading.current_thread().name == AHEAD)
        memory: SlotMemory = create(cls, capacity, path)
        return memory

    monkeypatch.setattr(SlotMemory, "create", classmethod(noting))
    return noted


def receive(bench: Bench, step: int, nbytes: int = 1000) -> Manifest:
    """What a snapshot server does with a snapshot that comes over the network."""
    manifest, image = manifest_of(step, 1, nbytes), image_of(step, nbytes)
    upload = bench.server.lease(RUN, 1, nbytes, manifest=manifest)
    until(lambda: not bench.server.uploads._ahead._making, "what is made ahead")
    with upload.slot.view(nbytes) as view:
        view[:] = image
    bench.server.uploads.arriving(upload, 0, nbytes)
    bench.server.uploads.arrived(upload, 0, checksum(image))
    return bench.server.commit(upload.id, manifest)


def test_only_the_first_sender_waits_for_memory(make_bench: MakeBench, made: list[bool]) -> None:
    bench = make_bench(slots=None, memory_bytes=64 * MIB)
    bench.open(keep=2)
    for step in range(6):
        receive(bench, step)
        assert bench.flush() == []
    assert made == [False, True, True]  # one that is filled, and two that are kept


def test_a_sender_waits_for_the_slot_that_is_being_made(
    make_bench: MakeBench, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(slots=None, memory_bytes=64 * MIB)
    bench.open(keep=1)
    go_on, leased = threading.Event(), Ring.try_lease

    def held_up(self: Ring, run: str, nbytes: int, *, only_new: bool = False, **how: bool) -> object:
        assert not only_new or go_on.wait(30)
        return leased(self, run, nbytes, only_new=only_new, **how)

    monkeypatch.setattr(Ring, "try_lease", held_up)
    first = bench.server.lease(RUN, 1, 1000, manifest=manifest_of(1))
    second: list[object] = []
    asking = threading.Thread(target=lambda: second.append(bench.server.lease(RUN, 1, 1000, manifest=manifest_of(2))))
    asking.start()
    assert made == [False]
    go_on.set()
    asking.join(30)
    assert len(second) == 1
    assert made == [False, True]
    bench.server.abort(first.id)


def test_nothing_makes_room_for_what_nobody_has_asked_for(make_bench: MakeBench, made: list[bool]) -> None:
    bench = make_bench(slots=None, memory_bytes=4 * MIB)
    bench.open(keep=5)
    first = receive(bench, 1)
    assert bench.flush() == []
    receive(bench, 2)
    assert made == [False, True]
    assert bench.server.ring.find(RUN_ID, first.name) is not None


def test_a_host_without_memory_says_so_to_who_asks(
    make_bench: MakeBench, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(slots=None, memory_bytes=64 * MIB)
    bench.open()
    create = SlotMemory.create

    def none_left(capacity: int, path: Path | None) -> SlotMemory:
        if bench.server.ring.slots[1:]:
            raise TierError("no memory")
        return create(capacity, path)

    monkeypatch.setattr(SlotMemory, "create", none_left)
    receive(bench, 1)
    with pytest.raises(TierError, match="no memory"):
        receive(bench, 2)


def test_a_slot_is_waited_for_only_once_it_is_being_made(
    bench: Bench, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender that came between the two could not wait for a thread that had not been started."""
    ahead, start, failed = SlotsAhead(bench.server.ring), threading.Thread.start, list[BaseException]()

    def wait() -> None:
        try:
            ahead.wait(RUN_ID)
        except RuntimeError as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)

    def interrupted(self: threading.Thread) -> None:
        start(waiting)
        waiting.join(0.2)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    ahead.make(RUN_ID, 1000, 1)
    monkeypatch.undo()
    waiting.join(30)
    ahead.close()
    assert not failed
