"""Objects of any fsspec file system, read and written, one or several at once: each appears whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fsspec.spec import AbstractFileSystem

from lightning_spot.config import PART_BYTES
from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.image.files import check_zero, cut, pieces
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.parts import part_ranges
from lightning_spot.image.shards import Image, JoinedImage, cut_out, slices
from lightning_spot.retry import retried
from lightning_spot.tiers import s3, store
from lightning_spot.tiers.fsspec_client import Job, make_parent, move, open_filesystem, speaks, tier_errors
from lightning_spot.tiers.s3 import S3, MultipartUpload, block_bytes, regrouped, upload

logger = logging.getLogger(__name__)

Parts = memoryview | JoinedImage | Iterable[memoryview]
"""The bytes of an object, whole or part by part."""

_TRIAL = ".lightning-spot-trial"
READERS = 8  # small requests at once
_WRITE_BYTES = 32 * 1024 * 1024
_PAUSES_S = (0.1, 0.5)
_ANSWERS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_CHANGES_WITH_CONTENT = ("size", "ETag", "etag", "LastModified", "last_modified", "mtime", "generation", "ino")

Result = TypeVar("Result")


class ObjectFiles:
    """The objects below a URL, each named by its path from there.

    Args:
        url: such as ``s3://bucket/run-1``.

    Raises:
        SettingsError: if the URL is malformed or its file system is not installed.

    Attributes:
        url: the same, without a slash at its end.
        fs: the file system.
        root: path in it.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.fs, self.root = open_filesystem(url)
        self._is_s3 = speaks(self.fs, s3.S3)

    def path(self, below: str) -> str:
        """Where an object is in the file system."""
        return f"{self.root}/{below}" if below else self.root

    def names(self, below: str) -> list[str]:
        """Names in a folder; empty if there is none."""
        return list(self.sizes(below))

    def sizes(self, below: str) -> dict[str, int]:
        """Names in a folder, with the sizes of what are files; empty if there is none."""
        try:
            listed = self.twice(lambda: list_folder(self.fs, self.path(below)))
        except FileNotFoundError:
            return {}
        named = ((str(item["name"]).rstrip("/").rpartition("/")[2], int(item["size"] or 0)) for item in listed)
        return {name: nbytes for name, nbytes in named if name}

    def patiently(self, action: Callable[[], Result]) -> Result:
        """Do what only reads; try again where the library does not do that itself."""

        def note(error: Exception, _pause_s: float) -> None:
            logger.debug("%s: %s; tried again", self.url, error)

        # Every library has errors of its own.
        pauses_s = () if self._is_s3 else _PAUSES_S
        return retried(action, pauses_s, lambda error: not isinstance(error, _ANSWERS), note)

    def twice(self, action: Callable[[], Result]) -> Result:
        """The same, and "nothing there" is asked for twice: a file server that fails over has said so wrongly.

        S3 is asked once: it shows what was written as soon as it has acknowledged it.
        """
        try:
            return self.patiently(action)
        except FileNotFoundError:
            if self._is_s3:
                raise
            return self.patiently(action)

    def read_small(self, below: str) -> bytes:
        """A manifest or claim.

        Raises:
            FileNotFoundError: if it is not there.
            CorruptSnapshotError: if it is too long for one.
        """
        path = self.path(below)
        data = bytes(self.twice(lambda: self.fs.cat_file(path, start=0, end=store.LONGEST_MANIFEST_BYTES + 1)))
        if len(data) > store.LONGEST_MANIFEST_BYTES:
            raise CorruptSnapshotError(f"{self.url}/{below} is too long for what it should be")
        return data

    def size(self, below: str) -> int | None:
        """Bytes of an object; ``None`` if it is not there."""
        try:
            return int(self.twice(lambda: self.fs.info(self.path(below)))["size"])
        except FileNotFoundError:
            return None

    def mark(self, below: str) -> dict[str, object]:
        """What changes when an object is replaced."""
        info = self.fs.info(self.path(below))
        return {name: info[name] for name in _CHANGES_WITH_CONTENT if name in info}

    def is_settled(self, below: str) -> bool:
        """Whether an object was not written to for so long that it has no writer any more."""
        try:
            return time.time() - float(self.fs.modified(self.path(below)).timestamp()) >= store.SETTLED_S
        except (FileNotFoundError, NotImplementedError, AttributeError, KeyError):
            return False

    def remove(self, below: str) -> None:
        """Remove an object; nothing happens if it is gone."""
        path = self.path(below)
        try:
            self.fs.rm_file(path)
        except FileNotFoundError:
            if self.fs.exists(path):  # a file server that fails over may have said so wrongly
                self.fs.rm_file(path)

    def remove_all(self, belows: Sequence[str]) -> None:
        """Remove objects: at S3 by one request, elsewhere in an object store side by side.

        Raises:
            Exception: if one could not be removed.
        """
        if self._is_s3:
            s3.remove_objects(self.fs, [self.path(below) for below in belows])
        elif speaks(self.fs):
            s3.remove_each(self.remove, belows)
        else:
            for below in belows:
                self.remove(below)

    def remove_directory(self, name: str) -> None:
        """Object stores have no directories; elsewhere one that is not empty stays."""
        if not speaks(self.fs) and not self.names(name):  # some remove one with all that is in it
            with contextlib.suppress(OSError, NotImplementedError):
                self.fs.rmdir(self.path(name))


