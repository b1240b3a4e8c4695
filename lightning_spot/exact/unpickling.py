"""Reads a checkpoint safely, with the exact states of all ranks as values."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO, Any

from lightning_spot.exact.dump import KEY
from lightning_spot.exact.rank_states import unpacked
from lightning_spot.image.safe_load import safe_load


def read_checkpoint(file: IO[bytes] | str, map_location: str = "cpu") -> Any:
    """Read a checkpoint, and the states of ranks in it, as :func:`safe_load` does; see there."""
    return with_ranks(safe_load(file, map_location), safe_load)


def with_ranks(checkpoint: Any, read: Callable[[IO[bytes]], Any]) -> Any:
    """The same checkpoint with the exact states of all ranks as values, if it has any.

    Args:
        checkpoint: changed in place.
        read: reads the state of a rank.
    """
    exact = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
    if isinstance(exact, dict) and isinstance(exact.get("ranks"), list):
        exact["ranks"] = unpacked(exact["ranks"], read)
    return checkpoint
