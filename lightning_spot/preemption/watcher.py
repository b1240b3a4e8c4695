"""The watcher asks every notice source on a thread of its own and keeps the first notice.

:func:`open_sources` makes the sources of ``notices=``: clouds, signals, a file, a Python callable.
"""

from __future__ import annotations

import difflib
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from lightning_spot.config import read_environment
from lightning_spot.errors import NoticeUnavailableError, SettingsError
from lightning_spot.preemption.clouds import CLOUDS, detect_cloud
from lightning_spot.preemption.notice import Notice, NoticeSource
from lightning_spot.preemption.signals import DEFAULT_SIGNALS, SignalSource
from lightning_spot.retry import pause_after
from lightning_spot.say import recovered, say

Answer = Notice | bool | float | None


class CallSource(NoticeSource):
    """Asks a callable.

    Args:
        call: returns ``None`` or ``False`` while all is well; ``True``, the seconds that are left, or a
            :class:`Notice` when the end is near. Called on a thread of its own.
    """

    name = "call"
    every_s = 1.0

    def __init__(self, call: Callable[[], Answer]) -> None:
        self._call = call

    def poll(self) -> Notice | None:
        """Ask."""
        name = getattr(self._call, "__name__", "the callable")
        try:
            answer = self._call()
        except Exception as error:  # the user's code may raise anything
            raise NoticeUnavailableError(f"{name} raised {type(error).__name__}: {error}") from error
        if answer is None or answer is False:
            return None
        if isinstance(answer, Notice):
            return answer
        if not isinstance(answer, (bool, int, float)):
            raise NoticeUnavailableError(f"{name} returned {answer!r}; it returns None, True, seconds or a Notice")
        grace_period_s = None if answer is True else float(answer)
        return Notice(source=self.name, text=f"{name} says that the end is near", grace_period_s=grace_period_s)


class FileSource(NoticeSource):
    """A notice is there when the file is.

    Args:
        path: of the file. If it holds a number, that many seconds are left.
        once: whether the file is removed when it was seen. Else whoever is started again hears of it, too.
    """

    name = "file"
    every_s = 0.5

    def __init__(self, path: str | Path, *, once: bool = False) -> None:
        self.path, self._once = Path(path), once

    def poll(self) -> Notice | None:
        """Look for the file."""
        try:
            content = self.path.read_text(encoding="utf-8", errors="replace").strip()
            if self._once:
                self.path.unlink(missing_ok=True)  # another rank may have seen it, too
        except FileNotFoundError:
            return None
        except OSError as error:
            raise NoticeUnavailableError(f"notice file {self.path} cannot be read ({error.strerror})") from error
        try:
            grace_period_s = float(content) if content else None
        except ValueError:  # a reason in words
            grace_period_s = None
        text = f"notice file {self.path} is there" + (f": {content[:100]}" if content else "")
        return Notice(source=self.name, text=text, grace_period_s=grace_period_s)


Notices = str | NoticeSource | Callable[[], Any] | Sequence[Any] | None


def open_sources(notices: Notices) -> list[NoticeSource]:
    """The sources that were asked for, not yet asked anything.

    Args:
        notices: see :class:`~lightning_spot.SpotCheckpoint`.

    Raises:
        SettingsError: if one is not known.
    """
    if notices is None:
        return []
    if isinstance(notices, str):
        return _named(notices)
    if isinstance(notices, Sequence) and not isinstance(notices, bytes):  # of a configuration, not only a list
        return [source for item in notices for source in open_sources(item)]
    if hasattr(notices, "poll") and not isinstance(notices, type):
        return [cast(NoticeSource, notices)]
    if callable(notices) and not isinstance(notices, type):
        return [CallSource(notices)]
    raise SettingsError(f"notices={notices!r}: give a name, a callable, a notice source, or a list of them")


def _named(name: str) -> list[NoticeSource]:
    if name == "auto":
        environment = read_environment()
        file, is_drill = environment.notice_file, environment.drill_dir is not None
        # A launcher may start ranks again after a drill's notice, which was for those before them.
        files: list[NoticeSource] = [FileSource(file, once=is_drill)] if file else []
        cloud = detect_cloud()
        return [SignalSource(), *files, *([CLOUDS[cloud]()] if cloud is not None else [])]
    if name == "signal":
        return [SignalSource()]
    if name in signal.Signals.__members__:
        return [SignalSource([name])]
    if name.startswith("file:") and len(name) > len("file:"):
        return [FileSource(name.removeprefix("file:"))]
    if name in CLOUDS:
        return [CLOUDS[name]()]
    known = ["auto", *CLOUDS, "signal", *DEFAULT_SIGNALS, "file:PATH"]
    near = difflib.get_close_matches(name, known, 1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise SettingsError(f"notices={name!r} is no known source of notices: they are {', '.join(known)}.{meant}")


LONGEST_PAUSE_S = 60.0
_LAST_ANSWER_S = 1.0


class Watcher:
    """Watches notice sources.

    Args:
        sources: to ask. Signals are not asked but come by themselves.

    Attributes:
        signals: those that are watched, of all sources.
        advice: the first notice that an end has become more likely.
    """

    def __init__(self, sources: Sequence[NoticeSource]) -> None:
        self.signals = SignalSource.of_all([source for source in sources if isinstance(source, SignalSource)])
        self._polled = [source for source in sources if not isinstance(source, SignalSource)]
        self._lock = threading.Lock()
        self._notices: dict[str, Notice] = {}
        self.advice: Notice | None = None
        self._accepted = False
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def notice(self) -> Notice | None:
        """The first notice that this machine will end. Its deadline stays, even if the source names a later one."""
        return min(list(self._notices.values()), key=lambda notice: notice.seen_s, default=self.signals.notice)

    @property
    def cloud(self) -> str | None:
        """The cloud that is asked; ``None`` if there is none."""
        return next((source.name for source in self._polled if source.name in CLOUDS), None)

    def accept(self) -> None:
        """Act on the notice: from now on it stands, even if its source takes it back."""
        with self._lock:
            self._accepted = True

    def start(self) -> None:
        """Begin to ask, on one thread for each source. Returns at once."""
        for number, source in enumerate(self._polled):
            key = f"{source.name}-{number}"
            thread = threading.Thread(target=self._ask, args=(source, key), name=f"spot-notice-{key}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Ask no more. Waits a little for answers under way."""
        self._stopped.set()
        deadline_s = time.monotonic() + _LAST_ANSWER_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _ask(self, source: NoticeSource, key: str) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                self._heard(key, source.poll())
                pause_s, failures = source.every_s, 0
                recovered("notices-unavailable", "notice source {about} answers again", about=source.name)
            except NoticeUnavailableError as error:
                text = "{error}. A preemption may go unnoticed. Retrying"
                say(logging.WARNING, "notices-unavailable", text, about=source.name, error=error)
                failures += 1
                pause_s = pause_after(failures, max(0.1, 2 * source.every_s), LONGEST_PAUSE_S)
            except Exception:  # a bug in a source must not end the watch
                text = "notice source {about} failed unexpectedly. A preemption may go unnoticed"
                say(logging.ERROR, "notices-failing", text, about=source.name, exc_info=True)
                pause_s = LONGEST_PAUSE_S
            self._stopped.wait(pause_s)
        source.close()

    def _heard(self, key: str, notice: Notice | None) -> None:
        with self._lock:
            if notice is not None and notice.kind == "advice":
                self.advice = self.advice or notice
                return
            if self._accepted:
                return
            if notice is None:  # one that was withdrawn before anything was done about it never was
                self._notices.pop(key, None)
            else:
                self._notices.setdefault(key, notice)
