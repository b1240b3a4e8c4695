"""The writer's way to the ring of its host: what is asked of it ends in time, and a ring that is lost is replaced."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar
from weakref import WeakSet

from lightning_spot.errors import FencedError, ServerUnreachableError, SnapshotFailedError, SpotError
from lightning_spot.retry import growing
from lightning_spot.say import recovered, say
from lightning_spot.server.host import Host, InProcessHost
from lightning_spot.server.tier import TierHealth

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 30.0
_CLOSE_S = 5.0  # a server that is being started just then may take longer: its thread ends by itself
_MOST_UNTOLD = 8  # only the newest: nothing waits for older snapshots
T = TypeVar("T")

SAY_S = 10.0
"""A longer wait is logged, with its reason."""


class HostLink:
    """A ring that may be lost and found again. Methods may be called from any thread.

    Args:
        host: the ring, its run already opened.
        reconnect: finds or starts a ring and opens the run there again; ``None`` if there is no other.
        prepare: makes a ring that was found ready for use, in the background.

    Attributes:
        host: the ring, ``None`` while there is none.
        is_closed: whether no other ring is looked for any more.
        losses: how often a ring was lost.
    """

    def __init__(
        self,
        host: Host,
        reconnect: Callable[[], Host] | None = None,
        prepare: Callable[[Host], None] = lambda _host: None,
    ) -> None:
        self.losses = 0
        self.host: Host | None = host
        self._reconnect = reconnect
        self._prepare = prepare
        self._changed = threading.Condition()
        self.is_closed = False
        self._thread: threading.Thread | None = None
        self._untold: deque[Callable[[Host], None]] = deque(maxlen=_MOST_UNTOLD)
        self._said: WeakSet[BaseException] = WeakSet()  # that come of losses which were said

    def ask(self, question: Callable[[Host], T], default: T) -> T:
        """Ask the ring; ``default`` if there is none, or it fails. One that does not answer in time counts as lost."""
        host = self.host
        if host is None:
            return default
        try:
            return question(host)
        except ServerUnreachableError as error:
            self.lose(host, error)
        except SpotError as error:
            logger.debug("the ring on this host: %s", error)
        return default

    def tell(self, send: Callable[[Host], None]) -> None:
        """Tell the ring what others may wait for; one that is lost: the next one, once it is found."""
        asked = self.host

        def sent(host: Host) -> bool:
            send(host)
            return True

        if self.ask(sent, False):
            return
        with self._changed:
            if self.host is None and self._thread is not None:
                self._untold.append(send)
                return
        if self.host is not asked:  # nothing takes the place of one that is left, or the only one
            self.ask(sent, False)

    def lose(self, host: Host, error: SpotError) -> None:
        """Let a ring go that is gone or does not answer, and look for a new one in the background."""
        with self._changed:
            if self._reconnect is None or self.is_closed:
                return
            if self.host is not host:
                self._said.add(error)
                return
            thread = threading.Thread(target=self._find, name="spot-reconnect", daemon=True)
            try:
                thread.start()  # what it finds, it says under this lock
            except RuntimeError as problem:  # no more threads can be had now: who asks next finds it lost again
                text = "no new snapshot server can be started now: {error}. It is retried. Raise ulimit -u."
                say(logging.WARNING, "no-threads", text, about="reconnect", error=problem)
                return
            self.host, self._thread = None, thread
            self.losses += 1
            self._said.add(error)
        silent = isinstance(error.__cause__, TimeoutError)
        reason = (
            f"it did not answer within server_call_timeout_s={host.server_call_timeout_s:.1f} s" if silent else error
        )
        text = "the snapshot server on this host is lost ({why}). Snapshots are missed until a new one runs."
        say(logging.WARNING, "local-server-lost", text, why=reason)
        host.disconnect()

    def missing(self) -> ServerUnreachableError:
        """The error of who needs the ring while there is none."""
        error = ServerUnreachableError("the snapshot server on this host is lost; a new one is being started")
        self._said.add(error)
        return error

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error says no more than what was said when a ring was lost."""
        return error in self._said

    def wait(self, wait_s: float) -> Host | None:
        """The ring, as soon as there is one; ``None`` if none came within ``wait_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.host is not None or self._thread is None, max(0.0, wait_s))
            return self.host

    def close(self) -> None:
        """Stop looking for a new ring. The one at hand stays open: it is the caller's."""
        with self._changed:
            self.is_closed = True
            self._reconnect, self._prepare = None, lambda _host: None  # those who gave them need not wait for us to go
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(_CLOSE_S)

    def _find(self) -> None:
        reconnect, prepare = self._reconnect, self._prepare
        pauses_s = growing(_FIRST_RETRY_S, _LAST_RETRY_S)
        found: Host | None = None
        while found is None and reconnect is not None and not self.is_closed:
            try:
                found = reconnect()
                prepare(found)
            except FencedError as error:
                text = "{error}. This attempt saves nothing more. End this trainer."
                say(logging.WARNING, "fenced", text, error=error)
                break
            except Exception as error:  # whatever it is, training goes on and it is tried again
                text = "no new snapshot server yet: {error}. It is retried."
                say(logging.WARNING, "no-local-server", text, error=error)
                with self._changed:
                    self._changed.wait_for(lambda: self.is_closed, next(pauses_s))
        with self._changed:
            self._thread = None
            unwanted = self.is_closed
            self.host = None if unwanted else found
            untold = list(self._untold)
            self._untold.clear()
            self._changed.notify_all()
        if found is not None:
            say_found(found)
            for send in untold:
                with contextlib.suppress(SpotError):  # one that is lost, too, is found to be so by who asks next
                    send(found)
            if unwanted:
                leave(found)


