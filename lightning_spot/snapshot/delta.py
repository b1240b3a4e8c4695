"""What differs between a part of a file and the same part of an earlier file: found, encoded, and applied again.

A delta names the ranges that differ and holds their bytes: as they are, or packed. Packed, four bytes at a time count
as a whole number, from which the earlier one is subtracted; the differences are folded to small positive numbers, their
four byte planes taken apart, and compressed with zstd. Consecutive states of a training differ in the low bits of
their floats, so that the planes of the high bytes are nearly empty. (XOR in place of the subtraction gave 1.48 x where
this gives 1.53 x.) It is arithmetic modulo 2**32: whatever the bytes mean, the new ones come out exactly.

::

    coding (1 byte), number of ranges (4), start and stop of each (4 + 4), then the bytes of all ranges

Where ``lossy="topk"`` asks for it, single numbers outside of the ranges follow these: those that changed most, instead
of all that changed. The others stay as they were at the receiver. Of each block, those are chosen that differ most from
what the receiver has. As what it has is known, and not only what was sent, nothing is lost for good: what a number is
behind grows until it is chosen (the error feedback of compressed training). The numbers themselves are sent, not their
differences, so that nothing is rounded on the way. AsymCheck chooses in blocks, too.

::

    first byte in the part (4 bytes), bytes of a number (1), how many (2), the place of each in the block (2), each

Both ends import this module when they need it: numpy would double the time that a server takes to start.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.snapshot.packing import zstd
from lightning_spot.snapshot.ranges import WIDTHS, Floats
from lightning_spot.snapshot.shards import Image

Range = tuple[int, int]
Buffer = memoryview | bytes | bytearray

LINE_BYTES = 64
"""What differs is found in lines of so many bytes: torch aligns tensors in a file to these."""

MOST_RANGES = 2**16
"""No delta has more ranges."""

_MOST_FOUND = 1024
_DENSE = 0.5  # share of sampled words that differ from which on the whole part counts as changed
_SAMPLE_STRIDE = 521  # words; odd, so that the samples do not fall on the same place of every row
_BLOCK = 256 * 1024  # a block and its planes fit the second-level cache
_WIDTH = 4  # bytes of a number whose planes are taken apart
_WINDOW_LOG = 17  # zstd's window: 128 KiB, also the most that a stranger's frame may ask for

_HEAD = struct.Struct(">BI")
_RANGE = struct.Struct(">II")

_Bytes = npt.NDArray[np.uint8]
_Numbers = npt.NDArray[np.uint32]


class Coding(enum.IntEnum):
    """How the bytes of a delta are written."""

    PLAIN = 0
    PACKED = 1
    PICKED = 2


def part_of(image: Image, start: int, stop: int) -> memoryview:
    """The part of an earlier file at the place of a part of a new one; beyond its end it is zeros."""
    end = min(stop, len(image))
    if end == stop:
        return image[start:stop]
    part = memoryview(bytearray(stop - start))
    if start < end:
        part[: end - start] = image[start:end]
    return part.toreadonly()


def changed_ranges(new: Buffer, base: Buffer) -> list[Range]:
    """Where two parts of the same length differ, in whole lines; one range for all if most of it does.

    Args:
        new: the part.
        base: the same part of the earlier file.
    """
    nbytes = len(new)
    words = nbytes // 8
    left, right = np.frombuffer(new, np.uint64, words), np.frombuffer(base, np.uint64, words)
    sample = left[::_SAMPLE_STRIDE] != right[::_SAMPLE_STRIDE]
    if len(sample) > _SAMPLE_STRIDE and np.count_nonzero(sample) > _DENSE * len(sample):
        return [(0, nbytes)]
    lines = -(-nbytes // LINE_BYTES)
    differs = np.zeros(lines * 8, np.bool_)
    np.not_equal(left, right, out=differs[:words])
    if new[words * 8 :] != base[words * 8 :]:
        differs[words] = True
    changed = np.flatnonzero(np.diff(differs.view(np.uint64) != 0, prepend=False, append=False))
    starts, stops = changed[::2], changed[1::2]
    gaps = starts[1:] - stops[:-1]
    shortest = 2 if len(gaps) < _MOST_FOUND else max(2, int(np.partition(gaps, -_MOST_FOUND)[-_MOST_FOUND]) + 1)
    kept = gaps >= shortest  # to name a range takes as much as a short gap
    first, last = starts[np.append(True, kept)[: len(starts)]], stops[np.append(kept, True)[: len(stops)]]
    return [
        (start * LINE_BYTES, min(stop * LINE_BYTES, nbytes))
        for start, stop in zip(first.tolist(), last.tolist(), strict=True)
    ]


def encode(new: Buffer, base: Buffer, ranges: list[Range], coding: Coding, picks: bytes = b"") -> bytes:
    """The delta that gives ``new`` where ``base`` is.

    Args:
        new: the part.
        base: the same part of the earlier file; needed to pack.
        ranges: where they differ, see :func:`changed_ranges`.
        coding: how to write the bytes.
        picks: single numbers outside of the ranges, see :func:`pick`.
    """
    head = _HEAD.pack(coding, len(ranges)) + b"".join(_RANGE.pack(*bounds) for bounds in ranges)
    if coding is not Coding.PACKED:
        return b"".join([head, *(new[start:stop] for start, stop in ranges), picks])
    compressor = zstd.ZstdCompressor(options=_options())
    left, right, planes = (np.empty(_BLOCK, np.uint8) for _ in range(3))
    pieces = [head]
    for segments in _blocks(ranges):
        numbers = _gather(new, segments, left)
        numbers -= _gather(base, segments, right)
        pieces.append(compressor.compress(_apart(_folded(numbers), planes)))
    pieces.append(compressor.flush())
    return b"".join(pieces)


def decode(delta: Buffer, base: Buffer, into: memoryview) -> None:
    """Write to ``into`` what a delta makes of ``base``; the caller checks the checksum of what came out.

    Args:
        delta: what :func:`encode` returned, or what a stranger sent.
        base: the part that it refers to.
        into: as long as ``base``.

    Raises:
        CorruptSnapshotError: if it is no delta for a part of this length.
    """
    try:
        _decode(memoryview(delta), base, into)
    except (struct.error, ValueError) as error:
        raise CorruptSnapshotError(f"a delta is damaged: {error}") from error
    except Exception as error:
        if zstd is None or not isinstance(error, zstd.ZstdError):
            raise
        raise CorruptSnapshotError(f"a delta is damaged: {error}") from error


def _decode(delta: memoryview, base: Buffer, into: memoryview) -> None:
    number, count = _HEAD.unpack_from(delta)
    coding = Coding(number)
    if count > MOST_RANGES:
        raise ValueError(f"{count} ranges in {len(into)} bytes")
    place = _HEAD.size + count * _RANGE.size
    ranges = list(_RANGE.iter_unpack(delta[_HEAD.size : place]))
    if len(ranges) != count or any(start >= stop for start, stop in ranges):
        raise ValueError("a range is cut short, or empty")
    ends = [0, *(stop for _, stop in ranges)]
    starts = [*(start for start, _ in ranges), len(into)]
    if any(end > start for end, start in zip(ends, starts, strict=True)):
        raise ValueError("its ranges overlap, or reach beyond the part")
    total = sum(stop - start for start, stop in ranges)
    data = delta[place:]
    for end, start in zip(ends, starts, strict=True):
        into[end:start] = base[end:start]
    if coding is Coding.PACKED:
        _decompress(data, base, into, ranges)
        return
    _scatter(data, ranges, into)
    put(data[total:], into)


def _scatter(data: memoryview, ranges: list[Range], into: memoryview) -> None:
    """Write the bytes of ranges, one after another, to their places."""
    taken = 0
    for start, stop in ranges:
        into[start:stop] = data[taken : taken + stop - start]
        taken += stop - start


def _decompress(data: memoryview, base: Buffer, into: memoryview, ranges: list[Range]) -> None:
    if zstd is None:
        raise ValueError("it is compressed with zstd, which this Python lacks")
    limits = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
    decompressor = zstd.ZstdDecompressor(options=limits)
    left, right = np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.uint8)
    for segments in _blocks(ranges):
        earlier = _gather(base, segments, right)
        numbers = _unfolded(_together(_exactly(decompressor, data, earlier.nbytes), left))
        data = data[:0]  # it is with the decompressor now
        numbers += earlier
        _scatter(left.data, segments, into)
    if (not decompressor.eof and decompressor.decompress(data, 1)) or not decompressor.eof or decompressor.unused_data:
        raise ValueError("it holds more bytes than its ranges")


def _exactly(decompressor: Any, data: memoryview, nbytes: int) -> _Bytes:
    """The next ``nbytes`` bytes, never more: nobody can make them as many as he likes."""
    out = bytearray()
    while len(out) < nbytes:
        got = b"" if decompressor.eof else decompressor.decompress(data, nbytes - len(out))
        if not got and (decompressor.eof or decompressor.needs_input):
            raise ValueError("it holds fewer bytes than its ranges")
        data = data[:0]
        out += got
    return np.frombuffer(out, np.uint8)


def _blocks(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    """Cut ranges into blocks of at most ``_BLOCK`` bytes, each a list of pieces of ranges."""
    block: list[Range] = []
    room = _BLOCK
    for start, stop in ranges:
        while start < stop:
            taken = min(room, stop - start)
            block.append((start, start + taken))
            start, room = start + taken, room - taken
            if not room:
                yield block
                block, room = [], _BLOCK
    if block:
        yield block


def _gather(data: Buffer, segments: list[Range], block: _Bytes) -> _Numbers:
    """The bytes of ranges, one after another, as numbers; the last one is filled up with zeros."""
    filled = 0
    for start, stop in segments:
        block[filled : filled + stop - start] = np.frombuffer(data[start:stop], np.uint8)
        filled += stop - start
    padded = -(-filled // _WIDTH) * _WIDTH
    block[filled:padded] = 0
    return block[:padded].view(np.uint32)


def _folded(numbers: _Numbers) -> _Numbers:
    """Differences of either sign as small numbers: 0, -1, 1, -2 become 0, 1, 2, 3. In place."""
    signs = (numbers.view(np.int32) >> np.int32(31)).view(np.uint32)
    numbers <<= np.uint32(1)
    numbers ^= signs
    return numbers


def _unfolded(numbers: _Numbers) -> _Numbers:
    """Undo :func:`_folded`. In place."""
    signs = -(numbers & np.uint32(1)).view(np.int32)
    numbers >>= np.uint32(1)
    numbers ^= signs.view(np.uint32)
    return numbers


def _apart(numbers: _Numbers, planes: _Bytes) -> memoryview:
    """The four byte planes of numbers, one after another."""
    for plane, target in enumerate(planes[: numbers.nbytes].reshape(_WIDTH, -1)):
        np.copyto(target, numbers >> np.uint32(8 * plane) if plane else numbers, casting="unsafe")
    return planes.data[: numbers.nbytes]


def _together(planes: _Bytes, block: _Bytes) -> _Numbers:
    """Undo :func:`_apart`."""
    numbers = block[: planes.nbytes].view(np.uint32)
    first, *others = planes.reshape(_WIDTH, -1)
    np.copyto(numbers, first)
    for plane, source in enumerate(others, 1):
        numbers |= source.astype(np.uint32) << np.uint32(8 * plane)
    return numbers


def _options() -> dict[Any, int]:
    """Level 1, for planes that hold little structure beyond how often each byte occurs: short matches do not pay."""
    names = zstd.CompressionParameter
    return {names.compression_level: 1, names.window_log: _WINDOW_LOG, names.hash_log: 6, names.min_match: 7}


# -- numbers that are picked -------------------------------------------------------------------------------------------

SHARE = 0.01
"""Of the numbers of a block, how many are chosen (AsymCheck's density)."""

_PICK_BLOCK = 2**14  # numbers
_PICKS = struct.Struct("<IBH")

_Raw = npt.NDArray[np.unsignedinteger]


def pick(new: memoryview, has: memoryview, floats: Iterable[Floats], share: float = SHARE) -> bytes:
    """Choose the numbers that ``has`` is most behind in, put them there, and encode them.

    Args:
        new: a part of the file.
        has: the same part as the receiver has it; it becomes what :func:`put` will make of it there.
        floats: where in the part its numbers lie.
        share: of the numbers of a block that are chosen, one at least.
    """
    pieces = []
    for run in floats:
        width = WIDTHS[run.dtype]
        raw = np.dtype(f"<u{width}")
        count = run.nbytes // width
        source, target = (np.frombuffer(part, raw, count, run.start) for part in (new, has))
        for first in range(0, count, _PICK_BLOCK):
            wanted, there = source[first : first + _PICK_BLOCK], target[first : first + _PICK_BLOCK]
            places = _most_different(wanted, there, run.dtype, math.ceil(share * len(wanted)))
            if len(places):
                there[places] = wanted[places]
                pieces.append(_PICKS.pack(run.start + first * width, width, len(places)))
                pieces.append(places.astype("<u2").tobytes())
                pieces.append(wanted[places].tobytes())
    return b"".join(pieces)


def put(picks: memoryview, into: memoryview) -> None:
    """Put numbers that :func:`pick` encoded, or a stranger sent, in their places.

    Raises:
        ValueError: if they are no such numbers of a part of this length.
    """
    place, last = 0, -1
    while place < len(picks):
        try:
            start, width, count = _PICKS.unpack_from(picks, place)
        except struct.error as error:
            raise ValueError("the numbers are cut short") from error
        place += _PICKS.size
        end = place + count * (2 + width)
        if width not in WIDTHS.values() or not count or not last < start <= len(into) or end > len(picks):
            raise ValueError("the numbers are none, out of order or cut short")
        places = np.frombuffer(picks, "<u2", count, place)
        target = np.frombuffer(into, f"<u{width}", min(_PICK_BLOCK, (len(into) - start) // width), start)
        if places.max() >= len(target):
            raise ValueError("a number lies beyond the part")
        target[places] = np.frombuffer(picks, f"<u{width}", count, place + 2 * count)
        place, last = end, start


def _most_different(wanted: _Raw, there: _Raw, dtype: str, count: int) -> npt.NDArray[np.intp]:
    """Places of at most ``count`` numbers that differ most; those whose difference is no number come first."""
    with np.errstate(all="ignore"):  # numbers of a training that went wrong are numbers to save, too
        far = np.abs(_numbers(wanted, dtype) - _numbers(there, dtype))
    if not np.isfinite(far.max()):
        far[~np.isfinite(far)] = np.inf
        far[wanted == there] = 0
    if count < len(far):
        least = np.partition(far, len(far) - count)[len(far) - count]
        if least > 0:
            beyond = np.flatnonzero(far > least)
            return np.concatenate((beyond, np.flatnonzero(far == least)[: count - len(beyond)]))
    return np.flatnonzero(far)[:count]


def _numbers(raw: _Raw, dtype: str) -> npt.NDArray[np.floating]:
    """What the bytes of numbers stand for, in a type that is fast to compare in."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    numbers = raw.view(f"<f{WIDTHS[dtype]}")
    return numbers.astype(np.float32) if dtype == "float16" else numbers
