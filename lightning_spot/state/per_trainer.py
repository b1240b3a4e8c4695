"""What belongs to one trainer, without keeping it alive; also objects of which each trainer has one."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    import lightning.pytorch as pl


class OfTrainer:
    """Base of what knows its trainer and does not keep it alive.

    Args:
        trainer: that it belongs to.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._of = weakref.ref(trainer)

    @property
    def _trainer(self) -> pl.Trainer:
        trainer = self._of()
        assert trainer is not None  # it calls us
        return trainer


class PerTrainer(OfTrainer):
    """Base of what each trainer has one of, shared by all callbacks that ask for it. Made by :meth:`of` only."""

    _all: ClassVar[weakref.WeakKeyDictionary[pl.Trainer, Any]]

    def __init_subclass__(cls) -> None:
        cls._all = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, trainer: pl.Trainer) -> Self:
        """The one of ``trainer``."""
        if trainer not in cls._all:
            cls._all[trainer] = cls(trainer)
        return cls._all[trainer]  # type: ignore[no-any-return] # see __init_subclass__

    def forget(self) -> None:
        """Have the trainer get another one."""
        self._all.pop(self._trainer, None)
