"""Where snapshots can be recovered from: the memory of the local server, any store, or shards at several of these.

Opening one checks it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from lightning_spot.client.local_server import LocalServer
from lightning_spot.client.part_streams import CONNECTIONS
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.starting import attach
from lightning_spot.errors import (
    CorruptSnapshotError,
    ServerUnreachableError,
    SnapshotNotFoundError,
    SpotError,
)
from lightning_spot.run.reading import OpenSnapshot, SnapshotReader, has_room, receive
from lightning_spot.server.tier import Listed
from lightning_spot.snapshot.files import pieces
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.parts import verify_file
from lightning_spot.snapshot.shards import JoinedImage, Section, sections
from lightning_spot.store.local import LocalStore
from lightning_spot.store.posix import open_regular, tier_errors
from lightning_spot.store.store import (
    Holdings,
    Progress,
    Store,
    Target,
    fetch_ranges,
    newest_first,
    put_together,
)

HOST = "host"
STORAGE = "storage"
_HERE = "this host's memory"
_READERS = 4  # whoever waits for a snapshot is idle meanwhile
_MOST_PLACES = 8


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

    def open(self, manifest: Manifest, progress: Progress | None = None, *, shared: bool = False) -> OpenSnapshot:
        """Open a snapshot of which every byte was checked.

        Args:
            manifest: what it is.
            progress: called with the number of bytes just checked.
            shared: whether many processes of this host will read it, or its image is wanted: it is brought into memory
                to which nobody writes any more. Where there is no room, they read it where it is.

        Raises:
            CorruptSnapshotError: if a checksum does not hold.
            SnapshotNotFoundError: if it is no longer there.
            TierError: if the tier fails.
        """


ReadShard = Callable[[Manifest, int, memoryview], None]
"""Reads whole parts of a shard at one place, from one on, and checks them; from any thread."""


class MemorySource:
    """The local server. One process reads its slots where they are; they stay pinned until the snapshot is closed.

    Args:
        url: durable URL of the run, which names the server.
        run: the run, as ``NAME@ID``.
    """

    tier = HOST

    def __init__(self, url: str, run: str) -> None:
        self._url = url
        self._run = run

    def survey(self) -> Holdings:
        """See :meth:`Source.survey`; empty if no server lives."""
        host = attach(self._url, self._run)
        if host is None:
            return Holdings()
        try:
            return Listed.holdings(host.listing())
        except SnapshotNotFoundError:  # the server does not know the run
            return Holdings()
        finally:
            host.disconnect()

    def open(self, manifest: Manifest, progress: Progress | None = None, *, shared: bool = False) -> OpenSnapshot:
        """See :meth:`Source.open`."""
        host = self._attached()
        with contextlib.ExitStack() as opened:
            snapshot = OpenSnapshot(manifest, HOST, _HERE, in_memory=True, release=host.disconnect)
            opened.callback(snapshot.close)
            held = [manifest]
            try:
                snapshot.fds = [host.open_snapshot(manifest)]
            except SnapshotNotFoundError:  # perhaps its shards are here
                held = [each for each in host.manifests() if each.shard and each.snapshot == manifest.name]
                check_whole(manifest, held)
                found, held = sections(held), [shard for shard in held if shard.nbytes]
                writers = [shard.shard.writer for shard in held if shard.shard]
                snapshot.sections = [each._replace(writer=writers.index(each.writer)) for each in found]
                snapshot.fds += map(host.open_snapshot, held)  # one after the other: what is open is closed in any case
            # Ranks of a sharded model read what they need; others look at all of it for longer than a slot may be kept.
            if shared and not manifest.is_sharded and has_room(manifest.nbytes):
                read = functools.partial(_read_slots, snapshot.fds, manifest, snapshot.sections)
                ranges = manifest.ranges()
                return receive(lambda into: fetch_ranges(read, ranges, into, progress, _READERS), manifest, HOST, _HERE)
            for fd, each in zip(snapshot.fds, held, strict=True):
                _verify(fd, each, _HERE, progress, _READERS)
            opened.pop_all()
            return snapshot

    @contextlib.contextmanager
    def shards(self) -> Iterator[ReadShard]:
        """Reads the shards that it has; their slots stay pinned meanwhile."""
        host, lock = self._attached(), threading.Lock()
        fds: dict[str, int] = {}
        with contextlib.ExitStack() as opened:
            opened.callback(host.disconnect)

            def read(manifest: Manifest, start: int, into: memoryview) -> None:
                with lock:
                    if manifest.name not in fds:
                        fds[manifest.name] = host.open_snapshot(manifest)
                        opened.callback(os.close, fds[manifest.name])
                _read_slots([fds[manifest.name]], manifest, (), start, into)

            yield read

    def _attached(self) -> LocalServer:
        host = attach(self._url, self._run)
        if host is None:
            raise SnapshotNotFoundError("the local server has gone")
        return host


def _read_slots(fds: Sequence[int], manifest: Manifest, found: Sequence[Section], start: int, into: memoryview) -> None:
    """Read whole parts of slots that are open, and check what was read."""
    with SnapshotReader(fds, manifest, _HERE, found) as reader:
        reader.seek(start)
        reader.readinto(into)


class StoreSource:
    """A store: storage, or a snapshot server elsewhere.

    Args:
        store: where snapshots are.
        tier: what to call it.
    """

    def __init__(self, store: Store | ServerStore, tier: str) -> None:
        self.store = store
        self.tier = tier

    def survey(self) -> Holdings:
        """See :meth:`Source.survey`."""
        return self.store.survey()

    def open(self, manifest: Manifest, progress: Progress | None = None, *, shared: bool = False) -> OpenSnapshot:
        """See :meth:`Source.open`.

        One process reads one local file in place; all else goes into memory.
        """
        url = f"{self.store.url}/{manifest.data_path}"
        in_place = not manifest.files and not (shared and has_room(manifest.nbytes))
        if isinstance(self.store, LocalStore) and in_place:
            with tier_errors(self.store.url, reading=True):
                fd = open_regular(self.store.root / manifest.data_path)
            snapshot = OpenSnapshot(manifest, self.tier, url, [fd])
            try:
                _verify(fd, manifest, url, progress)
            except BaseException:
                snapshot.close()
                raise
            return snapshot
        return receive(lambda into: self.store.fetch(manifest, into, progress), manifest, self.tier, url)

    @contextlib.contextmanager
    def shards(self) -> Iterator[ReadShard]:
        """Reads the shards that it has."""
        yield self.store.read if isinstance(self.store, ServerStore) else functools.partial(_read_stored, self.store)


def _read_stored(store: Store, manifest: Manifest, start: int, into: memoryview) -> None:
    """Read a shard of a snapshot in storage that is not committed there: files beside each other."""
    assert manifest.shard is not None
    folder = store.folder(manifest.snapshot, attempt=manifest.attempt, run_id=manifest.run_id)
    for span, first, last in pieces(manifest.files, start, start + len(into)):
        data = bytes(last - first)
        if span is not None:
            begin = first - span.offset + (manifest.shard.start if span == manifest.files[0] else 0)
            data = folder.read(span.name, begin, begin + last - first)
        if len(data) != last - first:
            raise CorruptSnapshotError(f"{manifest.name} is cut short at {store.url}", where=store.url)
        into[first - start : last - start] = data
    manifest.verify_range(start, into, store.url)


class ScatteredSource:
    """Snapshots whose shards lie at several tiers, none of which has all of them; implements :class:`Source`.

    Args:
        held: registers of writers, and the source that has each.
    """

    def __init__(self, held: Iterable[tuple[MemorySource | StoreSource, Manifest]]) -> None:
        self._held = list(held)
        self.tier = " ".join(dict.fromkeys(source.tier for source, _ in self._held))

    def survey(self) -> Holdings:
        """See :meth:`Source.survey`; what is whole at one of them is not among these."""
        sources = {id(source): source for source, _ in self._held}.values()
        shards_at = ([shard for source, shard in self._held if source is at] for at in sources)
        at_one = {whole.name for shards in shards_at for whole in put_together(shards)}
        manifests = put_together(manifest for _, manifest in self._held)
        return Holdings(newest_first([whole for whole in manifests if whole.name not in at_one]))

    def held(self, manifest: Manifest) -> list[tuple[MemorySource | StoreSource, Manifest]]:
        """The shards of a snapshot, each with a source that has it."""
        return [(source, shard) for source, shard in self._held if shard.snapshot == manifest.name]

    def open(self, manifest: Manifest, progress: Progress | None = None, *, shared: bool = False) -> OpenSnapshot:
        """See :meth:`Source.open`; each shard is read where it is, at the nearest tier first."""
        held = self.held(manifest)
        with contextlib.ExitStack() as opened:
            sources = {id(source): source for source, _ in held}
            places = {key: opened.enter_context(source.shards()) for key, source in sources.items()}
            reader = ShardReader(manifest, [(places[id(source)], shard) for source, shard in held])
            url = f"{manifest.name} at {self.tier}"
            return receive(lambda into: reader.fetch(into, progress), manifest, self.tier, url)


class ShardReader:
    """Reads a snapshot shard by shard.

    Args:
        manifest: of the snapshot.
        held: its shards, and where each is; one may be at several places.

    Raises:
        SnapshotNotFoundError: if these are not all of it.
    """

    def __init__(self, manifest: Manifest, held: Iterable[tuple[ReadShard, Manifest]]) -> None:
        self._manifest = manifest
        self._places: dict[str, list[ReadShard]] = {}
        self._silent: set[ReadShard] = set()  # places that did not answer when something was read from them last
        shards: dict[str, Manifest] = {}
        for place, shard in held:
            if shard == shards.setdefault(shard.name, shard):
                self._places.setdefault(shard.name, []).append(place)
        check_whole(manifest, shards.values())
        self._shards = sorted(shards.values(), key=lambda shard: shard.name)
        self._image = JoinedImage(sections(self._shards), ())

    def fetch(self, into: Target, progress: Progress | None) -> None:
        """See :meth:`Store.fetch`; all places are read at the same time."""
        ranges = sorted(self._manifest.ranges(), key=lambda bounds: next(self._image.pieces(*bounds))[1])
        places = {place for places in self._places.values() for place in places}
        fetch_ranges(self.read, ranges, into, progress, CONNECTIONS * min(len(places), _MOST_PLACES))

    def read(self, start: int, into: memoryview) -> None:
        """Read parts of the image, and check them; from any thread."""
        done = 0
        for writer, first, last in self._image.pieces(start, start + len(into)):
            self._read_shard(self._shards[writer], first, into[done : done + last - first])
            done += last - first

    def _read_shard(self, shard: Manifest, start: int, into: memoryview) -> None:
        problem: SpotError | None = None
        # Each part would else wait again for a server whose link is cut.
        for place in sorted(self._places[shard.name], key=self._silent.__contains__):
            try:
                place(shard, start, into)
                self._silent.discard(place)
                return
            except SpotError as error:
                problem = error
                if isinstance(error, ServerUnreachableError):
                    self._silent.add(place)
        assert problem is not None
        raise problem


def check_whole(manifest: Manifest, shards: Iterable[Manifest]) -> None:
    """Make sure that these shards are all of a snapshot.

    Raises:
        SnapshotNotFoundError: if not.
    """
    if [whole.checksums for whole in put_together(shards)] != [manifest.checksums]:
        raise SnapshotNotFoundError(f"not all of {manifest.name} is there any more")


def _verify(fd: int, manifest: Manifest, url: str, progress: Progress | None, threads: int = 1) -> None:
    """Check every part of a file, or of a slot; a disk reads faster from one place."""
    where = f"{manifest.run}/{manifest.name} at {url}"
    verify_file(fd, manifest.nbytes, manifest.checksums, manifest.part_bytes, where, progress, threads)
