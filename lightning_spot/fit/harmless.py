"""What training does not need is tried, and training goes on where that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from lightning_spot.capture.unforeseen import failure_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

THE_END, STILL_ENDS = "the end of snapshots", "the run ends all the same"
"""What each part of the end of a ``fit`` is for people, and what happens where one fails."""


class Harmless:
    """Tries what training does not need. Each thing that fails is said once.

    Args:
        strict: whether an error is raised all the same.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._said: set[str] = set()

    def run(self, what: str, do: Callable[[], T], otherwise: T, *, still: str = "training goes on") -> T:
        """Do something; ``otherwise`` if it fails.

        Args:
            what: it is, for people.
            do: it.
            otherwise: what it gives then.
            still: what happens all the same, for people.

        Raises:
            Exception: of the user's code; any with ``strict``.
        """
        try:
            return do()
        except Exception as error:
            if self._strict:
                raise
            failure = failure_of(error)
            if what not in self._said:
                self._said.add(what)
                logger.warning("lightning_spot: %s failed, %s: %s", what, still, failure)
            return otherwise

    def run_all(self, what: str, parts: Iterable[Callable[[], object]], last: Callable[[], T], *, still: str) -> T:
        """Do one part after the other, see :func:`do_all`.

        Args:
            what: see :meth:`run`.
            parts: of it.
            last: what comes after them; an error of its own is its caller's.
            still: see :meth:`run`.

        Returns:
            what ``last`` gives.

        Raises:
            Exception: see :meth:`run`; the first.
        """
        return do_all([partial(self.run, what, part, None, still=still) for part in parts], last)


def do_all(parts: Iterable[Callable[[], object]], last: Callable[[], T]) -> T:
    """Do one part after the other, whatever is raised in one: that is raised when all are done.

    Args:
        parts: what is done.
        last: what comes after them; an error of its own is its caller's.

    Returns:
        what ``last`` gives.

    Raises:
        Exception: the first of those of the parts.
    """
    raised: Exception | None = None
    for part in parts:
        try:
            part()
        except Exception as error:
            raised = raised or error
    found = last()
    if raised is not None:
        raise raised
    return found
