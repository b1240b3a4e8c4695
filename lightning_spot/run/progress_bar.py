"""How far a transfer is: a bar on a terminal. A restore has one once it takes long; elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from lightning_spot.config import format_bytes
from lightning_spot.say import say
from lightning_spot.untrusted import plain

logger = logging.getLogger(__name__)


def transfer_bar(console: Console) -> Progress:
    """A bar with bytes, speed and the time left; it vanishes at its end, and is none where ``console`` is no terminal.

    Args:
        console: of standard error: pipes get the result alone.
    """
    can_draw = console.is_terminal and not console.is_dumb_terminal
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not can_draw)


class RestoreProgress:
    """Shows how far a restore is, from the moment on at which it has taken ``after_s``; a context.

    Args:
        what: is restored.
        nbytes: of it.
        after_s: seconds after which something is shown.
        every_s: seconds between two lines where standard error is no terminal.

    Attributes:
        done: bytes so far.
    """

    def __init__(self, what: str, nbytes: int, *, after_s: float = 3.0, every_s: float = 30.0) -> None:
        self.done, self._nbytes, self._what, self._every_s = 0, nbytes, what, every_s
        self._lock, self._begun_s = threading.Lock(), time.monotonic()
        self._due_s = self._begun_s + after_s
        self._bar = transfer_bar(Console(file=sys.stderr))
        self._task = self._bar.add_task(plain(f"[spot] restoring {what}"), total=nbytes)

    def __call__(self, nbytes: int) -> None:
        """So many bytes more are there. May be called from any thread."""
        with self._lock:
            self.done += nbytes
            now_s = time.monotonic()
            if now_s < self._due_s:
                return
            if self._bar.disable:
                self._due_s = now_s + self._every_s
            try:
                self._show(now_s - self._begun_s)
            except Exception as error:  # such as a terminal that is gone: that is no reason to end a restore
                logger.debug("the progress of the restore cannot be shown: %r", error)

    def __enter__(self) -> RestoreProgress:
        return self

    def __exit__(self, *_raised: object) -> None:
        with contextlib.suppress(Exception):
            if self._bar.live.is_started:
                self._bar.stop()

    def _show(self, taken_s: float) -> None:
        if not self._bar.disable:
            self._bar.start()
            self._bar.update(self._task, completed=self.done)
            return
        say(
            logging.INFO,
            "restoring",
            "restoring {about}: {done} of {size}, {speed}/s",
            about=self._what,
            done=format_bytes(self.done),
            size=format_bytes(self._nbytes),
            speed=format_bytes(int(self.done / max(1e-3, taken_s))),
        )
