"""For how long something is not tried that has failed: a minute, then two, and so on up to an hour."""

from __future__ import annotations

import time
from typing import Any

_FIRST_PAUSE_S, _LAST_PAUSE_S = 60.0, 3600.0
_MOST_IN_A_ROW = 3


class Pause:
    """For how long one does without what has failed: a minute, then two, and so on up to an hour."""

    def __init__(self) -> None:
        self._next_s, self._until_s = _FIRST_PAUSE_S, 0.0

    @property
    def is_over(self) -> bool:
        """Whether it can be tried (again)."""
        return time.monotonic() >= self._until_s

    def begin(self) -> None:
        """It has failed."""
        self._until_s = time.monotonic() + self._next_s
        self._next_s = min(2 * self._next_s, _LAST_PAUSE_S)

    def forget(self) -> None:
        """It works: the next pause is as long as the first one."""
        self._next_s = _FIRST_PAUSE_S


class Failures:
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
