"""Errors that nobody expected, and what is done as far as possible: they cost a snapshot and not the training.

Errors of the user's own code are raised: Lightning raises them when it saves a checkpoint, too.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from lightning_spot.errors import FailureReason, SnapshotFailedError, SpotError
from lightning_spot.retry import growing
from lightning_spot.say import say

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 60.0, 3600.0
_MOST_IN_A_ROW = 3

_OURS = frozenset(
    (
        *("lightning_spot", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"),
        *("torch", "torchmetrics", "numpy", "xxhash", "backports", "rich"),
        *("aiohttp", "yarl", "multidict", "fsspec", "s3fs", "aiobotocore", "botocore", "gcsfs", "adlfs"),
    )
)
"""Packages that work for us. With Python's own modules, whatever else is on the way to an error is the user's."""


THE_END, STILL_ENDS = "the end of snapshots", "the run ends all the same"
"""What each part of the end of a ``fit`` is for people, and what happens where one fails."""


class Pause:
    """For how long one does without what has failed: a minute, then two, and so on up to an hour."""

    def __init__(self) -> None:
        self._until_s = 0.0
        self.forget()

    @property
    def is_over(self) -> bool:
        """Whether it can be tried (again)."""
        return time.monotonic() >= self._until_s

    def begin(self) -> None:
        """It has failed."""
        self._until_s = time.monotonic() + next(self._pauses_s)

    def forget(self) -> None:
        """It works: the next pause is as long as the first one."""
        self._pauses_s = growing(_FIRST_PAUSE_S, _LAST_PAUSE_S)


class UnexpectedFailures:
    """Snapshots that failed in a way that nobody has foreseen. After some in a row there is a pause."""

    def __init__(self) -> None:
        self._pause = Pause()
        self._in_a_row = 0
        self._newest: Any = None

    @property
    def are_too_many(self) -> bool:
        """Whether none is to be begun now."""
        return not self._pause.is_over

    def add(self, newest: Any) -> bool:
        """One more has failed.

        Args:
            newest: what was committed last: another one than before if they did not all fail since.

        Returns:
            whether a pause begins.
        """
        if newest is not self._newest:
            self._newest, self._in_a_row = newest, 0
            self._pause.forget()
        self._in_a_row += 1
        if self._in_a_row < _MOST_IN_A_ROW:
            return False
        self._pause.begin()
        return True


def failure_of(error: Exception) -> SpotError:
    """What an error means that came up while a snapshot was taken: that there is none now.

    Args:
        error: that was just caught.

    Returns:
        the error itself where it is one of ours; else what says the same.

    Raises:
        Exception: the error itself, if code of the user's has raised it, or what that has called.
    """
    if not isinstance(error, SpotError) and is_of_user(error):
        raise error
    return as_failure(error)


def as_failure(error: Exception) -> SpotError:
    """The same where none of the user's code is at work."""
    if isinstance(error, SpotError):
        return error
    logger.debug("a snapshot could not be taken", exc_info=error)
    text = str(error)
    failure = SnapshotFailedError(
        f"{type(error).__name__}: {text}" if text else type(error).__name__, reason=FailureReason.UNEXPECTED
    )
    failure.__cause__ = error.with_traceback(None)  # its frames would keep tensors alive
    return failure


def is_of_user(error: BaseException) -> bool:
    """Whether, where an error was raised, code was at work that is neither ours nor of what we build on."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in _OURS and name not in sys.stdlib_module_names:
            return True
        trace = trace.tb_next
    return False


T = TypeVar("T")


class BestEffort:
    """Tries what training does not need, and logs what fails.

    Args:
        strict: whether an error is raised all the same.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

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
            text = "{about} failed, {still}: {error}. Report it if it repeats."
            say(logging.WARNING, "extra-failed", text, about=what, still=still, error=failure)
            return otherwise
