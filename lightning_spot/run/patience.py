"""How often and how long tiers are asked when an attempt begins."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lightning_spot.errors import NodeRefused, ProtocolMismatch, SpotError, TierError
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
    begun_s, pause_s = time.monotonic(), bounds.first_pause_s
    for number in range(1, bounds.tries + 1):
        try:
            return action()
        except ProtocolMismatch:
            raise
        except Exception as error:
            has_answered = isinstance(error, SpotError) and not isinstance(error, TierError)
            has_answered |= isinstance(error, NodeRefused) and error.is_for_the_token
            is_late = time.monotonic() - begun_s + pause_s > bounds.no_more_tries_after_s
            if has_answered or is_late or number == bounds.tries:
                raise
            why = str(error) if isinstance(error, SpotError) else f"{type(error).__name__}: {error}"
            logger.warning("lightning_spot: %s; asking again in %.1f s", unread(where, why), pause_s)
        time.sleep(pause_s)
        pause_s *= 2
    raise AssertionError("unreachable")


def of_tier(tier: str, reason: str) -> str:
    """Why a tier could not be read, with its name; the reasons of nodes have it in them."""
    return reason if "://" in tier and tier in reason else f"{tier}: {reason}"


def unread(where: str, reason: str) -> str:
    """That a tier could not be read: its name is said once."""
    return reason if where in reason else f"{where} could not be read ({reason})"
