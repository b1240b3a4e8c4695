"""Where snapshots can be recovered from: the memory of the local server, any store, or shards at several of these.

Opening one checks it.

What a snapshot server has is read while it arrives: checked part by part, and never in memory as a whole. New memory
costs most when gigabytes are restored. Parts come ahead, over several connections, into a few buffers that stay warm,
and go from there to where the reader wants them. Not for several readers of one snapshot.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import mmap
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

from lightning_spot.client.embedded import EmbeddedHost
from lightning_spot.client.part_lanes import CONNECTIONS
from lightning_spot.client.remote import ServerStore, fetch_ranges
from lightning_spot.client.starting import attach
from lightning_spot.config import PART_BYTES
from lightning_spot.errors import (
    CorruptSnapshotError,
    ServerUnreachableError,
    SnapshotNotFoundError,
    SpotError,
    TierError,
)
from lightning_spot.image.files import pieces
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.parts import verify_file
from lightning_spot.image.shards import JoinedImage
from lightning_spot.memory.tier import Listed
from lightning_spot.run.reading import OpenSnapshot, SnapshotReader, has_room, receive
from lightning_spot.tiers.local import LocalStore
from lightning_spot.tiers.posix import open_regular
from lightning_spot.tiers.store import (
    HasFolders,
    Holdings,
    Progress,
    ReadsRanges,
    Store,
    newest_first,
    put_together,
)

HOST = "host"
STORAGE = "storage"
_READERS = 4  # whoever waits for a snapshot is idle meanwhile
_MOST_PLACES = 8

_LANES = 4
_BUFFERS = 6
_KEPT_PARTS = 3
_MOST_TURNS = 16  # torch reads the end of a file and then forwards, which takes 3 or 4
_SMALL_BYTES = 64 * 1024  # below this Python's lock is not worth letting go


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
            CorruptSnapshotError: if a checksum does not hold.
            SnapshotNotFoundError: if it is no longer there.
            TierError: if the tier fails.
        """


class ShardPlace(Protocol):
    """Where shards of a snapshot are read.

    Attributes:
        url: what to call it.
    """

    url: str

    def read(self, manifest: Manifest, start: int, into: memoryview) -> None:
        """Read whole parts of a shard, from one on, and check them; from any thread."""


class MemorySource:
    """The local server.

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
        return Holdings.of_memory(item.manifest for item in self.listing())

    def listing(self) -> list[Listed]:
        """Everything the server holds of the run."""
        host = attach(self._url, self._run)
        if host is None:
            return []
        try:
            return host.listing()
        except SnapshotNotFoundError:  # the server does not know the run
            return []
        finally:
            host.disconnect()

    def open(self, manifest: Manifest, progress: Progress | None = None, *, use: Use = Use.CHECK) -> OpenSnapshot:
        """See :meth:`Source.open`. The slot stays pinned until closed, unless it is copied to be shared."""
        with contextlib.ExitStack() as opened:
            host = opened.enter_context(self._attached())
            place = _LocalShards(host)
            opened.callback(place.close)
            try:
                fd = host.open_snapshot(manifest)
            except SnapshotNotFoundError:
                shards = [each for each in host.manifests() if each.shard and each.snapshot == manifest.name]
                return Joined(manifest, [(place, each) for each in shards]).open(HOST, place.url, progress)
            release = opened.pop_all().close
        slot = OpenSnapshot(manifest, HOST, place.url, fd, in_memory=True, release=release)
        # Of several files nothing is looked at for longer than it is open.
        if use is Use.SHARE and not manifest.files and has_room(manifest.nbytes):
            with contextlib.closing(slot):
                return receive(_Pinned(slot), manifest, HOST, slot.url, progress)
        return _checked(slot, progress)

    @contextlib.contextmanager
    def shards(self) -> Iterator[ShardPlace]:
        """Where the shards that it has are read."""
        with self._attached() as host, contextlib.closing(_LocalShards(host)) as place:
            yield place

    @contextlib.contextmanager
    def _attached(self) -> Iterator[EmbeddedHost]:
        host = attach(self._url, self._run)
        if host is None:
            raise SnapshotNotFoundError("the local server has gone")
        try:
            yield host
        finally:
            host.disconnect()


class _LocalShards:
    """Shards in slots of the local server, which stay pinned as long as it is connected; see :class:`ShardPlace`."""

    url = "this host's memory"

    def __init__(self, host: EmbeddedHost) -> None:
        self._host, self._lock = host, threading.Lock()
        self._open: dict[str, OpenSnapshot] = {}

    def read(self, manifest: Manifest, start: int, into: memoryview) -> None:
        """See :meth:`ShardPlace.read`."""
        with self._lock:
            if manifest.name not in self._open:
                fd = self._host.open_snapshot(manifest)
                self._open[manifest.name] = OpenSnapshot(manifest, HOST, self.url, fd, in_memory=True)
            slot = self._open[manifest.name]
        _Pinned(slot).read(manifest, start, into)

    def close(self) -> None:
        """Let the slots' memory go, once nobody reads any more: to disconnect closes no descriptor."""
        for slot in self._open.values():
            slot.close()
        self._open.clear()


