"""How often and how long tiers are asked when an attempt begins."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from lightning_spot.errors import ServerRefusedError, SpotError, TierError, TierReason
from lightning_spot.retry import growing, retried
from lightning_spot.say import recovered, say
from lightning_spot.threads import in_background

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Bounds.

    Attributes:
        tries: how often a tier is asked before it counts as unreadable, at least 1.
        first_pause_s: between the first two tries; it doubles.
        no_more_tries_after_s: no try begins later than this.
        answer_s: how long all answers together are waited for.
        silent_s: how long a tier is waited for from which nothing has come. Its library may wait, and ask again, for
            minutes: who takes connections and says nothing is not known to be lost.
    """

    tries: int = 3
    first_pause_s: float = 2.0
    no_more_tries_after_s: float = 20.0
    answer_s: float = 60.0
    silent_s: float = 8.0

    def pauses(self) -> Iterator[float]:
        """Between the tries that begin now, as long as a further one may be made."""
        begun_s = time.monotonic()
        for pause_s in itertools.islice(growing(self.first_pause_s), self.tries - 1):
            if time.monotonic() - begun_s + pause_s > self.no_more_tries_after_s:
                return
            yield pause_s


PATIENCE = Patience()
"""What holds unless a caller says otherwise."""


def unless_silent(action: Callable[[], T], heard: threading.Event, wait_s: float, where: str) -> T:
    """Ask a tier on another thread, and wait for its answer unless nothing is heard of it in time.

    Args:
        action: asks it; it goes on by itself if it is not waited for.
        heard: set when something has come.
        wait_s: how long nothing may come.
        where: what to call the tier in the error.

    Raises:
        TierError: if nothing has come.
        Exception: what ``action`` raises.
    """
    try:
        ended = in_background(action, "spot-ask")
    except RuntimeError as error:  # no more threads can be had now
        logger.debug("%s is asked without a bound: %s", where, error)
        return action()
    ended.add_done_callback(lambda _: heard.set())
    if not heard.wait(wait_s):
        raise TierError(f"{where}: no answer within {wait_s:.0f} s. Check it and the network to it", tier=where)
    return ended.result()


def patiently(action: Callable[[], T], bounds: Patience, where: str) -> T:
    """Ask a tier, again and again within the bounds while it fails, in whatever way.

    Args:
        action: asks it.
        bounds: how often, and for how long.
        where: what to call the tier in the log.

    Raises:
        Exception: of the last try; at once what says that it did answer, also with another version, or that it wants
            another token.
    """

    def note(error: Exception, pause_s: float) -> None:
        why = str(error) if isinstance(error, SpotError) else f"{type(error).__name__}: {error}"
        text = "{why}; asking again in {pause_s:.1f} s"
        say(logging.WARNING, "read-retried", text, about=where, why=unread(where, why), pause_s=pause_s)

    answer = retried(action, bounds.pauses(), lambda error: not _has_answered(error), note)
    recovered("read-retried", "{about} answers again", about=where)
    return answer


def _has_answered(error: Exception) -> bool:
    if isinstance(error, ServerRefusedError):
        return error.is_for_the_token or error.reason is TierReason.PROTOCOL
    return isinstance(error, SpotError) and not isinstance(error, TierError)


def of_tier(tier: str, reason: str) -> str:
    """Why a tier could not be read, with its name; the reasons of nodes have it in them."""
    return reason if "://" in tier and tier in reason else f"{tier}: {reason}"


def unread(where: str, reason: str) -> str:
    """That a tier could not be read: its name is said once."""
    return reason if where in reason else f"{where} could not be read ({reason})"
