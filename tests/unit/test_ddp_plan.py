"""How a checkpoint of DDP is cut: alike on all ranks, at parts, into about equal ranges."""

from __future__ import annotations

import pytest
import torch

from lightning_spot.capture.layouts import RANGE_BYTES, plan_ranges, ranges_for, sample

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