def list_folder(files: Any, path: str) -> list[dict[str, Any]]:
    """What lies in a folder of a file system, each with its path as ``name``, and with its ``size``.

    Raises:
        FileNotFoundError: if there is no such folder, where there are folders.
    """
    if speaks(files, s3.S3):
        return s3.list_folder(files, path)
    return list(files.ls(path, detail=True))


class _Once:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteHooks:
    """What is asked, and told, while objects are written.

    Attributes:
        temporary: makes the path of a temporary file, where they are written aside.
        ready: called when the bytes of the first of them are there, before it becomes visible. Both are called on any
            thread.
    """

    temporary: Callable[[], str]
    ready: Callable[[], None] = lambda: None

    def once(self) -> WriteHooks:
        """The same, but what is to be done first is done once, however many objects follow."""
        return replace(self, ready=_Once(self.ready))


class _SideBySide:
    """Objects on their way to S3, each in one request or in blocks. The next one begins when a connection is free.

    Args:
        files: an s3fs file system.
        objects: their bytes, by path.
        hooks: what is asked and told; it is ready each time that one is about to become visible.
    """

    def __init__(self, files: Any, objects: Mapping[str, Image], hooks: WriteHooks) -> None:
        self._files, self._objects, self._hooks = files, objects, hooks
        self._begun: dict[str, MultipartUpload] = {}
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
            blocks = [cut_out(data, *bounds) for bounds in part_ranges(len(data), sizes[path])]
            self._begun[path], self._left[path] = MultipartUpload(self._files, path), len(blocks)
            for number, block in enumerate(blocks, 1):
                yield len(block), functools.partial(self._send, path, number, block)

    def _put(self, path: str, data: Image) -> None:
        content = bytes(data[0 : len(data)])
        self._hooks.ready()
        self._files.pipe_file(path, content)

    def _send(self, path: str, number: int, block: Image) -> None:
        self._begun[path].send(number, block[0 : len(block)])
        with self._lock:
            self._left[path] -= 1
            is_last = not self._left[path]
        if is_last:
            self._hooks.ready()
            self._begun[path].complete()
            del self._begun[path]


def write_files(files: Any, root: str, manifest: Manifest, parts: Parts, hooks: WriteHooks) -> None:
    """Write the files of an image: side by side if it is whole, see :func:`write_whole`, else one after the other.

    Args:
        files: the file system.
        root: of the run.
        manifest: of the image.
        parts: its bytes.
        hooks: what is asked and told meanwhile.

    Raises:
        CorruptSnapshotError: if a byte that is in no file is not zero.
        Exception: whatever failed; no file is being written any more.
    """
    paths = {span: f"{root}/{manifest.path_of(span)}" for span in manifest.spans}
    if not isinstance(parts, (memoryview, JoinedImage)):
        hooks = hooks.once()
        for span, of_file in cut(manifest.spans, parts):
            write_object(files, paths[span], of_file, span.nbytes, hooks)
        return
    for gap, start, stop in pieces(manifest.spans, 0, len(parts)):
        if gap is None:
            check_zero(parts[start:stop])
    write_whole(files, {path: cut_out(parts, span.offset, span.stop) for span, path in paths.items()}, hooks)


