"""The partition planner: every byte once, in order, in proportion to idle time, none too small."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_spot.capture.partitions import (
    Partition,
    Window,
    bucket_ends,
    by_bucket,
    by_idle_time,
)

SIZES = st.lists(st.one_of(st.integers(0, 5000), st.integers(0, 10**9)), max_size=40)
ANY_TIME = st.one_of(st.floats(0, 10), st.floats(allow_nan=True, allow_infinity=True), st.just(0.0))
QUICK = settings(max_examples=60)


def each_byte_once(partitions: list[Partition], sizes: list[int]) -> None:
    """Spans of a piece follow each other without gap or overlap, from its first byte to its last."""
    seen = dict.fromkeys(range(len(sizes)), 0)
    for partition in partitions:
        assert partition.spans
        for span in partition.spans:
            assert span.nbytes > 0
            assert span.start == seen[span.piece]
            seen[span.piece] += span.nbytes
    assert list(seen.values()) == sizes


def large_enough(partitions: list[Partition], sizes: list[int], least: int) -> None:
    for partition in partitions:
        assert sum(span.nbytes for span in partition.spans) >= min(least, sum(sizes))


@QUICK
@given(SIZES, st.lists(ANY_TIME, min_size=1, max_size=30), st.integers(1, 10**8))
@example([10**6], [1.7e308, 1.7e308], 1)
def test_shares_hold_every_byte_once_in_order(sizes: list[int], idle: list[float], least: int) -> None:
    windows = [Window(number, 0.0, seconds) for number, seconds in enumerate(idle)]
    partitions = by_idle_time(sizes, windows, least)
    each_byte_once(partitions, sizes)
    large_enough(partitions, sizes, least)
    order = [span.piece for partition in partitions for span in partition.spans]
    assert order == sorted(order)
    points = [partition.point for partition in partitions]
    assert points == sorted(set(points))


def test_nothing_to_copy_is_no_partition() -> None:
    assert by_idle_time([], [Window(0, 0.0, 1.0)]) == by_idle_time([0, 0], [Window(0, 0.0, 1.0)]) == []
    assert by_bucket([], [], [1]) == by_bucket([0], [None], [1]) == []
    assert bucket_ends([], 10) == []


@QUICK
@given(st.data(), SIZES, st.integers(1, 12), st.integers(1, 10**8))
def test_buckets_hold_every_byte_once(data: st.DataObject, sizes: list[int], count: int, least: int) -> None:
    buckets = [data.draw(st.one_of(st.none(), st.integers(0, count - 1))) for _ in sizes]
    points = [3 * number + 1 for number in range(count)]
    partitions = by_bucket(sizes, buckets, points, least)
    each_byte_once(partitions, sizes)
    large_enough(partitions, sizes, least)
    released = {span.piece: partition.point for partition in partitions for span in partition.spans}
    merged = max(released.values(), default=0)
    for piece, point in released.items():  # never before its gradients, but where too little would be left
        assert point >= points[buckets[piece] or 0] or point == merged
    order = [partition.point for partition in partitions]
    assert order == sorted(set(order))
