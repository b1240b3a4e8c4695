"""How many parts of a transfer are under way at once, found by measuring. Not for what a part is or where it goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from lightning_spot.tiers.batches import Pace, best_part_bytes

Job = tuple[int, Callable[[], None]]
"""Bytes of a part, and what moves it."""

FEWEST = 4
FIRST = 8  # S3 gives 45–90 MB/s per stream
MOST = 32
SMALL_BYTES = 2**20
"""A part of less than this waits for its answer longer than it moves: it takes no lane from the others."""

_FASTER = 1.1  # what more lanes have to bring to be kept
_IN_FLIGHT_BYTES = 128 * 1024 * 1024


class Lanes:
    """Moves parts over several connections at once; keeps adding lanes while that makes it faster. Thread-safe.

    What was found is kept for the next transfer. At most 32 lanes, and 128 MiB of parts, are under way.

    Attributes:
        count: lanes to begin with.
        pace: of one lane.
    """

    def __init__(self) -> None:
        self.count = FIRST
        self.pace = Pace()
        self._lock = threading.Lock()

    def part_bytes(self, nbytes: int, least: int) -> int:
        """How large the parts of a transfer of ``nbytes`` should be, at least ``least``, from what was measured."""
        return best_part_bytes(nbytes, self.count, self.pace, least=least, under_way=_IN_FLIGHT_BYTES)

    def run(self, jobs: Iterable[Job], part_bytes: int) -> None:
        """Do all jobs, in any order; the next one is asked for when a lane is free.

        Small ones, which wait for answers rather than bandwidth, are under way beside those of the lanes, 32 in all.
        When this returns or raises no job is running any more.

        Args:
            jobs: the parts.
            part_bytes: most bytes of one of them.

        Raises:
            Exception: the first error of a job, or of ``jobs`` itself; what was not begun is not done then.
        """
        most = max(1, min(MOST, _IN_FLIGHT_BYTES // max(1, part_bytes)))
        climb = Climb(min(self.count, most), most)
        running: dict[Future[None], int] = {}
        with ThreadPoolExecutor(MOST, thread_name_prefix="spot-lane") as pool:
            try:
                for nbytes, job in jobs:
                    running[pool.submit(self._timed, nbytes, job)] = nbytes
                    while len(running) >= MOST or _in_lanes(running.values()) >= climb.lanes:
                        _await_one(running, climb)
                while running:
                    _await_one(running, climb)
            except BaseException:
                for future in running:
                    future.cancel()
                raise
        with self._lock:
            self.count = max(FEWEST, climb.best_lanes)

    def _timed(self, nbytes: int, job: Callable[[], None]) -> None:
        began_s = time.monotonic()
        job()
        with self._lock:
            self.pace.moved(nbytes, time.monotonic() - began_s)


class Climb:
    """Adds lanes, round by round, until a round is not faster than the one before.

    Args:
        lanes: to begin with.
        most: of them.
        clock: monotonic, seconds.

    Attributes:
        lanes: to have now.
        most: of them.
        best_lanes: with which it was fastest so far.
    """

    def __init__(self, lanes: int, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.lanes = self.best_lanes = lanes
        self.most = most
        self._best = 0.0
        self._climbing = True
        self._begun_s, self._parts, self._bytes = clock(), 0, 0

    def moved(self, nbytes: int) -> None:
        """A part of so many bytes was moved."""
        self._parts += 1
        self._bytes += nbytes
        if not self._climbing or self._parts < self.lanes:
            return
        speed = self._bytes / max(1e-9, self._clock() - self._begun_s)
        if speed > self._best * _FASTER:
            self._best, self.best_lanes = speed, self.lanes
            self.lanes = min(self.most, self.lanes + max(1, self.lanes // 2))
            self._climbing = self.lanes > self.best_lanes
        else:
            self.lanes, self._climbing = self.best_lanes, False
        self._begun_s, self._parts, self._bytes = self._clock(), 0, 0


def _in_lanes(parts: Iterable[int]) -> int:
    """How many of the parts that are under way, of so many bytes each, take a lane."""
    return sum(nbytes >= SMALL_BYTES for nbytes in parts)


def _await_one(running: dict[Future[None], int], climb: Climb) -> None:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        nbytes = running.pop(future)
        future.result()
        if nbytes >= SMALL_BYTES:
            climb.moved(nbytes)
