"""Snapshots of a ``fit`` in which each rank has a part of the model: every rank writes its own, on its own thread.

With several hosts, no host ever has a whole snapshot: all of them, the first, urgent ones and that of the end too, are
put together at a memory node that carries the run on. While there is none, there are no snapshots.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lightning_spot.capture.attempt import Attempt, RingSettings, expected_nbytes
from lightning_spot.capture.joining import Joining
from lightning_spot.capture.sharded_writer import ShardedCheckpoint
from lightning_spot.capture.split import Ranks
from lightning_spot.capture.tensors import by_storage, optimizer_owned
from lightning_spot.errors import NodeUnreachable, SettingsError, SpotError
from lightning_spot.exact.dump import KEY, Dump
from lightning_spot.exact.flat import Kinds
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.exact.sharded import holder_of, split
from lightning_spot.fit.agreement import Agreement
from lightning_spot.fit.hosts import Hosts
from lightning_spot.fit.together import ACROSS, ALONE, GATHERED
from lightning_spot.image.portion import MOST_HOSTS
from lightning_spot.run.location import Location
from lightning_spot.sharded.layout import state_archive
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.schedule import Schedule

if TYPE_CHECKING:
    import lightning.pytorch as pl

_LOOK_S = 0.05
_CARRIER_S = 60.0
_NO_CARRIER = (
    "no snapshot now, training goes on: each host has a part of the model, and no memory node that carries the run on"
    " is there to put them together (%s); it may be starting, or lack --allow for the durable tier"
)


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
        self._joining: Joining | None = None
        self._hosts = Hosts()
        self._kinds: list[Kinds] | None = None
        self._missed = 0

    def check(self) -> None:
        """Refuse a ring that other processes cannot fill, and several hosts that can put nothing together.

        Raises:
            SettingsError: if it is one.
        """
        if self._trainer.world_size > 1 and not self._location.embedded:
            raise SettingsError(
                "a sharded model needs a memory node on this host, which its ranks fill together: leave memory= as it"
                " is, or give memory='auto', and a dirpath that other processes see"
            )
        if self._trainer.num_nodes > 1:
            self._check_hosts(self._trainer.num_nodes)

    def _check_hosts(self, count: int) -> None:
        """Refuse several hosts whose parts of a snapshot would come together nowhere."""
        why = ""
        if not self._location.nodes:
            why = "no memory node. Start one that all hosts reach, and name it (memory='spot://host:7070')"
        elif self._ring.replicas > 1:
            why = f"replicas={self._ring.replicas}. Leave replicas= out"
        elif self._ring.compression == "topk":
            why = "compression='topk'. Leave compression= as it is"
        elif count > MOST_HOSTS:
            why = f"more than {MOST_HOSTS} hosts. Take fewer, larger ones"
        if why:
            raise SettingsError(
                f"a model that is sharded over {count} hosts is saved at one memory node, at which each host brings the"
                f" parts of its own ranks; this run has {why}; or use DDP, or Lightning's ModelCheckpoint"
            )

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
        self._hosts = hosts = Hosts.meet(agreement, self._location, self._ring, attempt, run, number)
        try:
            agreement.together(self._check_all)
        except BaseException:
            hosts.leave()
            raise
        across = hosts.ranks if hosts.can_bring else ()
        if attempt is not None:
            attempt.writer.across.wanted, attempt.writer.across.hosts = hosts.can_bring, across
        elif (mine := hosts.mine) is not None:
            copier = Copier(buffer_bytes=self._ring.device_buffer_bytes)
            rank, size = trainer.global_rank, trainer.world_size
            self._joining = Joining(mine, hosts.connect, across, copier, schedule, rank=rank, world_size=size)

    def _check_all(self) -> None:
        hosts = self._hosts
        if hosts.count > 1:
            self._check_hosts(hosts.count)
        if hosts.why_not:
            raise NodeUnreachable(f"every rank needs the memory node of its host, and one has none: {hosts.why_not}")

    def warm(self, state: Any) -> None:
        """On another rank than 0: have a slot made for a snapshot with the tensors of ``state``, if this rank is to."""
        if self._joining is not None and (part := self._hosts.warmed_by(self._trainer.global_rank)):
            self._joining.warm(expected_nbytes(state, part))

    def how(self, attempt: Attempt, *, waits: bool) -> str:
        """On rank 0: how the next snapshot is written, ``""`` if there is none now.

        Args:
            attempt: that writes it.
            waits: whether what is on its way to a memory node is waited for.
        """
        writer, across = attempt.writer, attempt.writer.across
        missed = writer.missed > self._missed
        at = ""
        if across.hosts:
            if across.is_under_way and not waits:
                writer.say_once("under way", "a snapshot that is due while the one before is on its way is skipped")
                return ""
            if not (at := self._carrier(attempt, anew=missed)):
                writer.say_once("no carrier", _NO_CARRIER, ", ".join(self._location.nodes))
                return ""
        self._missed = writer.missed
        # If one was missed, a rank may have more than the others know.
        return (GATHERED if missed else ALONE) + (ACROSS + at if at else "")

    def _how_last(self, attempt: Attempt | None, wait_s: float) -> str:
        """How an urgent snapshot is written, or that of the end; ``""`` if there is none. Every rank calls it.

        Args:
            attempt: on rank 0.
            wait_s: how long to wait for a memory node, where several hosts need one; a minute at most.
        """
        at = ""
        if attempt is not None and attempt.writer.across.hosts and not attempt.fenced:
            deadline_s = time.monotonic() + min(wait_s, _CARRIER_S)
            while not (at := self._carrier(attempt, anew=True)) and time.monotonic() < deadline_s:
                time.sleep(_LOOK_S)
            if not at:
                attempt.writer.say_once("no carrier", _NO_CARRIER, ", ".join(self._location.nodes))
        if not self._hosts.can_bring:
            return GATHERED
        told = Agreement(self._trainer).tell(at)
        return GATHERED + ACROSS + told if told else ""

    def _carrier(self, attempt: Attempt, *, anew: bool) -> str:
        """URL of the run at the memory node that carries it on; ``""`` for none."""
        across = attempt.writer.across
        if anew or not across.carrier:
            across.carrier = attempt.writer.link.ask(lambda host: host.carrier(), "")
        return across.carrier

    def write(
        self,
        attempt: Attempt | None,
        dump: Dump,
        interval: dict[str, Any],
        *,
        complete: bool,
        how: str,
        wait_s: float,
    ) -> None:
        """Begin a snapshot. Every rank calls it, at the same place.

        Args:
            attempt: on rank 0.
            dump: the state of this rank.
            interval: what the interval has measured.
            complete: whether the run is at its end.
            how: see :meth:`how`; ``""`` for an urgent one, or that of the end. With ``GATHERED`` ranks tell each other
                what they have to save, and how much room it needs. (So they do for the first one. Later on, a snapshot
                fails where one has more.)
            wait_s: how long to wait for a clean slot.
        """
        if not (how := how or self._how_last(attempt, wait_s)):
            return
        trainer, at = self._trainer, how.partition(ACROSS)[2]
        hosts = tuple(map(len, self._hosts.ranks))
        ranks = Ranks(sum(hosts), {}, hosts, at) if at else None
        holder = holder_of(trainer)
        state, rest = split(dump.apart(trainer), holder)
        most = 0
        if how.startswith(GATHERED) or self._kinds is None:
            try:
                most, self._kinds = self._ask(dump, holder.kinds(state))
            except SpotError as error:  # of one rank, and so of all
                if self._ring.strict:
                    raise
                if attempt is not None:
                    attempt.writer.say_once("own state", "no snapshot now, training goes on: %s", error)
                return
        holder.complete(state, self._kinds)
        checkpoint = ShardedCheckpoint(state, dump.state, rest, most)
        step, owned = trainer.global_step, optimizer_owned(trainer.optimizers)
        frozen = by_storage(item for item in trainer.lightning_module.parameters() if not item.requires_grad)
        kept = {address: tensors for address, tensors in frozen.items() if address not in owned}
        if self._joining is not None:
            self._joining.write(checkpoint, owned=owned, kept=kept, step=step, complete=complete, wait_s=wait_s, at=at)
        elif attempt is not None and attempt.fenced:
            attempt.decline(step, "a later attempt has taken the run over", complete=complete, at=at)
        elif attempt is not None:
            rest[KEY].update(interval=interval, lineage=attempt.lineage)
            attempt.write(
                checkpoint,
                owned=owned,
                kept=kept,
                step=step,
                epoch=trainer.current_epoch,
                world_size=trainer.world_size,
                complete=complete,
                wait_s=wait_s,
                ranks=ranks,
            )

    def _ask(self, dump: Dump, kinds: Kinds) -> tuple[int, list[Kinds]]:
        """Length of the longest of the ranks' own states, and what each has of others. Every rank calls it."""
        agreement = Agreement(self._trainer)
        everyones = agreement.gather((agreement.together(lambda: len(state_archive(dump.state))), kinds))
        return max(nbytes for nbytes, _ in everyones), [kinds for _, kinds in everyones]

    def copied(self) -> None:
        """Wait for what is not copied yet: weights may change now."""
        if self._joining is not None:
            self._joining.copied()

    def finish(self, wait_s: float) -> None:
        """Wait until what was begun is in place, and let the node go. A second call does nothing."""
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.settle(wait_s)
            joining.close(complete=self._hosts.is_guest)  # its node ends when all that it still sends is there
