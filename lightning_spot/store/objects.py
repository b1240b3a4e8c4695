"""A store in a bucket of S3, Google Cloud or Azure: an object appears whole or not at all; manifest last."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightning_spot.config import PART_BYTES
from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.say import say
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store import s3, store
from lightning_spot.store.fsspec_client import (
    REQUESTS,
    check_bucket,
    code_of,
    connections,
    is_s3,
    move,
    open_filesystem,
    tier_errors,
)
from lightning_spot.store.store import Data, Holdings, Progress, Ready, Store, Target, Writer, parts_of
from lightning_spot.threads import all_at_once

_IS_THERE = frozenset(("PreconditionFailed", "ConditionalRequestConflict", "412", "409"))
_WRITE_BYTES = 32 * 1024 * 1024


class ObjectStore(Store):
    """Snapshots of one run in a bucket; a :class:`~lightning_spot.store.store.Store`.

    Credentials and endpoints come from where the file system's own library looks (environment, config files). A
    bucket is never made.

    Args:
        url: the run's URL, such as ``s3://bucket/run-1``.
        is_lent: see :class:`Store`.

    Raises:
        SettingsError: if the URL is malformed or its file system is not installed.
    """

    _at_once_bytes = PART_BYTES  # of which a library may make a copy
    _checks_what_comes = True

    def __init__(self, url: str, *, is_lent: bool = False) -> None:
        super().__init__(url.rstrip("/"), is_lent=is_lent)
        self._fs, self._root = open_filesystem(url)
        self._is_s3 = is_s3(self._fs)

    def survey(self) -> Holdings:
        """See :meth:`Store.survey`."""
        found = super().survey()
        if not found.highest_attempt:
            with tier_errors(self.url):
                check_bucket(self._fs, self._root, self.url)
        return found

    def fetch(self, manifest: Manifest, into: Target, progress: Progress | None = None) -> None:
        """See :meth:`Store.fetch`; by several requests at once."""
        with tier_errors(self.url, reading=True):
            for span, nbytes in zip(manifest.spans, self._sizes_of(manifest), strict=True):
                if nbytes is not None and nbytes < span.nbytes:
                    where = f"{self.url}/{manifest.path_of(span)}"
                    why = f"{where} is cut short: {nbytes} of {span.nbytes} bytes are there"
                    raise CorruptSnapshotError(why, where=where)
        super().fetch(manifest, into, progress)

    # -- operations on files --------------------------------------------------------------------------------------

    def _path(self, below: str) -> str:
        return f"{self._root}/{below}" if below else self._root

    def _errors(self, *, reading: bool = False) -> contextlib.AbstractContextManager[None]:
        return tier_errors(self.url, reading=reading)

    def _all(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        return all_at_once(jobs, "spot-ask")

    def _names(self, below: str) -> list[str]:
        return list(self._sizes(below))

    def _sizes(self, below: str) -> dict[str, int]:
        try:
            listed = self._fs.ls(self._path(below), detail=True)
        except FileNotFoundError:
            return {}
        found = {str(item["name"]).rstrip("/"): int(item["size"] or 0) for item in listed}
        found.pop(self._path(below), None)  # some tools make an object of that name, and call it a folder
        return {path.rpartition("/")[2]: nbytes for path, nbytes in found.items()}

    def _size(self, below: str) -> int | None:
        try:
            return int(self._fs.info(self._path(below))["size"])
        except FileNotFoundError:
            return None

    def _read(self, below: str, start: int = 0, stop: int | None = None) -> bytes:
        return bytes(self._fs.cat_file(self._path(below), start=start, end=stop))

    def _readers(self, part_bytes: int) -> int:
        return connections(max(PART_BYTES, part_bytes))

    def _read_checked(self, manifest: Manifest, start: int, into: memoryview) -> None:
        try:
            super()._read_checked(manifest, start, into)
        except CorruptSnapshotError as error:  # perhaps on its way
            say(logging.INFO, "read-again", "read once more: {error}", error=error)
            super()._read_checked(manifest, start, into)

    def _fill(self, below: str, start: int, into: memoryview) -> int:
        data = self._read(below, start, start + len(into))
        into[: len(data)] = data
        return len(data)

    def _write(self, contents: Mapping[str, Data], by: Writer, ready: Ready = store.nothing) -> None:
        """See :meth:`Store._write`; side by side."""
        if len(contents) > 1:
            ready()
            ready = store.nothing
        jobs = []
        for below, data in contents.items():
            if len(contents) == 1 or (self._is_s3 and len(data) > s3.BLOCK_BYTES):
                self._write_one(below, data, ready)  # of one object, many blocks are under way at once
            else:
                jobs.append(functools.partial(self._write_one, below, data, ready))
        if jobs:  # of what another library sends, it has a copy of so many bytes
            move(jobs, s3.BLOCK_BYTES if self._is_s3 else _WRITE_BYTES)

    def _write_one(self, below: str, data: Data, ready: Ready) -> None:
        path, parts = self._path(below), parts_of(data, self._at_once_bytes)
        if not self._is_s3:
            self._write_in_turn(path, parts, ready)
        elif len(data) > (size := s3.block_bytes(len(data))):
            s3.upload(self._fs, path, s3.regrouped(parts, size), size, ready=ready)
        else:
            body = bytearray()
            for part in parts:
                body += part
            ready()
            self._fs.pipe_file(path, bytes(body))

    def _write_in_turn(self, path: str, parts: Iterable[memoryview], ready: Ready) -> None:
        """Write through the library's own upload."""
        file = self._fs.open(path, "wb", block_size=_WRITE_BYTES)
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

    def _create(self, below: str, data: bytes, by: Writer) -> None:
        path = self._path(below)
        try:
            self._fs.pipe_file(path, data, mode="create")
        except Exception as error:  # botocore's errors are made at run time, and s3fs translates some
            code = code_of(error)
            if isinstance(error, NotImplementedError) or code in ("NotImplemented", "501"):
                if not self._fs.exists(path):  # who has created it, tells a look at it
                    self._fs.pipe_file(path, data)
            elif not isinstance(error, FileExistsError) and code not in _IS_THERE:
                raise

    def _remove(self, below: str, names: Sequence[str]) -> None:
        def remove(name: str) -> Exception | None:
            try:
                self._fs.rm_file(self._path(f"{below}/{name}" if below else name))
            except FileNotFoundError:
                pass
            except Exception as error:  # every library has errors of its own
                return error
            return None

        failed = all_at_once([functools.partial(remove, name) for name in names], "spot-remove", REQUESTS)
        if error := next(filter(None, failed), None):
            raise error

    def _settle(self, *belows: str) -> None:
        """What was acknowledged is durable."""

    def _sweep_temporaries(self, current: Manifest) -> None:
        """Nothing is written aside."""

    def _is_settled(self, name: str, files: Sequence[str], current: Manifest) -> bool:
        paths = [self._path(below) for below in (current.manifest_path, *(f"{name}/{file}" for file in files))]
        try:
            now_s, *written_s = [self._fs.modified(path).timestamp() for path in paths]
        except (FileNotFoundError, NotImplementedError, AttributeError, KeyError):
            return False
        return all(now_s - each_s >= store.SETTLED_S for each_s in written_s)
