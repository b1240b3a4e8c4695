"""How a checkpoint of DDP is cut: alike on all ranks, at parts, into about equal ranges; what ranks know beside it."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_spot.capture.layouts import RANGE_BYTES, plan_ranges, ranges_for, sample
from lightning_spot.sharded.file_plan import state_file
from lightning_spot.state.dump import KEY, packed, states_in_files, with_ranks

pytestmark = pytest.mark.guarantee("G10")
PART = 64 * 1024


def test_no_rank_writes_a_range_for_little() -> None:
    ranks = range(8)
    assert ranges_for(0, ranks) == ranges_for(1, ranks) == ranges_for(RANGE_BYTES, ranks) == (0,)
    assert ranges_for(RANGE_BYTES + 1, ranks) == (1, 0)
    assert ranges_for(3 * RANGE_BYTES, ranks) == (1, 2, 0)
    assert ranges_for(100 * RANGE_BYTES, ranks) == (1, 2, 3, 4, 5, 6, 7, 0)
    assert ranges_for(100 * RANGE_BYTES, [0]) == (0,)


def tensors(*nbytes: int) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8) for size in nbytes]


@pytest.mark.parametrize("ranges", [(0,), (1, 0), (3, 5, 0), (1, 2, 3, 4, 5, 6, 0)])
@pytest.mark.parametrize("nbytes", [0, 1000, PART, 5 * PART + 1, 333 * PART + 7])
def test_ranges_begin_with_parts_and_follow_each_other(ranges: tuple[int, ...], nbytes: int) -> None:
    found, _ = plan_ranges(tensors(nbytes // 3, nbytes - nbytes // 3), ranges, PART, ("token",))
    assert list(found)[-1] == 0
    assert found.keys() <= set(ranges)
    starts, stops = zip(*found.values(), strict=True)
    assert (*starts[1:], None) == stops
    assert all(start % PART == 0 for start in starts)
    sizes = [stop - start for start, stop in found.values() if stop is not None]
    assert all(0 < size <= nbytes / len(found) + PART for size in sizes)


def test_whatever_differs_is_in_the_digest() -> None:
    first, last = tensors(PART, 3 * PART)
    digests = [
        plan_ranges([first, last], (1, 0), PART, ("token", "sample"))[1],
        plan_ranges([last, first], (1, 0), PART, ("token", "sample"))[1],
        plan_ranges([first, last.view(torch.int64)], (1, 0), PART, ("token", "sample"))[1],
        plan_ranges([first, last], (1, 0), 2 * PART, ("token", "sample"))[1],
        plan_ranges([first, last], (1, 0), PART, ("token", "other"))[1],
        plan_ranges([first, last], (1, 2, 0), PART, ("token", "sample"))[1],
    ]
    assert len(set(digests)) == len(digests)
    assert plan_ranges(tensors(PART, 3 * PART), (1, 0), PART, ("token", "sample"))[1] == digests[0]


def test_a_sample_is_the_same_of_equal_states_only() -> None:
    weights = [torch.rand(100) for _ in range(50)]
    same = [weight.clone() for weight in weights]
    other = [weight + 1 for weight in weights]
    first, second, third = (sample(each, "step-1") for each in (weights, same, other))
    assert first == second != third
    assert sample(weights, "step-2") != first


# -- what each rank knows beside the checkpoint ------------------------------------------------------------------------


def test_states_in_one_file_are_values_again_when_they_are_read() -> None:
    """So users' files have them, and snapshots of earlier versions, with room behind each."""
    state = {"random": [1, 2], "mean": torch.ones(3)}
    with_room = torch.cat([packed(state), torch.zeros(5000, dtype=torch.uint8)])
    read = with_ranks({KEY: {"ranks": [state, packed(state), with_room, {"old": 1}]}})[KEY]["ranks"]
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
