"""Ranks of two hosts that each write shards of one snapshot, with no snapshot server: it comes together in storage."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_spot.exact.compare import differences
from tests.distributed.test_sharded_fit import check_states, final, snapshots, without_what_came_later
from tests.distributed.test_sharded_hosts import Train, aborted, log, train

__all__ = ["train"]


def test_two_hosts_save_each_step_without_a_server(train: Train, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert train(root, "--steps", 3) == 0, log(root)
    assert len(check_states(root)) == 3
    assert aborted(root) == 0
    assert [manifest.step for manifest in snapshots(root)] == [3, 3, 2, 1]  # with that of the end


@pytest.mark.soak
def test_two_hosts_go_on_from_what_each_has_put_there(train: Train, tmp_path: Path) -> None:
    root, again = tmp_path / "run", tmp_path / "again"
    assert train(root, "--steps", 6) == 0, log(root)
    without_what_came_later(root, again, 4)
    assert train(again, "--steps", 6, "--seed", 99) == 0, log(again)
    assert "resumes at step 4" in log(again)
    assert list(differences(final(root), final(again))) == []


@pytest.mark.soak
@pytest.mark.parametrize("who", [0, 1, 3])
def test_a_rank_of_either_host_is_killed_within_its_shard(train: Train, tmp_path: Path, who: int) -> None:
    twin, root = tmp_path / "twin", tmp_path / "run"
    assert train(twin, "--ranks", 4) == 0, log(twin)
    assert train(root, "--ranks", 4, "--kill", who, 6) != 0
    newest = snapshots(root)[0].step
    assert newest >= 4
    assert train(root, "--ranks", 4, "--seed", 99) == 0, log(root)
    resumed = re.findall(r"resumes at step (\d+)", log(root))
    assert int(resumed[-1]) >= newest  # what servers had yet to bring may have come meanwhile
    check_states(root)
    assert list(differences(final(twin), final(root))) == []


@pytest.mark.soak
def test_an_urgent_snapshot_is_put_there_by_all_hosts(train: Train, tmp_path: Path) -> None:
    twin, root = tmp_path / "twin", tmp_path / "run"
    assert train(twin) == 0
    assert train(root, "--notice", 1, 5) == 143
    assert "is safe in" in log(root)
    assert train(root, "--seed", 99) == 0, log(root)
    assert list(differences(final(twin), final(root))) == []
