"""Writes several objects at once: small ones and the blocks of large ones side by side. Each appears as a whole."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_spot.tiers.multipart import Upload, block_bytes, slices_of
from lightning_spot.tiers.transfers import Job, move


class Once:
    """Does something the first time that it is called, on any thread; whoever comes meanwhile waits until it is done.

    Args:
        action: what to do; done again by the next call if it has raised.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action, self._lock, self._is_done = action, threading.Lock(), False

    def __call__(self) -> None:
        """Do it, unless it is done."""
        with self._lock:
            if not self._is_done:
                self._action()
                self._is_done = True


class SideBySide:
    """Objects on their way to S3, each in one request or in blocks. The next one begins when a connection is free.

    Args:
        files: an s3fs file system.
        objects: their bytes, by path.
        ready: called before an object becomes visible: each time, on any thread.
        goes_on: called before each request; what it raises ends all of it.
        done: told the path of each object that is there.
    """

    def __init__(
        self,
        files: Any,
        objects: Mapping[str, memoryview],
        *,
        ready: Callable[[], None],
        goes_on: Callable[[], None],
        done: Callable[[str], None],
    ) -> None:
        self._files, self._objects = files, objects
        self._ready, self._goes_on, self._done = ready, goes_on, done
        self._begun: dict[str, Upload] = {}
        self._left: dict[str, int] = {}  # blocks of each upload that are not there yet
        self._lock = threading.Lock()

    def write(self) -> None:
        """Write all of them.

        Raises:
            Exception: whatever failed first; what is not there as a whole is aborted, and no request is under way.
        """
        sizes = {path: block_bytes(len(data)) for path, data in self._objects.items()}
        try:
            move(self._jobs(sizes), max(sizes.values(), default=1))
        except BaseException:
            for upload in self._begun.values():
                with contextlib.suppress(Exception):  # the next attempt's sweep aborts it
                    upload.abort()
            raise

    def _jobs(self, sizes: Mapping[str, int]) -> Iterator[Job]:
        for path, data in self._objects.items():
            if len(data) <= sizes[path]:
                yield len(data), functools.partial(self._put, path, data)
                continue
            self._goes_on()
            blocks = list(slices_of(data, sizes[path]))
            self._begun[path], self._left[path] = Upload(self._files, path), len(blocks)
            for number, block in enumerate(blocks, 1):
                yield len(block), functools.partial(self._send, path, number, block)

    def _put(self, path: str, data: memoryview) -> None:
        self._goes_on()
        content = bytes(data)
        self._ready()
        self._files.pipe_file(path, content)
        self._done(path)

    def _send(self, path: str, number: int, block: memoryview) -> None:
        self._goes_on()
        self._begun[path].send(number, block)
        with self._lock:
            self._left[path] -= 1
            is_last = not self._left[path]
        if is_last:
            self._ready()
            self._begun[path].complete()
            del self._begun[path]
            self._done(path)
