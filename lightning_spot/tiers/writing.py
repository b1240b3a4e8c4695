"""Writes objects of any fsspec file system, one or several at once: each appears whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fsspec.spec import AbstractFileSystem

from lightning_spot.config import PART_BYTES
from lightning_spot.image.files import FileSpan, check_zero, cut, pieces
from lightning_spot.image.manifest import Manifest
from lightning_spot.tiers.filesystem import make_parent, open_filesystem, speaks, tier_errors
from lightning_spot.tiers.s3 import S3, Upload, block_bytes, regrouped, slices_of, upload
from lightning_spot.tiers.transfers import Job, move

Parts = memoryview | Iterable[memoryview]
"""The bytes of an object, whole or part by part."""

_WRITE_BYTES = 32 * 1024 * 1024
_TRIAL = ".lightning-spot-trial"


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


def nothing() -> None:
    """Nothing is to be done, and nobody gives it up."""


def ignored(_path: str) -> None:
    """Nobody asks which ones are there."""


def write_files(
    files: Any,
    root: str,
    manifest: Manifest,
    parts: Parts,
    *,
    temporary: str,
    ready: Callable[[], None],
) -> None:
    """Write the files of an image: side by side if it is whole, see :func:`write_whole`, else one after the other.

    Args:
        files: the file system.
        root: of the run.
        manifest: of the image.
        parts: its bytes.
        temporary: path of the temporary file.
        ready: called when the first file is about to become visible, before any other is.

    Raises:
        Exception: whatever failed; no file is being written any more.
    """
    found = by_file(manifest, parts)
    if isinstance(parts, memoryview) and manifest.files:
        objects = {f"{root}/{manifest.path_of(span)}": memoryview(data) for span, data in found}  # type: ignore[arg-type]
        write_whole(files, objects, temporary=lambda: temporary, ready=ready)
        return
    first = Once(ready)
    for span, of_file in found:
        path = f"{root}/{manifest.path_of(span)}"
        write_object(files, path, of_file, span.nbytes, temporary=temporary, ready=first)


def write_whole(
    files: Any,
    objects: Mapping[str, memoryview],
    *,
    temporary: Callable[[], str],
    ready: Callable[[], None] = nothing,
    goes_on: Callable[[], None] = nothing,
    done: Callable[[str], None] = ignored,
) -> None:
    """Write several objects, each as by :func:`write_object`: side by side in an object store, else in turn.

    Args:
        files: the file system.
        objects: their bytes, by path.
        temporary: makes the path of a temporary file.
        ready: called before the first of them becomes visible.
        goes_on: called before each of them and, at S3, before each of their blocks; what it raises ends all of it.
        done: told the path of each that is there.

    Raises:
        Exception: whatever failed; none is being written any more.
    """
    first = Once(ready)
    if speaks(files, S3):
        SideBySide(files, objects, ready=first, goes_on=goes_on, done=done).write()
        return

    def write(path: str, data: memoryview) -> None:
        goes_on()
        aside = temporary()
        write_object(files, path, data, len(data), temporary=aside, ready=first)
        done(path)

    if not speaks(files):  # not every library of a file system may be used by several threads
        for path, data in objects.items():
            write(path, data)
        return
    # Of what its library sends, it has a copy of so many bytes.
    jobs = ((min(len(data), _WRITE_BYTES), functools.partial(write, path, data)) for path, data in objects.items())
    move(jobs, _WRITE_BYTES)


def by_file(manifest: Manifest, parts: Parts) -> Iterator[tuple[FileSpan, Parts]]:
    """Yield each file of an image with its bytes: whole if the image is, so that several blocks can go at once.

    Raises:
        CorruptSnapshotError: if a byte that is in no file is not zero.
    """
    if not isinstance(parts, memoryview):
        yield from cut(manifest.spans, parts)
        return
    for span, start, stop in pieces(manifest.spans, 0, len(parts)):
        if span is None:
            check_zero(parts[start:stop])
    for span in manifest.spans:
        yield span, parts[span.offset : span.stop]


def write_object(
    files: Any,
    path: str,
    parts: Parts,
    nbytes: int,
    *,
    temporary: str,
    ready: Callable[[], None],
) -> None:
    """Write an object in place of what is there.

    S3 in parallel; other object stores through the upload of their own library, which appears when it is complete;
    file systems with real folders by a temporary file that is renamed.

    Args:
        files: the file system.
        path: of the object.
        parts: its bytes, whole; or part by part, each done with when the next one is asked for.
        nbytes: how many, about; decides into how many blocks they are cut.
        temporary: path of the temporary file.
        ready: called when all bytes are there, before the object becomes visible.

    Raises:
        Exception: whatever failed; what was there before is there still.
    """
    if speaks(files, S3):
        _write_to_s3(files, path, parts, nbytes, ready)
    elif speaks(files):
        _write_in_turn(files, path, parts, ready)
    else:
        with _renamed(files, temporary, path):
            _write_in_turn(files, temporary, parts, lambda: None)
            ready()


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


def _in_turn(parts: Parts) -> Iterable[memoryview]:
    return slices_of(parts, PART_BYTES) if isinstance(parts, memoryview) else parts


def _write_to_s3(files: Any, path: str, parts: Parts, nbytes: int, ready: Callable[[], None]) -> None:
    size = block_bytes(nbytes)
    if nbytes > size:
        blocks = slices_of(parts, size) if isinstance(parts, memoryview) else regrouped(parts, size)
        upload(files, path, blocks, size, ready=ready)
        return
    data = bytearray()
    for part in _in_turn(parts):
        data += part
    ready()
    files.pipe_file(path, bytes(data))


def _write_in_turn(files: Any, path: str, parts: Parts, ready: Callable[[], None]) -> None:
    file = files.open(path, "wb", block_size=_WRITE_BYTES)
    try:
        for part in _in_turn(parts):
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
