"""How far a transfer is: a bar on a terminal. A restore has one once it takes long; elsewhere a line now and then."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from lightning_spot.config import format_bytes
from lightning_spot.say import say
from lightning_spot.untrusted import plain

logger = logging.getLogger(__name__)

_DRAWN_EVERY_S = 0.2
_JOIN_S = 5.0


def transfer_bar(console: Console) -> Progress:
    """A bar with bytes, speed and the time left; it vanishes at its end, and is none where ``console`` is no terminal.

    Args:
        console: of standard error: pipes get the result alone.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not _can_draw(console))


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
        self.done = 0
        self._what, self._nbytes = what, nbytes
        self._after_s, self._every_s = after_s, every_s
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._show, name="spot-restoring", daemon=True)
        self._begun_s = time.monotonic()

    def __call__(self, nbytes: int) -> None:
        """So many bytes more are there. May be called from any thread."""
        with self._lock:
            self.done += nbytes

    def __enter__(self) -> RestoreProgress:
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads can be had now: a restore does without
            logger.debug("the restore shows no progress: %s", error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    def _show(self) -> None:
        if self._ended.wait(self._after_s):
            return
        console = Console(file=sys.stderr)
        try:
            if _can_draw(console):
                self._draw(console)
            else:
                self._write_lines()
        except Exception as error:  # such as a terminal that is gone: that is no reason to end a restore
            logger.debug("the progress of the restore cannot be shown: %r", error)

    def _draw(self, console: Console) -> None:
        with transfer_bar(console) as bar:
            task = bar.add_task(plain(f"[spot] restoring {self._what}"), total=self._nbytes, completed=self.done)
            while not self._ended.wait(_DRAWN_EVERY_S):
                bar.update(task, completed=self.done)

    def _write_lines(self) -> None:
        while True:
            say(
                logging.INFO,
                "restoring",
                "restoring {about}: {done} of {size}, {speed}/s",
                about=self._what,
                done=format_bytes(self.done),
                size=format_bytes(self._nbytes),
                speed=format_bytes(int(self.done / max(1e-3, time.monotonic() - self._begun_s))),
            )
            if self._ended.wait(self._every_s):
                return


def _can_draw(console: Console) -> bool:
    return bool(console.is_terminal and not console.is_dumb_terminal)