class _Pinned:
    """Copies a pinned slot; see :class:`~lightning_spot.run.reading.Fetches`."""

    def __init__(self, slot: OpenSnapshot) -> None:
        self.url, self._fd = slot.url, slot.fd

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """See :meth:`Fetches.fetch`."""
        fetch_ranges(self.read, manifest, manifest.ranges(), into, progress, _READERS)

    def read(self, manifest: Manifest, start: int, into: memoryview) -> None:
        """Read parts of it, and check them."""
        with SnapshotReader(self._fd, manifest, self.url, check=False) as reader:
            reader.seek(start)
            reader.readinto(into)
        manifest.verify_range(start, into, self.url)


class StoreSource:
    """A store: storage, or a snapshot server elsewhere.

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

        One process reads one local file in place, and what a server has while it arrives; all else goes into memory.
        """
        url = f"{self.store.url}/{manifest.data_path}"
        in_place = not manifest.files and not (use is Use.SHARE and has_room(manifest.nbytes))
        if isinstance(self.store, LocalStore) and in_place:
            try:
                fd = open_regular(self.store.root / manifest.data_path)
            except FileNotFoundError as error:
                raise SnapshotNotFoundError(f"{url} does not exist") from error
            except OSError as error:
                raise TierError(f"{url}: {error.strerror}", tier=self.store.url) from error
            return _checked(OpenSnapshot(manifest, self.tier, url, fd), progress)
        if isinstance(self.store, ServerStore) and use is Use.LOAD and not manifest.files:
            return Streamed(manifest, self.tier, self.store, url, progress)
        return receive(self.store, manifest, self.tier, url, progress)

    @contextlib.contextmanager
    def shards(self) -> Iterator[ShardPlace]:
        """Where the shards that it has are read."""
        yield self.store if isinstance(self.store, ServerStore) else _StoredShards(self.store)


class _StoredShards:
    """Shards of a snapshot in storage that is not committed there: files beside each other; see :class:`ShardPlace`."""

    def __init__(self, store: Store) -> None:
        self.url, self._store = store.url, store

    def read(self, manifest: Manifest, start: int, into: memoryview) -> None:
        """See :meth:`ShardPlace.read`."""
        assert isinstance(self._store, HasFolders)
        assert manifest.shard is not None
        folder = self._store.folder(manifest.snapshot, attempt=manifest.attempt, run_id=manifest.run_id)
        for span, first, last in pieces(manifest.files, start, start + len(into)):
            data = bytes(last - first)
            if span is not None:
                begin = first - span.offset + (manifest.shard.start if span == manifest.files[0] else 0)
                data = folder.read(span.name, begin, begin + last - first)
            if len(data) != last - first:
                raise CorruptSnapshotError(f"{manifest.name} is cut short at {self.url}", where=self.url)
            into[first - start : last - start] = data
        manifest.verify_range(start, into, self.url)


class Union:
    """Snapshots whose shards lie at several tiers, none of which has all of them; implements :class:`Source`.

    Args:
        held: registers of writers, and the source that has each.
    """

    def __init__(self, held: Iterable[tuple[MemorySource | StoreSource, Manifest]]) -> None:
        self._held = list(held)
        self.tier = " ".join(dict.fromkeys(source.tier for source, _ in self._held))

    def survey(self) -> Holdings:
        """See :meth:`Source.survey`; what is whole at one of them is not among these."""
        registers: dict[str, Manifest] = {}
        seen: dict[int, list[Manifest]] = {}
        for source, manifest in self._held:
            seen.setdefault(id(source), []).append(manifest)
            known = registers.setdefault(manifest.name, manifest)
            if manifest.why_failed and known is not manifest:
                registers[manifest.name] = manifest
        elsewhere = {whole.name for shards in seen.values() for whole in put_together(shards)}
        manifests = [whole for whole in put_together(registers.values()) if whole.name not in elsewhere]
        return Holdings(newest_first(manifests))

    def held(self, manifest: Manifest) -> list[tuple[MemorySource | StoreSource, Manifest]]:
        """The shards of a snapshot, each with a source that has it."""
        return [(source, shard) for source, shard in self._held if shard.snapshot == manifest.name]

    def open(self, manifest: Manifest, progress: Progress | None = None, *, use: Use = Use.CHECK) -> OpenSnapshot:
        """See :meth:`Source.open`; each shard is read where it is, at the nearest tier first."""
        held = self.held(manifest)
        with contextlib.ExitStack() as opened:
            sources = {id(source): source for source, _ in held}
            places = {key: opened.enter_context(source.shards()) for key, source in sources.items()}
            joined = Joined(manifest, [(places[id(source)], shard) for source, shard in held])
            return joined.open(self.tier, f"{manifest.name} at {self.tier}", progress)


