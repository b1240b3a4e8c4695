"""Ranks of two hosts that write one snapshot in shards, with no server: it comes together at the durable tier."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_spot.capture import following
from lightning_spot.client import starting
from lightning_spot.client.embedded import EmbeddedHost
from lightning_spot.errors import FailureReason, ServerUnreachableError, SnapshotFailedError
from lightning_spot.exact.compare import differences
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.image.tensor_index import Shards
from lightning_spot.tiers.local import LocalStore
from tests.distributed.test_sharded_across import LAST_S, Desk
from tests.distributed.test_sharded_fit import check_states, final, snapshots, without_what_came_later
from tests.distributed.test_sharded_hosts import Train, log, told, train
from tests.support.filled import check_archive
from tests.support.small_trainer import info_of
from tests.support.waiting import until

__all__ = ["train"]


class Apart(Desk):
    """Each host brings its files to the durable tier. None has memory for the largest snapshots as a whole."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(root, str(root / "run"), monkeypatch, memory_bytes=3 * 2**20)
        self.store = LocalStore(self.url)
        self.most_own_bytes = 1000  # as all ranks were told

    def connect(self) -> EmbeddedHost:
        """Another connection to the node of the second host, which is started anew if it is lost."""
        host = starting.start(self.url, "run", slots=3, memory_bytes=self.memory_bytes, server_idle_timeout_s=30.0)
        host.open_run(replace(info_of(self.url, 1), durable_url=None, carry=False))
        return host

    def image(self, manifest: Manifest) -> tuple[memoryview, Manifest]:
        there = next(each for each in self.store.survey().manifests if each.name == manifest.name)
        image = memoryview(bytearray(there.nbytes))
        self.store.fetch(there, image)
        return image, there


def is_free(node: EmbeddedHost) -> bool:
    """Whether it has no slot that nobody else can use now."""
    return all(slot["state"] == "free" for slot in node._call("GET", "/v1/status")["slots"])


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Apart]:
    made = Apart(tmp_path, monkeypatch)
    try:
        yield made
    finally:
        made.close()


def test_each_host_brings_its_files_and_whoever_is_last_commits(desk: Apart, tmp_path: Path) -> None:
    for step in range(1, 5):
        desk.check(manifest := desk.take(step))
        assert desk.first.committed == manifest
        assert desk.first.past_memory == manifest  # it is safe
        desk.weights += 1
    folder = tmp_path / "run" / manifest.name
    image, there = desk.image(manifest)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*(f.name for f in there.files), "manifest.json"])
    places = {file.name: file.offset for file in there.files}
    for tensor in Shards.read(image, there).tensors:
        for shard in tensor.shards:
            start = places[shard.at.file] + shard.at.offset
            check_archive(image[start : start + shard.at.nbytes])


def test_a_host_that_cannot_bring_its_files_drops_the_snapshot_and_the_next_one_is_whole(desk: Apart) -> None:
    desk.check(desk.take(1))
    desk.most_own_bytes = 100_000
    desk.hosts[0].decline(snapshot_name(2, 1), "no slot is free", desk.at)
    begun = [desk.begin(rank, 2) for rank in (1, 2, 3)]  # none of them waits for a slot that never comes
    desk.copied()
    futures.wait(begun, LAST_S)
    desk.most_own_bytes = 70_000  # and all have the same room again, also rank 0, which has not begun
    desk.check(desk.take(3))
    long = "x" * 400_000
    with pytest.raises(
        SnapshotFailedError, match=r"what only rank 3 knows has \d+ bytes", check=FailureReason.SHARE_MISSING.caused
    ):
        desk.take(4, long)
    until(lambda: is_free(desk.hosts[1]), "the other rank's part to keep no slot", LAST_S)
    desk.most_own_bytes = 401_000  # all ranks are asked after a snapshot was missed
    desk.check(desk.take(5, long))
    assert [manifest.step for manifest in desk.store.survey().manifests] == [5, 3, 1]


