"""Ranks of two hosts, each with a node, that write one snapshot in shards: it comes together at a snapshot server."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.host_link import RingSettings
from lightning_spot.capture.sharded_writer import Joining, ShardedCheckpoint, ShardedWriter
from lightning_spot.capture.split import SharingRanks
from lightning_spot.capture.tensors import by_storage
from lightning_spot.client import starting
from lightning_spot.client.embedded import EmbeddedHost
from lightning_spot.client.stores import open_store
from lightning_spot.errors import (
    FailureReason,
    ServerUnreachableError,
    SettingsError,
    ShareProblem,
    SnapshotFailedError,
    TierError,
)
from lightning_spot.fit.in_shards import InShards, WhereTo, check_place
from lightning_spot.fit.topology import Topology
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.memory import joint
from lightning_spot.memory.host import InProcessHost, Lease
from lightning_spot.memory.node import Node
from lightning_spot.run.location import Location
from lightning_spot.run.survey import survey
from lightning_spot.sharded.file_plan import ShardedLayouter, load_state, state_archive
from lightning_spot.sharded.reader import ImageReader, load_all
from lightning_spot.tiers import posix
from lightning_spot.tiers.local import LocalStore
from tests.support.ranks import rows
from tests.support.server import snapshot_server
from tests.support.small_trainer import RUN_ID, info_of
from tests.support.waiting import until

LAST_S = 600.0  # of what never takes so long
HOSTS = ((0, 2), (1, 3))
ROWS, COLUMNS = 8192, 16
"""Each rank has 128 KiB of one tensor, and as much of one that is frozen."""


def gone(rank: int) -> EmbeddedHost:
    raise ServerUnreachableError(f"rank {rank} has lost its node")


class Desk:
    """Writers of four ranks, of which each host has every other one."""

    def __init__(
        self,
        root: Path,
        at: str,
        monkeypatch: pytest.MonkeyPatch,
        nodes: tuple[str, ...] = (),
        memory_bytes: int = 2**26,
    ) -> None:
        self.url, self.at, self.most_own_bytes, self.memory_bytes = str(root / "run"), at, 0, memory_bytes
        self.hosts: list[EmbeddedHost] = []
        info = replace(info_of(self.url, 1), nodes=nodes, replicas=max(1, len(nodes)))
        for rank in (0, 2, 1, 3):
            if rank == 1:
                for name in ("LIGHTNING_SPOT_RUNTIME_DIR", "LIGHTNING_SPOT_SHM_DIR"):
                    (folder := Path(os.environ[name]) / "h1").mkdir(mode=0o700)
                    monkeypatch.setenv(name, str(folder))
                info = replace(info, nodes=(), durable_url=None, carry=False)
            host = starting.start(self.url, "run", slots=3, memory_bytes=memory_bytes, server_idle_timeout_s=30.0)
            if rank in (0, 1):
                host.open_run(info)
                LocalStore(self.url).claim(info.claim())  # as the trainer does
            host.run, host.attempt = info.text, 1
            self.hosts.append(host)
        self.hosts = [self.hosts[0], self.hosts[2], self.hosts[1], self.hosts[3]]
        self.first = ShardedWriter(self.hosts[0], world_size=4)
        self.first.across.hosts = HOSTS
        self.others = [
            Joining(self.hosts[rank], functools.partial(gone, rank), HOSTS, rank=rank, world_size=4)
            for rank in (1, 2, 3)
        ]
        ends = [ROWS * COLUMNS * part // 4 for part in range(5)]
        self.ranges = tuple(itertools.pairwise(ends))
        self.weights, self.frozen = (torch.rand(ROWS * COLUMNS) for _ in range(2))
        self.live: dict[int, list[torch.Tensor]] = {}
        self.is_frozen = True

    def begin(self, rank: int, step: int, own: Any = "") -> Future[Any]:
        """What a rank does: its tensors are where they were, with other numbers."""
        parts = [tensor[slice(*self.ranges[rank])] for tensor in (self.weights, self.frozen)]
        live = self.live.setdefault(rank, [part.clone() for part in parts])
        live[0].copy_(parts[0])
        shards = [rows(tensor.view(-1, COLUMNS), 4) for tensor in live]
        state = {"state_dict": {"w": shards[0], "f": shards[1]}, "groups": [{"lr": step}]}
        checkpoint = ShardedCheckpoint(
            state, {"rank": rank, "own": own}, {"epoch": 1, "text": "x" * step}, self.most_own_bytes
        )
        how: dict[str, Any] = {
            "owned": by_storage(live[:1]),
            "kept": by_storage(live[1:] if self.is_frozen else []),
            "wait_s": LAST_S,
        }
        if rank:
            return self.others[rank - 1].write(checkpoint, step=step, at=self.at, **how).done
        manifest = Manifest(run="run", run_id=RUN_ID, name=snapshot_name(step, 1), step=step, attempt=1, nbytes=0)
        return self.first.begin(checkpoint, manifest, ranks=SharingRanks(4, {}, (2, 2), self.at), **how)

    def copied(self) -> None:
        """The tensors may change."""
        for writer in (self.first, *self.others):
            writer.copied()

    def take(self, step: int, own: Any = "") -> Manifest:
        """A snapshot of all ranks; ``own`` is what rank 3 knows."""
        begun = [self.begin(rank, step, own if rank == 3 else "") for rank in range(4)]
        self.copied()
        futures.wait(begun, LAST_S)
        manifest: Manifest = begun[0].result()
        for future in begun[1:]:
            future.result()
        return manifest

    def image(self, manifest: Manifest) -> tuple[memoryview, Manifest]:
        """A snapshot where hosts have brought it, every byte checked."""
        raise NotImplementedError

    def check(self, manifest: Manifest) -> None:
        """It is there, every byte as the ranks had it."""
        image, manifest = self.image(manifest)
        saved = load_all(ImageReader(image, manifest))
        assert torch.equal(saved["state_dict"]["w"].view(-1), self.weights)
        assert torch.equal(saved["state_dict"]["f"].view(-1), self.frozen)
        own = [load_state(image[file.offset : file.stop]) for file in manifest.files if file.name[:5] == "rank-"]
        assert sorted(state["rank"] for state in own) == [0, 1, 2, 3]

    def close(self) -> None:
        self.first.close()
        for writer in self.others:
            writer.close(complete=True)
        for host in self.hosts[:1]:
            host.leave(complete=True)
            host.disconnect()

    def check_smaller_slot(self, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A rank that lays out more than its slot has would write to what is mapped behind that."""
        join = self.hosts[rank].join

        def smaller(*arguments: Any, **more: Any) -> Lease:
            return replace(join(*arguments, **more), nbytes=100_000)

        with monkeypatch.context() as patched:
            patched.setattr(self.hosts[rank], "join", smaller)
            with pytest.raises(
                SnapshotFailedError, match=f"rank {rank}: .*100000", check=FailureReason.SHARE_MISSING.caused
            ):
                self.take(1)
        self.check(self.take(2))


