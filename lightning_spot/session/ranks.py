"""Where the ranks of a run stop together at an event, and who started them and may do so again.

Ranks that are told of an event at different times agree on one place after which all of them act on it. They meet in
the store of their process group. A thread of each rank looks there now and then, and the training thread looks at one
flag at each place it passes. Once a rank calls, the thread of every rank posts where its training is; from then on
training holds at the next place until the first rank has published the stop, one place past the farthest. So no rank
can have gone past it, however late the news reached it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_spot.config import read_environment
from lightning_spot.protocol.listening import allow_descriptors
from lightning_spot.protocol.process import descendants
from lightning_spot.say import say
from lightning_spot.session.collectives import Agreement
from lightning_spot.state import compat, namespaces
from lightning_spot.state.fit_state import FitState
from lightning_spot.untrusted import LARGE_JSON_BYTES, read_json

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)

LOOK_S, _LONGEST_LOOK_S = 0.2, 2.0
_MOST_PER_S = 1000.0
"""The store is asked so often by all ranks together: of more ranks each asks less often, while a notice allows that."""
DECIDE_S = 30.0
_CLOSE_S = 2.0  # of a thread that waits for a host which has gone, for minutes perhaps


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A place in training that all ranks pass in the same order.

    Attributes:
        batch: training batches done in this ``fit``.
        evaluated: validation batches done since.
        evaluating: whether a validation follows ``batch`` or is under way.
    """

    batch: int
    evaluated: int = 0
    evaluating: bool = False

    def next(self) -> Place:
        """The next place at which training can stop."""
        return Place(self.batch, self.evaluated + 1) if self.evaluating else Place(self.batch + 1)


