"""Snapshots of a ``fit`` in which each rank has a part of the model: every rank writes its own, on its own thread.

With several hosts, no host ever has a whole snapshot: all of them, the first, urgent ones and that of the end too, are
put together at a snapshot server that carries the run on. While there is none, there are no snapshots. Where none is
named, each host brings its ranks' files to storage by itself.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.host_link import RingSettings, within
from lightning_spot.capture.saying import say_failing
from lightning_spot.capture.sharded_writer import Joining, ShardedCheckpoint
from lightning_spot.capture.split import SharingRanks
from lightning_spot.capture.tensors import Owners, by_storage, expected_nbytes, optimizer_owned
from lightning_spot.capture.unexpected import failure_of
from lightning_spot.client.stores import open_store
from lightning_spot.errors import (
    CorruptSnapshotError,
    ServerUnreachableError,
    SettingsError,
    SnapshotNotFoundError,
    SpotError,
    TierError,
)
from lightning_spot.exact.dump import KEY, Dump
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.exact.sharded import holder_of, split
from lightning_spot.fit.collectives import Agreement
from lightning_spot.fit.together import GATHERED, TOGETHER, How, OwnFiles, States
from lightning_spot.fit.topology import Topology, place_of
from lightning_spot.image.manifest import MOST_HOSTS
from lightning_spot.memory.runs import parse_run
from lightning_spot.run.location import Location
from lightning_spot.say import say
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.schedule import Schedule
from lightning_spot.tiers.fences import ATTEMPTS_DIR, Claim, claim_name, digest_of
from lightning_spot.tiers.store import HasFolders, Store

if TYPE_CHECKING:
    import lightning.pytorch as pl

_COMMIT_S = 300.0  # until it is known whether an urgent one, or that of the end, is there
_HELP_S = 2.0

_LOOK_S = 0.05
_CARRIER_S = 60.0
_HEALTH_S = 5.0
_ASKED_S = 10.0  # so long may it take at a start until servers were asked and carry the run on
_NO_CARRIER = (
    "no snapshot now: no server uploads the parts of all hosts ({about}). Training continues. Start the server with"
    " --allow-storage for the storage of the run."
)

_SEEN_S = 90.0  # a network mount may show late what another host has written


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
        self._hosts = Topology()
        self._files = OwnFiles(trainer)
        self._has_shown = False

    def check(self) -> None:
        """Refuse a ring that others cannot fill, and several hosts that can put nothing together.

        Raises:
            SettingsError: if it is one.
        """
        if self._trainer.world_size > 1 and not self._location.has_local_server:
            raise SettingsError(
                "a sharded model needs the local server, which its ranks fill together: leave local_server out, and"
                " give a dirpath that other processes see"
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
        if trainer.world_size == 1:
            return
        self._hosts = hosts = Topology.meet(agreement, self._location, self._ring, attempt, run, number, in_shards=True)
        try:
            agreement.together(self._check_all)
            if hosts.can_bring and not self._location.servers:
                leads = agreement.rank in [ranks[0] for ranks in hosts.ranks]
                agreement.together(lambda: check_place(self._location.url, run, number, hosts.token) if leads else None)
        except BaseException:
            hosts.leave()
            raise
        across = hosts.ranks if hosts.can_bring else ()
        if attempt is not None:
            self._where_to.begin()
            wanted = hosts.can_bring and bool(self._location.servers)
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
            raise ServerUnreachableError(
                f"every rank needs the snapshot server of its host, and one has none: {hosts.why_not}"
            )

    def warm(self, state: Any) -> None:
        """On another rank than 0: have a slot made for a snapshot with the tensors of ``state``, if this rank is to."""
        if self._joining is not None and (part := self._hosts.warmed_by(self._trainer.global_rank)):
            self._joining.warm(expected_nbytes(state, part))

    def how(self, attempt: Attempt, *, waits: bool) -> How | None:
        """On rank 0: how the next snapshot is written, see :meth:`WhereTo.how`."""
        return self._where_to.how(attempt, waits=waits)

    def _how_last(self, attempt: Attempt | None, wait_s: float) -> How | None:
        """How an urgent snapshot is written, or that of the end; ``None`` if there is none. Every rank calls it.

        Args:
            attempt: on rank 0.
            wait_s: how long to wait for a snapshot server, where several hosts need one; a minute at most.
        """

        def place() -> str:
            for writer in (attempt.writer if attempt is not None else None, self._joining):
                if writer is not None:
                    writer.check_all()
            return self._where_to.awaited(attempt, wait_s) if attempt is not None else ""

        at = Agreement(self._trainer).everyones(place)[0]
        if not self._hosts.can_bring:
            return GATHERED
        return replace(GATHERED, at=at) if at else None

    def write(
        self,
        attempt: Attempt | None,
        dump: Dump | SpotError,
        interval: Callable[[], dict[str, Any]],
        *,
        complete: bool,
        how: How | None,
        wait_s: float,
        commit_s: float,
    ) -> None:
        """Begin a snapshot. Every rank calls it, at the same place.

        An urgent one, or that of the end, is waited for.

        Args:
            attempt: on rank 0.
            dump: the state of this rank, or why it is not known.
            interval: what the interval has measured.
            complete: whether the run is at its end.
            how: see :meth:`how`; ``None`` for an urgent one, or that of the end: for these, ranks ask each other what
                they have to save, and how much room it needs. For others that was shown ahead; one fails where a rank
                has more, and the next one has the room.
            wait_s: how long to wait for a clean slot.
            commit_s: how long all ranks wait for an urgent one, or that of the end.
        """
        is_last, deadline_s = how is None, time.monotonic() + wait_s
        how = how or self._how_last(attempt, wait_s)
        checkpoint = self._checkpoint(attempt, dump, how, interval) if how else None
        if how is None or checkpoint is None:
            if complete and attempt is not None:
                attempt.miss_end()  # else the run would end as if there were a snapshot of its end
            return
        begin = functools.partial(
            self._begin, attempt, checkpoint, how, complete=complete, still=is_last, wait_s=wait_s
        )
        if not is_last:
            begin()
            self._show(attempt)
            return
        agreement = Agreement(self._trainer)
        agreement.together(begin)  # else ranks would wait for one that has raised an error
        if self._joining is not None:
            self._joining.copied_within(_HELP_S)  # where rank 0 cannot begin, nobody may know yet
        left_s = min(within(deadline_s), commit_s, _COMMIT_S)
        agreement.on_rank_zero(lambda: attempt.failure(left_s) if attempt is not None else None)

    def _checkpoint(
        self, attempt: Attempt | None, dump: Dump | SpotError, how: How, interval: Callable[[], dict[str, Any]]
    ) -> ShardedCheckpoint | SpotError | None:
        """What this rank writes, or why it cannot; ``None`` if all know that one cannot. Every rank calls it."""
        mine = self._own(dump)
        if how.states is States.GATHERED or self._files.see():
            try:
                self._files.ask(mine)
            except SpotError as error:  # of one rank, and so of all
                if self._ring.strict:
                    raise
                if attempt is not None:
                    attempt.skipped += 1
                    say(
                        logging.WARNING,
                        "no-snapshot",
                        "no snapshot now: {error}. Training continues.",
                        about="state",
                        error=error,
                    )
                return None
        if isinstance(mine, ShardedCheckpoint):
            mine = replace(mine, most_own_bytes=self._files.most_bytes)
            try:
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
            state, rest = split(dump.apart(self._trainer))
        except Exception as error:
            return failure_of(error)
        return ShardedCheckpoint(state, dump.state, rest, 0)

    def _begin(
        self,
        attempt: Attempt | None,
        checkpoint: ShardedCheckpoint | SpotError,
        how: How,
        *,
        complete: bool,
        still: bool,
        wait_s: float,
    ) -> None:
        trainer, at = self._trainer, how.at
        if at and not self._location.servers:
            at = self._location.url  # the same place may have another path on each host
        hosts = tuple(map(len, self._hosts.ranks))
        ranks = SharingRanks(sum(hosts), {}, hosts, at) if at else None
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
        what: dict[str, Any] = {"kept": kept, "step": step, "complete": complete, "wait_s": wait_s}
        if self._joining is not None:
            self._joining.write(checkpoint, owned=owned, at=at, still=still, **what)
        elif attempt is not None and attempt.fenced:
            why = "a later attempt has taken the run over"
            attempt.decline(step, why, complete=complete, at=at)
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
        if self._hosts.can_bring and (not self._location.servers or self._hosts.spread > 0):
            fault = attempt.writer.last_miss.fault if attempt is not None else None
            needs = self._joining.needs if self._joining is not None else 0
            self._files.show(fault.nbytes if fault is not None else needs)

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
        """Wait until what was begun is in place, and let the server go. A second call does nothing."""
        joining, self._joining = self._joining, None
        if joining is not None:
            deadline_s = time.monotonic() + wait_s
            joining.settle(wait_s)
            if self._hosts.is_guest:
                joining.flush(within(deadline_s))
            joining.close(complete=self._hosts.is_guest)  # its server ends when all that it still sends is there


# -- where hosts bring it ---------------------------------------------------------------------------------------------


class WhereTo:
    """Knows it of each snapshot, on rank 0, and says why there is no place.

    Args:
        location: where the run is.
        ring: how the ring on this host is opened.
    """

    def __init__(self, location: Location, ring: RingSettings) -> None:
        self._location, self._ring = location, ring
        self._missed, self._brought_s, self._looked_s = 0, float("-inf"), float("-inf")
        self._begun_s = float("-inf")

    def begin(self) -> None:
        """An attempt has begun: its snapshot servers are asked from now on."""
        self._begun_s = time.monotonic()

    def check(self, hosts: int) -> None:
        """Refuse several hosts whose parts of a snapshot would come together nowhere.

        Args:
            hosts: how many there are.

        Raises:
            SettingsError: if it is so.
        """
        why = ""
        if hosts > MOST_HOSTS:
            why = f"more than {MOST_HOSTS} hosts. Use fewer, larger hosts"
        elif self._location.servers and self._ring.compression == "topk":
            why = "lossy='topk'. Leave lossy= out"
        if why:
            raise SettingsError(
                f"a model that is sharded over {hosts} hosts cannot be saved with {why}, or use DDP or Lightning's"
                " ModelCheckpoint"
            )

    def how(self, attempt: Attempt, *, waits: bool) -> How | None:
        """How the next snapshot is written, ``None`` if there is none now.

        Args:
            attempt: that writes it.
            waits: whether what is on its way to a snapshot server is waited for.
        """
        writer, across = attempt.writer, attempt.writer.across
        missed = writer.missed > self._missed
        at = ""
        if across.hosts:
            if across.is_under_way and not waits:
                say(logging.WARNING, "upload-under-way", "a snapshot is skipped while the one before is uploaded")
                self._say_why(attempt)
                return None
            if not self._location.servers:
                now_s = time.monotonic()
                if now_s - self._brought_s < (self._ring.min_upload_interval_s or 0.0):
                    return None
                self._brought_s = now_s
            if not (at := self._carrier(attempt, anew=missed)):
                if time.monotonic() - self._begun_s >= _ASKED_S:
                    self._say_no_carrier(attempt)
                return None
        self._missed = writer.missed
        return replace(TOGETHER, at=at)

    def awaited(self, attempt: Attempt, wait_s: float) -> str:
        """Where several hosts bring an urgent snapshot, or that of the end; ``""`` if there is no place.

        Args:
            attempt: that writes it.
            wait_s: how long to wait for a snapshot server; a minute at most.
        """
        if not attempt.writer.across.hosts or attempt.fenced:
            return ""
        deadline_s = time.monotonic() + min(wait_s, _CARRIER_S)
        while not (at := self._carrier(attempt, anew=True)):
            if time.monotonic() >= deadline_s:
                self._say_no_carrier(attempt)
                break
            time.sleep(_LOOK_S)
        return at

    def _carrier(self, attempt: Attempt, *, anew: bool) -> str:
        """URL of the run at the snapshot server that carries it on; ``""`` if none does.

        Where no snapshot server is named, that of its storage.
        """
        across = attempt.writer.across
        if not self._location.servers:
            return self._location.url
        if anew or not across.carrier:
            across.look()
        return across.carrier

    def _say_no_carrier(self, attempt: Attempt) -> None:
        say(logging.WARNING, "no-uploader", _NO_CARRIER, about=", ".join(self._location.servers))

    def _say_why(self, attempt: Attempt) -> None:
        """Say if a tier fails: then the one before is on its way for long."""
        now_s = time.monotonic()
        if now_s - self._looked_s > _HEALTH_S:
            self._looked_s = now_s
            say_failing(attempt.writer.link)


def check_read_everywhere(ranks: Agreement, location: Location, run: str, number: int, token: str) -> None:
    """Refuse storage that some host does not see: nothing could be resumed there. Every rank calls it.

    Args:
        ranks: all of them.
        location: of the run.
        run: as ``NAME@ID``.
        number: of the attempt.
        token: of its claim, which rank 0 has written.

    Raises:
        SettingsError: if one host does not see there what rank 0 has written.
    """
    places = ranks.gather(place_of(location))
    leads = places[ranks.rank] != places[0] and places.index(places[ranks.rank]) == ranks.rank
    ranks.together(lambda: check_place(location.url, run, number, token, writes=False) if leads else None)


def check_place(url: str, run: str, number: int, token: str, *, writes: bool = True) -> None:
    """Refuse storage that is not the same place for all hosts.

    Args:
        url: of storage.
        run: as ``NAME@ID``.
        number: of the attempt.
        token: of its claim, which rank 0 has written.
        writes: whether this host brings its part of each snapshot there, or only reads what it resumes from.

    Raises:
        SettingsError: if this host does not see there what rank 0 has written, or cannot write there itself.
    """
    store, deadline_s = open_store(url), time.monotonic() + _SEEN_S
    while True:
        try:
            if _is_claimed(store, run, number, token, writes=writes):
                return
            problem = f"the claim of attempt {number}, which rank 0 has written there, is not seen"
        except TierError as error:
            problem = str(error)
        if time.monotonic() > deadline_s:
            break
        time.sleep(_LOOK_S)
    what = "written" if writes else "read"
    raise SettingsError(
        f"{url} cannot be {what} by every host ({problem}). Use a bucket, a directory that all hosts mount, or a"
        " snapshot server that all hosts reach (servers='spot://host:7070')"
    )


def _is_claimed(store: Store, run: str, number: int, token: str, *, writes: bool) -> bool:
    """Whether this attempt's claim is seen, by its name: a mount may list it late. Then it is written once more."""
    assert isinstance(store, HasFolders)
    folder = store.folder(ATTEMPTS_DIR, attempt=number, run_id=parse_run(run)[1])
    try:
        claim = Claim.from_json(folder.read(claim_name(number)))
    except (SnapshotNotFoundError, CorruptSnapshotError):
        return False
    if claim.digest != digest_of(token):
        return False
    if writes:
        store.claim(claim)  # which changes nothing, and shows that it may
    return True