class AtNodes(Desk):
    """They put snapshots together at snapshot servers, which are given by their URLs."""

    def __init__(
        self, root: Path, memories: dict[str, Node], monkeypatch: pytest.MonkeyPatch, memory_bytes: int = 2**26
    ) -> None:
        super().__init__(root, "", monkeypatch, tuple(memories), memory_bytes)
        self.memories = memories
        until(lambda: len(self.hosts[0].carrier().split()) == len(memories), "all nodes to be there")
        self.at = self.hosts[0].carrier()

    def settled(self) -> None:
        """Nothing is on its way any more, also to the other replica."""
        until(lambda: not self.hosts[0]._call("GET", "/v1/status")["busy"], "nothing to be on its way", LAST_S)

    def image(self, manifest: Manifest) -> tuple[memoryview, Manifest]:
        return self.image_at(self.at.split()[0], manifest)

    def image_at(self, at: str, manifest: Manifest) -> tuple[memoryview, Manifest]:
        committed = self.memories[at.rpartition("/")[0]].ring.committed()
        slot = next(each for each in committed if each.manifest and each.manifest.name == manifest.name)
        assert slot.manifest is not None
        return slot.view(), slot.manifest


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Desk]:
    with snapshot_server(tmp_path) as (memory, url):
        memory_bytes = getattr(request, "param", 2**26)
        with contextlib.closing(AtNodes(tmp_path, {url: memory}, monkeypatch, memory_bytes)) as made:
            yield made


