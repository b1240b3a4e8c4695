"""The ranks of one ``fit`` that write its snapshots together: who takes part, and whether the next one is written so.

Where all ranks hold the same parameters (DDP), those on the host of rank 0 write a share each, through its local
server, and each writes what only it knows. With other hosts, and a snapshot server that carries the run on, the ranks
of all hosts do, and each host's server sends what its ranks have written. Rank 0 decides for each snapshot, and its
word comes with the agreement that one is due. It writes the first snapshot alone, the one after a share was missing,
and all where that cannot be. What ranks know that do not write it by themselves, they send to rank 0, beside
training. Urgent ones and that of the end are rank 0's host's alone, and what only one rank knows is gathered: should
a share of these be missing, rank 0 has all that it needs to write them alone.
"""

from __future__ import annotations

import enum
import json
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.host_link import RingSettings
from lightning_spot.capture.mailbox import Mailbox, Sender
from lightning_spot.capture.sharded_writer import ShardedCheckpoint
from lightning_spot.capture.share import ShareWriter
from lightning_spot.capture.split import Number, SharingRanks
from lightning_spot.capture.tensors import Owners, expected_nbytes, optimizer_owned
from lightning_spot.capture.unexpected import Pause, failure_of
from lightning_spot.errors import FailureReason, ShareFault, ShareProblem, SnapshotFailedError, SpotError
from lightning_spot.exact import namespaces
from lightning_spot.exact.dump import Dump, gather
from lightning_spot.exact.fit_state import FitState
from lightning_spot.exact.own_parameters import average_now_and_then
from lightning_spot.exact.per_trainer import OfTrainer
from lightning_spot.exact.rank_states import Packing, Rooms, State
from lightning_spot.exact.sharded import is_sharded
from lightning_spot.fit.collectives import Agreement, AsyncGather
from lightning_spot.fit.ranks import Meeting, allow_ranks
from lightning_spot.fit.topology import Topology
from lightning_spot.image.manifest import MOST_HOSTS
from lightning_spot.run.location import Location
from lightning_spot.say import say
from lightning_spot.sharded.file_plan import state_archive
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.schedule import Schedule
from lightning_spot.untrusted import LARGE_BYTES, read_json

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)

_NUMBER_BYTES = 20


_NOT_APPROXIMATED = "what several hosts bring is not approximated. Leave lossy= out to have each host send its share"
_MOST_FAILURES = 2


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


class States(enum.Enum):
    """How what only one rank knows gets into a snapshot."""

    GATHERED = "gathered"
    """All ranks wait until rank 0 has it."""

    WRITTEN = "written"
    """Each rank writes it, beside training."""

    SENT = "sent"
    """Each rank sends it to rank 0, beside training."""


@dataclass(frozen=True, slots=True)
class How:
    """How a snapshot is written.

    Attributes:
        is_together: whether ranks write it together; else rank 0 writes all of it.
        states: how what only one rank knows gets into it.
        at: URLs of the run at the snapshot servers that all hosts bring it to; ``""`` if only that of rank 0 writes it.
        problem: why there is none, and training ends instead; ``""`` if nothing is in the way.
    """

    is_together: bool
    states: States
    at: str = ""
    problem: str = ""

    def word(self) -> str:
        """It as text, for the other ranks."""
        return json.dumps([self.is_together, self.states.value, self.at, self.problem])

    @classmethod
    def heard(cls, word: str) -> How | None:
        """What rank 0 has said of the next snapshot, see :meth:`word`; ``None`` if it is not taken: ``""``.

        Raises:
            SnapshotFailedError: on all ranks, if training ends instead.
        """
        if not word:
            return None
        is_together, states, at, problem = read_json(word, LARGE_BYTES)
        if problem:
            raise SnapshotFailedError(problem, reason=FailureReason.SHARE_MISSING)
        return cls(is_together, States(states), at)


ALONE, ALONE_SENT = How(False, States.GATHERED), How(False, States.SENT)
TOGETHER, TOGETHER_SENT, GATHERED = (How(True, states) for states in (States.WRITTEN, States.SENT, States.GATHERED))


