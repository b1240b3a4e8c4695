"""Ranks that write one sharded snapshot together, each with a connection of its own to the node on their host."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lightning_spot.capture.sharded_writer import ShardedCheckpoint, ShardedWriter
from lightning_spot.client import embedded
from lightning_spot.client.embedded import EmbeddedHost
from lightning_spot.errors import NodeUnreachable, ShareMissing, SpotError
from lightning_spot.image.manifest import Manifest, snapshot_name
from tests.small_trainer import RUN_ID, info_of

LAST_S = 600.0  # of what never takes so long


class Desk:
    """The writers of two ranks."""

    def __init__(self, root: Path) -> None:
        self.url = str(root / "run")
        self.first = self.connect()
        self.first.open_run(info_of(self.url, 1))
        self.writers = [ShardedWriter(self.first, rank=0, world_size=2)]
        self.writers += [ShardedWriter(self.joined(), self.joined, rank=1, world_size=2)]
        self.weights = torch.rand(100)
        self.pool = ThreadPoolExecutor(1)

    def connect(self) -> EmbeddedHost:
        return embedded.start(self.url, "run", slots=3, memory_bytes=2**26, idle_timeout_s=30.0)

    def joined(self) -> EmbeddedHost:
        host = self.connect()
        host.run, host.attempt = self.first.run, 1
        return host

    def begin(self, rank: int, step: int, wait_s: float = LAST_S) -> Future[Manifest]:
        manifest = Manifest(run="run", run_id=RUN_ID, name=snapshot_name(step, 1), step=step, attempt=1, nbytes=0)
        checkpoint = ShardedCheckpoint({"state_dict": {"w": self.weights}}, {"rank": rank}, {"epoch": 1})
        return self.writers[rank].begin(checkpoint, manifest, wait_s=wait_s)

    def take(self, step: int) -> Manifest:
        """A snapshot of both ranks."""
        other = self.pool.submit(self.begin, 1, step)
        done = self.begin(0, step)
        other.result(LAST_S)
        return done.result(LAST_S)

    def close(self) -> None:
        for writer in reversed(self.writers):
            writer.close()
            if writer.host is not None:
                writer.host.disconnect()
        self.pool.shutdown()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.close()


def test_a_rank_that_loses_its_connection_takes_part_again(desk: Desk) -> None:
    assert desk.take(1).step == 1
    link = desk.writers[1].link
    assert link.host is not None
    link.host.disconnect()  # as if its node had been killed
    with pytest.raises(NodeUnreachable):
        desk.begin(1, 2)
    assert link.wait(LAST_S) is not None
    assert desk.take(3).step == 3


def test_a_rank_that_does_not_wait_for_the_slot_drops_that_snapshot_only(desk: Desk) -> None:
    host = desk.writers[1].host
    assert host is not None
    usual_s, host.max_stall_s = host.max_stall_s, 0.1
    with pytest.raises(SpotError, match="was not begun within"):
        desk.begin(1, 1, wait_s=0.0)
    host.max_stall_s = usual_s
    with pytest.raises(ShareMissing, match="rank 1 has waited for its slot in vain"):
        desk.begin(0, 1).result(120.0)  # not after the ten minutes that a rank may need to write its share
    assert desk.take(2).step == 2
