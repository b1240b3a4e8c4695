"""Objects below one URL of an fsspec file system: asked for patiently, and removed. What `files` is for directories."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lightning_spot.errors import CorruptManifest
from lightning_spot.retry import retried
from lightning_spot.tiers import s3, store
from lightning_spot.tiers.filesystem import open_filesystem, speaks

logger = logging.getLogger(__name__)

READERS = 8  # small requests at once
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
            CorruptManifest: if it is too long for one.
        """
        path = self.path(below)
        data = bytes(self.twice(lambda: self.fs.cat_file(path, start=0, end=store.LONGEST_MANIFEST_BYTES + 1)))
        if len(data) > store.LONGEST_MANIFEST_BYTES:
            raise CorruptManifest(f"{self.url}/{below} is too long for what it should be")
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
