"""Snapshots of a ``fit`` in which each rank has a part of the model: every rank writes its own, on its own thread.

With several hosts, no host ever has a whole snapshot: all of them, the first, urgent ones and that of the end too, are
put together at a memory node that carries the run on. While there is none, there are no snapshots. Where none is named,
each host brings its ranks' files to the durable tier by itself.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.host_link import within
from lightning_spot.capture.joining import Joining
from lightning_spot.capture.outgrown import read_outgrown
from lightning_spot.capture.owners import Owners
from lightning_spot.capture.ring_settings import RingSettings
from lightning_spot.capture.sharded_writer import ShardedCheckpoint
from lightning_spot.capture.split import Ranks
from lightning_spot.capture.tensors import by_storage, expected_nbytes, optimizer_owned
from lightning_spot.capture.unforeseen import failure_of
from lightning_spot.errors import NodeUnreachable, SettingsError, SpotError
from lightning_spot.exact.dump import KEY, Dump
from lightning_spot.exact.flat import Kinds
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.exact.sharded import holder_of, is_flat, split
from lightning_spot.fit.agreement import Agreement
from lightning_spot.fit.hosts import Hosts
from lightning_spot.fit.one_place import check_place
from lightning_spot.fit.own_states import OwnFiles
from lightning_spot.fit.together import ACROSS, GATHERED
from lightning_spot.fit.where_to import WhereTo
from lightning_spot.run.location import Location
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.schedule import Schedule

if TYPE_CHECKING:
    import lightning.pytorch as pl

_LEAST_TORCH = "2.9"  # the first whose checkpoints know their version, and which reads them without a process group
_COMMIT_S = 300.0  # until it is known whether an urgent one, or that of the end, is there
_HELP_S = 2.0


class InShards(OfTrainer):
    """Has every rank write its part of the snapshots. Rank 0 has the attempt, and leads.

    Args:
        trainer: that fits.
        location: where the run is.
        ring: how the ring on this host is opened.
    """

    def __init__(self, trainer: pl.Trainer, location: Location, ring: RingSettings) -> None:
        super().__init__(trainer)
        self._location, self._ring = location, ring
        self._where_to = WhereTo(location, ring)
        self._joining: Joining | None = None
        self._hosts = Hosts()
        self._files = OwnFiles(trainer)
        self._keeps: Kinds | None = None  # the optimizers of this rank
        self._begun = (-1, False)  # the step, and whether it was the end
        self._has_shown = False

    def check(self) -> None:
        """Refuse a ring that others cannot fill, several hosts that can put nothing together, and an old torch.

        Raises:
            SettingsError: if it is one.
        """
        if torch.__version__ < _LEAST_TORCH:
            raise SettingsError(
                f"models in shards are saved with torch {_LEAST_TORCH} or later, and this is {torch.__version__}: take"
                " a later one, or DDP, or Lightning's ModelCheckpoint"
            )
        if self._trainer.world_size > 1 and not self._location.embedded:
            raise SettingsError(
                "a sharded model needs a memory node on this host, which its ranks fill together: leave memory= as it"
                " is, or give memory='auto', and a dirpath that other processes see"
            )
        if self._trainer.num_nodes > 1:
            self._where_to.check(self._trainer.num_nodes)

    def begin(self, attempt: Attempt | None, run: str, number: int, schedule: Schedule) -> None:
        """Join the attempt. Every rank calls it; an error of one is an error of all.

        Args:
            attempt: on rank 0.
            run: as ``NAME@ID``.
            number: of the attempt.
            schedule: when what only the optimizer changes is copied.
        """
        trainer, agreement = self._trainer, Agreement(self._trainer)
        agreement.together(lambda: holder_of(trainer))  # which may refuse the model
        if trainer.world_size == 1:
            return
        self._hosts = hosts = Hosts.meet(agreement, self._location, self._ring, attempt, run, number, in_shards=True)
        try:
            agreement.together(self._check_all)
            if hosts.can_bring and not self._location.nodes:
                leads = agreement.rank in [ranks[0] for ranks in hosts.ranks]
                agreement.together(lambda: check_place(self._location.url, run, number, hosts.token) if leads else None)
        except BaseException:
            hosts.leave()
            raise
        across = hosts.ranks if hosts.can_bring else ()
        if attempt is not None:
            self._where_to.begin()
            wanted = hosts.can_bring and bool(self._location.nodes)
            attempt.writer.across.wanted, attempt.writer.across.hosts = wanted, across
            attempt.writer.across.spread = hosts.spread
        elif (mine := hosts.mine) is not None:
            copier = Copier(buffer_bytes=self._ring.device_buffer_bytes)
            rank, size = trainer.global_rank, trainer.world_size
            self._joining = Joining(
                mine, hosts.connect, across, copier, schedule, rank=rank, world_size=size, token=hosts.token
            )

    def _check_all(self) -> None:
        hosts = self._hosts
        if hosts.count > 1:
            self._where_to.check(hosts.count)
        if hosts.why_not:
            raise NodeUnreachable(f"every rank needs the memory node of its host, and one has none: {hosts.why_not}")

    def warm(self, state: Any) -> None:
        """On another rank than 0: have a slot made for a snapshot with the tensors of ``state``, if this rank is to."""
        if self._joining is not None and (part := self._hosts.warmed_by(self._trainer.global_rank)):
            self._joining.warm(expected_nbytes(state, part))

    def how(self, attempt: Attempt, *, waits: bool) -> str:
        """On rank 0: how the next snapshot is written, see :meth:`WhereTo.how`."""
        return self._where_to.how(attempt, waits=waits)

    def _how_last(self, attempt: Attempt | None, wait_s: float) -> str:
        """How an urgent snapshot is written, or that of the end; ``""`` if there is none. Every rank calls it.

        Args:
            attempt: on rank 0.
            wait_s: how long to wait for a memory node, where several hosts need one; a minute at most.
        """

        def place() -> str:
            for writer in (attempt.writer if attempt is not None else None, self._joining):
                if writer is not None:
                    writer.check_all()
            return self._where_to.awaited(attempt, wait_s) if attempt is not None else ""

        at = Agreement(self._trainer).everyones(place)[0]
        if not self._hosts.can_bring:
            return GATHERED
        return GATHERED + ACROSS + at if at else ""

    def write(
        self,
        attempt: Attempt | None,
        dump: Dump | SpotError,
        interval: Callable[[], dict[str, Any]],
        *,
        complete: bool,
        how: str,
        wait_s: float,
        commit_s: float,
    ) -> None:
        """Begin a snapshot. Every rank calls it, at the same place.

        An urgent one, or that of the end, is waited for: if it is lost with a node or a share, all begin it once more.

        Args:
            attempt: on rank 0.
            dump: the state of this rank, or why it is not known.
            interval: what the interval has measured.
            complete: whether the run is at its end.
            how: see :meth:`how`; ``""`` for an urgent one, or that of the end: for these, ranks ask each other what
                they have to save, and how much room it needs. For others that was shown ahead; one fails where a rank
                has more, and the next one has the room.
            wait_s: how long to wait for a clean slot.
            commit_s: how long all ranks wait for an urgent one, or that of the end.
        """
        is_last, deadline_s = not how, time.monotonic() + wait_s
        how = how or self._how_last(attempt, wait_s)
        checkpoint = self._checkpoint(attempt, dump, how, interval) if how else None
        if checkpoint is None:
            if complete and attempt is not None:
                attempt.miss_end()  # else the run would end as if there were a snapshot of its end
            return
        name = (self._trainer.global_step, complete)
        again, self._begun = name == self._begun, name
        begin = functools.partial(self._begin, attempt, checkpoint, complete=complete, still=is_last)
        if not is_last:
            begin(how, wait_s=wait_s, again=again)
            self._show(attempt)
            return
        together = Agreement(self._trainer).together  # else ranks would wait for one that has raised an error
        together(lambda: begin(how, wait_s=wait_s, again=again))
        lost = self._is_lost(attempt, min(within(deadline_s), commit_s, _COMMIT_S))
        if again or not lost:
            return
        if attempt is not None:
            attempt.writer.say_once("again", "it is taken once more, by all ranks")
        if how := self._how_last(attempt, within(deadline_s)):
            together(lambda: begin(how, wait_s=within(deadline_s), again=True))

    def _is_lost(self, attempt: Attempt | None, wait_s: float) -> bool:
        """Whether what was begun last is to be begun once more, as rank 0 knows. Every rank calls it."""
        if self._joining is not None:
            self._joining.copied_within(_HELP_S)  # where rank 0 cannot begin, nobody may know yet
        agreement = Agreement(self._trainer)
        lost = agreement.on_rank_zero(lambda: attempt is not None and attempt.can_take_again(wait_s))
        return bool(agreement.tell(lost))

    def _checkpoint(
        self, attempt: Attempt | None, dump: Dump | SpotError, how: str, interval: Callable[[], dict[str, Any]]
    ) -> ShardedCheckpoint | SpotError | None:
        """What this rank writes, or why it cannot; ``None`` if all know that one cannot. Every rank calls it."""
        mine = self._own(dump)
        if how.startswith(GATHERED) or self._files.see():
            try:
                self._files.ask(mine)
            except SpotError as error:  # of one rank, and so of all
                if self._ring.strict:
                    raise
                if attempt is not None:
                    attempt.skipped += 1
                    attempt.writer.say_once("own state", "no snapshot now, training goes on: %s", error)
                return None
        self._keeps = None
        if isinstance(mine, ShardedCheckpoint):
            mine = replace(mine, most_own_bytes=self._files.most_bytes)
            try:
                holder = holder_of(self._trainer)
                self._keeps = holder.kinds(mine.state)
                holder.complete(mine.state, self._files.kinds)
                if attempt is not None:
                    mine.rest[KEY] |= {"interval": interval(), **attempt.origin}
            except Exception as error:
                return failure_of(error)
        return mine

    def _own(self, dump: Dump | SpotError) -> ShardedCheckpoint | SpotError:
        """What this rank writes, as far as it knows by itself."""
        if isinstance(dump, SpotError):
            return dump
        try:
            state, rest = split(dump.apart(self._trainer), holder_of(self._trainer))
        except Exception as error:
            return failure_of(error)
        return ShardedCheckpoint(state, dump.state, rest, 0)

    def _begin(
        self,
        attempt: Attempt | None,
        checkpoint: ShardedCheckpoint | SpotError,
        how: str,
        *,
        complete: bool,
        still: bool,
        wait_s: float,
        again: bool,
    ) -> None:
        trainer, at = self._trainer, how.partition(ACROSS)[2]
        if at and not self._location.nodes:
            at = self._location.url  # the same place may have another path on each host
        hosts = tuple(map(len, self._hosts.ranks))
        ranks = Ranks(sum(hosts), {}, hosts, at) if at else None
        step = trainer.global_step
        owned: Owners = {}
        kept: Owners = {}
        try:
            if isinstance(checkpoint, ShardedCheckpoint):
                owned = optimizer_owned(trainer.optimizers)
                frozen = by_storage(holder_of(trainer).frozen(checkpoint.state))
                kept = {address: tensors for address, tensors in frozen.items() if address not in owned}
        except Exception as error:
            checkpoint = failure_of(error)
        what: dict[str, Any] = {"kept": kept, "step": step, "complete": complete, "wait_s": wait_s, "again": again}
        if self._joining is not None:
            self._joining.write(checkpoint, owned=owned, at=at, still=still, **what)
        elif attempt is not None and attempt.fenced:
            why = "a later attempt has taken the run over"
            attempt.decline(step, why, complete=complete, at=at, again=again)
        elif attempt is not None:
            attempt.write(
                checkpoint,
                owned=owned,
                epoch=trainer.current_epoch,
                world_size=trainer.world_size,
                ranks=ranks,
                **what,
            )

    def show_once(self) -> None:
        """Show the other ranks what this one needs, for the first snapshot. Every rank calls it after each step."""
        if not self._has_shown and self._trainer.world_size > 1:
            self._has_shown = True
            self._files.show_first()

    def _show(self, attempt: Attempt | None) -> None:
        """Show it for the next snapshot, where nobody leads who would tell; every rank calls it."""
        is_agreed = self._hosts.can_bring and (not self._location.nodes or self._hosts.spread > 0)
        if is_agreed or is_flat(self._trainer):
            needs = self._joining.needs if self._joining is not None else 0
            said = read_outgrown(attempt.writer.missed_because) if attempt is not None else None
            self._files.show(said.nbytes if said is not None else needs, self._keeps)

    def newest_differs(self, attempt: Attempt | None) -> bool:
        """Whether what this rank has left out of the newest snapshot is not as it is now. An urgent one replaces it.

        Args:
            attempt: on rank 0.
        """
        writer = attempt.writer if attempt is not None else self._joining
        return writer is not None and writer.newest_differs()

    def copied(self) -> None:
        """Wait for what is not copied yet: weights may change now."""
        if self._joining is not None:
            self._joining.copied()

    def finish(self, wait_s: float) -> None:
        """Wait until what was begun is in place, and let the node go. A second call does nothing."""
        joining, self._joining = self._joining, None
        if joining is not None:
            deadline_s = time.monotonic() + wait_s
            joining.settle(wait_s)
            if self._hosts.is_guest:
                joining.flush(within(deadline_s))
            joining.close(complete=self._hosts.is_guest)  # its node ends when all that it still sends is there
