"""Moves the parts of a transfer to or from a store over several connections. Not for what a part is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

Job = tuple[int, Callable[[], None]]
"""Bytes of a part, and what moves it."""

CONNECTIONS = 16
"""Over which parts move at once: S3 gives 45–90 MB/s to each. With parts of 8 MiB, 128 MiB are under way."""

REQUESTS = 32
"""At once, with those for small parts."""

SMALL_BYTES = 2**20
"""A part of less than this waits for its answer longer than it moves: it takes no connection from the others."""

_IN_FLIGHT_BYTES = 128 * 1024 * 1024


def move(jobs: Iterable[Job], part_bytes: int) -> None:
    """Do all jobs, in any order; the next one is asked for when a connection is free.

    Small ones, which wait for answers rather than bandwidth, are under way beside the others.
    When this returns or raises no job is running any more.

    Args:
        jobs: the parts.
        part_bytes: most bytes of one of them.

    Raises:
        Exception: the first error of a job, or of ``jobs`` itself; what was not begun is not done then.
    """
    most = max(1, min(CONNECTIONS, _IN_FLIGHT_BYTES // max(1, part_bytes)))
    running: dict[Future[None], bool] = {}  # whether it is a large one
    with ThreadPoolExecutor(REQUESTS, thread_name_prefix="spot-transfer") as pool:
        try:
            for nbytes, job in jobs:
                running[pool.submit(job)] = nbytes >= SMALL_BYTES
                while len(running) >= REQUESTS or sum(running.values()) >= most:
                    _await_one(running)
            while running:
                _await_one(running)
        except BaseException:
            for future in running:
                future.cancel()
            raise


def _await_one(running: dict[Future[None], bool]) -> None:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        del running[future]
        future.result()
