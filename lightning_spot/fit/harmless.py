"""What training does not need is tried, and training goes on where that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
