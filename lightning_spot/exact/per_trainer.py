"""Objects of which each trainer has one, shared by all callbacks that ask for it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    import lightning.pytorch as pl


T = TypeVar("T", bound="PerTrainer")


class PerTrainer:
    """Base of what belongs to one trainer; neither keeps the other alive. Made by :meth:`of` only."""

    _all: ClassVar[weakref.WeakKeyDictionary[pl.Trainer, Any]]

    def __init_subclass__(cls) -> None:
        cls._all = weakref.WeakKeyDictionary()

    def __init__(self, trainer: pl.Trainer) -> None:
        self._of = weakref.ref(trainer)

    @classmethod
    def of(cls: type[T], trainer: pl.Trainer) -> T:
        """The one of ``trainer``."""
        if trainer not in cls._all:
            cls._all[trainer] = cls(trainer)
        return cls._all[trainer]  # type: ignore[no-any-return] # see __init_subclass__

    @property
    def _trainer(self) -> pl.Trainer:
        trainer = self._of()
        assert trainer is not None  # it calls us
        return trainer
