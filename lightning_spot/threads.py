"""Work on other threads: pieces that as many as can be had take, the calling one among them; or what goes on alone."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar, cast

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The container's share of the processors, seen from inside (cgroup v2)."""


@cache
def processors() -> int:
    """Processors that this process may use: not all of the host's where it is bound to some, or in a container.

    Threads beyond a container's share have all of its processes stopped until the next tenth of a second.
    """
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return min(count, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # there is none, or it says "max"
        return count


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Do something on a thread of its own, which the end of the program does not wait for; its result.

    Args:
        work: what to do.
        name: of the thread.

    Raises:
        RuntimeError: if no more threads can be had.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # whoever does not wait any more keeps it from nothing

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


class InBackground(Generic[T]):
    """Handles items in order, on a thread that lives as long as there are any.

    Args:
        handle: does it, and says what fails.
        name: of the thread.
        most: items that wait; newer ones count.

    Attributes:
        is_idle: whether nothing is being handled.
    """

    def __init__(self, handle: Callable[[T], object], name: str, most: int) -> None:
        self._handle, self._name = handle, name
        self._waiting: deque[T] = deque(maxlen=most)
        self._changed = threading.Condition()
        self.is_idle, self._is_closed = True, False

    def add(self, item: T) -> bool:
        """Have an item handled; whether a thread is at it."""
        with self._changed:
            if not self._is_closed:
                self._waiting.append(item)
                if self.is_idle:
                    try:
                        in_background(self._handle_all, self._name)
                        self.is_idle = False
                    except RuntimeError as error:  # no more threads can be had: the next item tries again
                        logger.debug("%s: %s", self._name, error)
            return not self.is_idle

    def wait(self, wait_s: float) -> bool:
        """Wait so many seconds at most until nothing is being handled; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_idle, wait_s)

    def close(self, wait_s: float) -> bool:
        """Wait so many seconds at most until all are handled, and handle no more; whether all are."""
        with self._changed:
            is_done, self._is_closed = self.wait(wait_s) and not self._waiting, True
            self._waiting.clear()
            return is_done

    def _handle_all(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self.is_idle = True
                    self._changed.notify_all()
                    return
                item = self._waiting.popleft()
            with contextlib.suppress(Exception):
                self._handle(item)
            del item  # who waits for the next one keeps nothing


def work_together(work: Callable[[], None], count: int, name: str) -> None:
    """Call ``work`` on this thread and up to ``count - 1`` others; returns when all calls have returned.

    Where no more threads can be had (a limit of processes was reached), those that are there do all of it.

    Args:
        work: takes pieces until none is left.
        count: threads at most.
        name: of the others.

    Raises:
        BaseException: what a call has raised, that on this thread first.
    """
    failures: list[BaseException] = []

    def help_out() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    helpers: list[threading.Thread] = []
    try:
        for _ in range(count - 1):
            helper = threading.Thread(target=help_out, name=name, daemon=True)
            try:
                helper.start()
            except RuntimeError as error:
                logger.debug("%d threads instead of %d: %s", len(helpers) + 1, count, error)
                break
            helpers.append(helper)
        work()
    finally:
        for helper in helpers:
            helper.join()
    if failures:
        raise failures[0]


def in_turn(pieces: Iterable[T], use: Callable[[T], object], count: int, name: str) -> None:
    """Have pieces taken in turn, by one thread at a time, and used side by side, until none is left.

    Args:
        pieces: none of them ``None``; the next one is asked for when a thread is free.
        use: what is done with it.
        count: threads at most, the calling one among them.
        name: of the others.

    Raises:
        BaseException: what one of them has raised, as :func:`work_together`. None is taken after one has failed, or the
            calling thread was interrupted, and none is being used any more.
    """
    left, taking, ended = iter(pieces), threading.Lock(), threading.Event()

    def work() -> None:
        try:
            while not ended.is_set():
                with taking:
                    piece = next(left, None)
                if piece is None:
                    return
                use(piece)
        except BaseException:
            ended.set()
            raise

    work_together(work, count, name)


def all_at_once(actions: Sequence[Callable[[], T]], name: str, most: int = 8) -> list[T]:
    """Do what waits for answers side by side; the results in order. Where threads are short, some after others.

    Args:
        actions: to do.
        name: of the threads.
        most: at once, the calling thread among them.

    Raises:
        Exception: what the first of those that failed, in order, has raised; see :func:`in_turn`.
    """
    results: dict[int, T] = {}
    failures: dict[int, Exception] = {}

    def act(index: int) -> None:
        try:
            results[index] = actions[index]()
        except Exception as error:
            failures[index] = error
            raise

    try:
        in_turn(range(len(actions)), act, min(most, len(actions)), name)
    except Exception as error:
        raise failures.get(min(failures, default=-1), error)  # noqa: B904 # which another thread has met
    return [results[index] for index in range(len(actions))]


def both(first: Callable[[], T], second: Callable[[], U], name: str) -> tuple[T, U]:
    """Do two such things, see :func:`all_at_once`."""
    either: Sequence[Callable[[], T | U]] = (first, second)
    return cast(tuple[T, U], tuple(all_at_once(either, name)))
