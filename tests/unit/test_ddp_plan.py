"""How a checkpoint of DDP is cut: alike on all ranks, at parts, into about equal ranges."""

from __future__ import annotations

import pytest
import torch

from lightning_spot.capture.ddp_plan import RANGE_BYTES, plan_ranges, ranges_for, sample

pytestmark = pytest.mark.guarantee("G10")
PART = 64 * 1024


def test_no_rank_writes_a_range_for_little() -> None:
    ranks = range(8)
    assert ranges_for(0, ranks) == ranges_for(1, ranks) == ranges_for(RANGE_BYTES, ranks) == (0,)
    assert ranges_for(RANGE_BYTES + 1, ranks) == (1, 0)
    assert ranges_for(3 * RANGE_BYTES, ranks) == (1, 2, 0)
    assert ranges_for(100 * RANGE_BYTES, ranks) == (1, 2, 3, 4, 5, 6, 7, 0)
    assert ranges_for(100 * RANGE_BYTES, [0]) == (0,)


@pytest.mark.parametrize("ranges", [(0,), (1, 0), (3, 5, 0), (1, 2, 3, 4, 5, 6, 0)])
@pytest.mark.parametrize("nbytes", [0, 1000, PART, 5 * PART + 1, 333 * PART + 7])
def test_ranges_begin_with_parts_and_follow_each_other(ranges: tuple[int, ...], nbytes: int) -> None:
    found = plan_ranges([nbytes // 3, nbytes - nbytes // 3], ["float32"] * 2, ranges, PART, ("token",))
    assert found.ranges[-1] == 0
    assert set(found.ranges) <= set(ranges)
    bounds = [found.range_of(rank, nbytes + 5000) for rank in found.ranges]
    starts = [each[0] for each in bounds if each is not None]
    ends = [each[1] for each in bounds if each is not None]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == nbytes + 5000
    assert all(start % PART == 0 for start in starts)
    sizes = [end - start for start, end in zip(starts[:-1], ends[:-1], strict=True)]
    assert all(0 < size <= nbytes / len(found.ranges) + PART for size in sizes)
    assert found.range_of(99, nbytes) is None


def test_whatever_differs_is_in_the_digest() -> None:
    sizes, dtypes = [PART, 3 * PART], ["float32", "int64"]
    digests = [
        plan_ranges(sizes, dtypes, (1, 0), PART, ("token", "sample")).digest,
        plan_ranges(sizes[::-1], dtypes, (1, 0), PART, ("token", "sample")).digest,
        plan_ranges(sizes, dtypes[::-1], (1, 0), PART, ("token", "sample")).digest,
        plan_ranges(sizes, dtypes, (1, 0), 2 * PART, ("token", "sample")).digest,
        plan_ranges(sizes, dtypes, (1, 0), PART, ("token", "other")).digest,
        plan_ranges(sizes, dtypes, (1, 2, 0), PART, ("token", "sample")).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert plan_ranges(sizes, dtypes, (1, 0), PART, ("token", "sample")).digest == digests[0]


def test_a_sample_is_the_same_of_equal_states_only() -> None:
    weights = [torch.rand(100) for _ in range(50)]
    same = [weight.clone() for weight in weights]
    other = [weight + 1 for weight in weights]
    first, second, third = (sample(each, "step-1") for each in (weights, same, other))
    assert first == second != third
    assert sample(weights, "step-2") != first
