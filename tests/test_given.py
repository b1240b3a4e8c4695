"""A slot whose memory was given to ranks that resume from it: it stays as it is, and the slot gets another."""

from __future__ import annotations

import io
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_spot.client.embedded import Session
from lightning_spot.errors import NodeUnreachable
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory import ahead, given, portions
from lightning_spot.run import receiving, sources
from lightning_spot.run.sources import MemorySource, Use
from lightning_spot.run.survey import Survey, survey
from lightning_spot.service import channel
from lightning_spot.staging.slot import SlotMemory
from lightning_spot.tiers.local import LocalStore
from lightning_spot.tiers.store import Holdings
from tests.conftest import until
from tests.gated import RUN_ID, Bench, image_of, manifest_of
from tests.test_restore import LARGE, restored

RUN = f"run@{RUN_ID}"
AHEAD = "spot-slot-ahead"


@pytest.fixture
def make(tmp_path: Path, runtime_dir: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def bench(**settings: Any) -> Bench:
        made.append(Bench(tmp_path, area=runtime_dir / "area", **settings))
        return made[-1]

    yield bench
    for each in made:
        each.close()


@pytest.fixture
def attached(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Bench], None]]:
    """Makes a node of this process that of this host: trainers get at its slots by descriptor, as they always do."""
    channels: list[channel.DescriptorChannel] = []

    def attach(bench: Bench) -> None:
        path = runtime_dir / "channel"
        channels.append(channel.DescriptorChannel(bench.node, path, None))

        def host(_url: str, run: str) -> SimpleNamespace:
            session = Session(path, None, 10.0)

            def open_snapshot(manifest: Manifest, *, give: bool = False) -> tuple[int, bool]:
                return session.open_snapshot(run, manifest.name, give=give)

            return SimpleNamespace(open_snapshot=open_snapshot, disconnect=session.close)

        monkeypatch.setattr(sources, "attach", host)

    yield attach
    for each in channels:
        each.close()


def give(bench: Bench, manifest: Manifest) -> int:
    """Give the memory of a snapshot away; a descriptor of it."""
    slot = bench.node.ring.find(RUN_ID, manifest.name)
    assert slot is not None
    assert slot.memory is not None
    assert given.give(bench.node.ring, slot, manifest)
    return os.dup(slot.memory.fd)


def content(fd: int) -> bytes:
    return os.pread(fd, 10_000, 0)


def test_what_was_given_stays_while_its_slot_is_used_again_and_again(make: Callable[..., Bench]) -> None:
    bench = make(slots=2)
    bench.open()
    fd = give(bench, bench.save(1))
    for step in range(2, 7):
        bench.save(step, wait_s=30)
        assert bench.flush() == []
    assert len(bench.node.ring.slots) == 2
    assert content(fd) == image_of(1, 1000)  # which ends there, as a file does
    assert not any(slot.given for slot in bench.node.ring.slots)
    os.close(fd)


