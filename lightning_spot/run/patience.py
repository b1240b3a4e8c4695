"""How often and how long tiers are asked when an attempt begins."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lightning_spot.errors import ProtocolMismatch, SpotError, TierError

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
    """

    tries: int = 3
    first_pause_s: float = 2.0
    no_more_tries_after_s: float = 20.0
    answer_s: float = 60.0


PATIENCE = Patience()
"""What holds unless a caller says otherwise."""


def patiently(action: Callable[[], T], bounds: Patience, where: str) -> T:
    """Ask a tier, again and again within the bounds while it fails, in whatever way.

    Args:
        action: asks it.
        bounds: how often, and for how long.
        where: what to call the tier in the log.

    Raises:
        Exception: of the last try; at once what says that it did answer, also with another version.
    """
    begun_s, pause_s = time.monotonic(), bounds.first_pause_s
    for number in range(1, bounds.tries + 1):
        try:
            return action()
        except ProtocolMismatch:
            raise
        except Exception as error:
            has_answered = isinstance(error, SpotError) and not isinstance(error, TierError)
            is_late = time.monotonic() - begun_s + pause_s > bounds.no_more_tries_after_s
            if has_answered or is_late or number == bounds.tries:
                raise
            why = str(error) if isinstance(error, SpotError) else f"{type(error).__name__}: {error}"
            logger.warning("lightning_spot: %s; asking again in %.1f s", unanswered(where, why), pause_s)
        time.sleep(pause_s)
        pause_s *= 2
    raise AssertionError("unreachable")


def of_tier(tier: str, reason: str) -> str:
    """Why a tier could not be read, with its name; the reasons of nodes have it in them."""
    return reason if "://" in tier and tier in reason else f"{tier}: {reason}"


def unanswered(where: str, reason: str) -> str:
    """That a tier does not answer: its name is said once."""
    return reason if where in reason else f"{where} does not answer ({reason})"
