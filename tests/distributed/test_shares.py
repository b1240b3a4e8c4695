"""One snapshot that several ranks fill: joined by name, committed when all shares are there, else given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lightning_spot.client import starting
from lightning_spot.client.embedded import EmbeddedHost
from lightning_spot.errors import (
    FailureReason,
    FencedError,
    ServerUnreachableError,
    SettingsError,
    SnapshotFailedError,
    SnapshotNotFoundError,
)
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.image.parts import checksum
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.upload import Upload
from lightning_spot.service.upload_requests import Waiting
from tests.support.server import RUN_ID, Bench, image_of, manifest_of
from tests.support.small_trainer import info_of

pytestmark = pytest.mark.guarantee("G10")

RUN, NBYTES = f"run@{RUN_ID}", 1000
LAST_S = 600.0  # of what never takes so long
T = TypeVar("T")


class Ranks:
    """The ranks of a host at one node, each with a session of its own; rank 0 has opened the run."""

    def __init__(self, root: Path, shares: int = 3, **settings: int) -> None:
        self.bench = Bench(root, **settings)
        self.node, self.shares, self.of = self.bench.node, shares, self.bench.node.uploads.shares
        for rank in range(shares):
            self.node.begin_session(f"rank-{rank}")
        self.bench.open(session="rank-0")
        self.pool = ThreadPoolExecutor(4)
        self.loop = asyncio.new_event_loop()  # on which the service waits, see Waiting
        self.looping = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.looping.start()
        self.waiting = self.on_loop(self._wait())

    async def _wait(self) -> Waiting:
        return Waiting(self.node)

    def on_loop(self, answer: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(answer, self.loop).result()

    def close(self) -> None:
        self.bench.close()
        self.pool.shutdown()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.looping.join()
        self.loop.close()

    def lease(self, step: int, digest: str = "") -> Upload:
        shared = Shared(name=snapshot_name(step, 1), shares=self.shares, digest=digest)
        return self.node.lease(RUN, 1, NBYTES, name=shared.name, session="rank-0", shared=shared)

    def join(self, step: int, rank: int, *, digest: str = "", wait_s: float = LAST_S) -> Upload:
        async def ask() -> Upload:
            gone = self.loop.create_future()
            name = snapshot_name(step, 1)
            return await self.waiting.join("a client", gone, RUN, 1, name, rank, f"rank-{rank}", digest, wait_s=wait_s)

        return self.on_loop(ask())

    def fill(self, upload: Upload, step: int, rank: int) -> None:
        """Write the bytes of a share, and say so."""
        ends = [NBYTES * each // self.shares for each in range(self.shares + 1)]
        with upload.slot.view(NBYTES) as view:
            view[ends[rank] : ends[rank + 1]] = image_of(step, NBYTES)[ends[rank] : ends[rank + 1]]
        if rank:
            self.of.placed(upload.id, rank)

    def take(self, step: int) -> Manifest:
        upload = self.lease(step)
        for rank in range(1, self.shares):
            self.fill(self.join(step, rank), step, rank)
        self.fill(upload, step, 0)
        return self.node.seal(upload.id, manifest_of(step))

    def slots_filling(self) -> int:
        return sum(slot["state"] == "filling" for slot in self.node.ring.status()["slots"])


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


def test_a_snapshot_is_committed_once_every_share_is_there(ranks: Ranks) -> None:
    upload = ranks.lease(1)
    first, second = ranks.join(1, 1), ranks.join(1, 2)
    assert first is second is upload
    ranks.fill(upload, 1, 0)
    ranks.fill(first, 1, 1)
    sealing = ranks.pool.submit(ranks.node.seal, upload.id, manifest_of(1))
    assert upload.joint.missing == [2]
    assert ranks.bench.committed() == []
    ranks.fill(second, 1, 2)
    assert sealing.result(LAST_S).checksums == manifest_of(1).sealed(memoryview(image_of(1, NBYTES))).checksums
    assert ranks.bench.committed() == [1]


def test_a_rank_may_ask_for_its_share_before_the_slot_is_leased(ranks: Ranks) -> None:
    asking = [ranks.pool.submit(ranks.join, 1, rank) for rank in (1, 2)]
    upload = ranks.lease(1)
    assert [each.result(LAST_S) for each in asking] == [upload, upload]


def test_a_slot_may_be_leased_before_it_is_known_for_which_snapshot(ranks: Ranks) -> None:
    asking = [ranks.pool.submit(ranks.join, 1, rank) for rank in (1, 2)]
    upload = ranks.node.lease(RUN, 1, 10, session="rank-0")
    shared = Shared(name=snapshot_name(1, 1), shares=3, layout="the places")
    for _ in range(2):  # the first answer was lost
        ranks.of.say(upload, NBYTES, shared)
    assert [each.result(LAST_S) for each in asking] == [upload, upload]
    assert upload.nbytes == NBYTES
    for rank in range(3):
        ranks.fill(upload, 1, rank)
    assert ranks.node.seal(upload.id, manifest_of(1)).step == 1
    following = ranks.node.lease(RUN, 1, 10, session="rank-0")  # of the same layout
    layout_id = checksum(b"the places")
    ranks.of.say(following, NBYTES, Shared(name=snapshot_name(2, 1), shares=3), layout_id)
    joined = ranks.join(2, 1)
    assert joined.joint.shared.layout == "the places"
    ranks.fill(joined, 2, 1)
    ranks.fill(ranks.join(2, 2), 2, 2)
    with pytest.raises(SettingsError):
        ranks.node.seal(following.id, manifest_of(3))


def test_a_slot_that_is_not_for_it_becomes_no_snapshot_of_ranks(ranks: Ranks) -> None:
    shared, say = Shared(name=snapshot_name(2, 1), shares=3), ranks.of.say
    other = Shared(name=snapshot_name(1, 1), shares=3)
    for is_sealed, how in (
        (False, {"session": "rank-0", "name": other.name, "shared": other}),
        (False, {"session": "rank-0", "name": other.name}),
        (False, {"session": "rank-0", "shared": other}),
        (False, {}),  # its sender is on another host
        (True, {"session": "rank-0"}),
    ):
        upload = ranks.node.lease(RUN, 1, NBYTES, **how)
        upload.sealing = is_sealed
        with pytest.raises(SettingsError, match="something else"):
            say(upload, NBYTES, shared)
        upload.sealing = False
        ranks.node.abort(upload.id)
    upload = ranks.node.lease(RUN, 1, NBYTES, session="rank-0")
    with pytest.raises(SettingsError, match="does not fit its slot"):
        say(upload, upload.slot.capacity + 1, shared)
    with pytest.raises(SettingsError, match="give it once more"):
        say(upload, NBYTES, shared, "0" * 32)
    ranks.bench.open(attempt=2, session="rank-0")
    with pytest.raises(FencedError):
        say(upload, NBYTES, shared)
    assert upload.joint is None
    ranks.node.abort(upload.id)
    with pytest.raises(SnapshotNotFoundError):
        say(upload, NBYTES, shared)


def test_of_a_slot_that_is_said_to_be_for_one_that_is_over_nothing_comes(ranks: Ranks) -> None:
    ranks.of.decline(RUN, 1, snapshot_name(1, 1), "no room")
    upload = ranks.node.lease(RUN, 1, NBYTES, session="rank-0")
    ranks.of.say(upload, NBYTES, Shared(name=snapshot_name(1, 1), shares=3))
    with pytest.raises(SnapshotFailedError, match="no room", check=FailureReason.SHARE_MISSING.caused):
        ranks.node.seal(upload.id, manifest_of(1))


@pytest.mark.parametrize("before", [True, False], ids=["before it has begun", "while it writes"])
def test_a_rank_that_ends_gives_the_snapshot_up_and_the_former_one_stands(ranks: Ranks, before: bool) -> None:
    ranks.take(1)
    upload = ranks.lease(2)
    ranks.fill(ranks.join(2, 1), 2, 1)
    if not before:
        ranks.join(2, 2)
    ranks.fill(upload, 2, 0)
    sealing = ranks.pool.submit(ranks.node.seal, upload.id, manifest_of(2))
    ranks.of.reconnect_s = 0.0
    ranks.node.end_session("rank-2")
    with pytest.raises(SnapshotFailedError, match="rank 2 ended", check=FailureReason.SHARE_MISSING.caused):
        sealing.result(LAST_S)
    assert ranks.bench.committed() == [1]
    assert ranks.slots_filling() == 0  # it can be used again


def test_a_share_that_was_torn_gives_the_snapshot_up_with_its_reason(ranks: Ranks) -> None:
    upload = ranks.lease(1)
    ranks.of.placed(ranks.join(1, 1).id, 1, "rank 1: a tensor changed")
    with pytest.raises(SnapshotFailedError, match="a tensor changed", check=FailureReason.SHARE_MISSING.caused):
        ranks.join(1, 2)
    with pytest.raises(SnapshotFailedError, match="a tensor changed", check=FailureReason.SHARE_MISSING.caused):
        ranks.node.seal(upload.id, manifest_of(1))
    assert ranks.slots_filling() == 0


def test_a_slot_is_not_used_again_while_a_rank_may_still_write_into_it(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, slots=1)
    upload = ranks.lease(1)
    ranks.join(1, 1)
    ranks.node.abort(upload.id)
    with pytest.raises(SnapshotFailedError, check=FailureReason.RING_FULL.caused):
        ranks.lease(2)
    ranks.of.placed(upload.id, 1)  # its bytes went nowhere
    assert ranks.lease(2).slot is upload.slot
    with pytest.raises(SnapshotNotFoundError):
        ranks.of.placed(upload.id, 1)
    ranks.close()


def test_nobody_waits_for_a_snapshot_that_will_not_be(ranks: Ranks) -> None:
    waiting = ranks.pool.submit(ranks.join, 1, 1)
    ranks.of.decline(RUN, 1, snapshot_name(1, 1), "no slot is free")
    with pytest.raises(SnapshotFailedError, match="no slot is free", check=FailureReason.SHARE_MISSING.caused):
        waiting.result(LAST_S)
    waiting = ranks.pool.submit(ranks.join, 2, 1)
    ranks.lease(3)
    with pytest.raises(SnapshotFailedError, match="overtaken", check=FailureReason.SHARE_MISSING.caused):
        waiting.result(LAST_S)
    ranks.take(4)
    with pytest.raises(SnapshotFailedError, match="committed already", check=FailureReason.SHARE_MISSING.caused):
        ranks.join(4, 1)
    waiting = ranks.pool.submit(ranks.join, 5, 1)
    ranks.node.end_session("rank-0")
    with pytest.raises(SnapshotFailedError, match="has ended", check=FailureReason.SHARE_MISSING.caused):
        waiting.result(LAST_S)
    with pytest.raises(ServerUnreachableError, match="has closed"):
        ranks.of.join(RUN, 1, snapshot_name(6, 1), 1, "a stranger")


@pytest.mark.parametrize("when", ["before it has begun", "after that"])
def test_a_snapshot_that_was_given_up_waits_for_no_share(ranks: Ranks, when: str) -> None:
    """Ranks that hear of it first ask for no share any more."""
    ranks.of.wait_s = 1.0  # else ten minutes
    upload = ranks.lease(1) if when == "after that" else None
    ranks.of.decline(RUN, 1, snapshot_name(1, 1), "another host has given it up")
    upload = upload or ranks.lease(1)
    with pytest.raises(SnapshotFailedError, match="given it up", check=FailureReason.SHARE_MISSING.caused):
        ranks.node.seal(upload.id, manifest_of(1))
    assert ranks.slots_filling() == 0
    assert ranks.take(2).step == 2


def test_a_share_that_never_comes_is_waited_for_no_longer_than_allowed(ranks: Ranks) -> None:
    upload = ranks.lease(1)
    ranks.fill(ranks.join(1, 1), 1, 1)
    with pytest.raises(SnapshotFailedError, match="not begun within", check=FailureReason.SHARE_MISSING.caused):
        ranks.join(2, 2, wait_s=0.0)
    ranks.of.wait_s = 0.0
    with pytest.raises(SnapshotFailedError, match="rank 2 did not come", check=FailureReason.SHARE_MISSING.caused):
        ranks.node.seal(upload.id, manifest_of(1))


def test_a_rank_whose_connection_has_closed_is_not_waited_for(ranks: Ranks) -> None:
    ranks.node.end_session("rank-2")
    with pytest.raises(ServerUnreachableError, match="has closed"):
        ranks.join(1, 2)
    upload = ranks.lease(1)
    ranks.fill(ranks.join(1, 1), 1, 1)
    ranks.of.wait_s, ranks.of.reconnect_s = 10.0, 0.0
    with pytest.raises(SnapshotFailedError, match="rank 2 ended", check=FailureReason.SHARE_MISSING.caused):
        ranks.node.seal(upload.id, manifest_of(1))
    assert ranks.slots_filling() == 0


def test_a_rank_that_has_given_up_waiting_is_not_waited_for(ranks: Ranks) -> None:
    with pytest.raises(SnapshotFailedError, match="not begun within", check=FailureReason.SHARE_MISSING.caused):
        ranks.join(1, 2, wait_s=0.0)
    upload = ranks.lease(1)
    ranks.of.wait_s = 10.0
    with pytest.raises(SnapshotFailedError, match=r"rank 2 .*in vain", check=FailureReason.SHARE_MISSING.caused):
        ranks.node.seal(upload.id, manifest_of(1))
    assert ranks.take(2).step == 2


def test_a_rank_with_another_layout_gives_the_snapshot_up_for_all(ranks: Ranks) -> None:
    upload = ranks.lease(1, digest="one")
    ranks.join(1, 1, digest="one")
    with pytest.raises(SnapshotFailedError, match="another layout", check=FailureReason.SHARE_MISSING.caused):
        ranks.join(1, 2, digest="two")
    with pytest.raises(SnapshotFailedError, match=r"rank 2 .*layout", check=FailureReason.SHARE_MISSING.caused):
        ranks.node.seal(upload.id, manifest_of(1))


def test_a_slot_that_is_there_when_it_is_over_is_waited_for_by_nobody(ranks: Ranks) -> None:
    """The other ranks were told so while it was made."""
    ranks.of.decline(RUN, 1, snapshot_name(1, 1), "no room")
    upload = ranks.lease(1)
    with pytest.raises(SnapshotFailedError, match="no room", check=FailureReason.SHARE_MISSING.caused):
        ranks.of.wait(upload)


def test_it_is_known_whether_a_rank_has_asked_for_its_share(ranks: Ranks) -> None:
    name = snapshot_name(1, 1)
    upload = ranks.lease(1)
    ranks.join(1, 2)
    assert not ranks.of.is_joined(RUN, name, 1)
    ranks.join(1, 1)
    assert ranks.of.is_joined(RUN, name, 1)
    ranks.node.abort(upload.id)
    assert ranks.of.is_joined(RUN, name, 1)  # nobody can any more


def test_a_rank_that_is_a_snapshot_behind_finds_the_layout_of_that(ranks: Ranks) -> None:
    def shared(step: int, layout: str = "") -> Shared:
        return Shared(name=snapshot_name(step, 1), shares=3, layout=layout)

    known = [ranks.of.joint(RUN_ID, shared(step, f"layout {step}")) for step in (1, 2, 3, 4)]
    assert ranks.of.joint(RUN_ID, shared(3), known[2].layout_id).shared.layout == "layout 3"
    with pytest.raises(SettingsError, match="give it once more"):
        ranks.of.joint(RUN_ID, shared(1), known[0].layout_id)


def test_a_share_is_one_rank_s_and_one_of_those_there_are(ranks: Ranks) -> None:
    ranks.lease(1)
    name = snapshot_name(1, 1)
    ranks.join(1, 1)
    assert ranks.join(1, 1) is ranks.join(1, 1)  # the answer may have been lost
    with pytest.raises(SettingsError, match="another rank's"):
        ranks.of.join(RUN, 1, name, 1, "rank-2")
    with pytest.raises(SettingsError, match="3 shares"):
        ranks.of.join(RUN, 1, name, 3, "rank-2")
    with pytest.raises(SettingsError, match="names no snapshot"):
        ranks.of.join(RUN, 1, "best.ckpt", 1, "rank-1")
    with pytest.raises(SettingsError, match=r"best\.ckpt"):
        Shared(name="best.ckpt", shares=2)


def test_a_rank_of_an_earlier_attempt_takes_no_share(ranks: Ranks) -> None:
    ranks.bench.open(attempt=2, session="rank-0")
    with pytest.raises(FencedError):
        ranks.join(1, 1)


# -- over the sockets of a local server --------------------------------------------------------------------------


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[[], EmbeddedHost]]:
    """Make connections to one local server, as each rank has one; the first has opened the run."""
    made: list[EmbeddedHost] = []

    def connect() -> EmbeddedHost:
        settings = {"slots": 2, "memory_bytes": 2**26, "server_idle_timeout_s": 30.0}
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


def test_processes_fill_one_slot_through_the_node_of_their_host(hosts: Callable[[], EmbeddedHost]) -> None:
    first, second, pool = hosts(), hosts(), ThreadPoolExecutor(1)
    for step in (1, 2):
        manifest = replace(manifest_of(step, nbytes=NBYTES), run="run", run_id=first.run.partition("@")[2])
        shared = Shared(name=manifest.name, shares=2, digest="d", layout="the places" * 50_000)
        joining = pool.submit(second.join, manifest.name, share=1, wait_s=LAST_S)
        lease = first.lease(NBYTES, 30.0, shared=shared)
        theirs = joining.result(LAST_S)
        assert theirs.shared == shared
        assert (theirs.slot, theirs.share, theirs.id) == (lease.slot, 1, lease.id)
        image = image_of(step, NBYTES)
        lease.map[:400], theirs.map[400:NBYTES] = image[:400], image[400:]
        second.placed(theirs)
        first.seal(lease, manifest)
        assert first.manifests()[0].checksums == manifest.sealed(memoryview(image)).checksums
    said = replace(shared, name=snapshot_name(3, 1))
    joining = pool.submit(second.join, said.name, share=1, wait_s=LAST_S)
    ahead = replace(first.lease(10, 30.0), shared=said, nbytes=NBYTES, is_said=False)
    first.say(ahead)
    theirs = joining.result(LAST_S)
    assert (theirs.id, theirs.nbytes, theirs.shared) == (ahead.id, NBYTES, said)
    second.placed(theirs)
    first.abort(ahead)
    ahead = first.lease(10, 30.0)
    path, body = f"/v1/uploads/{ahead.id}/share", {"nbytes": NBYTES, "name": said.name, "digest": "d"}
    for wrong in ({}, {"shares": 2, "at": "spot://host/run", "layout": ""}):
        with pytest.raises(SettingsError, match="how many ranks"):
            first._call("POST", path, {**body, **wrong})
    first.abort(ahead)
    first.decline(snapshot_name(4, 1), "no slot is free")
    with pytest.raises(SnapshotFailedError, match="no slot is free", check=FailureReason.SHARE_MISSING.caused):
        second.join(snapshot_name(4, 1), share=1, wait_s=LAST_S)
    lease = first.lease(NBYTES, 30.0, shared=replace(shared, name=snapshot_name(5, 1)))
    second.join(snapshot_name(5, 1), share=1, wait_s=LAST_S)
    second.disconnect()
    with pytest.raises(SnapshotFailedError, match="rank 1 ended", check=FailureReason.SHARE_MISSING.caused):
        first.seal(lease, replace(manifest, name=snapshot_name(5, 1), step=5))
