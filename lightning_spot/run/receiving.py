"""Receives a snapshot into memory of this process, checked part by part as it comes. Not for reading it later."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from typing import Protocol

from lightning_spot.config import format_bytes
from lightning_spot.errors import SpotError, TierError
from lightning_spot.image.manifest import Manifest
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.say import say
from lightning_spot.staging.slot import available_bytes, memory_file, populate, seal_memory
from lightning_spot.tiers.store import Progress

_AHEAD_BYTES = 32 * 1024 * 1024


class Fetches(Protocol):
    """Where a snapshot comes from: a :class:`~lightning_spot.tiers.store.Store`, or what fetches like one.

    Attributes:
        url: what to call it.
    """

    url: str

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """See :meth:`~lightning_spot.tiers.store.Store.fetch`."""


def receive(store: Fetches, manifest: Manifest, tier: str, url: str, progress: Progress | None) -> OpenSnapshot:
    """Fetch a snapshot, each part checked as it comes.

    Args:
        store: where it is.
        manifest: what it is.
        tier: what to call the tier.
        url: what to call it in errors.
        progress: called with the number of bytes just moved.

    Returns:
        the snapshot, in sealed memory where the system can seal it; a host that has not room for it there keeps it on
        its disk meanwhile.

    Raises:
        SpotError: as :meth:`Store.fetch`, or if there is room for it nowhere.
    """
    in_memory = has_room(manifest.nbytes)
    try:
        fd = _memory_file(manifest.nbytes) if in_memory else _disk_file(manifest.nbytes)
    except (OSError, OverflowError) as error:
        raise TierError(f"{url}: no room for {manifest.nbytes} bytes ({error})", tier=store.url) from error
    try:
        if manifest.nbytes:
            shared = mmap.mmap(fd, manifest.nbytes)
            with _made_ahead(shared) if in_memory else contextlib.nullcontext(), memoryview(shared) as view:
                store.fetch(manifest, view, progress)
            shared.close()  # not after an error, whose traceback has views of it
        sealed = in_memory and seal_memory(fd)
    except (OSError, ValueError) as error:
        _drop(fd)
        if isinstance(error, SpotError):
            raise
        raise TierError(f"{url}: no memory for {manifest.nbytes} bytes ({error})", tier=store.url) from error
    except BaseException:
        _drop(fd)
        raise
    return OpenSnapshot(manifest, tier, url, [fd], in_memory=in_memory, sealed=sealed)


def has_room(nbytes: int) -> bool:
    """Whether this host has memory for so many bytes more, as far as can be told."""
    available = available_bytes()
    return available is None or nbytes <= available


@contextlib.contextmanager
def _made_ahead(shared: mmap.mmap) -> Iterator[None]:
    """Have its pages made by a thread, many at a time, while others write to it: page by page costs twice as much."""
    ended = threading.Event()

    def make() -> None:
        for start in range(0, len(shared), _AHEAD_BYTES):
            if ended.is_set() or not populate(shared, start, min(_AHEAD_BYTES, len(shared) - start), write=True):
                return

    thread = threading.Thread(target=make, name="spot-make-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _drop(fd: int) -> None:
    """Give the memory back at once: the mapping lives as long as the traceback of the error that ended it."""
    os.ftruncate(fd, 0)
    os.close(fd)


def _memory_file(nbytes: int) -> int:
    fd = memory_file("lightning-spot-restore")
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _disk_file(nbytes: int) -> int:
    """A file without a name, its room reserved: a disk that is full shows here, and not as a ``SIGBUS`` later."""
    with tempfile.TemporaryFile(prefix="lightning-spot-restore-") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        text = "this host has less than {size} of free memory. The snapshot is received in {about}, which is slower"
        say(logging.WARNING, "received-on-disk", text, about=tempfile.gettempdir(), size=format_bytes(nbytes))
        return os.dup(file.fileno())
