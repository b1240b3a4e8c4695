"""Work that several threads take pieces of: as many as can be had, the calling one among them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of the container, seen from inside (cgroup v2)


@cache
def processors() -> int:
    """Processors that this process may use: not all of the host's where it is bound to some, or in a container.

    Threads beyond a container's share have all of its processes stopped until the next tenth of a second.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
        return min(count, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # there is none, or it says "max"
        return count


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


def all_at_once(actions: Sequence[Callable[[], T]], name: str, most: int = 8) -> list[T]:
    """Do what waits for answers side by side; the results in order. Where threads are short, some after others.

    Args:
        actions: to do.
        name: of the threads.
        most: at once, the calling thread among them.

    Raises:
        Exception: what the first of those that failed, in order, has raised. None is begun after one has failed, or
            the calling thread was interrupted, and none is being done any more.
    """
    results: dict[int, T] = {}
    failures: dict[int, Exception] = {}
    left, lock = iter(range(len(actions))), threading.Lock()
    ended = threading.Event()

    def work() -> None:
        try:
            while not ended.is_set():
                with lock:
                    index = next(left, None)
                if index is None:
                    return
                try:
                    results[index] = actions[index]()
                except Exception as error:
                    failures[index] = error
                    ended.set()
        except BaseException:
            ended.set()
            raise

    work_together(work, min(most, len(actions)), name)
    if failures:
        raise failures[min(failures)]
    return [results[index] for index in range(len(actions))]


def both(first: Callable[[], T], second: Callable[[], U], name: str) -> tuple[T, U]:
    """Do two such things, see :func:`all_at_once`."""
    one: list[T] = []
    other: list[U] = []
    all_at_once((lambda: one.append(first()), lambda: other.append(second())), name)
    return one[0], other[0]
