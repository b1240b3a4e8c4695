"""What training does not need is tried, and training goes on where that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from lightning_spot.capture.unforeseen import failure_of

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
        """Do one part after the other, whatever fails in one: what is raised, is raised when all are done.

        Args:
            what: see :meth:`run`.
            parts: of it.
            last: what comes after them; an error of its own is its caller's.
            still: see :meth:`run`.

        Returns:
            what ``last`` gives.

        Raises:
            Exception: see there; the first.
        """
        raised: Exception | None = None
        for part in parts:
            try:
                self.run(what, part, None, still=still)
            except Exception as error:
                raised = raised or error
        found = last()
        if raised is not None:
            raise raised
        return found
