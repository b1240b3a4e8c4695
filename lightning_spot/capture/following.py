"""What ranks have in common that write a part of snapshots whose slots rank 0 leases: they wait for nothing.

The training thread calls :meth:`Follower.copied` before the tensors change. Everything else happens on one background
thread: to wait for the slot, to copy, to say that the bytes are in place.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from lightning_spot.capture.background import CLOSE_S, Background
from lightning_spot.capture.contents import CopyPlan, SlotViews, Unchanged
from lightning_spot.capture.host_link import leave, within
from lightning_spot.capture.saying import SAY_S
from lightning_spot.capture.slot_pool import give_back, have_made
from lightning_spot.capture.split import Number
from lightning_spot.capture.unexpected import as_failure
from lightning_spot.errors import (
    FailureReason,
    FencedError,
    ServerUnreachableError,
    ShareFault,
    SnapshotFailedError,
    SpotError,
    TierReason,
    fault_of,
)
from lightning_spot.image.pieces import Piece
from lightning_spot.memory.host import Host, Lease
from lightning_spot.say import say
from lightning_spot.staging.batch import SlotView
from lightning_spot.staging.copier import Copier, CopyJob, Watches
from lightning_spot.staging.cuda import Marks
from lightning_spot.staging.schedule import Schedule

logger = logging.getLogger(__name__)

_MOST = 8  # newer ones count: what came before is over by then

What = TypeVar("What")
_JOIN_S = 600.0  # as long as rank 0 may wait for a slot; a server says at once if there will be none
_AGAIN_S = 5.0  # until a server is told once more what it has not heard


class Declined:
    """Snapshots of which the local server has not heard that a rank writes nothing. Not thread-safe."""

    def __init__(self) -> None:
        self._untold: dict[str, Callable[[Host], None]] = {}  # by the name of the snapshot, the oldest first

    def __bool__(self) -> bool:
        return bool(self._untold)

    def note(self, name: str, say: Callable[[Host], None]) -> None:
        """Note one that is to be said; of two for one snapshot, the first."""
        self._untold.setdefault(name, say)
        if len(self._untold) > _MOST:
            del self._untold[next(iter(self._untold))]

    def forget(self) -> None:
        """Nobody waits for any of them any more."""
        self._untold.clear()

    def say(self, host: Callable[[], Host]) -> bool:
        """Tell the server; what it does not hear now is told again.

        Args:
            host: its connection, made if need be.

        Returns:
            whether the connection is still good.
        """
        for name, send in list(self._untold.items()):
            try:
                send(host())
            except (SpotError, OSError) as error:
                if isinstance(error, OSError) or TierReason.SERVER_FAILED.caused(error):
                    logger.debug("it is told again that a rank writes nothing: %s", error)
                    return not isinstance(error, ServerUnreachableError)
                # It is another server, or another attempt's: nobody waits there.
                logger.debug("nobody waits for what a rank does not write: %s", error)
            self._untold.pop(name, None)
        return True


@dataclass(eq=False, slots=True)
class Task(Generic[What]):
    """A part on its way.

    Attributes:
        name: of the snapshot.
        who: writes it, for messages.
        number: which share of it is this rank's.
        at: URL of the run at the snapshot server, or storage, to which this host brings it; ``""`` on that of rank
            0.
        what: is written, as at the seam; ``None`` once it is, so that nothing is kept alive.
        wait_s: how long rank 0 may wait for a clean slot.
        still: whether no tensor changes until it is there. Then nothing is left for training to copy, or to order.
        told: in storage: what the local server has to know of the snapshot, and a checksum of all of it.
        after: what that had ordered on GPUs at the seam.
        job: the copies, once the slot is there.
        look: compares what the slot had already with the tensors, which must not change before; how many differ.
        begun: whether the copies have begun, or never will.
        late: whether training has gone on without them.
        done: becomes ``None`` when the bytes are in place.
    """

    name: str
    who: str
    number: Number
    at: str
    what: What | None
    wait_s: float
    still: bool = False
    told: tuple[str, str] = ("", "")
    after: Marks = field(default_factory=dict)
    job: CopyJob | None = None
    look: Callable[[], int] = int
    begun: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    late: bool = False
    done: Future[None] = field(default_factory=Future)

    def give_up(self, error: Exception | None) -> None:
        """Training goes on without the copies: they do not begin any more.

        Args:
            error: for which nobody may use those that have begun; ``None`` if training waits for these.
        """
        with self.lock:
            job = self.job
            self.late = job is None
        if job is not None and error is not None:
            job.fail(error)


class Entrusted:
    """The last such part of a rank; the one before it was brought, or given up."""

    def __init__(self) -> None:
        self._task: Task[Any] | None = None

    def __bool__(self) -> bool:
        """Whether the server may have something to bring."""
        return self._task is not None

    def note(self, task: Task[Any]) -> None:
        """A part is in the slot; where it goes nowhere from there, there is nothing to look after."""
        self._task = task if task.at else None

    def forget(self) -> None:
        """Look after it no longer."""
        self._task = None

    def lost(self, host: Host) -> None:
        """Another server is there now: let the other hosts know that nothing will come."""
        task, self._task = self._task, None
        if task is None:
            return
        why, number = f"{task.who}: the server of its host was lost", task.number
        try:
            host.decline(task.name, why, task.at, number.host, number.here)
        except SpotError as error:
            logger.debug("nobody could be told that the local server was lost: %s", error)


class Follower(ABC, Generic[What]):
    """Writes a rank's parts.

    Args:
        host: connection to the local server, with run and attempt; closed with the writer.
        connect: makes another one when it was lost.
        copier: that copies; closed with the writer.
        schedule: when each part is copied; ``None`` for at once.

    Attributes:
        copied_bytes: written into slots so far.
        torn: parts that were given up since a tensor changed while it was copied.
    """

    def __init__(
        self, host: Host, connect: Callable[[], Host], copier: Copier | None = None, schedule: Schedule | None = None
    ) -> None:
        self.copied_bytes = 0
        self.torn = 0
        self._connect = connect
        self._copier = copier if copier is not None else Copier()
        self._schedule = schedule
        self._max_stall_s = host.server_call_timeout_s
        self._host: Host | None = host
        self._views = SlotViews(self._copier)
        self._unsteady: frozenset[int] = frozenset()
        self._pending: list[Task[What]] = []
        self._declined, self._entrusted = Declined(), Entrusted()
        self._is_closed = False
        self._unchanged = Unchanged()
        try:
            self._tasks = Background("spot-share", self._look, self._look_s)
        except BaseException:  # nobody else closes what was given
            self._copier.close()
            host.disconnect()
            raise

    # -- on the training thread -----------------------------------------------------------------------------------

    def copied(self) -> None:
        """Return when the tensors may change: call it before every optimizer step, swap of weights, and at the end."""
        for task in self._pending:
            try:
                self._wait(task, task.begun)
                if (job := task.job) is None:
                    continue
                task.look()
                job.wait_cpu()
                self._copier.fence()
                job.settle()
            except SpotError:
                continue  # the background thread reports it
            except Exception as error:  # training goes on without it
                task.give_up(error)
        self._pending = [task for task in self._pending if not task.done.done()]

    def check_all(self) -> None:
        """See :meth:`~lightning_spot.capture.writer.SnapshotWriter.check_all`."""
        self._unchanged.checks_all = True

    def newest_differs(self) -> bool:
        """See :meth:`~lightning_spot.capture.contents.Unchanged.newest_differs`."""
        return self._unchanged.newest_differs()

    def copied_within(self, wait_s: float) -> bool:
        """Help to copy as :meth:`copied` does, if all slots come in time; whether they did."""
        deadline_s = time.monotonic() + wait_s
        if all(task.begun.wait(within(deadline_s)) for task in self._pending):
            self.copied()
            return True
        return False

    def warm(self, nbytes: int) -> None:
        """Have a slot made at the local server, in the background, for what its ranks write; others follow.

        Args:
            nbytes: of all that, about.
        """
        self._tasks.put(lambda: self._warm(nbytes))

    def settle(self, wait_s: float) -> None:
        """Wait until every part begun so far is in place or given up."""
        self.copied()
        deadline_s = time.monotonic() + wait_s
        for task in self._pending:
            try:
                task.done.result(within(deadline_s))
            except (SpotError, TimeoutError) as error:
                logger.debug("%s's part of %s: %s", task.who, task.name, error)

    def close(self, *, complete: bool = False) -> None:
        """Stop the threads, and leave the server.

        Args:
            complete: whether nobody needs the local server any more.
        """
        self._entrusted.forget()
        self.copied()
        self._tasks.put(self._say_last)
        if not self._tasks.close(CLOSE_S):
            self._is_closed = True
            if (host := self._host) is not None:
                host.disconnect()  # what it waits for breaks off
            self._tasks.close(CLOSE_S)
        host, self._host = self._host, None
        with contextlib.ExitStack() as ends:  # from the last one on, whatever fails in one
            if host is not None:
                ends.callback(host.disconnect)
                if complete:
                    ends.callback(leave, host, complete=True)
                ends.callback(self._views.drop, host)
            ends.callback(self._pending.clear)
            ends.callback(self._copier.close)

    def _put(self, task: Task[What]) -> None:
        """Have a part written."""
        task.after = self._copier.marks()
        self._pending.append(task)
        self._tasks.put(lambda: self._write(task), lambda error: self._lost(task, error))

    def _wait(self, task: Task[What], event: threading.Event) -> None:
        """Wait for something that comes before training may go on; if it does not come in time, the part is torn."""
        limit_s = task.wait_s or self._max_stall_s
        if task.late or event.wait(min(limit_s, SAY_S)):
            return
        if limit_s > SAY_S:
            text = "{who}: training waits for its slot of {snapshot}, for up to {left_s:.0f} s more"
            facts: dict[str, Any] = {"who": task.who, "snapshot": task.name, "left_s": limit_s - SAY_S}
            say(logging.WARNING, "slot-awaited", text, **facts)
            if event.wait(limit_s - SAY_S):
                return
        task.give_up(None)

    # -- on the background thread ---------------------------------------------------------------------------------

    def _look_s(self) -> float | None:
        """After how long :meth:`_look` is called while nothing else is to be done; ``None`` for never."""
        return _AGAIN_S if self._declined or self._entrusted else None

    def _look(self) -> None:
        """Look after what was written, or was not."""
        self._say_owed()
        if not self._entrusted:
            return
        try:
            (self._host or self._reconnect()).check()
        except (SpotError, OSError) as error:
            logger.debug("the local server: %s", error)
            if isinstance(error, ServerUnreachableError):
                self._leave()

    def _owe(self, name: str, why: str, at: str, host: int = 0, share: int = 1) -> None:
        """Tell the server that this rank writes nothing of a snapshot, see :meth:`Host.decline`: others wait for it.

        It is told behind the task that is under way, for whose end training may wait.
        """
        self._declined.note(name, lambda node: node.decline(name, why, at, host, share))
        self._tasks.put(self._say_owed)

    def _say_owed(self) -> None:
        """Tell the server what it may not have heard."""
        if not self._declined.say(lambda: self._host or self._reconnect()):
            self._leave()

    def _say_last(self) -> None:
        """The same for the last time: no other server is looked for, or even started, to be told of it."""
        self._entrusted.forget()  # also what was noted since the end began
        if self._host is not None:
            self._say_owed()
        self._declined.forget()

    def _check_begun(self, task: Task[What], what: What) -> None:  # there need not be anything to check
        """Raise if it is known already that this rank has nothing to write."""

    @abstractmethod
    def _fill(self, host: Host, lease: Lease, task: Task[What], what: What) -> None:
        """Copy this rank's bytes into the slot; raises if they are not what they should be."""

    def _failed(self, task: Task[What], error: SpotError) -> None:
        """A part was not written. Rank 0 says why there is no snapshot."""
        logger.debug("%s's part of %s: %s", task.who, task.name, error)

    def _copy(
        self, task: Task[What], plan: CopyPlan, pieces: Sequence[Piece], view: SlotView, watches: Watches
    ) -> CopyJob:
        """Start the copies for which training waits before its optimizer steps.

        Raises:
            SnapshotFailedError: if it has gone on already.
        """
        with task.lock:
            if task.late:
                raise SnapshotFailedError(
                    "training went on before its slot was there", reason=FailureReason.SHARE_MISSING
                )
            task.look = functools.partial(self._unchanged.written_past_counts, plan, view)
            schedule = None if task.still else self._schedule
            task.job = job = self._copier.start(pieces, view, watches, schedule, task.after)
        task.begun.set()
        return job

    def _check_steady(self, task: Task[What], job: CopyJob) -> None:
        """Wait; raise if a tensor was written to before it was copied, or one that was left out had been."""
        found = task.look()
        job.wait()
        if job.moved:
            self._unsteady |= job.moved
            self.torn += 1
            raise SnapshotFailedError(
                f"{len(job.moved)} tensors changed between two optimizer steps while they were copied",
                reason=FailureReason.TORN,
            )
        if found:
            self.torn += 1
            raise SnapshotFailedError(
                f"{found} tensors were written to past torch's count of writes", reason=FailureReason.TORN
            )

    def _warm(self, nbytes: int) -> None:
        if (host := self._host) is None:
            return
        try:
            give_back(host, have_made(host, nbytes))
        except SpotError as error:  # then it is made when it is needed
            logger.debug("no slot was made ahead: %s", error)

    def _write(self, task: Task[What]) -> None:
        what, task.what = task.what, None
        assert what is not None
        lease: Lease | None = None
        problem: BaseException | None = None
        try:
            self._check_begun(task, what)
            host, lease = self._join(task)
            self._fill(host, lease, task, what)
        except Exception as raised:  # rank 0 says why there is no snapshot
            problem = error = as_failure(raised)
            self._failed(task, error)
            if isinstance(error, ServerUnreachableError):
                self._leave()
        except BaseException as error:
            problem = error
            raise
        finally:
            del what  # nothing is kept alive until the next one comes
            task.begun.set()
            try:
                if problem is not None and task.job is not None:
                    self._end(task.job)
                if lease is not None and self._host is not None:
                    self._say(
                        self._host, lease, "" if problem is None else f"{task.who}: {_text(problem)}", fault_of(problem)
                    )
            finally:  # whatever fails, nobody waits for it after
                if problem is None:
                    self._entrusted.note(task)
                    task.done.set_result(None)
                else:  # without its frames, which hold the tensors
                    task.done.set_exception(problem.with_traceback(None) if isinstance(problem, SpotError) else problem)

    def _lost(self, task: Task[What], error: BaseException) -> None:
        """Whatever has failed beside what is expected to, nobody waits for a part after."""
        if not task.done.done():
            task.what = None
            task.begun.set()
            task.done.set_exception(error)
            self._owe_share(task, error)

    def _owe_share(self, task: Task[What], error: BaseException) -> None:
        number = task.number
        self._owe(task.name, f"{task.who}: {_text(error)}", task.at, number.host, number.here)

    def _join(self, task: Task[What]) -> tuple[Host, Lease]:
        """Wait for the slot of a snapshot."""
        try:
            self._say_owed()  # who waits for an earlier part is in this one's way
            return self._joined(task)
        except Exception as error:
            if not is_said_by_node(error):  # it may never have heard of this rank, and would wait for it
                self._owe_share(task, error)
            raise

    def _joined(self, task: Task[What]) -> tuple[Host, Lease]:
        """Wait for it; through another connection, if the last one was lost."""
        try:
            if self._host is not None:
                return self._host, self._ask(self._host, task)
        except ServerUnreachableError as error:
            logger.debug("another connection is made: %s", error)
            self._leave()
        host = self._reconnect()
        return host, self._ask(host, task)

    def _reconnect(self) -> Host:
        host = self._connect()
        if self._is_closed:  # this took longer than the end of the training
            host.disconnect()
            raise ServerUnreachableError("nothing more is written by this rank")
        self._host = host
        self._entrusted.lost(host)
        return host

    def _ask(self, host: Host, task: Task[What]) -> Lease:
        number, (told, digest) = task.number, task.told
        try:
            return host.join(
                task.name, share=number.here, digest=digest, wait_s=_JOIN_S, at=task.at, host=number.host, told=told
            )
        except ServerUnreachableError:
            raise
        except Exception as error:
            if not is_said_by_node(error):  # it would wait for this rank for as long as it is connected
                self._leave()
            raise

    def _say(self, host: Host, lease: Lease, torn: str, fault: ShareFault | None) -> None:
        """Tell the server that a share is over, which it waits for as long as it sees this rank."""
        try:
            try:
                host.placed(lease, torn, fault)
            except ServerUnreachableError as error:  # this process stood still, perhaps before that was sent
                logger.debug("it is said once more that a share is over: %s", error)
                host.placed(lease, torn, fault)
        except ServerUnreachableError as error:
            logger.debug("a share is over, and the server is left: %s", error)
            self._leave()
        except SpotError as error:  # it was given up meanwhile: rank 0 knows
            logger.debug("a share is over: %s", error)
        except Exception:  # the server, which waits for it, sees that this rank has gone
            self._leave()
            raise

    def _end(self, job: CopyJob) -> None:
        """Nothing may come into the slot any more once it was said that the share is over."""
        try:
            job.wait()
        except SpotError as error:
            logger.debug("copies of a share that was given up: %s", error)

    def _leave(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            self._views.drop(host)
            host.disconnect()


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, SpotError) else f"{type(error).__name__}: {error}"


def is_said_by_node(error: BaseException) -> bool:
    """Whether a server has said that there is nothing for a rank to write: it does not wait for that."""
    return isinstance(error, FencedError) or FailureReason.SHARE_MISSING.caused(error)
