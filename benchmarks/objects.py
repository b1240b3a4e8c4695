"""A snapshot to and from an object store that gives each connection 40 MB/s, against one connection; and its memory.

The store is ``benchmarks.s3_server`` behind ``benchmarks.throttle``, each a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from benchmarks.measure import Result, seconds
from benchmarks.s3_server import s3_behind
from benchmarks.throttle import Throttle
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.store.objects import ObjectStore

MEGABYTES_PER_S = 40.0
NBYTES = 512 * 10**6
ONE_CONNECTION_BYTES = 80 * 10**6


@dataclass(frozen=True)
class Speeds:
    """Bytes per second, and bytes of memory beyond the snapshot itself."""

    put: float
    get: float
    put_over_one: float
    get_over_one: float
    put_extra_bytes: int
    get_extra_bytes: int


def measured(nbytes: int, megabytes_per_s: float, rounds: int = 1) -> Speeds:
    """Put and get a snapshot, and a smaller one over one connection by s3fs alone."""
    image = memoryview(os.urandom(2**20) * -(-nbytes // 2**20))[:nbytes]
    into = memoryview(bytearray(b"\1") * nbytes)
    few = bytes(image[: min(nbytes, ONE_CONNECTION_BYTES)])
    puts, gets, extra = [], [], [0, 0]
    with s3_behind(lambda port: Throttle(port, megabytes_per_s)):
        store = ObjectStore("s3://benchmark/run-1")
        for step in range(rounds + 1):  # the first opens the connections
            manifest = Manifest(run="run-1", name=snapshot_name(step, 1), step=step, attempt=1, nbytes=nbytes)
            manifest = manifest.sealed(image)
            with peak_memory() as peak:
                puts.append(seconds(lambda m=manifest: store.put(m, image, attempt=1)))  # type: ignore[misc]
            extra[0] = max(extra[0], peak())
            with peak_memory() as peak:
                gets.append(seconds(lambda m=manifest: store.fetch(m, into)))  # type: ignore[misc]
            extra[1] = max(extra[1], peak())
            assert into == image
            store.delete(manifest)
        files, path = store._fs, "benchmark/one"
        put_one = seconds(lambda: files.pipe_file(path, few, chunksize=2**30, max_concurrency=1))
        get_one = seconds(lambda: files.cat_file(path, start=0, end=len(few)))
    return Speeds(
        put=nbytes / min(puts[1:]),
        get=nbytes / min(gets[1:]),
        put_over_one=len(few) / put_one,
        get_over_one=len(few) / get_one,
        put_extra_bytes=extra[0],
        get_extra_bytes=extra[1],
    )


@contextlib.contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """How much the process grew at most, in bytes."""
    process, stop = psutil.Process(), threading.Event()
    before = highest = process.memory_info().rss

    def watch() -> None:
        nonlocal highest
        while not stop.wait(0.01):
            highest = max(highest, process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: highest - before
    finally:
        stop.set()
        thread.join()


def run(quick: bool) -> list[Result]:
    speeds: list[Any] = [measured(NBYTES, MEGABYTES_PER_S) for _ in range(1 if quick else 3)]
    return [
        Result("put of 512 MB / over one connection", [item.put / item.put_over_one for item in speeds], 5, False),
        Result("get of 512 MB / over one connection", [item.get / item.get_over_one for item in speeds], 5, False),
        Result("memory of a put beyond the snapshot", [item.put_extra_bytes / NBYTES for item in speeds], 0.3),
        Result("memory of a get beyond the snapshot", [item.get_extra_bytes / NBYTES for item in speeds], 0.5),
    ]
