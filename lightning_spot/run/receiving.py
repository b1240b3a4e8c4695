"""Receives a snapshot from elsewhere into memory, checked part by part as it comes. Not for reading it later."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator

from lightning_spot.config import format_bytes
from lightning_spot.errors import SpotError, TierError
from lightning_spot.image.manifest import Manifest
from lightning_spot.staging.slot import available_bytes, memory_file, populate
from lightning_spot.tiers.store import Progress, Store

logger = logging.getLogger(__name__)

_AHEAD_BYTES = 32 * 1024 * 1024


def receive(store: Store, manifest: Manifest, url: str, progress: Progress | None) -> tuple[int, bool]:
    """Fetch a snapshot, each part checked as it comes.

    Args:
        store: where it is.
        manifest: what it is.
        url: what to call it in errors.
        progress: called with the number of bytes just moved.

    Returns:
        a descriptor of the file, which is the caller's to close, and whether it is in memory: a host that has not room
        for it there keeps it on its disk meanwhile.

    Raises:
        SpotError: as :meth:`Store.fetch`, or if there is room for it nowhere.
    """
    available = available_bytes()
    in_memory = available is None or manifest.nbytes <= available
    try:
        fd = _memory_file(manifest.nbytes) if in_memory else _disk_file(manifest.nbytes)
    except (OSError, OverflowError) as error:
        raise TierError(f"{url}: no room for {manifest.nbytes} bytes ({error})", tier=store.url) from error
    try:
        if manifest.nbytes:
            with (
                _mapped(fd, manifest.nbytes) as shared,
                _made_ahead(shared) if in_memory else contextlib.nullcontext(),
            ):
                with memoryview(shared) as view:
                    store.fetch(manifest, view, progress)
    except (OSError, ValueError) as error:
        os.close(fd)
        if isinstance(error, SpotError):
            raise
        raise TierError(f"{url}: no memory for {manifest.nbytes} bytes ({error})", tier=store.url) from error
    except BaseException:
        os.close(fd)
        raise
    return fd, in_memory


@contextlib.contextmanager
def _mapped(fd: int, nbytes: int) -> Iterator[mmap.mmap]:
    shared = mmap.mmap(fd, nbytes)
    try:
        yield shared
    finally:
        with contextlib.suppress(BufferError):  # an error on its way holds views of it still, and unmaps it as it goes
            shared.close()


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
        logger.warning(
            "lightning_spot: this host has not %s of memory to receive a snapshot into; it goes to %s first",
            format_bytes(nbytes),
            tempfile.gettempdir(),
        )
        return os.dup(file.fileno())
