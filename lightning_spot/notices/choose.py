"""Turns the ``notices=`` argument into sources."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Callable, Sequence
from typing import Any, cast

from lightning_spot.config import read_environment
from lightning_spot.errors import SettingsError
from lightning_spot.notices.call import CallSource
from lightning_spot.notices.detect import CLOUDS, AutoSource
from lightning_spot.notices.file import FileSource
from lightning_spot.notices.notice import NoticeSource
from lightning_spot.notices.signals import DEFAULT_SIGNALS, SignalSource

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
