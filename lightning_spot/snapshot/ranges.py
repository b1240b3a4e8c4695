"""Where floating-point numbers lie in a file, as plain data: a trainer tells its server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_spot.errors import SettingsError

WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number of each type that can be approximated."""

_MOST = 2**20


class Floats(NamedTuple):
    """A run of numbers of one type.

    Attributes:
        start: first byte in the file.
        nbytes: length in bytes, whole numbers only.
        dtype: one of :data:`WIDTHS`.
    """

    start: int
    nbytes: int
    dtype: str

    @property
    def stop(self) -> int:
        """First byte behind them."""
        return self.start + self.nbytes


def read_floats(fields: Any, nbytes: int) -> tuple[Floats, ...]:
    """Read what a request says of numbers in a file of ``nbytes`` bytes.

    Raises:
        SettingsError: if it is malformed, or they overlap, are not in order or reach beyond the file.
    """
    if not isinstance(fields, Sequence) or len(fields) > _MOST:
        raise SettingsError("malformed request: ranges are no list")
    found: list[Floats] = []
    for item in fields:
        is_item = isinstance(item, Sequence) and len(item) == 3 and type(item[0]) is type(item[1]) is int
        end = found[-1].stop if found else 0
        if not is_item or item[0] < end or item[1] < 1 or item[0] + item[1] > nbytes:
            raise SettingsError(f"malformed request: {str(item)[:100]} is no range, or not in order, of {nbytes} bytes")
        floats = Floats(*item)
        if type(floats.dtype) is not str or floats.dtype not in WIDTHS or floats.nbytes % WIDTHS[floats.dtype]:
            raise SettingsError(f"malformed request: {str(floats)[:100]} are no numbers that can be approximated")
        found.append(floats)
    return tuple(found)
