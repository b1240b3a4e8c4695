"""Deltas: whatever two parts hold, the new one comes out of the earlier one and the delta; strangers cannot harm."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.image import delta
from lightning_spot.image.delta import LINE_BYTES, Coding, changed_ranges, decode, encode

pytestmark = pytest.mark.guarantee("G20")

KIB = 1024
CODINGS = [Coding.PLAIN, *([Coding.PACKED] if delta.zstd is not None else [])]


def parts(source: random.Random, nbytes: int, change: str) -> tuple[bytes, bytes]:
    """An earlier part and the new one."""
    base = source.randbytes(nbytes)
    new = bytearray(base)
    if change == "all":
        new = bytearray(source.randbytes(nbytes))
    elif change == "training":
        floats = np.frombuffer(base[: nbytes // 4 * 4], np.float32)
        with np.errstate(all="ignore"):
            new[: floats.nbytes] = (floats * np.float32(1.001)).tobytes()
    elif change == "last byte" and nbytes:
        new[-1] ^= 1
    elif change == "some":
        for _ in range(source.randrange(1, 40)):
            start = source.randrange(max(1, nbytes))
            stop = min(nbytes, start + source.choice([1, 7, 64, 1000, 300 * KIB]))
            new[start:stop] = source.randbytes(stop - start)
    return base, bytes(new)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("change", ["nothing", "all", "training", "last byte", "some"])
@pytest.mark.parametrize("nbytes", [1, 3, 64, 1001, 256 * KIB, 700 * KIB + 5])
def test_the_new_part_comes_out(coding: Coding, change: str, nbytes: int, seed: int) -> None:
    base, new = parts(random.Random(seed), nbytes, change)
    ranges = changed_ranges(new, base)
    sent = encode(memoryview(new), memoryview(base), ranges, coding)
    into = bytearray(random.Random(seed).randbytes(nbytes))
    decode(sent, base, memoryview(into))
    assert bytes(into) == new
    if change == "nothing":
        assert not ranges


def test_only_what_differs_is_named() -> None:
    base = bytes(1000 * KIB)
    new = bytearray(base)
    for place in range(0, len(new), 50 * KIB):
        new[place + 100 : place + 300] = b"x" * 200  # in the lines from 64 to 320
    ranges = changed_ranges(new, base)
    assert ranges == [(place + 64, place + 320) for place in range(0, len(new), 50 * KIB)]


def test_changes_in_very_many_places_are_named_in_few_ranges() -> None:
    base = bytes(4 * 2**20)
    new = bytearray(base)
    for place in range(0, len(new), 10 * LINE_BYTES):
        new[place] = 1
    ranges = changed_ranges(new, base)
    assert len(ranges) <= 1025
    into = bytearray(len(new))
    decode(encode(memoryview(new), memoryview(base), ranges, Coding.PLAIN), base, memoryview(into))
    assert into == new


def delta_of(ranges: list[tuple[int, int]], data: bytes, coding: int = 0, count: int | None = None) -> bytes:
    head = struct.pack(">BI", coding, len(ranges) if count is None else count)
    return head + b"".join(struct.pack(">II", *each) for each in ranges) + data


LIES = {
    "nothing": b"",
    "unknown coding": delta_of([(0, 4)], b"1234", coding=9),
    "a range too few": delta_of([(0, 4)], b"", count=2),
    "a billion ranges": delta_of([], b"", count=2**31),
    "beyond the part": delta_of([(990, 1010)], bytes(20)),
    "backwards": delta_of([(20, 10)], bytes(10)),
    "overlapping": delta_of([(0, 10), (5, 15)], bytes(20)),
    "too few bytes": delta_of([(0, 10)], bytes(9)),
    "too many bytes": delta_of([(0, 10)], bytes(11)),
    "not compressed": delta_of([(0, 10)], bytes(10), coding=1),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lie_is_an_error_and_never_reaches_beyond_the_part(lie: bytes) -> None:
    whole = bytearray(3000)
    with memoryview(whole) as view, pytest.raises(CorruptSnapshotError):
        decode(lie, bytes(1000), view[1000:2000])
    assert not any(whole[:1000] + whole[2000:])


@pytest.mark.skipif(delta.zstd is None, reason="this Python has no zstd")
def test_a_decompression_bomb_does_not_go_off() -> None:
    bomb = delta.zstd.compress(bytes(64 * 2**20))
    short = delta.zstd.compress(bytes(996))
    wide = delta.zstd.compress(bytes(1000), options={delta.zstd.CompressionParameter.window_log: 27})
    into = bytearray(1000)
    for data in (bomb, short, bomb[:-20], short + b"more"):
        with pytest.raises(CorruptSnapshotError):
            decode(delta_of([(0, 1000)], data, coding=1), bytes(1000), memoryview(into))
    assert wide  # a window that is larger than its content is no harm: nothing is allocated for it


@pytest.mark.skipif(delta.zstd is None, reason="this Python has no zstd")
def test_states_that_hardly_moved_become_small() -> None:
    weights = np.random.default_rng(1).standard_normal(250_000).astype(np.float32)
    new, base = (weights * np.float32(1.0001)).tobytes(), weights.tobytes()
    assert len(encode(memoryview(new), memoryview(base), [(0, len(new))], Coding.PACKED)) < len(new) / 1.4