def say_found(host: Host) -> None:
    """Log that there is a ring again, after one was lost."""
    text = "a snapshot server runs on this host again"
    if isinstance(host, InProcessHost):
        text = "snapshots go through this process from now on, since no snapshot server could be started"
    for key in ("local-server-lost", "no-local-server"):
        recovered(key, text)


def leave(host: Host, *, complete: bool = False) -> None:
    """Let a ring go; that it has gone already is no harm."""
    try:
        host.leave(complete=complete)
    except SpotError as error:
        logger.debug("the ring on this host could not be told: %s", error)


def seconds_left(deadline_s: float) -> float:
    """Seconds until a deadline on the monotonic clock, at least 0."""
    return max(0.0, deadline_s - time.monotonic())


def tiers_of(link: HostLink) -> Mapping[str, TierHealth]:
    """How each tier below is doing, by its URL; none if the ring does not say."""
    nothing: Mapping[str, TierHealth] = {}
    return link.ask(lambda host: host.tiers(), nothing)


def say_waiting(link: HostLink, full: SnapshotFailedError, left_s: float) -> None:
    """Log that training waits for a slot, and what fails meanwhile."""
    text = "training waits for a slot, for up to {left_s:.0f} s more: {error}. Increase slots= or the interval."
    say(logging.WARNING, "slot-awaited", text, left_s=left_s, error=full)
    say_failing(link)


def say_failing(link: HostLink) -> None:
    """Log what a server logs in its own file only: a tier fails, refuses this attempt, or lost a snapshot."""
    for url, tier in tiers_of(link).items():
        if tier.error:
            text = "{about} fails ({why}). The local server retries; snapshots stay in memory meanwhile. Check it."
            say(logging.WARNING, "upload-failing", text, about=url, why=tier.error)
        else:
            recovered("upload-failing", "{about} works again", about=url)
        if tier.refused:
            text = "{about} takes no more snapshots of this attempt: {why}. End this trainer."
            say(logging.WARNING, "attempt-refused", text, about=url, why=tier.refused)
        if tier.silent:
            text = "{why}. The local server has closed that connection and retries. Check the network."
            say(logging.WARNING, "storage-silent", text, about=url, why=tier.silent)
        if tier.dropped:
            text = "{why}. {about} is dropped; the snapshot before it counts. Check the memory of this host."
            say(logging.ERROR, "snapshot-dropped", text, about=tier.dropped_name, why=tier.dropped)
