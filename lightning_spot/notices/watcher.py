"""The watcher: asks every source on a thread of its own and keeps the first notice."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from lightning_spot.errors import NoticeUnavailableError
from lightning_spot.notices.notice import Notice, NoticeSource
from lightning_spot.notices.signals import SignalSource
from lightning_spot.say import recovered, say

LONGEST_PAUSE_S = 60.0
_LAST_ANSWER_S = 1.0


class Watcher:
    """Watches notice sources.

    Args:
        sources: to ask. Signals are not asked but come by themselves, see :meth:`install_signals`.
    """

    def __init__(self, sources: Sequence[NoticeSource]) -> None:
        self._signals = [source for source in sources if isinstance(source, SignalSource)]
        self._polled = [source for source in sources if not isinstance(source, SignalSource)]
        self._lock = threading.Lock()
        self._notices: dict[str, Notice] = {}
        self._advice: Notice | None = None
        self._latched: Notice | None = None
        self._accepted = False
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def notice(self) -> Notice | None:
        """The first notice that this machine will end. Its deadline stays, even if the source names a later one."""
        for source in self._signals:
            if source.notice is not None:
                return self._latched or source.notice
        return self._latched

    @property
    def advice(self) -> Notice | None:
        """The first notice that an end has become more likely."""
        return self._advice

    @property
    def repeated(self) -> int:
        """How many more signals came after the first: somebody is impatient."""
        return sum(max(0, source.received - 1) for source in self._signals)

    @property
    def usual_grace_s(self) -> float | None:
        """The least time that one of the sources usually leaves; ``None`` if none tells."""
        return min(
            (item.grace_period_s for item in [*self._signals, *self._polled] if item.grace_period_s is not None),
            default=None,
        )

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

    def install_signals(self) -> None:
        """Catch signals; from the main thread."""
        for source in self._signals:
            source.install()

    def expect_workers(self) -> None:
        """See :meth:`SignalSource.expect_workers`."""
        for source in self._signals:
            source.expect_workers()

    def restore_signals(self) -> None:
        """Put the previous handlers back."""
        for source in self._signals:
            source.restore()

    def hold_signals(self) -> None:
        """See :meth:`SignalSource.hold`."""
        for source in self._signals:
            source.hold()

    @property
    def holds_signal(self) -> bool:
        """Whether a signal is kept, see :meth:`SignalSource.hold`."""
        return any(source.is_held for source in self._signals)

    def pass_signals_on(self) -> None:
        """See :meth:`SignalSource.pass_on`."""
        for source in self._signals:
            source.pass_on()

    def _ask(self, source: NoticeSource, key: str) -> None:
        pause_s = source.every_s
        while not self._stopped.is_set():
            try:
                self._heard(key, source.poll())
                pause_s = source.every_s
                recovered("notices-unavailable", "notice source {about} answers again", about=source.name)
            except NoticeUnavailableError as error:
                text = "{error}; it is asked again"
                say(logging.WARNING, "notices-unavailable", text, about=source.name, error=error)
                pause_s = min(2 * pause_s + 0.1, LONGEST_PAUSE_S)
            except Exception:  # a bug in a source must not end the watch
                say(logging.ERROR, "notices-failing", "notice source {about} failed", about=source.name, exc_info=True)
                pause_s = LONGEST_PAUSE_S
            self._stopped.wait(pause_s)
        source.close()

    def _heard(self, key: str, notice: Notice | None) -> None:
        with self._lock:
            if notice is not None and notice.kind == "advice":
                self._advice = self._advice or notice
                return
            if notice is None:
                self._notices.pop(key, None)
            else:
                self._notices.setdefault(key, notice)
            if not self._accepted:  # a notice that was withdrawn before anything was done about it never was
                self._latched = min(self._notices.values(), key=lambda item: item.seen_s, default=None)
