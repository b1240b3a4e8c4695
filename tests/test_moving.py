"""Copies past the caches: every byte arrives, none beside it is touched, and only large snapshots go that way."""

from __future__ import annotations

import ctypes
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_spot.staging import moving
from lightning_spot.staging.moving import goes_past_caches, move_past_caches
from tests.conftest import compiled

SIZES = st.one_of(st.integers(0, 300), st.integers(16_000, 16_500), st.integers(0, 70_000))


@compiled
@settings(max_examples=60)
@given(st.lists(st.tuples(SIZES, st.integers(0, 80), st.integers(0, 80)), max_size=6), st.integers(0, 2**32))
def test_every_byte_arrives_and_none_beside_it_is_touched(moves: list[tuple[int, int, int]], seed: int) -> None:
    total, dice = sum(nbytes + before + between for nbytes, before, between in moves) + 200, random.Random(seed)
    source, expected = dice.randbytes(total), bytearray(dice.randbytes(total))
    taken = ctypes.create_string_buffer(source, total)
    target = ctypes.create_string_buffer(bytes(expected), total)
    rows, read, written = [], 0, 0
    for nbytes, before, between in moves:
        written += before
        read += between
        rows.append((ctypes.addressof(target) + written, ctypes.addressof(taken) + read, nbytes))
        expected[written : written + nbytes] = source[read : read + nbytes]
        written, read = written + nbytes, read + nbytes
    move_past_caches(rows, ctypes.addressof(target), total)
    assert target.raw == bytes(expected)
    assert taken.raw == source


@compiled
@pytest.mark.parametrize("moves", [b"\0" * 23, "text", None])
def test_what_are_no_rows_is_refused(moves: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        moving._move(moves, 0, 0)  # type: ignore[misc,arg-type]


@compiled
@pytest.mark.parametrize(
    ("place", "nbytes"), [(-1, 10), (91, 10), (100, 1), (0, 101), (0, 2**64 - 1), (10, 2**64 - 5), (200, 1)]
)
def test_what_goes_beyond_its_memory_is_refused_and_nothing_is_copied(place: int, nbytes: int) -> None:
    source, target = (ctypes.create_string_buffer(byte * 300, 300) for byte in (b"s", b"t"))
    first = ctypes.addressof(target) + 100
    rows = [(first, ctypes.addressof(source), 50), (first + place, ctypes.addressof(source), nbytes)]
    with pytest.raises(ValueError, match="goes beyond the memory"):
        move_past_caches(rows, first, 100)
    assert target.raw == b"t" * 300
    move_past_caches([(first, ctypes.addressof(source), 100), (first + 100, 0, 0)], first, 100)
    assert target.raw == b"t" * 100 + b"s" * 100 + b"t" * 100


@compiled
def test_only_what_the_caches_cannot_hold_goes_past_them() -> None:
    assert not goes_past_caches(moving._LARGE_BYTES - 1)
    assert goes_past_caches(moving._LARGE_BYTES)


def test_without_a_compiler_everything_goes_by_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "_move", None)
    assert not goes_past_caches(10**12)
