"""Where snapshots can be recovered from: the memory of this host's node, or any store. Opening one checks it."""

from __future__ import annotations

import io
import mmap
import os
import tempfile
from dataclasses import dataclass
from typing import IO, Any, Protocol, cast

from lightning_spot.errors import CorruptSnapshot, SnapshotNotFound, TierError
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.embedded import EmbeddedHost, attach
from lightning_spot.tiers.local import LocalStore
from lightning_spot.tiers.store import Progress, Store

MEMORY = "memory"
DURABLE = "durable"


@dataclass(slots=True)
class OpenSnapshot:
    """A snapshot whose checksums were found to hold, open for reading.

    Attributes:
        manifest: what it is.
        tier: ``"memory"`` (this host's node), ``"durable"``, or the URL of a memory node.
        url: where it came from, for people.
        fd: descriptor of its file; closed by :meth:`close`.
        session: what keeps its slot from being reused, if it is one.
    """

    manifest: Manifest
    tier: str
    url: str
    fd: int
    session: EmbeddedHost | None = None

    def reader(self) -> IO[bytes]:
        """The file, of exactly ``manifest.nbytes`` bytes, for ``torch.load``. Close it before the snapshot."""
        return cast(IO[bytes], _SnapshotReader(self.fd, self.manifest.nbytes))

    def close(self) -> None:
        """Let the file, and the slot, go."""
        os.close(self.fd)
        if self.session is not None:
            self.session.session.close()


class _SnapshotReader(io.BufferedIOBase):
    """Reads the first bytes of a descriptor: a slot is longer than the snapshot in it.

    ``readinto`` copies once, straight into the caller's memory (a tensor's storage).
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        super().__init__()
        self._fd = fd
        self._nbytes = nbytes
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._nbytes}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted, got = min(len(view), max(0, self._nbytes - self._place)), 0
        while got < wanted:  # one preadv moves at most 2 GiB
            count = os.preadv(self._fd, [view[got:wanted]], self._place)
            if count == 0:
                break
            got += count
            self._place += count
        return got

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._nbytes - self._place)
        buffer = bytearray(left if size is None or size < 0 else min(size, left))
        return bytes(memoryview(buffer)[: self.readinto(buffer)])


class Source(Protocol):
    """A tier to recover from."""

    tier: str

    def manifests(self) -> list[Manifest]:
        """Committed snapshots, newest first."""

    def open(self, manifest: Manifest, progress: Progress | None = None) -> OpenSnapshot:
        """Open a snapshot after checking every byte of it.

        Raises:
            CorruptSnapshot: if a checksum does not hold.
            SnapshotNotFound: if it is no longer there.
            TierError: if the tier fails.
        """


class MemorySource:
    """The node on this host.

    Args:
        dirpath: durable URL of the run, which names the node.
        run: the run.
    """

    tier = MEMORY

    def __init__(self, dirpath: str, run: str) -> None:
        self._dirpath = dirpath
        self._run = run

    def manifests(self) -> list[Manifest]:
        """See :meth:`Source.manifests`; empty if no node lives."""
        host = attach(self._dirpath, self._run)
        if host is None:
            return []
        try:
            return host.manifests()
        finally:
            host.session.close()

    def open(self, manifest: Manifest, progress: Progress | None = None) -> OpenSnapshot:
        """See :meth:`Source.open`. The slot is mapped, not copied, and stays pinned until closed."""
        host = attach(self._dirpath, self._run)
        if host is None:
            raise SnapshotNotFound("the node on this host has gone")
        where = "this host's memory"
        snapshot = OpenSnapshot(manifest, MEMORY, where, host.open_snapshot(manifest), host)
        return _checked(snapshot, where, progress)


class StoreSource:
    """A store: the durable tier, or a memory node elsewhere.

    Args:
        store: where snapshots are.
        tier: what to call it.
    """

    def __init__(self, store: Store, tier: str) -> None:
        self.store = store
        self.tier = tier

    def manifests(self) -> list[Manifest]:
        """See :meth:`Source.manifests`."""
        return self.store.survey().manifests

    def open(self, manifest: Manifest, progress: Progress | None = None) -> OpenSnapshot:
        """See :meth:`Source.open`. A local file is read in place; from elsewhere it is fetched into memory once."""
        url = f"{self.store.url}/{manifest.data_path}"
        if isinstance(self.store, LocalStore):
            try:
                fd = os.open(self.store.root / manifest.data_path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError as error:
                raise SnapshotNotFound(f"{url} does not exist") from error
            except OSError as error:
                raise TierError(f"{url}: {error.strerror}", tier=self.store.url) from error
            return _checked(OpenSnapshot(manifest, self.tier, url, fd), url, progress)
        fd = _memory_file(manifest.nbytes)
        snapshot = OpenSnapshot(manifest, self.tier, url, fd)
        try:
            if manifest.nbytes:
                with mmap.mmap(fd, manifest.nbytes) as shared, memoryview(shared) as view:
                    self.store.fetch(manifest, view, progress)
        except BaseException:
            snapshot.close()
            raise
        return _checked(snapshot, url, None)


def _checked(snapshot: OpenSnapshot, where: str, progress: Progress | None) -> OpenSnapshot:
    """Verify every part; closes the snapshot if one is bad."""
    manifest = snapshot.manifest
    try:
        size = os.fstat(snapshot.fd).st_size
        if size < manifest.nbytes or not (manifest.checksums or manifest.nbytes == 0):
            raise CorruptSnapshot(
                f"{manifest.run}/{manifest.name} at {where} is cut short: {size} of {manifest.nbytes} bytes are there",
                where=where,
            )
        if manifest.nbytes:
            with mmap.mmap(snapshot.fd, manifest.nbytes, access=mmap.ACCESS_READ) as shared:
                with memoryview(shared) as view:
                    manifest.verify(view, where)
        if progress is not None:
            progress(manifest.nbytes)
    except BaseException:
        snapshot.close()
        raise
    return snapshot


def _memory_file(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("lightning-spot-restore", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, nbytes)
    return fd
