"""Messages to the person who runs a training or a server: each has a level, a key and facts.

A warning or an error is logged once for each cause. While the cause lasts, it is logged again every ten minutes, with a
count; :func:`recovered` logs its end. Beyond so many causes in that time, all others of a key count as one. Of what
strangers make up these are few, so that they fill no log, and hide nothing. The key is ``spot_key`` of the log record,
and the facts are ``spot_facts``:

    logging.getLogger("lightning_spot").addFilter(lambda record: getattr(record, "spot_key", "") != "storage-slow")
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

logger = logging.getLogger("lightning_spot")

AGAIN_S = 600.0
"""Seconds between two messages of one cause."""

UNEXPECTED = "{about} failed unexpectedly. It is retried. Report the traceback."
"""Text of messages with the key ``unexpected``."""

_MOST_CAUSES, _MOST_OF_STRANGERS, _OTHERS = 1024, 64, "…"  # of one key
_MOST_RECENT, _MOST_RECENT_OF_KEY, _LONGEST_RECENT = 100, 20, 1000


@dataclass(frozen=True, slots=True)
class Said:
    """A message that was logged.

    Attributes:
        unix_s: when.
        level: as in :mod:`logging`.
        key: names the event.
        text: what was logged.
    """

    unix_s: float
    level: int
    key: str
    text: str


Listener = Callable[[str, str, str, bool], None]
"""Takes a message's key, what it is about, its line, and whether the cause is over. It raises nothing."""


class Messages:
    """Logs messages and counts those that it leaves out. Methods may be called from any thread.

    Args:
        clock: gives seconds.

    Attributes:
        recent: the latest messages, oldest first; of each key a few.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By key and cause: when it was logged last, how often it came up since. No lock: a fork would inherit it.
        self._said: dict[str, dict[str, tuple[float, int]]] = {}
        self._listeners: tuple[Listener, ...] = ()
        self.recent: deque[Said] = deque(maxlen=_MOST_RECENT)

    def say(
        self,
        level: int,
        key: str,
        text: str,
        /,
        *,
        about: object = "",
        only_rank_zero: bool = False,
        of_strangers: bool = False,
        exc_info: bool = False,
        **facts: object,
    ) -> None:
        """Log a message.

        Args:
            level: ``logging.ERROR`` if the run cannot be resumed, or a guarantee is broken; ``WARNING`` if the reader
                should act; ``INFO`` for a change of state, which is logged each time.
            key: names the event, such as ``"storage-slow"``; documented in ``docs/reference/messages.md``.
            text: event, consequence, action; :meth:`str.format` fills in ``about`` and the facts.
            about: which run, server or file; with the key, it is the cause.
            only_rank_zero: whether other ranks do not log it.
            of_strangers: whether strangers make up what it is about: few causes are told apart.
            exc_info: whether the traceback of the current exception follows.
            facts: values in the text.
        """
        if only_rank_zero and _rank():
            return
        count, is_new = 0, False
        if level >= logging.WARNING:
            causes, cause, now_s = self._said.setdefault(key, {}), str(about), self._clock()
            most = _MOST_OF_STRANGERS if of_strangers else _MOST_CAUSES
            if cause not in causes and len(causes) >= most:
                for each, (said_s, _) in list(causes.items()):
                    if each != _OTHERS and now_s - said_s >= AGAIN_S:
                        causes.pop(each, None)
                cause = cause if len(causes) < most else _OTHERS
            is_new = cause not in causes
            said_s, count = causes.get(cause, (-AGAIN_S, 0))
            if now_s - said_s < AGAIN_S:
                causes[cause] = (said_s, count + 1)
                return
            causes[cause] = (now_s, 0)
        often = f" ({count + 1} times since this was last logged)" if count else ""
        line = text.format(about=about, **facts)
        self._log(level, key, line + often, {"about": about, **facts}, exc_info=exc_info)
        if is_new:
            self._tell(key, about, line, is_over=False)

    def recovered(self, key: str, text: str, /, *, about: object = "", **facts: object) -> None:
        """Log that a cause is over, if it was logged before.

        Args:
            key: of the message that was logged.
            text: see :meth:`say`.
            about: see :meth:`say`.
            facts: see :meth:`say`.
        """
        if self._said.get(key, {}).pop(str(about), None) is not None:
            line = text.format(about=about, **facts)
            self._log(logging.INFO, key, line, {"about": about, **facts})
            self._tell(key, about, line, is_over=True)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Have a listener called, on the thread that logs, when a cause is logged first and when it is over.

        Returns:
            what has it called no more.
        """
        self._listeners = (*self._listeners, listener)

        def stop() -> None:
            self._listeners = tuple(each for each in self._listeners if each != listener)

        return stop

    def forget(self) -> None:
        """Log each cause once more."""
        self._said.clear()

    def _tell(self, key: str, about: object, line: str, *, is_over: bool) -> None:
        for listener in self._listeners:
            listener(key, str(about), line, is_over)

    def _log(self, level: int, key: str, line: str, facts: dict[str, object], *, exc_info: bool = False) -> None:
        rank = _rank()
        prefix = f"[spot r{rank}]" if rank else "[spot]"
        extra = {"spot_key": key, "spot_facts": facts}
        of_key = [said for said in self.recent.copy() if said.key == key]
        if len(of_key) >= _MOST_RECENT_OF_KEY:
            with contextlib.suppress(ValueError):  # another thread was faster
                self.recent.remove(of_key[0])
        self.recent.append(Said(time.time(), level, key, line[:_LONGEST_RECENT]))
        logger.log(level, "%s %s", prefix, line, exc_info=exc_info, extra=extra, stacklevel=3)


def show() -> None:
    """Show messages of level INFO and above on standard error, as Lightning shows its own, unless the user logs."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _Console) for handler in logger.handlers):
        logger.addHandler(_Console())


class _Console(logging.StreamHandler[TextIO]):
    """Writes messages to standard error for as long as the program has no handlers of its own."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # the stream is looked up for each message: programs replace it

    @property
    def stream(self) -> TextIO:  # type: ignore[override] # as logging's own last resort has it
        """Standard error, as it is now."""
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        is_message = hasattr(record, "spot_key") or record.levelno >= logging.WARNING
        return is_message and not logging.getLogger().handlers and bool(super().filter(record))


def _rank() -> int:
    """This process's rank. Lightning keeps it there for its own messages; a server does not import Lightning."""
    known = sys.modules.get("lightning_utilities.core.rank_zero")
    return int(getattr(getattr(known, "rank_zero_only", None), "rank", None) or 0)


_messages = Messages()
say, recovered, listen = _messages.say, _messages.recovered, _messages.listen
forget, recent = _messages.forget, _messages.recent
