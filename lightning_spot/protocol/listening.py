"""What a program that listens watches over: how many files it may have open, and how much it logs of strangers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import traceback
from collections import Counter
from typing import Any

logger = logging.getLogger(__name__)

_UNLIMITED = 2**30


def allow_descriptors(more: int) -> None:
    """Let this process open so many files more, as far as it may raise its limit: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = more
    with contextlib.suppress(OSError):  # where nothing shows what is open
        wanted += len(os.listdir("/proc/self/fd"))
    wanted = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            logger.debug("the limit of open files stays at %d: %s", soft, error)


def open_files() -> int:
    """How many files this process may have open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


_EVERY_S = 60.0
_MOST_KINDS = 16
_LONGEST_KIND = 240


class CountedLog:
    """Counts what happens, and writes one line a minute for each kind of it. All methods: on one event loop.

    Args:
        logger: gets the lines.
        every_s: seconds between two lines of one kind.
    """

    def __init__(self, logger: logging.Logger, every_s: float = _EVERY_S) -> None:
        self._logger, self._every_s = logger, every_s
        self._counts: Counter[tuple[str, str]] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, kind: str, whose: str = "", *, key: str = "") -> None:
        """Count one.

        Args:
            kind: what has happened, in the plural.
            whose: address of the client, if that is known; a few addresses are remembered until they are written.
            key: of the line, as :mod:`lightning_spot.say` has them.
        """
        line = (f"{kind} from {whose}" if whose else kind)[:_LONGEST_KIND], key
        if line not in self._counts and len(self._counts) >= _MOST_KINDS:
            line = "further events", ""
        self._counts[line] += 1
        if self._timer is None:
            try:
                self._timer = asyncio.get_running_loop().call_later(self._every_s, self.write)
            except RuntimeError:  # the loop has ended: what is left of it comes now
                self.write()

    def add_error(self, kind: str, error: BaseException | None) -> None:
        """Count an error: by its class and the place where it was raised. Its text may hold what a stranger sent."""
        if isinstance(error, OSError):
            kind += f" ({error.strerror or type(error).__name__})"
        elif error is not None:
            places = traceback.extract_tb(error.__traceback__)
            where = f" at {places[-1].filename}:{places[-1].lineno}" if places else ""
            kind += f" ({type(error).__name__}{where})"
        self.add(kind)

    def on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What :meth:`asyncio.loop.set_exception_handler` takes. By default, asyncio writes a traceback for each."""
        self.add_error(f"errors of the event loop: {context.get('message')}", context.get("exception"))

    def write(self) -> None:
        """Write what was counted, now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for (line, key), count in self._counts.items():
            extra = {"spot_key": key, "spot_facts": {"count": count, "about": line}}
            self._logger.warning("%d %s in the last minute", count, line, extra=extra)
        self._counts.clear()
