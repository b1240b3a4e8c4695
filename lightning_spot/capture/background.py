"""A thread beside training that does what it is given, one thing after another."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable

from lightning_spot.say import UNEXPECTED, say
from lightning_spot.staging.copier import LoneThread

CLOSE_S = 10.0
"""At the end, threads beside training are waited for so long, twice: then what they wait for is broken off."""

_AGAIN_S = 1.0
_Failed = Callable[[BaseException], None]


class Background:
    """Does tasks in turn on a thread of its own, until :meth:`close`.

    Args:
        name: of the thread.
        idle: called when nothing has come for a while, and at the end.
        idle_s: how long that is, asked each time; ``None`` for ever.
    """

    def __init__(
        self,
        name: str,
        idle: Callable[[], None] = lambda: None,
        idle_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._idle, self._idle_s = idle, idle_s
        self._is_over = False
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], _Failed] | None] = queue.SimpleQueue()
        self._thread = LoneThread(target=self._run, name=name)
        self._thread.start()

    def put(self, task: Callable[[], None], failed: _Failed = lambda _error: None) -> None:
        """Have something done after all that was put before.

        Args:
            task: what.
            failed: called with the error if it raises one, wherever that comes up: somebody may wait for what it does.
        """
        self._tasks.put((task, failed))

    def close(self, wait_s: float) -> bool:
        """Do what was put so far, and no more; whether the thread has ended, after ``wait_s`` seconds at most."""
        self._tasks.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_over:
            try:
                self._turn()
            except Exception:  # nobody is to wait for a thread that has ended
                say(logging.ERROR, "unexpected", UNEXPECTED, about="a task during training", exc_info=True)

    def _turn(self) -> None:
        """Do what comes next, or what is to be done while nothing comes."""
        try:
            task = self._tasks.get(timeout=self._wait_s())
        except queue.Empty:
            self._idle()
            return
        if task is None:
            self._is_over = True
            self._idle()
            return
        do, failed = task
        try:
            do()
        except BaseException as error:
            failed(error)
            raise

    def _wait_s(self) -> float | None:
        try:
            return self._idle_s()
        except Exception:  # it is asked again, and not at once
            say(logging.ERROR, "unexpected", UNEXPECTED, about="a pause during training", exc_info=True)
            return _AGAIN_S
