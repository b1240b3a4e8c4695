"""Tries again what failed. All loops that do are made of these."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat, takewhile
from typing import TypeVar

T = TypeVar("T")

_MOST_DOUBLINGS = 30


def growing(first_s: float, last_s: float = float("inf"), factor: float = 2.0) -> Iterator[float]:
    """Pauses without end, each longer than the one before.

    Args:
        first_s: seconds of the first.
        last_s: seconds of the longest.
        factor: by which they grow.
    """
    pause_s = min(first_s, last_s)
    while True:
        yield pause_s
        pause_s = min(factor * pause_s, last_s)


def pause_after(failures: int, first_s: float, last_s: float) -> float:
    """The pause of :func:`growing` after so many failures in a row, where others are made between two tries.

    Args:
        failures: from 1.
        first_s: seconds after the first.
        last_s: seconds of the longest.
    """
    return min(last_s, first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))


def within(bound_s: float, pauses_s: Iterable[float]) -> Iterator[float]:
    """Those pauses that end in time, beginning now; the last one again and again.

    Args:
        bound_s: seconds for all of it.
        pauses_s: seconds of each.
    """
    pauses, deadline_s = tuple(pauses_s), time.monotonic() + bound_s
    return takewhile(lambda pause_s: time.monotonic() + pause_s < deadline_s, chain(pauses, repeat(pauses[-1])))


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
