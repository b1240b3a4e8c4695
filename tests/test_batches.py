"""The size and number of parts under way to a tier follow from its measured latency and bandwidth."""

from __future__ import annotations

import math

import pytest

from lightning_spot.tiers.batches import Pace, best_part_bytes, useful_streams

MIB = 2**20
GIB = 2**30


def pace(latency_s: float, bytes_per_s: float) -> Pace:
    known = Pace()
    known.answered(latency_s)
    known.moved(8 * MIB, latency_s + 8 * MIB / bytes_per_s)
    return known


def size(nbytes: int, streams: int, known: Pace, under_way: int = GIB) -> int:
    return best_part_bytes(nbytes, streams, known, least=MIB, under_way=under_way)


def seconds(nbytes: int, streams: int, part_bytes: int, latency_s: float, bytes_per_s: float) -> float:
    """What the rule minimises, beyond the time of the bytes themselves."""
    return nbytes / (streams * part_bytes) * latency_s + part_bytes / (2 * bytes_per_s)


@pytest.mark.parametrize("nbytes", [GIB // 8, GIB, 20 * GIB])
@pytest.mark.parametrize("streams", [1, 4, 16])
@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(0.03, 80e6), (0.2, 40e6), (0.005, 1e9)])
def test_no_other_size_is_faster(nbytes: int, streams: int, latency_s: float, bytes_per_s: float) -> None:
    best = size(nbytes, streams, pace(latency_s, bytes_per_s), under_way=2**50)
    cost_s = seconds(nbytes, streams, best, latency_s, bytes_per_s)
    for other in (best // 2, best - MIB, best + 2 * MIB, best * 2):
        if other >= MIB:
            assert cost_s <= seconds(nbytes, streams, other, latency_s, bytes_per_s) * 1.0001


def test_a_far_tier_gets_larger_parts_and_a_near_one_does_not_pay() -> None:
    near, middle, far = (size(GIB, 8, pace(latency_s, 80e6)) for latency_s in (1e-5, 0.02, 0.2))
    assert near == MIB
    assert MIB < middle < far
    assert size(GIB, 8, Pace()) == MIB  # nothing is known yet


def test_more_streams_share_what_may_be_under_way() -> None:
    assert size(100 * GIB, 4, pace(1.0, 1e9), under_way=128 * MIB) == 32 * MIB
    assert size(100 * GIB, 16, pace(1.0, 1e9), under_way=128 * MIB) == 8 * MIB
    assert size(100 * GIB, 1000, pace(1.0, 1e9), under_way=128 * MIB) == MIB  # never less than the least


def test_latency_is_told_from_bandwidth() -> None:
    known = pace(0.1, 50e6)
    assert math.isclose(known.latency_s, 0.1)
    assert math.isclose(known.bytes_per_s, 50e6, rel_tol=0.01)
    known.moved(1000, 0.1)  # a small one says nothing of bandwidth
    assert math.isclose(known.bytes_per_s, 50e6, rel_tol=0.01)
    for _ in range(20):  # and a single slow answer is none
        known.answered(0.01)
    known.answered(30.0)
    assert math.isclose(known.latency_s, 0.01)
    quick = Pace()
    quick.answered(5.0)  # slower than a whole part after it
    quick.moved(8 * MIB, 0.1)
    assert 8 * MIB / 0.1 <= quick.bytes_per_s <= 2 * 8 * MIB / 0.1


def test_streams_to_a_node_nearby_and_far_away() -> None:
    assert useful_streams(0.0, fewest=4, most=16) == 4
    assert useful_streams(0.0005, fewest=4, most=16) == 4
    assert useful_streams(0.01, fewest=4, most=16) == 8
    assert useful_streams(0.1, fewest=4, most=16) == 16
