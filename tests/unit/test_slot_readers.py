"""How processes of this host get at slots: by descriptor, each by that of the very memory that is meant."""

from __future__ import annotations

import contextlib
import io
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_spot.errors import CorruptSnapshotError, ServerUnreachableError
from lightning_spot.run import sources
from lightning_spot.run.sources import MemorySource
from lightning_spot.run.survey import Survey, survey
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.local import LocalStore
from lightning_spot.store.store import Holdings
from tests.distributed.test_restore import LARGE, restored
from tests.support.server import RUN, RUN_ID, Bench, MakeBench, image_of, manifest_of, sessions_of
from tests.support.waiting import until


@pytest.fixture
def attached(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Bench], None]]:
    """Makes a server of this process that of this host: trainers get at its slots by descriptor, as they always do."""
    with contextlib.ExitStack() as serving:

        def attach(bench: Bench) -> None:
            begin = serving.enter_context(sessions_of(bench.server, runtime_dir / "http"))

            def host(_url: str, run: str) -> SimpleNamespace:
                session = begin()

                def open_snapshot(manifest: Manifest) -> int:
                    return session.open_snapshot(run, manifest.name)

                return SimpleNamespace(open_snapshot=open_snapshot, manifests=list, disconnect=session.close)

            monkeypatch.setattr(sources, "attach", host)

        yield attach


def test_a_slot_replaced_while_handed_over_maps_no_other_file(
    make_bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of its descriptor goes to the next file that is opened: a trainer would have written there."""
    server = make_bench(slots=1).server
    ring = server.ring
    slot = ring.try_lease(RUN, 1000)
    slot.memory.map[:4] = b"mine"
    nbytes, send, others = slot.capacity, socket.send_fds, []

    def replaced_first(connection: socket.socket, lines: list[bytes], fds: list[int]) -> int:
        for memory in ring._take_memory(slot):
            memory.close()
        others.append(open(tmp_path / "other", "wb+"))  # noqa: SIM115 - it is to stay open
        others[0].truncate(nbytes)
        return send(connection, lines, fds)

    monkeypatch.setattr(socket, "send_fds", replaced_first)
    with sessions_of(server, tmp_path / "http") as begin:
        session = begin()
        mapped = session.map_slot(slot.index, slot.generation)
        assert mapped[:4] == b"mine"
        with pytest.raises(ServerUnreachableError, match=rf"\b{slot.index}\b"):
            session.map_slot(slot.index, slot.generation)
        session.close()
    others[0].close()


def test_a_slot_with_new_memory_since_its_lease_is_not_mapped(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench(slots=1)
    slot = bench.server.ring.try_lease(RUN, 1000)
    with sessions_of(bench.server, tmp_path / "http") as begin:
        session = begin()
        session.map_slot(slot.index, slot.generation).close()
        with pytest.raises(ServerUnreachableError, match=rf"\b{slot.index}\b"):
            session.map_slot(slot.index, slot.generation - 1)
        session.close()


def test_ranks_look_at_one_copy_of_a_slot_that_is_used_again(
    make_bench: MakeBench, attached: Callable[[Bench], None], tmp_path: Path
) -> None:
    bench = make_bench(slots=2)
    bench.open()
    file = io.BytesIO()
    torch.save({"step": 1, "large": torch.arange(LARGE)}, file)
    upload = bench.server.uploads.lease(RUN, 1, len(file.getvalue()))
    with upload.slot.view(upload.nbytes) as view:
        view[:] = file.getvalue()
    sealed = bench.server.uploads.seal(upload.id, manifest_of(1, 1, upload.nbytes))
    attached(bench)

    def look(location: Any) -> Survey:
        found = survey(location)
        found.answers = [(MemorySource("", RUN), Holdings([sealed], {}, 1)), *found.answers]
        return found

    found = restored(LocalStore(str(tmp_path / "run")), 4, look=look)
    until(lambda: not upload.slot.readers, "the slot to be let go")
    for step in range(2, 6):
        bench.save(step, nbytes=upload.nbytes, wait_s=60)
        assert bench.flush() == []
    assert len(bench.server.ring.slots) == 2
    for rank, (resumed, checkpoint) in enumerate(found):
        assert (resumed.step, resumed.tier) == (1, "host")
        assert torch.equal(checkpoint["large"], torch.arange(LARGE))
        checkpoint["large"] += rank  # its own, whoever else looks at that memory
        assert checkpoint["large"][1] == 1 + rank


def test_shared_data_is_read_only_and_data_read_alone_not_copied(
    make_bench: MakeBench, attached: Callable[[Bench], None]
) -> None:
    bench = make_bench()
    bench.open()
    manifest = bench.save(1)
    (slot,) = bench.server.ring.contents(RUN_ID)
    attached(bench)
    source = MemorySource("", RUN)
    snapshot = source.open(manifest, shared=True)
    until(lambda: not slot.readers, "the slot to be let go")
    assert snapshot.sealed
    assert os.pread(snapshot.fds[0], 10_000, 0) == image_of(1, 1000)
    with pytest.raises(PermissionError):
        os.pwrite(snapshot.fds[0], b"x", 0)
    snapshot.close()
    alone = source.open(manifest)  # a single process has the slot pinned for as long as it reads
    assert not alone.sealed
    assert slot.readers == 1
    alone.close()


def test_a_slot_that_is_damaged_is_found_as_it_is_copied(
    make_bench: MakeBench, attached: Callable[[Bench], None]
) -> None:
    bench = make_bench()
    bench.open()
    manifest = bench.save(1)
    (slot,) = bench.server.ring.contents(RUN_ID)
    with slot.view(1000) as view:
        view[500] ^= 1
    attached(bench)
    with pytest.raises(CorruptSnapshotError):
        MemorySource("", RUN).open(manifest, shared=True)
    until(lambda: not slot.readers, "the slot to be let go")