class Joined:
    """A snapshot that is read shard by shard; see :class:`~lightning_spot.run.reading.Fetches`.

    Args:
        manifest: of the snapshot.
        held: its shards, and where each is; one may be at several places.

    Raises:
        SnapshotNotFoundError: if these are not all of it.
    """

    def __init__(self, manifest: Manifest, held: Iterable[tuple[ShardPlace, Manifest]]) -> None:
        self._manifest, self.url = manifest, manifest.name
        self._places: dict[str, list[ShardPlace]] = {}
        self._silent: set[str] = set()  # URLs of places that did not answer when something was read from them last
        shards: dict[str, Manifest] = {}
        for place, shard in held:
            if shard == shards.setdefault(shard.name, shard):
                self._places.setdefault(shard.name, []).append(place)
        if [whole.checksums for whole in put_together(shards.values())] != [manifest.checksums]:
            raise SnapshotNotFoundError(f"not all of {manifest.name} is there any more")
        self._shards = sorted(shards.values(), key=lambda shard: shard.name)
        self._image = JoinedImage(self._shards, ())

    def open(self, tier: str, url: str, progress: Progress | None) -> OpenSnapshot:
        """Receive it into memory, each part checked as it comes."""
        return receive(self, self._manifest, tier, url, progress)

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """See :meth:`Fetches.fetch`; all places are read at the same time."""
        ranges = sorted(manifest.ranges(), key=lambda bounds: next(self._image.pieces(*bounds))[1])
        places = {place.url for places in self._places.values() for place in places}
        fetch_ranges(self.read, manifest, ranges, into, progress, CONNECTIONS * min(len(places), _MOST_PLACES))

    def read(self, manifest: Manifest, start: int, into: memoryview) -> None:
        """Read parts of the image, and check them; from any thread."""
        done = 0
        for writer, first, last in self._image.pieces(start, start + len(into)):
            self._read_shard(self._shards[writer], first, into[done : done + last - first])
            done += last - first

    def _read_shard(self, shard: Manifest, start: int, into: memoryview) -> None:
        problem: SpotError | None = None
        # Each part would else wait again for a server whose link is cut.
        for place in sorted(self._places[shard.name], key=lambda each: each.url in self._silent):
            try:
                place.read(shard, start, into)
                self._silent.discard(place.url)
                problem = None  # its traceback has views of the memory, which could not be unmapped
                return
            except SpotError as error:
                problem = error
                if isinstance(error, ServerUnreachableError):
                    self._silent.add(place.url)
        assert problem is not None
        raise problem


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


class Streamed(OpenSnapshot):
    """A snapshot whose bytes are fetched, and checked, when they are read.

    Args:
        manifest: what it is.
        tier: what to call the tier.
        store: where it is.
        url: what to call it in errors.
        progress: called with the number of bytes of each range that is read, once.
    """

    def __init__(
        self, manifest: Manifest, tier: str, store: ReadsRanges, url: str, progress: Progress | None = None
    ) -> None:
        super().__init__(manifest, tier, url, fd=-1)
        self._store, self._progress = store, progress

    def reader(self, *, whole: bool = False) -> StreamReader:
        """See :meth:`OpenSnapshot.reader`."""
        return StreamReader(self._store, self.manifest, self.url, self._progress)

    def close(self) -> None:
        """Nothing is open but what a reader has opened."""


