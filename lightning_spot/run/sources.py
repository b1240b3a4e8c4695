"""Where snapshots can be recovered from: the memory of this host's node, or any store. Opening one checks it."""

from __future__ import annotations

import contextlib
import enum
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from lightning_spot.client.remote import NodeStore
from lightning_spot.client.spread import SpreadStore
from lightning_spot.client.starting import attach
from lightning_spot.errors import SnapshotNotFound, TierError
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.parts import verify_file
from lightning_spot.memory.tier import Listed
from lightning_spot.run.reading import OpenSnapshot, SnapshotReader
from lightning_spot.run.receiving import has_room, receive
from lightning_spot.run.streaming import Streamed
from lightning_spot.tiers.files import open_regular
from lightning_spot.tiers.local import LocalStore
from lightning_spot.tiers.store import Holdings, Progress, Store, newest_first

MEMORY = "memory"
DURABLE = "durable"
_READERS = 4  # whoever waits for a snapshot is idle meanwhile


class Use(enum.Enum):
    """What an open snapshot is wanted for.

    Attributes:
        CHECK: every byte is checked when it is open.
        LOAD: one reader goes through it once, and then calls :meth:`SnapshotReader.finish`.
        SHARE: many processes of this host will read it, or its image is wanted: it is brought into memory to which
            nobody writes any more. Where there is no room, they read it where it is.
    """

    CHECK = enum.auto()
    LOAD = enum.auto()
    SHARE = enum.auto()


class Source(Protocol):
    """A tier to recover from.

    Attributes:
        tier: what to call it.
    """

    tier: str

    def survey(self) -> Holdings:
        """What it holds of the run.

        Raises:
            TierError: if it could not be read.
        """

    def open(self, manifest: Manifest, progress: Progress | None = None, *, use: Use = Use.CHECK) -> OpenSnapshot:
        """Open a snapshot of which every byte was checked, or will be when it is read.

        Args:
            manifest: what it is.
            progress: called with the number of bytes just checked.
            use: what it is wanted for.

        Raises:
            CorruptSnapshot: if a checksum does not hold.
            SnapshotNotFound: if it is no longer there.
            TierError: if the tier fails.
        """


class MemorySource:
    """The node on this host.

    Args:
        url: durable URL of the run, which names the node.
        run: the run, as ``NAME@ID``.
    """

    tier = MEMORY

    def __init__(self, url: str, run: str) -> None:
        self._url = url
        self._run = run

    def survey(self) -> Holdings:
        """See :meth:`Source.survey`; empty if no node lives."""
        manifests = newest_first([item.manifest for item in self.listing() if not item.manifest.is_file])
        return Holdings(manifests, {}, max((manifest.attempt for manifest in manifests), default=0))

    def listing(self) -> list[Listed]:
        """Everything the node holds of the run."""
        host = attach(self._url, self._run)
        if host is None:
            return []
        try:
            return host.listing()
        except SnapshotNotFound:  # the node does not know the run
            return []
        finally:
            host.disconnect()

    def open(self, manifest: Manifest, progress: Progress | None = None, *, use: Use = Use.CHECK) -> OpenSnapshot:
        """See :meth:`Source.open`. The slot stays pinned until closed, unless it is copied to be shared."""
        host = attach(self._url, self._run)
        if host is None:
            raise SnapshotNotFound("the node on this host has gone")
        try:
            fd = host.open_snapshot(manifest)
        except BaseException:
            host.disconnect()
            raise
        slot = OpenSnapshot(manifest, MEMORY, "this host's memory", fd, in_memory=True, release=host.disconnect)
        # Of several files nothing is looked at for longer than it is open.
        if use is Use.SHARE and not manifest.files and has_room(manifest.nbytes):
            with contextlib.closing(slot):
                return receive(_Pinned(slot), manifest, MEMORY, slot.url, progress)
        return _checked(slot, progress)


class _Pinned:
    """Copies a pinned slot; see :class:`~lightning_spot.run.receiving.Fetches`."""

    def __init__(self, slot: OpenSnapshot) -> None:
        self.url, self._fd = slot.url, slot.fd

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """See :meth:`Fetches.fetch`."""

        def read(bounds: tuple[int, int]) -> None:
            start, stop = bounds
            with SnapshotReader(self._fd, manifest, self.url, check=False) as reader:
                reader.seek(start)
                reader.readinto(into[start:stop])
            manifest.verify_range(start, into[start:stop], self.url)
            if progress is not None:
                progress(stop - start)

        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(read, manifest.ranges()))


class StoreSource:
    """A store: the durable tier, or a memory node elsewhere.

    Args:
        store: where snapshots are.
        tier: what to call it.
    """

    def __init__(self, store: Store, tier: str) -> None:
        self.store = store
        self.tier = tier

    def survey(self) -> Holdings:
        """See :meth:`Source.survey`."""
        return self.store.survey()

    def open(self, manifest: Manifest, progress: Progress | None = None, *, use: Use = Use.CHECK) -> OpenSnapshot:
        """See :meth:`Source.open`.

        One process reads one local file in place, and what a node has while it arrives; all else goes into memory.
        """
        url = f"{self.store.url}/{manifest.data_path}"
        if isinstance(self.store, SpreadStore):
            url = f"{manifest.name}, spread over {len(self.store.nodes)} nodes"
        in_place = not manifest.files and not (use is Use.SHARE and has_room(manifest.nbytes))
        if isinstance(self.store, LocalStore) and in_place:
            try:
                fd = open_regular(self.store.root / manifest.data_path)
            except FileNotFoundError as error:
                raise SnapshotNotFound(f"{url} does not exist") from error
            except OSError as error:
                raise TierError(f"{url}: {error.strerror}", tier=self.store.url) from error
            return _checked(OpenSnapshot(manifest, self.tier, url, fd), progress)
        if isinstance(self.store, NodeStore) and use is Use.LOAD and not manifest.files:
            return Streamed(manifest, self.tier, self.store, url)
        return receive(self.store, manifest, self.tier, url, progress)


def _checked(snapshot: OpenSnapshot, progress: Progress | None) -> OpenSnapshot:
    """Verify every part; closes the snapshot if one is bad."""
    manifest = snapshot.manifest
    where = f"{manifest.run}/{manifest.name} at {snapshot.url}"
    try:
        threads = _READERS if snapshot.in_memory else 1  # a disk reads faster from one place
        verify_file(snapshot.fd, manifest.nbytes, manifest.checksums, manifest.part_bytes, where, progress, threads)
    except BaseException:
        snapshot.close()
        raise
    return snapshot
