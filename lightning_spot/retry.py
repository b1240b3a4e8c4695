"""Retries: pauses that grow, and the policy by which servers and storage are read when an attempt begins."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from lightning_spot.errors import ServerRefusedError, SpotError, TierError, TierReason
from lightning_spot.say import recovered, say
from lightning_spot.threads import in_background

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_DOUBLINGS = 30


def growing(first_s: float, last_s: float = float("inf")) -> Iterator[float]:
    """Pauses without end, each twice as long as the one before.

    Args:
        first_s: seconds of the first.
        last_s: seconds of the longest.
    """
    return (pause_after(failures, first_s, last_s) for failures in itertools.count(1))


def pause_after(failures: int, first_s: float, last_s: float) -> float:
    """The pause of :func:`growing` after so many failures in a row, where others are made between two tries.

    Args:
        failures: from 1.
        first_s: seconds after the first.
        last_s: seconds of the longest.
    """
    return min(last_s, first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))


def within(seconds: float, pauses_s: Iterable[float]) -> Iterator[float]:
    """Pauses, as long as the try after one begins in time.

    Args:
        seconds: from when the first pause is asked for, so after the first failure: it may have come late.
        pauses_s: all that may be made.
    """
    ends_s = time.monotonic() + seconds
    yield from itertools.takewhile(lambda pause_s: time.monotonic() + pause_s <= ends_s, pauses_s)


def retried(
    action: Callable[[], T],
    pauses_s: Iterable[float],
    again: Callable[[Exception], bool],
    note: Callable[[Exception, float], None] = lambda _error, _pause_s: None,
) -> T:
    """Do something, and again where it fails, as long as there are pauses to make.

    Args:
        action: what to do.
        pauses_s: seconds between two tries; the next one is asked for when a try has failed.
        again: whether it may go otherwise the next time, by the error.
        note: told the error, and how long is paused now.

    Raises:
        Exception: of the last try, or of one after which it makes no sense to try again.
    """
    pauses = iter(pauses_s)
    while True:
        try:
            return action()
        except Exception as error:
            pause_s = next(pauses, None) if again(error) else None
            if pause_s is None:
                raise
            note(error, pause_s)
        time.sleep(pause_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often, and how long, a server or the storage is read.

    Attributes:
        tries: how often it is read before it counts as unreadable, at least 1.
        first_pause_s: seconds between the first two tries; they double.
        no_more_tries_after_s: no try begins later than this after the first has failed.
        answer_s: how long all answers together are waited for.
        silent_s: how long a first sign of life is waited for. A library may wait, and retry, for minutes if a server
            takes connections and sends nothing.
    """

    tries: int = 3
    first_pause_s: float = 2.0
    no_more_tries_after_s: float = 20.0
    answer_s: float = 60.0
    silent_s: float = 8.0

    def pauses(self) -> Iterator[float]:
        """Between the tries that begin now, as long as a further one may be made."""
        return within(self.no_more_tries_after_s, itertools.islice(growing(self.first_pause_s), self.tries - 1))


DEFAULT_POLICY = RetryPolicy()


def unless_silent(action: Callable[[], T], heard: threading.Event, wait_s: float, where: str) -> T:
    """Do something on another thread, and wait for its end unless there is no sign of life in time.

    Args:
        action: reads a server or the storage; it goes on by itself if it is not waited for.
        heard: set at the first sign of life.
        wait_s: how long that is waited for.
        where: what is read, for the error.

    Raises:
        TierError: if there was no sign of life.
        Exception: what ``action`` raises.
    """
    try:
        ended = in_background(action, "spot-ask")
    except RuntimeError as error:  # no more threads can be had now
        logger.debug("%s is read without a bound: %s", where, error)
        return action()
    ended.add_done_callback(lambda _: heard.set())
    if not heard.wait(wait_s):
        raise TierError(f"{where}: no answer within {wait_s:.0f} s. Check it and the network to it", tier=where)
    return ended.result()


def with_retries(action: Callable[[], T], policy: RetryPolicy, where: str) -> T:
    """Read a server or the storage, and again while that fails, in whatever way.

    Args:
        action: reads it.
        policy: how often, and for how long.
        where: what is read, for messages.

    Raises:
        Exception: of the last try; at once if it says that there was an answer: nothing is there, or another version,
            token or certificate is needed.
    """

    def note(error: Exception, pause_s: float) -> None:
        why = str(error) if isinstance(error, SpotError) else f"{type(error).__name__}: {error}"
        text = "{why}. Retrying in {pause_s:.1f} s"
        say(logging.WARNING, "read-retried", text, about=where, why=unread(where, why), pause_s=pause_s)

    answer = retried(action, policy.pauses(), lambda error: not _has_answered(error), note)
    recovered("read-retried", "{about} answers again", about=where)
    return answer


def _has_answered(error: Exception) -> bool:
    if isinstance(error, ServerRefusedError):
        return error.is_for_the_token or error.reason in (TierReason.PROTOCOL, TierReason.TLS)
    return isinstance(error, SpotError) and not isinstance(error, TierError)


def unread(where: str, reason: str) -> str:
    """That something could not be read; its name is there once."""
    return reason if where in reason else f"{where} could not be read ({reason})"
