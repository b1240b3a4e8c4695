"""Snapshots whose shards lie at several snapshot servers: read as one, each part from a server that has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_spot.client.remote import ServerStore
from lightning_spot.errors import CorruptSnapshotError, SnapshotNotFoundError
from lightning_spot.protocol.wire import PartKind
from lightning_spot.run.identity import Identity
from lightning_spot.run.location import Location
from lightning_spot.run.sources import ScatteredSource, StoreSource
from lightning_spot.run.survey import Survey, scattered
from lightning_spot.server.runs import RunInfo
from lightning_spot.session.collectives import Agreement
from lightning_spot.session.selection import Restore
from lightning_spot.snapshot.files import MODEL_FILE
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from tests.support.server import MIB, RUN_ID, Bench, served
from tests.support.shards import PART, checkpoint_of, failed_shard, sealed_shard, shard_image, whole_of

pytestmark = pytest.mark.guarantee("G10")


class Servers:
    """Snapshot servers of one run, each a source."""

    def __init__(self, root: Path, stack: ExitStack, count: int = 3) -> None:
        self.benches = [Bench(root / f"far-{number}", slots=None, memory_bytes=64 * MIB) for number in range(count)]
        self.stores: list[ServerStore] = []
        for bench in self.benches:
            port = stack.enter_context(served(bench.server))
            store = ServerStore(f"spot://127.0.0.1:{port}/run@{RUN_ID}")
            store.open_run(RunInfo(name="run", id=RUN_ID, location="", attempt=1, token="t"))
            self.stores.append(store)
        self.sources = [StoreSource(store, store.url.rpartition("/")[0]) for store in self.stores]

    def put(self, step: int, writer: int, *at: int, writers: int = 3) -> Manifest:
        manifest = sealed_shard(step, writer, writers)
        for number in at:
            self.stores[number].send(manifest, memoryview(shard_image(manifest)), attempt=1)
        return manifest

    @property
    def scattered(self) -> ScatteredSource:
        return ScatteredSource((source, shard) for source in self.sources for shard in source.survey().shards)

    def damage(self, number: int, step: int, writer: int) -> None:
        """Change a byte of a shard in the memory of a server."""
        slot = self.benches[number].server.ring.registers(RUN_ID, snapshot_name(step, 1))[writer]
        with slot.view() as view:
            view[0] ^= 1


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path, stack)


def test_shards_of_several_servers_are_one_snapshot(servers: Servers) -> None:
    for writer, at in ((0, 0), (1, 1)):
        servers.put(1, writer, at)
    assert servers.scattered.survey().manifests == []
    servers.put(1, 2, 2)
    (manifest,) = servers.scattered.survey().manifests
    assert manifest == whole_of(1, 3)
    moved: list[int] = []
    with closing(servers.scattered.open(manifest, moved.append)) as opened:
        assert opened.reader().read() == checkpoint_of(1, 3)
    assert sum(moved) == manifest.nbytes
    answers = [(source, source.survey()) for source in servers.sources]
    assert [holdings.manifests for _, holdings in scattered(answers)] == [[manifest]]


def test_a_rank_of_another_host_reads_shards_of_several_servers(
    servers: Servers, tmp_path: Path, runtime_dir: Path
) -> None:
    """Its host has nothing in memory; rank 0 says where the shards are."""
    for writer in range(3):
        servers.put(1, writer, writer)
    told: list[Any] = []
    here = SimpleNamespace(rank=0, tell=told.append, gather=lambda mine: [mine], together=lambda do: do())
    here.everyones = lambda do: [do()]
    ranks, location = cast(Agreement, here), Location.of(str(tmp_path / "run"))
    restore = Restore(ranks, location, lambda _: {})
    found = Survey(
        location, Identity(run_id=RUN_ID), None, answers=scattered([(s, s.survey()) for s in servers.sources])
    )
    ((manifest, source),) = found.candidates
    with closing(restore.announce(found, source, manifest)):
        (tried,) = told
    with closing(restore.open(tried)) as opened:
        assert opened.reader().read() == checkpoint_of(1, 3)


def test_what_is_whole_at_one_server_is_read_there(servers: Servers) -> None:
    for writer in range(3):
        servers.put(1, writer, 1, *([2] if writer else []))
    assert servers.scattered.survey().manifests == []
    (manifest,) = servers.sources[1].survey().manifests
    assert manifest == whole_of(1, 3)
    with closing(servers.sources[1].open(manifest)) as opened:
        assert opened.reader().read() == checkpoint_of(1, 3)
    span = manifest.span_of(MODEL_FILE)
    part = memoryview(bytearray(PART))
    servers.stores[1].read(manifest, span.offset + PART, part)
    assert bytes(part) == checkpoint_of(1, 3)[PART : 2 * PART]


def test_a_part_is_read_from_another_server_if_one_fails(servers: Servers) -> None:
    servers.put(1, 0, 0)
    servers.put(1, 1, 0, 1)
    servers.put(1, 2, 1, 2)
    (manifest,) = servers.scattered.survey().manifests
    servers.damage(0, 1, 1)
    servers.benches[2].server.remove(f"run@{RUN_ID}", snapshot_name(1, 1))
    found = servers.scattered
    with closing(found.open(manifest)) as opened:
        assert opened.reader().read() == checkpoint_of(1, 3)
    servers.damage(1, 1, 1)
    with pytest.raises(CorruptSnapshotError):
        found.open(manifest)


def test_a_snapshot_of_which_a_rank_failed_is_none(servers: Servers) -> None:
    for writer, at in ((0, 0), (1, 1), (2, 2)):
        servers.put(1, writer, at)
    (manifest,) = servers.scattered.survey().manifests
    servers.stores[0].fail(failed_shard(1, 2, 3))  # another server was asked before it had the shard
    assert servers.scattered.survey().manifests == []
    servers.put(2, 0, 0)
    servers.stores[1].fail(failed_shard(2, 1, 3))
    servers.put(2, 2, 2)
    assert servers.scattered.survey().manifests == []
    with pytest.raises(SnapshotNotFoundError):
        servers.scattered.open(replace(manifest, name=snapshot_name(2, 1)))
    listed = [item.manifest for item in servers.stores[1].listing() if item.manifest.shard is not None]
    assert any(each.shard is not None and each.shard.failed for each in listed)


def test_shards_are_sent_as_what_changed(servers: Servers) -> None:
    first = servers.put(1, 1, 0)
    sent = servers.stores[0].sent
    assert sent[PartKind.WHOLE] == first.nbytes
    again = replace(first, name=first.name.replace("000000001", "000000002"), step=2)
    servers.stores[0].send(again, memoryview(shard_image(first)), attempt=1)
    assert sent[PartKind.WHOLE] == first.nbytes
    assert sent[PartKind.SAME] == first.nbytes
