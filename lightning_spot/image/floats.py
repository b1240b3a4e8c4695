"""Where floating-point numbers lie in a checkpoint file, as plain data: a trainer knows it, and tells its server."""

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
    """Read what a request says of a file of ``nbytes`` bytes.

    Raises:
        SettingsError: if it is malformed, or they overlap, are not in order or reach beyond the file.
    """
    if not isinstance(fields, Sequence) or len(fields) > _MOST:
        raise SettingsError("malformed request: floats are no list")
    found, end = [], 0
    for item in fields:
        try:
            floats = Floats(*item)
            is_right = type(floats.start) is type(floats.nbytes) is int and floats.nbytes % WIDTHS[floats.dtype] == 0
        except (TypeError, KeyError) as error:
            raise SettingsError(f"malformed request: {str(item)[:100]} are no floats") from error
        if not is_right or not end <= floats.start < floats.stop <= nbytes:
            raise SettingsError(f"malformed request: floats {str(item)[:100]} are not in order within {nbytes} bytes")
        found.append(floats)
        end = floats.stop
    return tuple(found)
