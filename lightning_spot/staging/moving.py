"""How bytes get from one place in memory to another: by the C library, or past the caches of the processor."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable

try:
    from lightning_spot.staging import _past_caches
except ImportError:  # installed where there was no compiler
    _move: Callable[[bytes, int, int], None] | None = None
else:
    _move = _past_caches.move

_LARGE_BYTES = 64 * 1024 * 1024

memmove = ctypes.CDLL(None).memmove  # lets go of the GIL
memmove_small = ctypes.PyDLL(None).memmove  # keeps it
memmove.argtypes = memmove_small.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memmove.restype = memmove_small.restype = None


def goes_past_caches(nbytes: int) -> bool:
    """Whether so many bytes, copied one after the other, are better not left in the caches.

    Whoever checksums them next finds less than that in the caches still: 0.13 and not 0.20 CPU seconds a GiB for both.
    Of more, nothing is left there by then: 0.28 and not 0.23.
    """
    return _move is not None and nbytes >= _LARGE_BYTES


def move_past_caches(moves: Iterable[tuple[int, int, int]], address: int, nbytes: int) -> None:
    """Copy memory past the caches, all of it without the GIL; only where :func:`goes_past_caches`.

    Args:
        moves: address of the target, address of the source, bytes. No target overlaps a source.
        address: of the memory in which all targets lie.
        nbytes: its size.

    Raises:
        ValueError: if one does not lie there. Nothing is copied then.
    """
    assert _move is not None
    rows = array("Q")
    for move in moves:
        rows.extend(move)
    _move(rows.tobytes(), address, nbytes)