class Together(OfTrainer):
    """Writing snapshots together, on every rank.

    Args:
        trainer: that fits.
        settings: of the ring.

    Attributes:
        rooms: for the states of the other ranks, on rank 0.
        writer: of this rank's shares; ``None`` on rank 0, and where it writes none.
    """

    def __init__(self, trainer: pl.Trainer, settings: RingSettings) -> None:
        super().__init__(trainer)
        self.rooms = Rooms()
        self._own = OwnStates(trainer, self.rooms)
        self.writer: ShareWriter | None = None
        self._settings = settings
        self._hosts = Topology()
        self._members: list[int] = []
        self._failures, self._missed, self._taken, self._brought, self._posted = 0, 0, 0, 0, 0
        self._was_tried, self._tried = False, ALONE  # since the last failure was counted; what was tried last
        self._was_across = self._was_sent = self._has_shown = False
        self._unsent = 0  # that rank 0 began alone since it had all that was sent for one
        self._pause, self._pause_of_mail = Pause(), Pause()
        self._mail: Mail | None = None

    # -- begin and end --------------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt | None, location: Location, run: str, number: int) -> bool:
        """Find out which ranks can take part. Every rank calls it, when the attempt has begun.

        Args:
            attempt: on rank 0.
            location: of the run.
            run: the run, as ``NAME@ID``.
            number: of the attempt.

        Returns:
            whether this rank writes shares, beside rank 0.
        """
        trainer = self._trainer
        is_ddp = isinstance(trainer.strategy, namespaces.classes("strategies", "DDPStrategy"))
        if trainer.world_size == 1 or not location.has_local_server or not is_ddp:
            return False
        self._hosts = hosts = Topology.meet(Agreement(trainer), location, self._settings, attempt, run, number)
        self._members = list(hosts.ranks[0]) if len(hosts.ranks[0]) > 1 else []
        if attempt is not None:
            attempt.writer.across.wanted = hosts.can_bring
            if hosts.count > 1 and location.servers and (why := self._why_by_itself(hosts)):
                text = "the host of rank 0 sends every snapshot by itself, since {why}"
                say(logging.WARNING, "sent-by-one-host", text, only_rank_zero=True, why=why)
        if hosts.mine is None or trainer.global_rank in (0, *self._members) or hosts.can_bring:
            return attempt is None and hosts.mine is not None
        hosts.leave()
        return False

    def _why_by_itself(self, hosts: Topology) -> str:
        """Why no other host than that of rank 0 sends anything to snapshot servers; ``""`` if all do."""
        if self._settings.compression == "topk":
            return _NOT_APPROXIMATED
        if hosts.count > MOST_HOSTS:
            return f"at most {MOST_HOSTS} hosts bring one together, and these are {hosts.count}"
        return f"every rank needs the server of its host, and one has none: {hosts.why_not}" if hosts.why_not else ""

    def begin_training(self, attempt: Attempt | None) -> None:
        """Have ranks send what only they know where they do not write it. Every rank calls it, with the optimizers.

        Args:
            attempt: on rank 0.
        """
        if self._trainer.world_size > 1 and not is_sharded(self._trainer):
            self._mail = Mail(self._trainer, attempt)

    def write_with(self, schedule: Schedule) -> None:
        """On a rank beside rank 0: write shares from now on, each part at its time."""
        copier = Copier(buffer_bytes=self._settings.device_buffer_bytes)
        rank, hosts = self._trainer.global_rank, self._hosts
        number = Number.of_hosts([self._members], rank) if rank in self._members else None
        across = Number.of_hosts(hosts.ranks, rank) if hosts.can_bring else None
        assert hosts.mine is not None
        self.writer = ShareWriter(hosts.mine, hosts.connect, number, copier, schedule, across)

    def show_once(self) -> None:
        """Show rank 0 what room this rank needs, for the first snapshot. Every rank calls it after each step."""
        if self._can_send and not self._has_shown:
            self._has_shown = True
            self._own.show()

    def warm(self, state: Any) -> None:
        """On another rank than 0: have a slot made for a snapshot with the tensors of ``state``, if this rank is to."""
        if self.writer is not None and (part := self._hosts.warmed_by(self._trainer.global_rank)):
            self.writer.warm(expected_nbytes(state, part))

    def close(self) -> None:
        """Write no more shares. A second call does nothing."""
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.close(complete=self._hosts.is_guest)
        if self._mail is not None:
            self._mail.close()

    # -- snapshots ------------------------------------------------------------------------------------------------

    def how(self, attempt: Attempt, *, waits: bool = False, across: bool = True) -> How | None:
        """On rank 0: how the next snapshot is written, or why training ends, for all ranks.

        Args:
            attempt: that writes it.
            waits: whether what is on its way to a snapshot server is waited for; else there is none now.
            across: whether other hosts may take part.
        """
        writer = attempt.writer
        if self.hold_their_own:
            self._end()
        if not (self._members or self._hosts.can_bring or self._can_send):
            return ALONE
        if writer.together > self._taken:
            self._taken, self._failures = writer.together, 0
        if writer.posted > self._posted:
            self._posted, self._unsent = writer.posted, 0
            self._pause_of_mail.forget()
            # What rank 0 writes alone in place of what fails says nothing of that.
            self._failures = 0 if self._tried == ALONE_SENT else self._failures
        if writer.across.brought > self._brought:
            self._brought = writer.across.brought
            self._pause.forget()
        if writer.missed > self._missed:
            self._missed = writer.missed
            writer.across.carrier = ""  # until it is known who carries the run on now
            return self._after_miss(*writer.last_miss)
        how = self._usual(attempt, waits=waits, across=across)
        if how not in (None, ALONE) and (how.is_together or not self._writes_own_states):
            self._was_tried, self._tried = True, how
            self._was_across |= bool(how.at)  # it may be missed when others were begun since
            self._was_sent |= how.states is States.SENT
        return how

    def _usual(self, attempt: Attempt, *, waits: bool, across: bool) -> How | None:
        """How a snapshot is written if nothing speaks against it; ``None`` if there is none now."""
        known = len(self.rooms.known) >= self._trainer.world_size - 1
        if across and self._hosts.can_bring and self._pause.is_over:
            state = attempt.writer.across
            if state.is_under_way and not waits:
                say(logging.WARNING, "upload-under-way", "a snapshot is skipped while the one before is uploaded")
                return None
            if state.carrier and known:
                return replace(TOGETHER, at=state.carrier)
        if self._members and self._writes_own_states:
            return TOGETHER if known else self._alone()
        if self._can_send and self._pause_of_mail.is_over:
            return TOGETHER_SENT if self._members else ALONE_SENT
        return GATHERED if self._members else ALONE

    def _alone(self) -> How:
        """How rank 0 writes alone: with what the others send, or gathered where they cannot, or did so in vain."""
        self._unsent += 1
        if self._can_send and self._pause_of_mail.is_over and self._unsent <= _MOST_FAILURES:
            return ALONE_SENT
        self._unsent = 0
        return ALONE

    def _after_miss(self, because: str, fault: ShareFault | None) -> How:
        self._own.learn(fault)
        problem = fault.problem if fault is not None else None
        differ, is_by_one = problem is ShareProblem.DIFFERS, problem is ShareProblem.ONE_WRITER
        # One that was begun before the one before it was known to be missed says no more than that.
        self._failures, self._was_tried = self._failures + (self._was_tried or is_by_one), False
        if self._failures < _MOST_FAILURES and not differ:
            return ALONE if is_by_one else self._alone()
        if self._was_across and not differ:
            self._failures, self._was_across = 0, False
            self._pause.begin()
            say(
                logging.WARNING,
                "hosts-apart",
                "hosts cannot send snapshots together: {because}. The host of rank 0 sends them by itself for now",
                only_rank_zero=True,
                because=because,
            )
            return self._alone()
        if self._was_sent and self._mail is not None and not differ:
            self._failures, self._was_sent = 0, False
            self._pause_of_mail.begin()
            self._mail.works = not is_by_one  # nothing that is sent could be put into such a file
            say(
                logging.WARNING,
                "ranks-gather",
                "snapshots were missed: {because}. Training now waits at each snapshot until rank-local state is"
                " gathered" + (", for some minutes" if self._can_send else ""),
                only_rank_zero=True,
                because=because,
            )
            return ALONE
        self._end()
        self._failures = 0
        if self._mail is not None and is_by_one:
            self._mail.works = False
        why = f"ranks cannot write snapshots together: {because}"
        if self._settings.strict and differ:
            return replace(ALONE, problem=why)
        text = "{why}. From now on rank 0 writes them alone"
        say(logging.WARNING, "ranks-apart", text, only_rank_zero=True, why=why)
        return self._alone()

    def _end(self) -> None:
        self._members, self._hosts = [], Topology(mine=self._hosts.mine, is_guest=self._hosts.is_guest)

    def how_last(self, attempt: Attempt | None) -> How:
        """How an urgent snapshot is written, or that of the end; every rank calls this at the same place.

        Args:
            attempt: on rank 0.
        """

        def are_together() -> bool:
            for writer in (attempt.writer if attempt is not None else None, self.writer):
                if writer is not None:
                    writer.check_all()
            how = self.how(attempt, across=False) if attempt is not None and not attempt.fenced else None
            return how is not None and how.is_together

        return GATHERED if Agreement(self._trainer).everyones(are_together)[0] else ALONE

    def checkpoint(self, dump: Dump | SpotError, how: How) -> dict[str, Any] | SpotError:
        """The checkpoint of a snapshot, on rank 0, or why there is none; every rank calls this at the same place."""
        try:
            if isinstance(dump, SpotError):
                if how.states is States.GATHERED:
                    gather(self._trainer, dump)  # the others are in it
                return dump
            if how.states is not States.GATHERED:
                if not self._trainer.is_global_zero:
                    return dump.checkpoint
                self._own.make_rooms(dump.state)
                return dump.shared(self._trainer, self.rooms)
            return dump.gathered(self._trainer, self.rooms)
        except Exception as error:
            return failure_of(error)

    def ranks(self, how: How) -> SharingRanks | None:
        """On rank 0: who fills the snapshot; ``None`` if it does so alone."""
        if how == ALONE:
            return None
        if how.at:
            numbers = {rank: Number.of_hosts(self._hosts.ranks, rank).share for rank in self.rooms.known}
            rooms = {numbers[rank]: room for rank, room in self.rooms.known.items()}
            hosts = tuple(map(len, self._hosts.ranks))
            return SharingRanks(sum(hosts), rooms, hosts, how.at)
        shares, known = len(self._members) if how.is_together else 1, self.rooms.known
        if how.states is States.SENT:
            return SharingRanks(shares, {}, sent=known)
        return SharingRanks(shares, known if how.states is States.WRITTEN else {})

    def share(self, dump: Dump | SpotError, how: How, name: str, wait_s: float) -> None:
        """On another rank: begin its share of a snapshot that is written together, or say why there is none."""
        own: Packing | SpotError | bytes = b""
        owned: Owners = {}
        try:
            if isinstance(dump, SpotError):
                raise dump
            own = Packing(dump.state) if how.states is not States.GATHERED else b""
            owned = optimizer_owned(self._trainer.optimizers)
        except Exception as error:
            own = failure_of(error)
        if self._mail is not None and self._mail.sender is not None and how.states is States.SENT:
            self._mail.sender.send(name, own)
        if self.writer is not None and how.is_together:
            state = b"" if how.states is States.SENT and not isinstance(own, SpotError) else own
            self.writer.begin(name, owned, state, wait_s, how.at)

    def copied(self) -> None:
        """Wait for what is not copied yet: weights may change now."""
        if self.writer is not None:
            self.writer.copied()

    @property
    def hold_their_own(self) -> bool:
        """Whether ranks are known to hold other parameters, or other states of optimizers, than rank 0."""
        trainer = self._trainer
        if getattr(trainer.strategy.model, "parameters_to_ignore", ()):
            return True  # those that DDP was told to ignore
        # ZeroRedundancyOptimizer shares the states out.
        are_shared_out = any(hasattr(optimizer, "consolidate_state_dict") for optimizer in trainer.optimizers)
        return are_shared_out or average_now_and_then(trainer)

    @property
    def _can_send(self) -> bool:
        return self._mail is not None and self._mail.works

    @property
    def _writes_own_states(self) -> bool:
        return len(self._members) == self._trainer.world_size


