"""CRC-32, fast where ``zlib-ng`` has a wheel, and of a long run of bytes from its pieces, for several threads."""

from __future__ import annotations

import functools

try:
    from zlib_ng.zlib_ng import crc32  # 0.10 s of CPU a GiB
except ImportError:
    from zlib import crc32  # the same result in 0.31 s

__all__ = ["combine", "crc32"]

_POLYNOMIAL = 0xEDB88320  # of zlib and zip, reflected
_ONE = 1 << 31


def combine(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of two runs of bytes one after the other.

    Args:
        first: CRC-32 of the first run.
        second: CRC-32 of the second run.
        second_bytes: length of the second run.
    """
    if not first:  # as of nothing: most records lie in one piece
        return second
    return _multiply(_shift(second_bytes), first) ^ second


def _multiply(left: int, right: int) -> int:
    """Product of two polynomials over GF(2), modulo the CRC's (the algorithm of zlib's ``crc32_combine``)."""
    product, bit = 0, _ONE
    while bit:
        if left & bit:
            product ^= right
        bit >>= 1
        right = (right >> 1) ^ _POLYNOMIAL if right & 1 else right >> 1
    return product


@functools.lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    """X to the power of ``8 * nbytes``: what appending so many zero bytes multiplies a CRC with."""
    power, square, left = _ONE, _ONE >> 8, nbytes
    while left:
        if left & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        left >>= 1
    return power
