"""Parts of the work that lean on the inside of Lightning and torch: one that fails is turned off, with one warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_spot.exact import private

if TYPE_CHECKING:
    import lightning.pytorch as pl

T = TypeVar("T")


class Switches:
    """Which parts of :mod:`~lightning_spot.exact.private` do their work in one ``fit``; all, until one fails."""

    def __init__(self) -> None:
        self._off: set[str] = set()

    def probe(self, trainer: pl.Trainer) -> None:
        """Turn off what misses a name, or finds something else by it."""
        for part, reason in private.problems(trainer).items():
            self._turn_off(part, reason)

    def is_on(self, part: str) -> bool:
        """Whether a part can do its work."""
        return part not in self._off

    def run(self, part: str, do: Callable[[], T], errors: tuple[type[Exception], ...] = (Exception,)) -> T | None:
        """Do something of a part; ``None`` if that is off, or fails now. Training goes on without it.

        Args:
            part: of :mod:`~lightning_spot.exact.private`.
            do: what.
            errors: that may be the part's; others are raised: they come from what it calls.

        Raises:
            MemoryError: the part works, and this time there is not enough memory for it.
        """
        if part in self._off:
            return None
        try:
            return do()
        except (MemoryError, torch.cuda.OutOfMemoryError):
            raise  # there may be enough the next time; what is missing here would be missing in every later snapshot
        except errors as error:
            self._turn_off(part, f"{type(error).__name__}: {error}")
            return None

    def _turn_off(self, part: str, reason: str) -> None:
        self._off.add(part)
        without = private.WITHOUT.get(part, "a resume is not exact there")
        rank_zero_warn(
            f"lightning_spot: {part}: {without} ({reason}). Training goes on; please report it with the versions of"
            " Lightning and torch"
        )