def write_whole(files: Any, objects: Mapping[str, Image], hooks: WriteHooks) -> None:
    """Write several objects, each as by :func:`write_object`: side by side in an object store, else in turn.

    Args:
        files: the file system.
        objects: their bytes, by path.
        hooks: what is asked and told meanwhile.

    Raises:
        Exception: whatever failed; none is being written any more.
    """
    hooks = hooks.once()
    if speaks(files, S3):
        _SideBySide(files, objects, hooks).write()
        return

    def write(path: str, data: Image) -> None:
        write_object(files, path, slices(data, PART_BYTES), len(data), hooks)

    if not speaks(files):  # not every library of a file system may be used by several threads
        for path, data in objects.items():
            write(path, data)
        return
    # Of what its library sends, it has a copy of so many bytes.
    jobs = ((min(len(data), _WRITE_BYTES), functools.partial(write, path, data)) for path, data in objects.items())
    move(jobs, _WRITE_BYTES)


def write_object(files: Any, path: str, parts: Iterable[memoryview], nbytes: int, hooks: WriteHooks) -> None:
    """Write an object in place of what is there.

    S3 in parallel; other object stores through the upload of their own library, which appears when it is complete;
    file systems with real folders by a temporary file that is renamed.

    Args:
        files: the file system.
        path: of the object.
        parts: its bytes, each part done with when the next one is asked for.
        nbytes: how many, about; decides into how many blocks they are cut.
        hooks: what is asked and told; it is ready when all bytes are there.

    Raises:
        Exception: whatever failed; what was there before is there still.
    """
    if speaks(files, S3):
        _write_to_s3(files, path, parts, nbytes, hooks.ready)
    elif speaks(files):
        _write_in_turn(files, path, parts, hooks.ready)
    else:
        temporary = hooks.temporary()
        with _renamed(files, temporary, path):
            _write_in_turn(files, temporary, parts, lambda: None)
            hooks.ready()


def write_small(files: Any, path: str, data: bytes, temporary: str) -> None:
    """Write a manifest, claim or record, whole or not at all, in place of what is there.

    Raises:
        Exception: whatever failed.
    """
    if speaks(files):
        files.pipe_file(path, data)
        return
    with _renamed(files, temporary, path):
        files.pipe_file(temporary, data)


def try_writing(url: str) -> None:
    """Write a small object directly below a URL, and remove it.

    Raises:
        SettingsError: if the URL is malformed or its file system is not installed.
        TierError: if it cannot be written.
    """
    files, root = open_filesystem(url)
    path = f"{root}/{_TRIAL}"
    with tier_errors(url):
        make_parent(files, path)
        files.pipe_file(path, b"lightning_spot")
        with contextlib.suppress(Exception):  # another server may have removed it, or nothing may be removed there
            files.rm_file(path)


def _write_to_s3(files: Any, path: str, parts: Iterable[memoryview], nbytes: int, ready: Callable[[], None]) -> None:
    size = block_bytes(nbytes)
    if nbytes > size:
        upload(files, path, regrouped(parts, size), size, ready=ready)
        return
    data = bytearray()
    for part in parts:
        data += part
    ready()
    files.pipe_file(path, bytes(data))


def _write_in_turn(files: Any, path: str, parts: Iterable[memoryview], ready: Callable[[], None]) -> None:
    file = files.open(path, "wb", block_size=_WRITE_BYTES)
    try:
        for part in parts:
            file.write(part)
        ready()
    except BaseException:
        # Closing would complete the object with what came so far.
        with contextlib.suppress(Exception):
            file.discard()
        with contextlib.suppress(AttributeError):  # a plain file: its temporary is removed
            file.closed = True
        raise
    file.close()


@contextlib.contextmanager
def _renamed(files: Any, temporary: str, path: str) -> Iterator[None]:
    """Rename what is written here, or leave nothing of it."""
    try:
        yield
        _rename(files, temporary, path)
    except BaseException:
        with contextlib.suppress(Exception):
            files.rm_file(temporary)
        raise


def _rename(files: Any, source: str, target: str) -> None:
    if type(files).mv is AbstractFileSystem.mv:
        # The base class copies what a pattern matches, and a run's path may look like one.
        files.cp_file(source, target)
        files.rm_file(source)
        return
    try:
        files.mv(source, target)
    except FileExistsError:
        files.rm_file(target)
        files.mv(source, target)