class StreamReader(SnapshotReader):
    """Reads forwards fast; when it is to go back, or far ahead, the stream begins anew from there.

    Args:
        store: where it is.
        manifest: what it is.
        where: what to call it in errors.
        progress: see :class:`Streamed`.
    """

    def __init__(self, store: ReadsRanges, manifest: Manifest, where: str, progress: Progress | None = None) -> None:
        super().__init__(-1, manifest, where)
        self._store, self._progress = store, progress
        self._ranges = list(manifest.ranges())
        self._span = max(1, PART_BYTES // manifest.part_bytes) * manifest.part_bytes
        self._buffers = [memoryview(mmap.mmap(-1, self._span)) for _ in range(min(_BUFFERS, len(self._ranges)))]
        self._pool = ThreadPoolExecutor(_LANES, thread_name_prefix="spot-stream")
        self._ahead: _Ahead | None = None
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self._unseen = set(range(len(self._ranges)))
        self._turns = 0

    def finish(self) -> None:
        """See :meth:`SnapshotReader.finish`."""
        for index in sorted(self._unseen):
            self._part(index)

    def close(self) -> None:
        """Stop fetching, and let the memory go."""
        if not self.closed:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._ahead = None
            self._kept.clear()
            self._buffers.clear()
        super().close()

    def _read_some(self, into: memoryview) -> int:
        index, within = divmod(self._place, self._span)
        part = self._part(index)
        count = min(len(into), len(part) - within)
        _copy(part[within : within + count], into[:count])
        return count

    def _part(self, index: int) -> memoryview:
        """The bytes of a range, for as long as no other is asked for."""
        if index in self._kept:
            return self._kept[index]
        if self._ahead is None or not 0 <= index - self._ahead.index <= len(self._buffers):
            self._turn_to(index)
        assert self._ahead is not None
        while (part := self._ahead.part) is None or self._ahead.index < index:
            try:
                self._ahead.go_on()
            except BaseException:  # its buffer holds what was not found to be right: nobody is to be handed that
                self._ahead.stop()
                self._ahead = None
                raise
            if self._ahead.index in self._unseen:
                self._unseen.remove(self._ahead.index)
                if self._progress is not None and self._ahead.part is not None:
                    self._progress(len(self._ahead.part))
        return part

    def _turn_to(self, index: int) -> None:
        """Begin the stream anew. What was read last is kept: torch comes back to the end of the file."""
        if self._ahead is not None:
            if (part := self._ahead.part) is not None:
                self._kept[self._ahead.index] = memoryview(bytearray(part))
                if len(self._kept) > _KEPT_PARTS:
                    self._kept.popitem(last=False)
            self._ahead.stop()
        self._turns += 1
        # Who goes on jumping gets one part at a time, not many of which most are for nothing.
        buffers = self._buffers if self._turns <= _MOST_TURNS else self._buffers[:1]
        self._ahead = _Ahead(self._store, self._manifest, self._ranges, index, buffers, self._pool)


class _Ahead:
    """Ranges of a snapshot from one on, in their order, as many under way as there are buffers.

    Attributes:
        index: of the range at hand; the first one before it is.
        part: its bytes; ``None`` before the first :meth:`go_on`.
    """

    def __init__(
        self,
        store: ReadsRanges,
        manifest: Manifest,
        ranges: list[tuple[int, int]],
        first: int,
        buffers: list[memoryview],
        pool: ThreadPoolExecutor,
    ) -> None:
        self.index = first
        self.part: memoryview | None = None
        self._store = store
        self._manifest = manifest
        self._left = iter(list(enumerate(ranges))[first:])
        self._pool = pool
        self._buffer = buffers[0]
        self._under_way: deque[tuple[int, memoryview, memoryview, Future[None]]] = deque()
        for buffer in buffers:
            self._begin(buffer)

    def go_on(self) -> None:
        """Turn to the next range; its buffer is used again when that is called the next time.

        Raises:
            SpotError: if it could not be read, or is not what was committed.
        """
        if self.part is not None:
            self._begin(self._buffer)
        self.index, self.part, self._buffer, arriving = self._under_way.popleft()
        arriving.result()

    def stop(self) -> None:
        """Return when nobody writes to the buffers any more."""
        for *_, arriving in self._under_way:
            arriving.cancel()
        wait([arriving for *_, arriving in self._under_way])

    def _begin(self, buffer: memoryview) -> None:
        index, (start, stop) = next(self._left, (-1, (0, 0)))
        if index >= 0:
            part = buffer[: stop - start]
            arriving = self._pool.submit(self._store.read, self._manifest, start, part)
            self._under_way.append((index, part, buffer, arriving))


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes; many of them while other threads go on."""
    if len(target) < _SMALL_BYTES:
        target[:] = source
        return
    if len(source) != len(target):
        raise ValueError(f"{len(source)} bytes for {len(target)}")
    to, origin = (ctypes.c_char.from_buffer(view) for view in (target, source))
    ctypes.memmove(ctypes.addressof(to), ctypes.addressof(origin), len(target))
