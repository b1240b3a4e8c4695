"""An open snapshot: received into memory or read later, every part checked as it comes. Not for finding snapshots.

The first rank of each host opens the snapshot, once, and says which descriptors it has of it. The other ranks open the
same memory through ``/proc``. All ranks meet before the first one goes on, so its descriptors stay open meanwhile.
"""

from __future__ import annotations

import contextlib
import io
import logging
import mmap
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, cast

from lightning_spot.config import format_bytes
from lightning_spot.errors import SpotError, TierError
from lightning_spot.protocol.slot import available_bytes, memory_file, seal_memory
from lightning_spot.say import say
from lightning_spot.snapshot.files import MODEL_FILE
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.parts import read_at
from lightning_spot.snapshot.shards import Image, JoinedImage, Section
from lightning_spot.store.store import Target

_KEPT_PARTS = 3  # torch reads the end of the file first, then forwards
_MOST_KEPT_PARTS = 32  # of a snapshot of several files, one for each of them: they are read side by side


@dataclass(slots=True)
class OpenSnapshot:
    """A snapshot whose checksums were found to hold, open for reading.

    Attributes:
        manifest: what it is.
        tier: ``"host"`` (the memory of the local server), ``"storage"``, or the URL of a snapshot server.
        url: where it came from, for people.
        fds: descriptors of the memory, or of the file, that has its image; closed by :meth:`close`.
        sections: where the image lies in several of these, by their places; empty where there is one.
        in_memory: whether it is a pinned slot or memory of this process: what was checked stays as it is. A file on a
            disk may not.
        sealed: whether nobody writes to that memory any more, so that tensors may look at it for as long as they live.
            A slot is reused once it is let go.
        release: lets go of what keeps its slot from being reused, if it is one.
    """

    manifest: Manifest
    tier: str
    url: str
    fds: list[int] = field(default_factory=list)
    in_memory: bool = False
    sealed: bool = False
    sections: list[Section] = field(default_factory=list)
    release: Callable[[], None] | None = None

    def reader(self, *, whole: bool = False) -> SnapshotReader:
        """The checkpoint, for ``torch.load``, or the ``whole`` image. Close it before the snapshot."""
        checkpoint = next((span for span in self.manifest.files[:1] if span.name == MODEL_FILE), None)
        nbytes = checkpoint.nbytes if checkpoint is not None and not whole else None
        check = not self.in_memory
        return SnapshotReader(self.fds, self.manifest, self.url, self.sections, check=check, nbytes=nbytes)

    @contextlib.contextmanager
    def image(self) -> Iterator[Image]:
        """The whole image: mapped for reading only, or, of one on a disk, read and checked as far as it is asked for.

        A disk that fails is an error then, and no SIGBUS; who needs some of it has memory for that.
        """
        nbytes = self.manifest.nbytes
        if not nbytes:
            yield memoryview(b"")
        elif self.in_memory:
            # It is unmapped when nobody looks at it any more: not here, where after an error its traceback still does.
            lengths = [0] * len(self.fds) if self.sections else [nbytes]
            for section in self.sections:
                lengths[section.writer] = max(lengths[section.writer], section.offset + section.nbytes)
            mapped = zip(self.fds, lengths, strict=True)
            images = [memoryview(mmap.mmap(fd, length, prot=mmap.PROT_READ)) for fd, length in mapped]
            yield JoinedImage(self.sections, images) if self.sections else images[0]
        else:
            with SnapshotReader(self.fds, self.manifest, self.url) as reader:
                yield reader

    def close(self) -> None:
        """Let the file, and the slot, go; a file on a disk leaves the page cache to the training data."""
        for fd in self.fds:
            if not self.in_memory and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        if self.release is not None:
            self.release()


