"""Signals: how SLURM, Kubernetes, torchrun, SageMaker and people say that a process will end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from lightning_spot.config import read_environment
from lightning_spot.errors import SettingsError
from lightning_spot.preemption.notice import Notice, NoticeSource
from lightning_spot.say import say

DEFAULT_SIGNALS = ("SIGTERM", "SIGUSR1")

_DEAD_WORKER = "DataLoader worker (pid"  # torch has no class for its error

GROUP_S = 0.25
"""A signal to a whole process group reaches all its processes within so long, workers perhaps before this one."""


class SignalSource(NoticeSource):
    """Signals to this process.

    The handler only sets attributes: it runs between two instructions of the training thread, which may hold any lock.

    Args:
        signals: their names.
        grace_period_s: seconds between the signal and the end; default ``LIGHTNING_SPOT_GRACE_PERIOD_S``, or unknown.

    Raises:
        SettingsError: if there is no such signal, or it cannot be caught.
    """

    name = "signal"
    every_s = 0.1

    def __init__(self, signals: Sequence[str] = DEFAULT_SIGNALS, grace_period_s: float | None = None) -> None:
        for item in signals:
            if item not in signal.Signals.__members__ or item in ("SIGKILL", "SIGSTOP"):
                raise SettingsError(
                    f"notices={item!r}: there is no such signal that can be caught; try SIGTERM or SIGUSR1"
                )
        environment = read_environment()
        self.grace_period_s = grace_period_s if grace_period_s is not None else environment.grace_period_s
        self._by = " from SLURM" if environment.slurm_job is not None else ""
        self.notice: Notice | None = None
        self.received = 0
        self._signals = [signal.Signals[item] for item in signals]
        self._previous: dict[signal.Signals, Any] = {}
        self._first: dict[signal.Signals, Any] = {}
        self._of_children: Callable[[int, FrameType | None], Any] | None = None
        self._pid = 0
        self._is_over = False
        self._came: int | None = None
        self._held: int | None = None

    @classmethod
    def of_all(cls, sources: Sequence[SignalSource]) -> SignalSource:
        """One source for the signals of several."""
        if len(sources) == 1:
            return sources[0]
        names = dict.fromkeys(number.name for source in sources for number in source._signals)
        return cls(
            list(names), next((item.grace_period_s for item in sources if item.grace_period_s is not None), None)
        )

    @property
    def repeated(self) -> int:
        """How many more signals came after the first: somebody is impatient."""
        return max(0, self.received - 1)

    def install(self) -> None:
        """Catch the signals; from the main thread only. A second call does nothing."""
        if self._previous or not self._signals:
            return
        if threading.current_thread() is not threading.main_thread():
            text = "training does not run in the main thread. Signals are not noticed"
            say(logging.WARNING, "signals-unwatched", text)
            return
        for number in self._signals:
            self._previous[number] = former = signal.signal(number, self._handle)
            self._first.setdefault(number, former)
        self._pid = os.getpid()

    def expect_workers(self) -> None:
        """Be the first to hear of workers that end, since they may hear of a signal to the whole group before this one.

        Called again and again, from the main thread: torch begins to listen when it makes its first workers.
        """
        if self._previous:
            self._expect_ends_of_children()

    def restore(self) -> None:
        """Put back the handlers that were there before, unless somebody else has replaced ours."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._of_children is not None and signal.getsignal(signal.SIGCHLD) == self._child_ended:
            signal.signal(signal.SIGCHLD, self._of_children)
            self._of_children = None  # else who has replaced ours may call it
        while self._previous:
            number, handler = self._previous.popitem()
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def hold(self) -> None:
        """Training is over: keep a signal until :meth:`pass_on`. A second one goes on at once.

        Called where Lightning has put back the handlers that were there before training. One that came after the last
        place to stop at is kept, too: nobody has stopped for it.
        """
        if self._previous:
            self.restore()
            self._is_over, self._held = True, self._came
            self.install()
            self._expect_ends_of_children()  # loaders may keep their workers, and torch's error would break it off

    @property
    def is_held(self) -> bool:
        """Whether a signal is kept, see :meth:`hold`."""
        return self._held is not None

    def pass_on(self) -> None:
        """Send this process the signal that was kept, if one was; after :meth:`restore`."""
        number, self._held = self._held, None
        if number is not None:
            signal.raise_signal(number)

    def is_told_to_end(self) -> bool:
        """Whether a signal has come, or comes at once: its handler runs while this one waits."""
        deadline_s = time.monotonic() + GROUP_S
        while self.notice is None and not self.is_held and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return self.notice is not None or self.is_held

    def poll(self) -> Notice | None:
        """The first signal that came."""
        return self.notice

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child: the training is its parent's
            if not _is_worker_of(self._pid):
                self._do_as_before(number, frame)
            return
        if self._is_over:
            is_second, self._held = self._held is not None, number
            if is_second:
                self.restore()
                self.pass_on()
            return
        self.received += 1
        self._came = number
        if self.notice is None:
            text = f"{signal.Signals(number).name}{self._by}: this process is to end"
            self.notice = Notice(source=self.name, text=text, grace_period_s=self.grace_period_s)
            self._expect_ends_of_children()

    def _do_as_before(self, number: int, frame: FrameType | None) -> None:
        """Do what a signal did before training: Lightning's handlers would only tell a training of it."""
        former = self._first[signal.Signals(number)]
        if callable(former):
            former(number, frame)
        elif former != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _expect_ends_of_children(self) -> None:
        """Have torch say nothing of workers that end: the signal may have been for all processes of the group.

        SLURM and systemd send it to all. What torch raises of each worker of a ``DataLoader``, in the middle of any
        step, would come between training and its last snapshot.
        """
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and self._of_children is None:
            self._of_children = handler
            signal.signal(signal.SIGCHLD, self._child_ended)

    def _child_ended(self, number: int, frame: FrameType | None) -> None:
        if (handler := self._of_children) is None:
            return
        try:
            handler(number, frame)
        except RuntimeError:  # a loader that needs that worker raises the same where it waits
            if not (self._previous and self.is_told_to_end()):
                raise


def _is_worker_of(pid: int) -> bool:
    """Whether this is a loader's worker of a living process, which needs its batches until it has stopped."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None and os.getppid() == pid


def is_of_dead_worker(error: BaseException) -> bool:
    """Whether an error says that a worker of a ``DataLoader`` has died: of its own, or by a signal to the group."""
    return isinstance(error, RuntimeError) and str(error).startswith(_DEAD_WORKER)
