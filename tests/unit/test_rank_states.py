"""What each rank knows beside one checkpoint, as whoever goes on from it reads it."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_spot.sharded.file_plan import state_file
from lightning_spot.state.rank_states import packed, states_in_files, unpacked

pytestmark = pytest.mark.guarantee("G10")


def test_states_in_one_file_are_values_again_when_they_are_read() -> None:
    """So users' files have them, and snapshots of earlier versions, with room behind each."""
    state = {"random": [1, 2], "mean": torch.ones(3)}
    with_room = torch.cat([packed(state), torch.zeros(5000, dtype=torch.uint8)])
    read = unpacked([state, packed(state), with_room, {"old": 1}], lambda file: torch.load(file, weights_only=True))
    assert [read[0], read[3]] == [state, {"old": 1}]
    for each in read[1:3]:
        assert each["random"] == [1, 2]
        assert torch.equal(each["mean"], state["mean"])


@pytest.mark.parametrize("first", [[{"rank": 0}], []], ids=["beside a checkpoint", "of a model in shards"])
@pytest.mark.parametrize("world_size", [3, 2])
def test_a_rank_reads_the_files_that_it_needs(first: list[Any], world_size: int) -> None:
    files = {}
    for rank in range(3):
        data = io.BytesIO()
        torch.save({"rank": rank}, data)
        files[state_file(rank)] = memoryview(data.getvalue())
    shared = {"world_size": 3, "shares": 3, "ranks": first}
    strategy = SimpleNamespace(distributed_sampler_kwargs={"rank": 1, "num_replicas": world_size})
    trainer = cast(Any, SimpleNamespace(world_size=world_size, global_rank=1, strategy=strategy))
    read: list[str] = []
    found = states_in_files(trainer, shared, lambda name: read.append(name) or files[name])  # type: ignore[func-returns-value]
    wanted = {0, 1} if world_size == 3 else {0, 1, 2}
    assert [each.get("rank") for each in found] == [rank if rank in wanted else None for rank in range(3)]
    assert read == [state_file(rank) for rank in sorted(wanted)[len(first) :]]