def test_a_slot_that_gets_other_memory_as_it_is_handed_over_is_not_taken_for_another_file(
    make: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of its descriptor goes to the next file that is opened: a trainer would have written there."""
    ring = make(slots=1).node.ring
    slot = ring.try_lease(RUN, 1000)
    assert slot is not None
    assert slot.memory is not None
    slot.memory.map[:4] = b"mine"
    nbytes, send, others = slot.capacity, channel._send, []

    def replaced_first(connection: socket.socket, told: dict[str, Any], fd: int | None) -> None:
        if fd is not None:
            memory = ring._take_memory(slot)
            assert memory is not None
            memory.close()
            others.append(open(tmp_path / "other", "wb+"))  # noqa: SIM115 - it is to stay open
            others[0].truncate(nbytes)
        send(connection, told, fd)

    monkeypatch.setattr(channel, "_send", replaced_first)
    listening = channel.DescriptorChannel(make().node, tmp_path / "channel", None)
    listening._node = SimpleNamespace(ring=ring, begin_session=lambda *_: None, end_session=lambda _: [])  # type: ignore[assignment] # all that is asked
    session = Session(tmp_path / "channel", None, 10.0)
    mapped = session.map_slot(slot.index, slot.generation)
    assert mapped[:4] == b"mine"
    with pytest.raises(NodeUnreachable, match="no longer has slot"):
        session.map_slot(slot.index, slot.generation)
    session.close()
    listening.close()
    others[0].close()


def test_a_slot_that_has_got_other_memory_since_it_was_leased_is_not_mapped(
    make: Callable[..., Bench], tmp_path: Path
) -> None:
    bench = make(slots=1)
    slot = bench.node.ring.try_lease(RUN, 1000)
    assert slot is not None
    listening = channel.DescriptorChannel(bench.node, tmp_path / "channel", None)
    session = Session(tmp_path / "channel", None, 10.0)
    session.map_slot(slot.index, slot.generation).close()
    with pytest.raises(NodeUnreachable, match="as it was leased"):
        session.map_slot(slot.index, slot.generation - 1)
    session.close()
    listening.close()


def test_a_node_that_takes_the_slot_over_does_not_write_to_it_either(make: Callable[..., Bench]) -> None:
    killed = make(slots=2)
    killed.open(durable=False)
    fd = give(killed, killed.save(1))
    killed.die()
    heir = make(slots=2)
    assert heir.committed() == [1]
    heir.open(attempt=2)
    for step in range(2, 5):
        heir.save(step, attempt=2, wait_s=30)
        assert heir.flush() == []
    assert content(fd) == image_of(1, 1000)
    os.close(fd)


def test_the_next_node_cuts_the_file_where_one_was_killed_before_it_had(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no rank could read it: torch looks for the end of a file at its end."""
    killed = make(slots=2)
    killed.open(durable=False)
    manifest = killed.save(1)
    slot = killed.node.ring.find(RUN_ID, manifest.name)
    assert slot is not None

    class Killed(BaseException):
        pass

    def kill(_memory: SlotMemory, _nbytes: int) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(SlotMemory, "cut", kill)
        with pytest.raises(Killed):
            given.give(killed.node.ring, slot, manifest)
    killed.die()
    heir = make(slots=2)
    (taken,) = heir.node.committed(RUN)
    assert taken.given
    assert taken.manifest is not None
    fd = give(heir, taken.manifest)
    assert content(fd) == image_of(1, 1000)
    os.close(fd)


def test_what_is_left_if_a_memory_node_is_lost_gets_no_other_memory(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.open(durable=False)
    fd = give(bench, bench.save(1))
    (slot,) = bench.node.committed(RUN)
    portions.surpass(bench.node.ring, RUN_ID, manifest_of(2))
    assert slot.surpassed
    assert given.idle(bench.node.ring, RUN_ID) is None
    slot.settled = True
    assert given.idle(bench.node.ring, RUN_ID) is slot
    os.close(fd)


def test_without_a_record_nothing_is_given(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make()
    bench.open()
    manifest = bench.save(1)
    slot = bench.node.ring.find(RUN_ID, manifest.name)
    assert slot is not None

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("lightning_spot.memory.area.os.replace", full)
    assert not given.give(bench.node.ring, slot, manifest)
    monkeypatch.undo()
    assert given.give(bench.node.ring, slot, manifest)


def test_new_memory_is_made_while_nobody_waits_for_it(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "LEAST_BYTES", 1)
    bench = make(slots=3)
    bench.open()
    fd = give(bench, bench.save(1))
    makers: list[str] = []
    create = SlotMemory.create

    def noting(capacity: int, path: Path | None) -> SlotMemory:
        makers.append(threading.current_thread().name)
        return create(capacity, path)

    monkeypatch.setattr(SlotMemory, "create", noting)
    for step in (2, 3, 4, 5):
        bench.save(step, wait_s=30)
        assert bench.flush() == []
        until(lambda: not bench.node.uploads.begins._ahead._making, "what is made ahead")
    assert makers.count(AHEAD) == 1
    assert len(makers) == 3  # the two that were not used before have had none
    assert content(fd) == image_of(1, 1000)
    os.close(fd)


def test_ranks_look_at_the_slot_itself_and_training_goes_on_in_others(
    make: Callable[..., Bench], attached: Callable[[Bench], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(receiving, "receive", lambda *_: pytest.fail("it was copied"))
    bench = make(slots=2)
    bench.open()
    file = io.BytesIO()
    torch.save({"step": 1, "large": torch.arange(LARGE)}, file)
    upload = bench.node.lease(RUN, 1, len(file.getvalue()))
    with upload.slot.view(upload.nbytes) as view:
        view[:] = file.getvalue()
    sealed = bench.node.seal(upload.id, manifest_of(1, 1, upload.nbytes))
    attached(bench)

    def look(location: Any) -> Survey:
        found = survey(location)
        found.answers = [(MemorySource("", RUN), Holdings([sealed], {}, 1))]
        return found

    found = restored(LocalStore(str(tmp_path / "run")), 4, look=look)
    assert upload.slot.given
    until(lambda: not upload.slot.readers, "the ranks have read it")
    for step in range(2, 6):
        bench.save(step, nbytes=upload.nbytes, wait_s=30)
        assert bench.flush() == []
    for rank, (resumed, checkpoint) in enumerate(found):
        assert (resumed.step, resumed.tier) == (1, "memory")
        assert torch.equal(checkpoint["large"], torch.arange(LARGE))
        checkpoint["large"] += rank  # its own, whoever else looks at that memory
        assert checkpoint["large"][1] == 1 + rank


def test_what_was_given_cannot_be_written_to_by_who_got_it(
    make: Callable[..., Bench], attached: Callable[[Bench], None]
) -> None:
    bench = make()
    bench.open()
    manifest = bench.save(1)
    attached(bench)
    source = MemorySource("", RUN)
    snapshot = source.open(manifest, use=Use.SHARE)
    assert snapshot.sealed
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(snapshot.fd, b"x", 0)
    snapshot.close()
    alone = source.open(manifest, use=Use.LOAD)  # a single process has the slot pinned for as long as it reads
    assert not alone.sealed
    alone.close()
