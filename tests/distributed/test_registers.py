"""Ranks of a host write shards of a snapshot, each into slots of its own: it counts once all are there, else never."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.client import starting
from lightning_spot.client.local_server import LocalServer
from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    FencedError,
    SettingsError,
    SnapshotFailedError,
    SnapshotNotFoundError,
    SpotError,
)
from lightning_spot.run.reading import Exported
from lightning_spot.run.sources import HOST, MemorySource
from lightning_spot.server.host import Lease
from lightning_spot.server.reconcile import Servers
from lightning_spot.server.slots import Mark, Resident
from lightning_spot.snapshot.files import MODEL_FILE, FileSpan
from lightning_spot.snapshot.manifest import Manifest, ShardOf, shard_name, snapshot_name
from lightning_spot.snapshot.shards import Status
from tests.support.server import RUN, RUN_ID, Bench, committed, named_run
from tests.support.shards import PART, checkpoint_of, failed_shard, sealed_shard, shard_image, shard_manifest, whole_of
from tests.support.small_trainer import info_of

pytestmark = pytest.mark.guarantee("G10")

LAST_S = 600.0  # of what never takes so long
MOST_MIB = 64


class Ranks:
    """The ranks of a host at one server, each with a session of its own; rank 0 has opened the run."""

    def __init__(self, root: Path, writers: int = 3) -> None:
        self.bench, self.writers = Bench(root, slots=2), writers
        self.server = self.bench.server
        for rank in range(writers):
            self.server.registry.begin_session(f"rank-{rank}")
        self.bench.open(session="rank-0", durable=False)

    def write(self, step: int, rank: int, **fields: object) -> Manifest:
        """Fill a slot with the shard of a rank, and seal it."""
        if fields.get("complete"):
            fields["name"] = shard_name(snapshot_name(step, 1, complete=True), rank)
        manifest = shard_manifest(step, rank, self.writers, **fields)
        return committed(self.server, RUN, manifest, shard_image(manifest), session=f"rank-{rank}", writer=rank)

    def status(self, step: int) -> tuple[Status, str]:
        return self.server.wait_for(RUN, snapshot_name(step, 1), 0.0)

    def names(self) -> list[str]:
        return [manifest.name for _, manifest in self.server.ring.readable(RUN_ID)]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.bench.close()


def test_a_snapshot_counts_once_every_shard_is_there(ranks: Ranks) -> None:
    for rank in (2, 0):
        ranks.write(1, rank)
        assert ranks.status(1)[0] is Status.PENDING
    assert snapshot_name(1, 1) not in ranks.names()
    ranks.write(1, 1)
    assert ranks.status(1) == (Status.COMMITTED, "")
    ((held, manifest),) = ranks.server.ring.readable(RUN_ID)
    assert manifest == whole_of(1, 3)
    with ranks.server.ring.reading(held) as image:
        span = manifest.span_of(MODEL_FILE)
        assert bytes(image[span.offset : span.stop]) == checkpoint_of(1, 3)


def test_a_rank_that_failed_aborts_the_snapshot(ranks: Ranks) -> None:
    for rank in range(3):
        ranks.write(1, rank)
    ranks.write(2, 0)
    for why in ("a tensor changed", "another reason"):  # the first one stands
        ranks.server.uploads.fail(RUN, 1, failed_shard(2, 1, 3, why))
    status, why = ranks.status(2)
    assert status is Status.ABORTED
    assert "a tensor changed" in why
    ranks.write(2, 2)  # in vain, and no error
    assert ranks.status(2)[0] is Status.ABORTED
    assert ranks.status(1)[0] is Status.COMMITTED
    for step in (3, 4, 5):  # what was aborted takes no slot
        for rank in range(3):
            ranks.write(step, rank)
        assert ranks.status(step)[0] is Status.COMMITTED


def test_a_register_is_written_once(ranks: Ranks) -> None:
    first = ranks.write(1, 1)
    assert ranks.write(1, 1) == first  # the answer may have been lost
    with pytest.raises(SnapshotFailedError, check=FailureReason.SHARD_MISSING.caused):
        ranks.write(1, 1, epoch=7)
    ranks.server.uploads.fail(RUN, 1, failed_shard(1, 1, 3))
    assert ranks.server.ring.registers(RUN_ID, snapshot_name(1, 1))[1].manifest == first
    ranks.server.uploads.fail(RUN, 1, failed_shard(1, 2, 3))
    with pytest.raises(SnapshotFailedError, check=FailureReason.SHARD_MISSING.caused):
        ranks.write(1, 2)
    assert not len(ranks.server.uploads)


@pytest.mark.parametrize(
    "forged",
    [
        {"lineage": "2" * 12},
        {"part_bytes": 2 * PART},
        {"shard": ShardOf(2, 3, "plan", start=5 * PART)},
        {"files": (FileSpan(MODEL_FILE, 0, PART), FileSpan("rank-00001.pt", PART, 100))},
        {"files": (FileSpan("rank-00002.pt", 0, 100), FileSpan(MODEL_FILE, PART, PART))},
    ],
    ids=["lineage", "parts", "gap", "a file twice", "the checkpoint twice"],
)
def test_a_shard_that_does_not_fit_is_no_register(ranks: Ranks, forged: dict[str, Any]) -> None:
    ranks.write(1, 0)
    ranks.write(1, 1)
    with pytest.raises(SnapshotFailedError, check=FailureReason.SHARD_MISSING.caused):
        ranks.write(1, 2, **forged)
    assert ranks.status(1)[0] is Status.PENDING
    assert not len(ranks.server.uploads)
    ranks.write(1, 2)
    assert ranks.status(1)[0] is Status.COMMITTED
    assert ranks.names() == [snapshot_name(1, 1)]


def test_registers_at_servers_that_do_not_fit_do_not_count() -> None:
    """What fits those at each server does not fit those of all."""
    urls = tuple(f"spot://10.0.0.{writer}:7070" for writer in range(3))
    servers = Servers(replace(named_run("run"), servers=urls))
    for odd in (2 * PART, PART):
        for writer, server in enumerate(servers.all):
            shard = sealed_shard(1, writer, 3, part_bytes=odd if writer == 1 else PART)
            server.shown = {shard.snapshot: [shard]}
        assert list(servers.committed({})) == [("1" * 12, whole_of(1, 3).order)] * (odd == PART)
    assert not list(servers.committed({"1" * 12: {whole_of(1, 3).order}}))


def test_a_rank_that_ends_leaves_the_snapshot_to_the_next_one(ranks: Ranks) -> None:
    ranks.write(1, 0)
    ranks.write(1, 1)
    upload = ranks.server.uploads.lease(RUN, 1, 10, session="rank-2", writer=2)
    ranks.server.end_session("rank-2")
    with pytest.raises(SnapshotNotFoundError):
        ranks.server.uploads.find(upload.id)
    assert ranks.status(1)[0] is Status.ABORTED
    ranks.server.registry.begin_session("rank-2")
    for rank in range(3):
        ranks.write(2, rank)
    assert ranks.status(2)[0] is Status.COMMITTED


def test_a_rank_of_an_earlier_attempt_writes_nothing(ranks: Ranks) -> None:
    ranks.bench.open(attempt=2, session="rank-0", durable=False)
    with pytest.raises(FencedError):
        ranks.write(1, 1)
    with pytest.raises(FencedError):
        ranks.server.uploads.fail(RUN, 1, failed_shard(1, 1, 3))


def test_a_failed_shard_is_of_this_run_and_has_a_reason(ranks: Ranks) -> None:
    for wrong in (shard_manifest(1, 1), failed_shard(1, 1, run_id="f" * 12), failed_shard(1, 1, attempt=2)):
        with pytest.raises(SettingsError):
            ranks.server.uploads.fail(RUN, 1, wrong)


@pytest.mark.parametrize("known_by", ["its register", "other places", "nobody"])
def test_an_end_that_was_aborted_is_not_listed_as_complete(ranks: Ranks, known_by: str) -> None:
    ring, failed = ranks.server.ring, failed_shard(1, 1, 3, complete=True)
    for rank in (0, 2):
        ranks.write(1, rank, complete=True)
    if known_by == "its register":
        ranks.server.uploads.fail(RUN, 1, failed)
    elif known_by == "other places" and failed.shard is not None:
        ring.see(RUN_ID, failed.snapshot, {1: failed.shard})
    for slot in ring.contents(RUN_ID):
        assert slot.manifest is not None
        ring.mark(Resident.of([slot]), "spot://first/run", Mark.SAFE)
    assert [run["state"] for run in ranks.server.listed()] == ["training"]


@pytest.mark.parametrize("known_by", ["its registers", "other places", "storage", "its sender"])
def test_an_end_that_counts_is_listed_as_complete(ranks: Ranks, known_by: str) -> None:
    manifest = ranks.write(1, 0, complete=True)
    assert [run["state"] for run in ranks.server.listed()] == ["training"]
    ring, (slot,) = ranks.server.ring, ranks.server.ring.contents(RUN_ID)
    if known_by == "its registers":
        for rank in (1, 2):
            ranks.write(1, rank, complete=True)
    elif known_by == "other places":
        ring.mark_committed(RUN_ID, manifest.lineage, manifest.order)
    elif known_by == "storage":  # as the next server on this host reads it in the record
        with ring.changed:
            slot.seen["/tier"] = Mark.SAFE
            ring.touch(RUN_ID)
    else:
        ring.mark_persisted(RUN_ID, manifest.lineage, manifest.order)
    assert [run["state"] for run in ranks.server.listed()] == ["complete"]


# -- over the sockets of a local server --------------------------------------------------------------------------


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[[], LocalServer]]:
    """Make connections to one local server, as each rank has one; the first has opened the run."""
    made: list[LocalServer] = []

    def connect() -> LocalServer:
        settings = {"slots": 2, "memory_bytes": MOST_MIB * 2**20, "server_idle_timeout_s": 30.0}
        host = starting.start(str(tmp_path / "run"), "run", **settings)
        made.append(host)
        if len(made) == 1:
            host.open_run(info_of(str(tmp_path / "run"), 1))
        else:
            host.run, host.attempt = made[0].run, made[0].attempt
        return host

    yield connect
    for host in reversed(made[1:]):
        host.disconnect()
    made[0].leave(complete=True)


def _written(host: LocalServer, step: int, rank: int) -> Lease:
    manifest = shard_manifest(step, rank, run_id=host.run.partition("@")[2])
    lease = host.lease(manifest.nbytes, 30.0, writer=rank)
    lease.map[: manifest.nbytes] = shard_image(manifest)
    host.seal(lease, manifest)
    return lease


def test_processes_write_shards_and_one_waits_for_the_commit(hosts: Callable[[], LocalServer], tmp_path: Path) -> None:
    first, second = hosts(), hosts()
    with ThreadPoolExecutor(1) as pool:
        for step in (1, 2):
            name = snapshot_name(step, 1)
            _written(first, step, 0)
            assert first.wait_for(name, 0.0) == (Status.PENDING, "")
            waiting = pool.submit(first.wait_for, name, LAST_S)
            _written(second, step, 1)
            assert waiting.result(LAST_S) == (Status.COMMITTED, "")
        name = snapshot_name(3, 1)
        waiting = pool.submit(first.wait_for, name, LAST_S)
        second.fail(shard_manifest(3, 1, run_id=first.run.partition("@")[2]), "a tensor changed")
        status, why = waiting.result(LAST_S)
    assert status is Status.ABORTED
    assert "a tensor changed" in why
    source = MemorySource(str(tmp_path / "run"), first.run)
    newest = source.survey().manifests[0]
    assert newest.name == snapshot_name(2, 1)
    before = len(os.listdir("/proc/self/fd"))
    for shared in (False, True):
        with contextlib.closing(source.open(newest, shared=shared)) as opened:
            assert opened.tier == HOST
            assert opened.reader().read() == checkpoint_of(2)
            with opened.image() as image:
                span, own = newest.span_of("rank-00001.pt"), shard_manifest(2, 1)
                theirs = shard_image(own)[own.files[1].offset : own.files[1].stop]
                assert bytes(image[span.offset : span.stop]) == theirs
            with contextlib.closing(Exported.of(opened).open(newest)) as imported:
                assert imported.reader().read() == checkpoint_of(2)
    with source.shards() as read:
        for shard in (each for each in source.survey().shards if each.snapshot == newest.name):
            read(shard, 0, memoryview(bytearray(shard.nbytes)))
    del image  # which is mapped
    assert len(os.listdir("/proc/self/fd")) == before  # each slot that was read would stay, with its memory


@pytest.mark.parametrize(("harm", "error"), [("left", SnapshotNotFoundError), ("damaged", CorruptSnapshotError)])
def test_a_shard_that_left_memory_or_was_damaged_is_not_read(
    hosts: Callable[[], LocalServer], tmp_path: Path, harm: str, error: type[SpotError]
) -> None:
    first, second = hosts(), hosts()
    _written(first, 1, 0)
    lease = _written(second, 1, 1)
    source = MemorySource(str(tmp_path / "run"), first.run)
    manifest = source.survey().manifests[0]
    if harm == "left":
        first.remove(manifest.name)
    else:
        lease.map[7] ^= 1
    with pytest.raises(error):
        source.open(manifest)
