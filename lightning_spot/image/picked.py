"""The numbers of a file that changed most, sent instead of all that changed: chosen, encoded, and put in their places.

Not exact: the numbers that are not chosen stay as they were at the receiver. Of each block, those are chosen that
differ most from what the receiver has. As what it has is known, and not only what was sent, nothing is lost for good:
what a number is behind grows until it is chosen (the error feedback of compressed training). The numbers themselves
are sent, not their differences, so that nothing is rounded on the way. AsymCheck chooses in blocks, too.

::

    first byte in the part (4 bytes), bytes of a number (1), how many (2), the place of each in the block (2), each
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from lightning_spot.image.floats import WIDTHS, Floats

SHARE = 0.01
"""Of the numbers of a block, how many are chosen (AsymCheck's density)."""

_BLOCK = 2**14  # numbers
_HEAD = struct.Struct("<IBH")

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
        for first in range(0, count, _BLOCK):
            wanted, there = source[first : first + _BLOCK], target[first : first + _BLOCK]
            places = _most_different(wanted, there, run.dtype, math.ceil(share * len(wanted)))
            if len(places):
                there[places] = wanted[places]
                pieces.append(_HEAD.pack(run.start + first * width, width, len(places)))
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
            start, width, count = _HEAD.unpack_from(picks, place)
        except struct.error as error:
            raise ValueError("the numbers are cut short") from error
        place += _HEAD.size
        end = place + count * (2 + width)
        if width not in WIDTHS.values() or not count or not last < start <= len(into) or end > len(picks):
            raise ValueError("the numbers are none, out of order or cut short")
        places = np.frombuffer(picks, "<u2", count, place)
        target = np.frombuffer(into, f"<u{width}", min(_BLOCK, (len(into) - start) // width), start)
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