class StopAgreement:
    """One event that all ranks act on after the same place.

    Args:
        rank: of this process.
        world_size: number of ranks.
        store: reached by all ranks, over a connection of this agreement's own, and under names of this agreement's own;
            ``None`` for a single rank.
        called: what this rank knows of the event, as plain values, or ``None``; must be cheap.

    Attributes:
        facts: of the event, once it was called.
        called_s: when that was heard here, on the monotonic clock.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        store: Store | None,
        called: Callable[[], dict[str, Any] | None],
    ) -> None:
        self.facts: dict[str, Any] | None = None
        self.called_s = 0.0
        self._rank, self._world_size, self._store, self._called = rank, world_size, store, called
        self._place = Place(0)
        self._stop: Place | None = None
        self._decided, self._closed, self._first_left = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        if store is not None:
            self._thread = threading.Thread(target=self._watch, args=(store,), name="spot-stop", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # where Python ends under a thread that is in torch's code, the process aborts

    @classmethod
    def of(cls, trainer: pl.Trainer, called: Callable[[], dict[str, Any] | None]) -> StopAgreement:
        """That of the ranks of one ``fit``. Every rank makes it, once."""
        ranks, store = Agreement(trainer), None
        if ranks.size > 1:
            if ranks.rank == 0:  # which may serve the store: what most systems allow a process at first is 1,024 files
                allow_descriptors(2 * ranks.size)
            name = ranks.tell(secrets.token_hex(8))
            present = compat.DEFAULT_STORE.of(distributed_c10d)()
            store = PrefixStore(f"lightning_spot/{name}", ranks.together(compat.CLONE_STORE.of(present)))
        return cls(rank=ranks.rank, world_size=ranks.size, store=store, called=called)

    # -- on the training thread -----------------------------------------------------------------------------------

    def passed(self, place: Place) -> bool:
        """Tell that training is at ``place``; whether it is to act on the event here.

        Holds, for at most ``DECIDE_S``, while the ranks agree.
        """
        self._place = place  # before the next line: see _decide
        if self._store is None:
            self.facts, self.called_s = self._called(), time.monotonic()
            return self.facts is not None
        if self.facts is None:
            return False
        if not self._decided.wait(DECIDE_S):
            text = "ranks did not agree where to stop within {limit_s:.0f} s. This rank stops now"
            say(logging.WARNING, "stop-not-agreed", text, limit_s=DECIDE_S)
            return True
        return self._stop is not None and (place.batch, place.evaluated) >= (self._stop.batch, self._stop.evaluated)

    def wait_for_first(self, wait_s: float) -> None:
        """Return when the first rank has left, or after ``wait_s`` seconds; on the first rank, at once.

        It leaves first because launchers end all ranks once one has ended, and it has the snapshot to bring to safety.
        """
        if self._thread is not None and self._rank:
            self._first_left.wait(wait_s)

    def close(self) -> None:
        """Stop waiting. A second call does nothing."""
        self._closed.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self.close)
            thread.join(_CLOSE_S)

    def leave(self, *, at_exit: bool) -> None:
        """Stop waiting; the first rank has the others stop, too.

        Args:
            at_exit: whether they hear of it when this process ends, since they are to end after it.
        """
        self.close()
        if self._store is None or self._rank:
            return
        if at_exit:
            atexit.register(self._say_left, self._store)
        else:
            self._say_left(self._store)

    @staticmethod
    def _say_left(store: Store) -> None:
        try:
            for key in ("called", "left"):
                _publish(store, key, None)
        except RuntimeError as error:
            logger.debug("no rank is told that the first one has left: %s", error)

    # -- on its thread --------------------------------------------------------------------------------------------

    def _watch(self, store: Store) -> None:
        try:
            if self._comes(store, "called"):
                if (facts := _published(store, "called")) is not None:  # else the first rank has come to its end
                    self._decide(store, facts)
                if self._comes(store, "left"):
                    self._first_left.set()
        except (RuntimeError, ValueError, TypeError) as error:  # it is gone, a rank does not answer, or a stranger does
            if not (self._closed.is_set() or self._decided.is_set()):
                text = "the connection to the other ranks is lost ({error}). They may stop at another step"
                say(logging.WARNING, "ranks-unreachable", text, error=str(error).partition("\n")[0])
            self._first_left.set()  # nothing more is heard of it

    def _comes(self, store: Store, key: str) -> bool:
        """Wait until something is published; whether it was, before this was closed."""
        look_s = min(max(LOOK_S, self._world_size / _MOST_PER_S), _LONGEST_LOOK_S)
        while not store.check([key]):
            if self._closed.wait(look_s):
                return False
            if self.facts is None and (facts := self._called()) is not None:
                _publish(store, "called", facts)
        return True

    def _decide(self, store: Store, facts: dict[str, Any]) -> None:
        self.called_s = time.monotonic()
        self.facts = facts  # from here on training holds at its next place, so that what is posted stays true
        _publish(store, f"at/{self._rank}", asdict(self._place))
        if self._rank == 0:
            posts = [f"at/{rank}" for rank in range(self._world_size)]
            store.wait(posts, timedelta(seconds=DECIDE_S))
            farthest = max(Place(**_published(store, post)) for post in posts)
            _publish(store, "stop", asdict(farthest.next()))
        store.wait(["stop"], timedelta(seconds=DECIDE_S))
        self._stop = Place(**_published(store, "stop"))
        self._decided.set()


def _publish(store: Store, key: str, value: dict[str, Any] | None) -> None:
    """Publish plain values. Of several for one key, the first counts."""
    store.compare_set(key, "", json.dumps(value))


def _published(store: Store, key: str) -> Any:
    return read_json(store.get(key), LARGE_JSON_BYTES)


# -- who started them -------------------------------------------------------------------------------------------------


def is_requeued_by_slurm(trainer: pl.Trainer) -> bool:
    """Whether Lightning is to ask SLURM for another turn when a job is cut off."""
    if not FitState.of(trainer).can(compat.ENVIRONMENT):
        return False
    environment = compat.CLUSTER_ENVIRONMENT.of(trainer)
    kinds = namespaces.classes("fabric.plugins.environments", "SLURMEnvironment")
    return isinstance(environment, kinds) and bool(environment.auto_requeue)


def requeue_slurm_job() -> None:
    """Ask SLURM to queue this job again, as Lightning does on its requeue signal."""
    job = read_environment().slurm_job or ""
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=30, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError) as error:
        text = "SLURM did not take job {about} back ({error}). Submit it again"
        say(logging.WARNING, "not-requeued", text, about=job, error=error)
    else:
        say(logging.INFO, "requeued", "SLURM queues job {about} again", about=job)


def end_restarts_here() -> None:
    """When this process ends, tell whoever would start it again on this machine, which will be taken away.

    torchrun starts ranks again whatever they end with: they would only stop again, until the machine is gone or no
    restart is left.
    """
    restarter = read_environment().restarter_pid
    if restarter is None:
        return
    own = os.getpid()
    text = "process {about} is not told that this machine goes ({why}). Let what starts the training set its number"

    def tell() -> None:
        if os.getpid() != own:  # a forked child
            return
        try:
            if own not in descendants(restarter):  # looked at when the state is secured: it takes time, and may fail
                raise ProcessLookupError("it is no parent of this process")  # another one, or that of a container
            os.kill(restarter, signal.SIGTERM)
        except OSError as error:
            say(logging.WARNING, "not-the-restarter", text, about=restarter, why=error)

    atexit.register(tell)