class Mail:
    """The mail of one ``fit``. Every rank makes one, at the same place.

    Args:
        trainer: that fits.
        attempt: on rank 0, whose writer gets the mailbox.

    Attributes:
        works: whether all ranks reach rank 0.
        sender: of this rank; ``None`` on rank 0.
    """

    def __init__(self, trainer: pl.Trainer, attempt: Attempt | None) -> None:
        agreement, secret, box, problem = Agreement(trainer), secrets.token_hex(32), None, ""
        self.sender: Sender | None = None
        meeting = Meeting.of(trainer)
        if attempt is not None:
            allow_ranks(agreement)
            try:
                box = attempt.writer.mailbox = Mailbox(secret, meeting.listen(), agreement.size)
            except OSError as error:
                logger.debug("no mailbox can be had: %s", error)
        mine = (meeting.listen(), box.port, secret) if box is not None else ("", 0, secret)
        listen, port, secret = agreement.tell(mine)
        if attempt is None:
            try:
                self.sender = Sender(meeting.connect(listen), port, secret, trainer.global_rank)
            except (OSError, RuntimeError) as error:  # also where no thread can be had
                problem = f"rank {trainer.global_rank} does not reach rank 0: {error}"
        problems = [each for each in agreement.gather(problem) if each]
        self.works = not problems
        if problems:
            self.close()
            say(
                logging.WARNING,
                "rank-unreached",
                "{problem}. Training waits at each snapshot that rank 0 writes alone, until rank-local state is"
                " gathered",
                only_rank_zero=True,
                problem=problems[0],
            )

    def close(self) -> None:
        """Send what is left, and no more. Rank 0's writer closes its mailbox."""
        sender, self.sender = self.sender, None
        if sender is not None:
            sender.close()
