"""How much room ranks need for what only they know: shown ahead.

All ranks show it after the first step, and see it when the first snapshot is due. (Where that is at once, they wait.)
Later on, who needs more says so in place of its bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_spot.capture.sharded_writer import ShardedCheckpoint
from lightning_spot.capture.unexpected import failure_of
from lightning_spot.errors import ShareFault, ShareProblem, SpotError
from lightning_spot.exact.fit_state import FitState
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.exact.rank_states import Packing, Rooms, State
from lightning_spot.fit.collectives import Agreement, AsyncGather
from lightning_spot.sharded.file_plan import state_archive

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)

_NUMBER_BYTES = 20


class OwnStates(OfTrainer):
    """The states of all ranks but the first, where rank 0 keeps room for them in one file.

    Args:
        trainer: that fits.
        rooms: that are kept, on rank 0.
    """

    def __init__(self, trainer: pl.Trainer, rooms: Rooms) -> None:
        super().__init__(trainer)
        self._rooms = rooms
        self._mine, self._has_outgrown = 0, False
        self._shown = AsyncGather(trainer, _NUMBER_BYTES)

    def show(self) -> None:
        """Show rank 0 how long the state of this rank is. Every rank calls it, after the first step."""
        trainer = self._trainer
        self._mine = _length(lambda: len(Packing(FitState.of(trainer).capture())))
        self._shown.show(str(self._mine).encode())

    def make_rooms(self, mine: State) -> None:
        """On rank 0: have room for the states that were shown, if they have grown since as much as its own has.

        Where one has outgrown its room, others have too: all grow as that of rank 0 does, but one only was named.

        Args:
            mine: state of rank 0 now.
        """
        size = self._trainer.world_size
        if len(self._rooms.known) < size - 1:
            shown = self._shown.seen() or [b"0"] * size
            grown = max(0, _length(lambda: len(Packing(mine))) - self._mine)
            needs = [int(each or 0) + grown for each in shown]
        elif self._has_outgrown:
            nbytes = _length(lambda: len(Packing(mine)))
            needs = [nbytes + nbytes // 4] * size
        else:
            return
        self._has_outgrown = False
        for rank in range(1, size):
            self._rooms.make(rank, needs[rank])

    def learn(self, fault: ShareFault | None) -> None:
        """On rank 0: have room for a state that had none, if that is why a snapshot was missed."""
        if fault is not None and fault.problem is ShareProblem.OUTGROWN:
            self._rooms.make(fault.rank, 2 * fault.nbytes)  # it is one that grows
            self._has_outgrown = True


class OwnFiles(OfTrainer):
    """The states of all ranks, where each has a file of its own, and the files of all are as long.

    Args:
        trainer: that fits.

    Attributes:
        most_bytes: that one of them was seen to need; all ranks have seen the same.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self.most_bytes = 0
        self._shown = AsyncGather(trainer, _NUMBER_BYTES)

    def show_first(self) -> None:
        """Show what this rank needs. Every rank calls it, after the first step."""
        self.show(_length(lambda: len(state_archive(FitState.of(self._trainer).capture()))))

    def show(self, nbytes: int) -> None:
        """Show it with a snapshot that was begun, for the next one. Every rank calls it.

        Args:
            nbytes: that the state of this rank needs; 0 where it has the room.
        """
        self._shown.show(str(nbytes).encode())

    def see(self) -> bool:
        """Look at what was shown last. Every rank calls it, at the same place; whether ranks have to ask each other.

        So it is where none knew what to show: all of them see that.
        """
        self.most_bytes = max(self.most_bytes, *(int(shown or 0) for shown in self._shown.seen() or [b"0"]))
        return not self.most_bytes

    def ask(self, mine: ShardedCheckpoint | SpotError) -> None:
        """Have all ranks tell each other, and wait for it. Every rank calls it.

        Args:
            mine: what this rank saves, or why it cannot.

        Raises:
            SpotError: on all ranks, if one of them cannot.
        """
        self._shown.forget()
        self.most_bytes = max(self.most_bytes, *Agreement(self._trainer).everyones(lambda: _needed(mine)))


def _needed(mine: ShardedCheckpoint | SpotError) -> int:
    if isinstance(mine, SpotError):
        raise mine
    try:
        return len(state_archive(mine.own))
    except Exception as error:
        raise failure_of(error) from error


def _length(measure: Callable[[], int]) -> int:
    try:
        return measure()
    except Exception as error:  # the first snapshot meets it too, and says so
        logger.debug("how long the state of this rank is, is not known: %s", error)
        return 0
