"""What a run does once and a resumed one does not again: the sanity check, a tuner's trial. What they changed is noted.

:mod:`~lightning_spot.exact.changed_values` begins when training begins, and would take that for the way in which every
attempt begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_spot.exact import private
from lightning_spot.exact.buffers import Buffers, Marks, marks_of
from lightning_spot.exact.changed_values import ChangedValues, Names
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.exact.shipped import tuners
from lightning_spot.exact.switches import Switches

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Once(OfTrainer):
    """Follows one trainer's ``fit`` until its training begins.

    Args:
        trainer: whose ``fit`` it is.
        switches: which parts of the work are on.
        hooked: is told which values were changed in what happens once.
        buffers: is told which buffers were.
    """

    def __init__(self, trainer: pl.Trainer, switches: Switches, hooked: ChangedValues, buffers: Buffers) -> None:
        super().__init__(trainer)
        self._run = partial(switches.run, private.HOOKED)
        self._hooked, self._buffers = hooked, buffers
        self._first: ChangedValues | None = None
        self._before = ChangedValues()
        self._since = Names()
        self._marks: Marks = {}

    def begins(self) -> None:
        """Note how everything is. Further calls do nothing until :meth:`ends`."""
        if self._first is None:
            self._since = Names()
            self._run(self._begin)
            self._first = self._before

    def ends(self) -> None:
        """Note what was changed since :meth:`begins`, and not back. A second call does nothing."""
        first, self._first = self._first, None
        if first is not None:
            self._run(self._end)
            self._run(lambda: self._hooked.before.update(self._since.common(self._changed(first))))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens within, since a resumed run does it, too: to ask for loaders."""
        if self._first is not None:
            self._run(self._end)
        try:
            yield
        finally:
            if self._first is not None:
                self._run(self._begin)

    def _begin(self) -> None:
        self._before = ChangedValues()
        self._before.begin(self._trainer)
        self._marks = marks_of(self._trainer.lightning_module)

    def _end(self) -> None:
        self._since.update(self._changed(self._before))
        self._buffers.note_changed(self._trainer.lightning_module, self._marks)

    def _changed(self, values: ChangedValues) -> Names:
        return Names.of(values.capture(self._trainer, list(self._trainer.lightning_module.named_modules())))

    def follow_tuners(self) -> list[Callable[[], object]]:
        """Note what their trials change.

        Returns:
            what takes that back.
        """
        undo: list[Callable[[], object]] = []
        for tuner in tuners(self._trainer):
            tuner.on_fit_start = partial(self._around, tuner.on_fit_start)
            undo.append(partial(vars(tuner).pop, "on_fit_start", None))
        return undo

    def _around(self, trial: Callable[..., Any], *arguments: Any) -> None:
        self.begins()
        trial(*arguments)
        self.ends()