class SnapshotReader(io.BufferedIOBase):
    """Reads a snapshot's file, or its :class:`~lightning_spot.snapshot.shards.Image`, checked as it is read.

    A file that was good when it was opened may be cut, replaced or unreadable a moment later: then this raises, and
    the caller falls back to another snapshot. Nothing is mapped, so a failing disk is no SIGBUS. Large reads go
    straight into the caller's memory (a tensor's storage); a few parts are kept for the small ones.

    Args:
        fds: the file; it may be longer than the snapshot (a slot). Not closed.
        manifest: sealed.
        where: what to call the place in errors.
        sections: see :class:`OpenSnapshot`.
        check: whether to check what is read; not needed where it cannot have changed since it was checked.
        nbytes: of the image's beginning, which is all that is shown; ``None`` for all of it.

    Attributes:
        problem: what a read has raised, ``None`` while all is well. A library in between may wrap or lose it.
    """

    def __init__(
        self,
        fds: Sequence[int],
        manifest: Manifest,
        where: str,
        sections: Sequence[Section] = (),
        *,
        check: bool = True,
        nbytes: int | None = None,
    ) -> None:
        super().__init__()
        self._nbytes = manifest.nbytes if nbytes is None else nbytes
        self.problem: SpotError | None = None
        self._fds = fds
        self._joined = JoinedImage(sections, ()) if sections else None
        self._manifest = manifest
        self._where = where
        files = len(manifest.files) if nbytes is None else 0
        self._check, self._kept_parts = check, max(_KEPT_PARTS, min(files, _MOST_KEPT_PARTS))
        self._place = 0
        self._parts: OrderedDict[int, memoryview] = OrderedDict()

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, bounds: slice) -> memoryview:
        start, stop, _ = bounds.indices(self._nbytes)
        data = bytearray(max(0, stop - start))
        self.seek(start)
        self.readinto(data)
        return memoryview(data)

    def as_file(self) -> IO[bytes]:
        """This reader, as the type that torch asks for."""
        return cast(IO[bytes], self)

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Offset of the next byte."""
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset."""
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._nbytes}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` as far as there are bytes.

        Raises:
            CorruptSnapshotError: if a part is not what was committed, or is gone.
            TierError: if it cannot be read.
        """
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), max(0, self._nbytes - self._place))
        got = 0
        try:
            while got < wanted:
                count = self._read_some(view[got:wanted])
                got += count
                self._place += count
        except SpotError as error:
            self.problem = error
            raise
        return wanted

    def read(self, size: int | None = -1) -> bytes:
        """The next ``size`` bytes, or all that are left."""
        left = max(0, self._nbytes - self._place)
        buffer = bytearray(left if size is None or size < 0 else min(size, left))
        self.readinto(buffer)
        return bytes(buffer)

    def _read_some(self, into: memoryview) -> int:
        """Read from the part at the present place; straight into ``into`` where it takes all of that part."""
        if not self._check:
            self._fill(self._place, into)
            return len(into)
        size = self._manifest.part_bytes
        index, within = divmod(self._place, size)
        start = index * size
        nbytes = min(size, self._manifest.nbytes - start)
        if within == 0 and len(into) >= nbytes and index not in self._parts:
            self._read_part(start, into[:nbytes])
            return nbytes
        if index not in self._parts:
            part = memoryview(bytearray(nbytes))
            self._read_part(start, part)
            self._parts[index] = part
            if len(self._parts) > self._kept_parts:
                self._parts.popitem(last=False)
        self._parts.move_to_end(index)
        count = min(len(into), nbytes - within)
        into[:count] = self._parts[index][within : within + count]
        return count

    def _read_part(self, start: int, into: memoryview) -> None:
        self._fill(start, into)
        self._manifest.verify_range(start, into, self._where)

    def _fill(self, start: int, into: memoryview) -> None:
        stop, done = start + len(into), 0
        for number, first, last in self._joined.pieces(start, stop) if self._joined is not None else [(0, start, stop)]:
            read_at(self._fds[number], first, into[done : done + last - first], self._where)
            done += last - first


# -- received ---------------------------------------------------------------------------------------------------------


def receive(fetch: Callable[[Target], object], manifest: Manifest, tier: str, url: str) -> OpenSnapshot:
    """Fetch a snapshot, each part checked as it comes.

    Args:
        fetch: brings it, see :meth:`~lightning_spot.store.store.Store.fetch`.
        manifest: what it is.
        tier: what to call the tier.
        url: what to call it in errors.

    Returns:
        the snapshot, in sealed memory where the system can seal it; a host that has not room for it there keeps it on
        its disk meanwhile.

    Raises:
        SpotError: as ``fetch``, or if there is room for it nowhere.
    """
    in_memory = has_room(manifest.nbytes)
    try:
        with contextlib.ExitStack() as opened:
            fd = memory_file("lightning-spot-restore") if in_memory else _disk_file(manifest.nbytes)
            opened.callback(os.close, fd)
            os.ftruncate(fd, manifest.nbytes)
            fetch(_File(fd))
            sealed = in_memory and seal_memory(fd)
            opened.pop_all()
    except SpotError:
        raise  # some of ours are OSErrors, too
    except OSError as error:
        raise TierError(f"{url}: no memory for {manifest.nbytes} bytes ({error})", tier=url) from error
    return OpenSnapshot(manifest, tier, url, [fd], in_memory=in_memory, sealed=sealed)


def has_room(nbytes: int) -> bool:
    """Whether this host has memory for so many bytes more, as far as can be told."""
    available = available_bytes()
    return available is None or nbytes <= available


class _File:
    """An open file that is written to; see :class:`~lightning_spot.store.store.Target`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __setitem__(self, where: slice, data: memoryview, /) -> None:
        place = where.start
        while data:
            count = os.pwrite(self._fd, data, place)
            data, place = data[count:], place + count


def _disk_file(nbytes: int) -> int:
    """A file without a name, its room reserved: a disk that is full shows here, and not as a ``SIGBUS`` later."""
    with tempfile.TemporaryFile(prefix="lightning-spot-restore-") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        text = "this host has less than {size} of free memory. The snapshot is received in {about}, which is slower"
        say(logging.WARNING, "received-on-disk", text, about=tempfile.gettempdir(), size=format_bytes(nbytes))
        return os.dup(file.fileno())


# -- shared with others of this host ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exported:
    """What other processes of this host need to have a snapshot that one of them has opened, besides its manifest.

    Attributes:
        paths: by which they open its descriptors, as long as it stays open there.
        snapshot: as they have it then.
    """

    paths: tuple[str, ...]
    snapshot: OpenSnapshot

    @classmethod
    def of(cls, snapshot: OpenSnapshot) -> Exported:
        """What others need to have a snapshot that stays open until they have opened it."""
        paths = tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in snapshot.fds)
        manifest = replace(snapshot.manifest, files=(), checksums=())  # which may be long, and they have it
        return cls(paths, replace(snapshot, manifest=manifest, fds=[], release=None))

    def open(self, manifest: Manifest) -> OpenSnapshot:
        """Open it. It was checked there; the memory is the same.

        Args:
            manifest: of the snapshot.

        Raises:
            TierError: if it cannot be had.
        """
        snapshot = replace(self.snapshot, manifest=manifest, fds=[])
        try:
            for path in self.paths:
                snapshot.fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            snapshot.close()
            why = f"what another rank of this host has opened cannot be had ({error})"
            raise TierError(why, tier=snapshot.tier) from error
        return snapshot
