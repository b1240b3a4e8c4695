"""Turns the ``notices=`` argument into sources; those that a user makes: a file, and a Python callable."""

from __future__ import annotations

import difflib
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from lightning_spot.config import read_environment
from lightning_spot.errors import NoticeUnavailableError, SettingsError
from lightning_spot.notices.detect import CLOUDS, AutoSource
from lightning_spot.notices.notice import Notice, NoticeSource
from lightning_spot.notices.signals import DEFAULT_SIGNALS, SignalSource

Answer = Notice | bool | float | None


class CallSource:
    """Asks a callable.

    Args:
        call: returns ``None`` or ``False`` while all is well; ``True``, the seconds that are left, or a
            :class:`Notice` when the end is near. Called on a thread of its own.
    """

    name = "call"
    every_s = 1.0
    grace_period_s: float | None = None

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
        text = f"{name} says that the end is near"
        return Notice(source=self.name, kind="stop", text=text, seen_s=time.monotonic(), grace_period_s=grace_period_s)

    def close(self) -> None:
        """See :meth:`NoticeSource.close`."""


class FileSource:
    """A notice is there when the file is.

    Args:
        path: of the file. If it holds a number, that many seconds are left.
        once: whether the file is removed when it was seen. Else whoever is started again hears of it, too.
    """

    name = "file"
    every_s = 0.5
    grace_period_s: float | None = None

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
        return Notice(source=self.name, kind="stop", text=text, seen_s=time.monotonic(), grace_period_s=grace_period_s)

    def close(self) -> None:
        """See :meth:`NoticeSource.close`."""


Notices = str | NoticeSource | Callable[[], Any] | Sequence[Any] | None


def open_sources(notices: Notices) -> list[NoticeSource]:
    """The sources that were asked for, not yet asked anything.

    Args:
        notices: see :class:`~lightning_spot.PreemptionGuard`.

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
        return [SignalSource(), *files, AutoSource()]
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