@pytest.mark.parametrize("rank", [3, 2])  # of the first host's portion only rank 0 knows where it ends
def test_of_a_slot_that_is_smaller_than_what_is_laid_out_nothing_goes_to_the_tier(
    desk: Apart, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    desk.check_smaller_slot(rank, monkeypatch)


def test_hosts_that_wait_for_others_keep_no_slot_and_owe_what_they_wait_for(desk: Apart) -> None:
    others = [desk.begin(rank, 1) for rank in (1, 3)]
    desk.copied()
    futures.wait(others, LAST_S)
    until(lambda: is_free(desk.hosts[1]), "its slot to be free", LAST_S)
    leading = [desk.begin(rank, 1) for rank in (0, 2)]
    desk.copied()
    desk.check(leading[0].result(LAST_S))

    leading = [desk.begin(rank, 2) for rank in (0, 2)]
    node = desk.hosts[2]  # as a trainer asks at its end that had lost the node for a moment
    assert node.flush(0.0) == [f"{desk.at}: {snapshot_name(2, 1)} is on its way"]
    others = [desk.begin(rank, 2) for rank in (1, 3)]
    desk.copied()
    assert node.flush(LAST_S) == []
    assert [manifest.step for manifest in desk.store.survey().manifests] == [2, 1]
    futures.wait([*leading, *others], LAST_S)


def test_ranks_have_the_same_room_where_rank_0_could_not_begin(desk: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.check(desk.take(1))
    desk.most_own_bytes = 100_000
    with monkeypatch.context() as patch:
        patch.setattr(desk.first.link, "_host", None)
        with pytest.raises(ServerUnreachableError):
            desk.begin(0, 2)
    desk.hosts[0].decline(snapshot_name(2, 1), "its node was lost for a moment", desk.at)
    futures.wait([desk.begin(rank, 2) for rank in (1, 2, 3)], LAST_S)
    desk.most_own_bytes = 0  # nobody is asked for the next one
    desk.check(desk.take(3))


def test_the_node_of_another_host_says_what_it_has_still_to_bring(desk: Apart) -> None:
    """Its ranks' processes wait for that: with them, it may end."""
    others, node = [desk.begin(1, 1)], desk.hosts[1]
    futures.wait(others, LAST_S)
    assert node.flush(0.0) == [f"{desk.at}: {snapshot_name(1, 1)} is on its way"]
    others.append(desk.begin(3, 1))
    desk.copied()
    futures.wait(others, LAST_S)
    desk.others[0].flush(LAST_S)
    folder = desk.store.root / snapshot_name(1, 1)
    assert (folder / "portion-0001.json").exists()
    leading = [desk.begin(rank, 1) for rank in (0, 2)]
    desk.copied()
    desk.check(leading[0].result(LAST_S))


def test_a_rank_that_comes_when_it_is_over_takes_no_slot(desk: Apart) -> None:
    node = desk.hosts[1]
    node.decline(snapshot_name(1, 1), "rank 1: it has no room")
    with pytest.raises(SnapshotFailedError, match="rank 1: it has no room", check=FailureReason.SHARE_MISSING.caused):
        desk.begin(3, 1).result(LAST_S)
    assert [slot for slot in node._call("GET", "/v1/status")["slots"] if slot["capacity_bytes"]] == []


@pytest.mark.parametrize("written", [1, 3])
@pytest.mark.parametrize("notices", ["first", "last"])
def test_a_host_whose_node_is_lost_has_nobody_wait_for_its_files(
    desk: Apart, monkeypatch: pytest.MonkeyPatch, written: int, notices: str
) -> None:
    """One of its ranks has written; the other one comes to the next node, where nobody has the first one's bytes."""
    monkeypatch.setattr(following, "_AGAIN_S", 0.05 if notices == "first" else LAST_S)
    early, other = (desk.others[rank - 1] for rank in (written, 4 - written))
    early._connect = other._connect = desk.connect
    done = desk.begin(written, 1)
    early.copied()
    done.result(LAST_S)
    os.kill(desk.hosts[1]._call("GET", "/v1/status")["pid"], signal.SIGKILL)  # it waits for the other rank there
    if notices == "first":
        until(lambda: not early._entrusted, "the rank to notice", LAST_S)
    late = desk.begin(4 - written, 1)
    leading = [desk.begin(rank, 1) for rank in (0, 2)]
    desk.copied()
    if notices == "last":
        late.result(LAST_S)  # so the next node answers where the lost one did
        monkeypatch.setattr(following, "_AGAIN_S", 0.05)
        early._tasks.put(lambda: None)
    with pytest.raises(
        SnapshotFailedError,
        match=f"rank {written}: the server of its host was lost",
        check=FailureReason.SHARE_MISSING.caused,
    ):
        leading[0].result(LAST_S)
    futures.wait([late], LAST_S)


@pytest.mark.parametrize("written", [1, 3])
def test_a_rank_that_has_lost_its_connection_only_drops_nothing(
    desk: Apart, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    monkeypatch.setattr(following, "_AGAIN_S", 0.05)
    rank = desk.others[written - 1]
    rank._connect = desk.connect
    begun = [desk.begin(written, 1)]
    rank.copied()
    begun[0].result(LAST_S)
    desk.hosts[written].session.close()
    until(lambda: not rank._entrusted, "the rank to notice", LAST_S)
    begun += [desk.begin(each, 1) for each in (0, 2, 4 - written)]
    desk.copied()
    futures.wait(begun, LAST_S)
    desk.check(begun[1].result())


def test_ranks_of_two_hosts_save_each_step_without_a_memory_node(train: Train, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert train(root, "--steps", 3) == 0, log(root)
    assert len(check_states(root)) == 3
    assert told(root)["missed"] == 0
    assert told(root)["brought"] == 3
    assert [manifest.step for manifest in snapshots(root)] == [3, 3, 2, 1]  # with that of the end
    assert 0.4 < told(root)["own"] / snapshots(root)[0].nbytes < 0.6


@pytest.mark.soak
def test_ranks_of_two_hosts_train_on_from_what_each_has_brought(train: Train, tmp_path: Path) -> None:
    root, again = tmp_path / "run", tmp_path / "again"
    assert train(root, "--steps", 6) == 0, log(root)
    without_what_came_later(root, again, 4)
    assert train(again, "--steps", 6, "--seed", 99) == 0, log(again)
    assert "resumes at step 4" in log(again)
    assert list(differences(final(root), final(again))) == []


@pytest.mark.soak
@pytest.mark.parametrize("who", [0, 1, 3])
def test_a_rank_of_either_host_is_killed_in_the_middle_of_its_share(train: Train, tmp_path: Path, who: int) -> None:
    twin, root = tmp_path / "twin", tmp_path / "run"
    assert train(twin, "--ranks", 4) == 0, log(twin)
    assert train(root, "--ranks", 4, "--kill", who, 6) != 0
    newest = snapshots(root)[0].step
    assert newest >= 4
    assert train(root, "--ranks", 4, "--seed", 99) == 0, log(root)
    resumed = re.findall(r"resumes at step (\d+)", log(root))
    assert int(resumed[-1]) >= newest  # what nodes had yet to bring may have come meanwhile
    check_states(root)
    assert list(differences(final(twin), final(root))) == []


@pytest.mark.soak
def test_an_urgent_snapshot_is_brought_by_all_hosts(train: Train, tmp_path: Path) -> None:
    twin, root = tmp_path / "twin", tmp_path / "run"
    assert train(twin) == 0
    assert train(root, "--notice", 1, 5) == 143
    assert "is safe in" in log(root)
    assert train(root, "--seed", 99) == 0, log(root)
    assert list(differences(final(twin), final(root))) == []
