"""A Python callable: the user's own way to know."""

from __future__ import annotations

import time
from collections.abc import Callable

from lightning_spot.errors import NoticeUnavailable
from lightning_spot.notices.notice import Notice

Answer = Notice | bool | float | None


class CallSource:
    """Asks a callable.

    Args:
        call: returns ``None`` or ``False`` while all is well; ``True``, the seconds that are left, or a
            :class:`Notice` when the end is near. Called on a thread of its own.
    """

    name = "call"
    every_s = 1.0
    grace_s: float | None = None

    def __init__(self, call: Callable[[], Answer]) -> None:
        self._call = call

    def poll(self) -> Notice | None:
        """Ask."""
        name = getattr(self._call, "__name__", "the callable")
        try:
            answer = self._call()
        except Exception as error:  # the user's code may raise anything
            raise NoticeUnavailable(f"{name} raised {type(error).__name__}: {error}") from error
        if answer is None or answer is False:
            return None
        if isinstance(answer, Notice):
            return answer
        if not isinstance(answer, (bool, int, float)):
            raise NoticeUnavailable(f"{name} returned {answer!r}; it returns None, True, seconds or a Notice")
        grace_s = None if answer is True else float(answer)
        text = f"{name} says that the end is near"
        return Notice(source=self.name, kind="stop", text=text, seen_s=time.monotonic(), grace_s=grace_s)

    def close(self) -> None:
        """See :meth:`NoticeSource.close`."""