def test_shards_of_ranks_that_are_no_neighbours_come_together_whichever_of_them_change(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []  # how large slots are made ahead

    def another(_host: Any, nbytes: int) -> bool:
        asked.append(nbytes)
        return False

    monkeypatch.setattr(desk.first._maker, "another", another)
    for step in range(1, 7):
        desk.check(manifest := desk.take(step))
        assert desk.first.committed == manifest
        assert 0.4 < desk.first.across.own_nbytes / manifest.nbytes < 0.6
        desk.weights += 1
    assert asked
    assert max(asked) < 0.6 * manifest.nbytes
    copied = [writer.copied_bytes for writer in (desk.first, *desk.others)]
    share = 4 * ROWS * COLUMNS // 4
    for nbytes in copied:  # what is frozen, once for each slot
        assert 6 * share < nbytes < 13 * share


def test_a_host_fills_its_own_shares_only_however_many_ranks_there_are(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of all ranks was held against the bound for those of one host: more than 1,024 took no snapshot."""
    monkeypatch.setattr(joint, "MOST_SHARES", 3)
    desk.check(desk.take(1))


@pytest.mark.parametrize("rank", [3, 2])  # of the first host's portion only rank 0 knows where it ends
def test_a_slot_that_is_smaller_than_what_is_laid_out_gets_nothing_of_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    desk.check_smaller_slot(rank, monkeypatch)


@contextlib.contextmanager
def at_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AtNodes]:
    """Hosts that bring each snapshot to both."""
    with snapshot_server(tmp_path) as one, snapshot_server(tmp_path) as other:
        with contextlib.closing(AtNodes(tmp_path, {url: node for node, url in (one, other)}, monkeypatch)) as made:
            yield made


@pytest.mark.parametrize("lost", [0, 1])
def test_with_replicas_each_host_brings_its_part_to_both_nodes_or_to_the_one_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    with at_two_nodes(tmp_path, monkeypatch) as made:
        urls = made.at.split()
        left, nobody = urls[1 - lost], f"spot://127.0.0.1:1/run@{RUN_ID}"
        for step in (1, 2, 3):
            made.at = " ".join(urls if step != 2 else [nobody, left] if lost == 0 else [left, nobody])
            manifest = made.take(step)
            made.settled()
            sums = set[tuple[str, ...]]()
            for url in urls if step != 2 else [left]:
                image, there = made.image_at(url, manifest)
                sums.add(there.checksums)
                assert torch.equal(load_all(ImageReader(image, there))["state_dict"]["w"].view(-1), made.weights)
            assert len(sums) == 1
            made.weights += 1


def test_a_replica_that_has_a_snapshot_a_moment_after_the_other_has_the_next_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the next one goes is asked when the first node has this one: the other one then counted as late."""
    with at_two_nodes(tmp_path, monkeypatch) as made:
        urls, go_on = made.at.split(), threading.Event()
        second = made.memories[urls[1].rpartition("/")[0]]
        seal = second.seal

        def late(*arguments: Any) -> Any:
            assert go_on.wait(LAST_S)
            return seal(*arguments)

        monkeypatch.setattr(second, "seal", late)
        made.take(1)
        made.at = made.hosts[0].carrier()
        go_on.set()
        made.settled()
        manifest = made.take(2)
        made.settled()
        for url in urls:
            made.image_at(url, manifest)


@pytest.mark.parametrize("desk", [2**20], indirect=True)
def test_a_host_needs_memory_for_its_own_part_only(desk: Desk) -> None:
    desk.check(manifest := desk.take(1))
    assert manifest.nbytes > 2**20


def test_a_rank_of_another_host_whose_own_state_has_no_room_drops_that_snapshot_and_has_it_in_the_next(
    desk: Desk,
) -> None:
    desk.check(desk.take(1))
    long = "x" * 400_000
    with pytest.raises(SnapshotFailedError, match="did not come together at spot://") as failed:
        desk.take(2, long)
    fault = failed.value.fault
    assert fault is not None
    assert (fault.problem, fault.rank, fault.nbytes > len(long)) == (ShareProblem.OUTGROWN, 3, True)
    desk.check(desk.take(3, long))


def test_a_rank_that_is_done_and_leaves_takes_no_share_from_the_others_of_its_host(desk: Desk) -> None:
    desk.is_frozen = False
    leaving, done = desk.begin(1, 1), desk.begin(0, 1)
    leaving.result(LAST_S)
    desk.hosts[1].leave(complete=True)  # as at the end of a training
    for rank in (2, 3):
        desk.begin(rank, 1)
    desk.check(done.result(LAST_S))


def test_elastic_wait_for_nothing_and_what_training_changes_meanwhile_is_saved_as_it_was(desk: Desk) -> None:
    desk.is_frozen = False  # so it counts as what forward may change
    begun = [desk.begin(rank, 1) for rank in (1, 2, 3)]  # rank 0 has not begun: there is no slot yet, nowhere
    for rank in (1, 2, 3):
        desk.live[rank][1].add_(1)
    begun.append(desk.begin(0, 1))
    desk.copied()
    for future in begun:
        future.result(LAST_S)
    desk.check(begun[-1].result())


class OnTwoHosts(SimpleNamespace):
    """A trainer, as far as it is asked for its hosts."""

    world_size, num_nodes = 4, 2


@pytest.mark.parametrize(
    ("memory", "settings", "way_on"),
    [
        ("spot://a:1", {"compression": "topk"}, r"lossy='topk'\. Leave lossy="),
    ],
)
def test_hosts_whose_parts_would_come_together_nowhere_are_refused(
    memory: str, settings: dict[str, Any], way_on: str
) -> None:
    ring = RingSettings(slots=2, memory_bytes=2**20, server_idle_timeout_s=9.0, keep=1, strict=False, **settings)
    trainer = cast(Any, OnTwoHosts())
    with pytest.raises(SettingsError, match=rf"2 hosts .*{way_on}"):
        InShards(trainer, Location.of("/nowhere", servers=memory), ring).check()


def claim_at(root: Path, token: str) -> None:
    info = replace(info_of(str(root), 1), token=token)
    LocalStore(root).claim(info.claim())


def test_a_durable_tier_that_is_not_one_place_for_all_hosts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host looks at the place as it knows it, and writes there what is there already."""
    monkeypatch.setattr("lightning_spot.fit.in_shards._SEEN_S", 0.0)
    url, run = str(tmp_path / "run"), f"run@{RUN_ID}"
    claim_at(tmp_path / "run", "this")
    check_place(url, run, 1, "this")
    with pytest.raises(SettingsError, match="claim of attempt 2"):
        check_place(url, run, 2, "this")
    with monkeypatch.context() as patch:
        patch.setattr(posix, "create_exclusively", functools.partial(refuse, TierError("Permission denied", tier="")))
        with pytest.raises(SettingsError, match="Permission denied"):
            check_place(url, run, 1, "this")
    with pytest.raises(SettingsError, match="is not seen"):
        check_place(url, run, 1, "another")


def refuse(error: Exception, *_: Any, **__: Any) -> None:
    raise error


def test_ranks_of_two_trainers_never_agree() -> None:
    def digest(token: str) -> str:
        own = state_archive({}, 4096)
        return ShardedLayouter(0, 1, token).lay_out({"lr": 0.1}, own, [4096], {}).digest

    assert digest("one") == digest("one")
    assert digest("one") != digest("another")


def test_a_run_that_ends_with_no_snapshot_of_its_end_does_not_end_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why there was none may have been said long before, and then nothing was said at the end."""
    monkeypatch.setattr(WhereTo, "_carrier", lambda *_, anew: "")
    ring = RingSettings(slots=2, memory_bytes=2**20, server_idle_timeout_s=9.0, keep=1, strict=False)
    location = Location.of(str(tmp_path / "run"), local_server=False)
    host = InProcessHost(slots=2, memory_bytes=2**20, open_store=open_store)
    attempt = Attempt(survey(location), host, ring, sharded_over=4)
    attempt.writer.across.hosts = HOSTS
    trainer = cast(Any, OnTwoHosts(global_rank=0, strategy=SimpleNamespace(broadcast=lambda said, src=0: said)))
    in_shards = InShards(trainer, location, ring)
    in_shards._hosts = Topology(HOSTS, can_bring=True)
    in_shards.write(attempt, cast(Any, None), {}, complete=True, how=None, wait_s=0.0, commit_s=0.0)
    assert attempt.finish(5.0, complete=True) is False
