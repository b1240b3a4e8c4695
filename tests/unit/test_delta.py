"""Deltas: whatever two parts hold, the new one comes out of the earlier one and the delta; strangers cannot harm."""

from __future__ import annotations

import math
import random
import struct

import numpy as np
import pytest

from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.snapshot import delta
from lightning_spot.snapshot.delta import LINE_BYTES, Coding, changed_ranges, decode, encode, pick
from lightning_spot.snapshot.ranges import WIDTHS, Floats

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


# -- numbers that are picked -------------------------------------------------------------------------------------------

NUMBERS = 40_000  # two whole blocks and a piece of one


def raw(source: np.random.Generator, dtype: str, spoilt: bool) -> bytes:
    """Random numbers as they lie in a file; spoilt ones are any bits, infinities and NaNs among them."""
    width = WIDTHS[dtype]
    if spoilt:
        return source.bytes(NUMBERS * width)
    numbers = source.standard_normal(NUMBERS).astype(np.float32)
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()
    return numbers.astype(f"<f{width}").tobytes()


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("dtype", WIDTHS)
def test_both_ends_agree_and_the_most_different_values_are_exact(dtype: str, spoilt: bool, seed: int) -> None:
    source = np.random.default_rng(seed)
    head = source.bytes(37)  # numbers lie at any place
    new, base = head + raw(source, dtype, spoilt), head + raw(source, dtype, spoilt)
    mine = bytearray(base)
    picks = pick(memoryview(new), memoryview(mine), [Floats(37, NUMBERS * WIDTHS[dtype], dtype)])
    theirs = bytearray(len(base))
    decode(encode(memoryview(mine), b"", [], Coding.PICKED, picks), base, memoryview(theirs))
    assert theirs == mine
    unsigned = f"<u{WIDTHS[dtype]}"
    wanted, before, after = (np.frombuffer(each, unsigned, NUMBERS, 37) for each in (new, base, mine))
    changed = before != after
    assert (after[changed] == wanted[changed]).all()
    blocks = [2**14, 2**14, NUMBERS - 2**15]
    assert changed.sum() == sum(math.ceil(0.01 * block) for block in blocks)
    assert len(picks) == changed.sum() * (2 + WIDTHS[dtype]) + 7 * len(blocks)
    if dtype == "float32" and not spoilt:
        far = np.abs(wanted.view("<f4") - before.view("<f4"))[: 2**14]
        assert far[changed[: 2**14]].min() >= far[~changed[: 2**14]].max()


def test_what_is_behind_is_chosen_in_the_end() -> None:
    """Of numbers that stay as they are, nothing stays wrong: what was not sent is not forgotten."""
    source = np.random.default_rng(1)
    new, mine = source.bytes(1000 * 4), bytearray(source.bytes(1000 * 4))
    for _ in range(10):
        assert mine != new
        pick(memoryview(new), memoryview(mine), [Floats(0, 4000, "float32")], share=0.1)
    assert mine == new
    assert not pick(memoryview(new), memoryview(mine), [Floats(0, 4000, "float32")])


def test_strangers_cannot_write_beyond_the_part(seed: int) -> None:
    source = random.Random(seed)
    base = source.randbytes(10_000)
    new = source.randbytes(10_000)
    picks = pick(memoryview(new), memoryview(bytearray(base)), [Floats(100, 8000, "float32")])
    sent = encode(memoryview(new), b"", [(3, 99)], Coding.PICKED, picks)
    for _ in range(300):
        hostile = bytearray(sent)
        for _ in range(source.randrange(1, 4)):
            hostile[source.randrange(len(hostile))] = source.randrange(256)
        hostile = hostile[: source.choice([len(hostile), source.randrange(len(hostile))])]
        room = bytearray(12_000)
        try:
            decode(hostile, base, memoryview(room)[1000:11_000])
        except CorruptSnapshotError:
            continue
        finally:
            assert room[:1000] == room[11_000:] == bytes(1000)


@pytest.mark.parametrize(
    "picks",
    [
        struct.pack("<IBH", 0, 4, 1),  # cut short
        struct.pack("<IBH", 0, 3, 0),  # of no width
        struct.pack("<IBHHI", 9_996, 4, 1, 1, 7),  # behind the end
        struct.pack("<IBHHI", 20_000, 4, 1, 0, 7),
        struct.pack("<IBHHI", 0, 4, 1, 2**14, 7),  # in another block
        b"\0",
    ],
)
def test_numbers_that_are_none_are_refused(picks: bytes) -> None:
    with pytest.raises(CorruptSnapshotError):
        decode(encode(b"", b"", [], Coding.PICKED, picks), bytes(10_000), memoryview(bytearray(10_000)))
