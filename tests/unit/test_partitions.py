"""The partition planner: every byte once, in order, in proportion to idle time, none too small."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_spot.capture.partitions import (
    LEAST_BYTES,
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


@QUICK
@given(st.integers(10**6, 10**12), st.lists(st.floats(0.001, 10), min_size=1, max_size=50))
def test_shares_are_in_proportion_to_idle_time(total: int, idle: list[float]) -> None:
    windows = [Window(number, 0.0, seconds) for number, seconds in enumerate(idle)]
    partitions = by_idle_time([total], windows, least=1)
    shares = {partition.point: partition.spans[0].nbytes for partition in partitions}
    for number, seconds in enumerate(idle):
        assert shares.get(number, 0) == pytest.approx(total * seconds / math.fsum(idle), abs=2, rel=1e-9)


def test_a_window_without_idle_time_gets_nothing() -> None:
    windows = [Window(0, 0.0, 0.0), Window(1, 0.0, 1.0), Window(2, 0.0, math.nan), Window(3, 0.0, -1.0)]
    assert [partition.point for partition in by_idle_time([10 * LEAST_BYTES], windows)] == [1]


@pytest.mark.parametrize("idle", [0.0, math.nan, math.inf, -1.0])
def test_where_nothing_is_idle_all_windows_count_alike(idle: float) -> None:
    found = by_idle_time([8 * LEAST_BYTES], [Window(number, 0.0, idle) for number in range(4)])
    assert [(p.point, p.spans[0].nbytes) for p in found] == [(number, 2 * LEAST_BYTES) for number in range(4)]


def test_spans_too_small_for_a_partition_wait_for_a_later_window() -> None:
    found = by_idle_time([10 * LEAST_BYTES], [Window(number, 0.0, 1.0) for number in range(100)])
    assert len(found) == 10
    assert [partition.point for partition in found][:2] == [9, 19]
    assert found[-1].point == 99


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


def test_a_storage_goes_with_its_bucket_or_else_with_the_first() -> None:
    mib = LEAST_BYTES
    found = by_bucket([mib, mib, mib, mib], [1, None, 2, 0], [5, 6, 9])
    assert [(p.point, [span.piece for span in p.spans]) for p in found] == [(5, [1, 3]), (6, [0]), (9, [2])]


@given(st.lists(st.integers(0, 100), max_size=60), st.integers(1, 300), st.integers(1, 50))
def test_buckets_are_cut_where_they_are_full(sizes: list[int], limit: int, first: int) -> None:
    ends = bucket_ends(sizes, limit, first)
    assert ends == sorted(set(ends))
    assert (ends[-1] == len(sizes) - 1) if sizes else not ends
    begin = 0
    for number, end in enumerate(ends):
        bucket = sizes[begin : end + 1]
        full = first if number == 0 else limit
        assert sum(bucket) >= full or end == len(sizes) - 1
        assert sum(bucket[:-1]) < full
        begin = end + 1
