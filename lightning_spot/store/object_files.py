"""Objects of a bucket, read and written, one or several at once: each appears whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from lightning_spot.config import PART_BYTES
from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.retry import retried
from lightning_spot.snapshot.files import check_zero, cut, pieces
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.shards import Image, JoinedImage, cut_out, slices
from lightning_spot.store import store
from lightning_spot.store.fsspec_client import is_s3, move, open_filesystem, tier_errors
from lightning_spot.store.s3 import BLOCK_BYTES, block_bytes, regrouped, upload
from lightning_spot.threads import all_at_once

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
        is_s3: whether it is that of S3.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.fs, self.root = open_filesystem(url)
        self.is_s3 = is_s3(self.fs)

    def path(self, below: str) -> str:
        """Where an object is in the file system."""
        return f"{self.root}/{below}" if below else self.root

    def names(self, below: str) -> list[str]:
        """Names in a folder; empty if there is none."""
        return list(self.sizes(below))

    def sizes(self, below: str) -> dict[str, int]:
        """Names in a folder, with the sizes of what are files; empty if there is none."""
        try:
            listed = self.twice(lambda: self.fs.ls(self.path(below), detail=True))
        except FileNotFoundError:
            return {}
        found = {str(item["name"]).rstrip("/"): int(item["size"] or 0) for item in listed}
        found.pop(self.path(below), None)  # some tools make an object of that name, and call it a folder
        return {path.rpartition("/")[2]: nbytes for path, nbytes in found.items()}

    def patiently(self, action: Callable[[], Result]) -> Result:
        """Do what only reads; try again where the library does not do that itself."""

        def note(error: Exception, _pause_s: float) -> None:
            logger.debug("%s: %s; tried again", self.url, error)

        # Every library has errors of its own.
        pauses_s = () if self.is_s3 else _PAUSES_S
        return retried(action, pauses_s, lambda error: not isinstance(error, _ANSWERS), note)

    def twice(self, action: Callable[[], Result]) -> Result:
        """The same, and "nothing there" is asked for twice: a file server that fails over has said so wrongly.

        S3 is asked once: it shows what was written as soon as it has acknowledged it.
        """
        try:
            return self.patiently(action)
        except FileNotFoundError:
            if self.is_s3:
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
        """Remove objects side by side; where one cannot be removed, the others are.

        Raises:
            Exception: if one could not be removed.
        """

        def one(below: str) -> Exception | None:
            try:
                self.remove(below)
            except Exception as error:  # every library has errors of its own
                return error
            return None

        failed = all_at_once([functools.partial(one, below) for below in belows], "spot-remove")
        if error := next(filter(None, failed), None):
            raise error


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


def write_files(files: Any, root: str, manifest: Manifest, parts: Parts, ready: Callable[[], None]) -> None:
    """Write the files of an image: side by side if it is whole, see :func:`write_whole`, else one after the other.

    Args:
        files: the file system.
        root: of the run.
        manifest: of the image.
        parts: its bytes.
        ready: called once, on any thread: when the bytes of the first file are there, before it becomes visible.

    Raises:
        CorruptSnapshotError: if a byte that is in no file is not zero.
        Exception: whatever failed; no file is being written any more.
    """
    paths = {span: f"{root}/{manifest.path_of(span)}" for span in manifest.spans}
    if not isinstance(parts, (memoryview, JoinedImage)):
        once = _Once(ready)
        for span, of_file in cut(manifest.spans, parts):
            write_object(files, paths[span], of_file, span.nbytes, once)
        return
    for gap, start, stop in pieces(manifest.spans, 0, len(parts)):
        if gap is None:
            check_zero(parts[start:stop])
    write_whole(files, {path: cut_out(parts, span.offset, span.stop) for span, path in paths.items()}, ready)


def write_whole(files: Any, objects: Mapping[str, Image], ready: Callable[[], None]) -> None:
    """Write several objects, each as by :func:`write_object`: small ones side by side.

    Args:
        files: the file system.
        objects: their bytes, by path.
        ready: see :func:`write_files`.

    Raises:
        Exception: whatever failed; none is being written any more.
    """
    once = _Once(ready)

    def write(path: str, data: Image) -> None:
        write_object(files, path, slices(data, PART_BYTES), len(data), once)

    jobs = [(min(len(data), _WRITE_BYTES), functools.partial(write, path, data)) for path, data in objects.items()]
    if is_s3(files):  # of one object, many parts are under way at once
        for _, job in [each for each in jobs if each[0] > BLOCK_BYTES]:
            job()
        move((each for each in jobs if each[0] <= BLOCK_BYTES), BLOCK_BYTES)
    else:  # of what its library sends, it has a copy of so many bytes
        move(jobs, _WRITE_BYTES)


def write_object(files: Any, path: str, parts: Iterable[memoryview], nbytes: int, ready: Callable[[], None]) -> None:
    """Write an object in place of what is there: at S3 in parallel, elsewhere through the upload of its library.

    Args:
        files: the file system.
        path: of the object.
        parts: its bytes, each part done with when the next one is asked for.
        nbytes: how many, about; decides into how many blocks they are cut.
        ready: called when all bytes are there, before the object becomes visible.

    Raises:
        Exception: whatever failed; what was there before is there still.
    """
    if is_s3(files):
        _write_to_s3(files, path, parts, nbytes, ready)
    else:
        _write_in_turn(files, path, parts, ready)


def try_writing(url: str) -> None:
    """Write a small object directly below a URL, and remove it.

    Raises:
        SettingsError: if the URL is malformed or its file system is not installed.
        TierError: if it cannot be written.
    """
    files, root = open_filesystem(url)
    path = f"{root}/{_TRIAL}"
    with tier_errors(url):
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
        file.closed = True
        raise
    file.close()
