"""Brings a snapshot from an object store into memory: pieces of its files side by side, and checks each range."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_spot.errors import CorruptSnapshot
from lightning_spot.image.files import FileSpan, pieces
from lightning_spot.image.manifest import Manifest
from lightning_spot.tiers.store import Progress
from lightning_spot.tiers.transfers import Job

logger = logging.getLogger(__name__)

Piece = tuple[FileSpan, int, int]
"""A file, and a range of the image that lies in it."""


@dataclass(eq=False, slots=True)
class _Range:
    """Some of the image that is checked as one.

    Attributes:
        start: in the image.
        stop: in the image.
        pieces: that it is put together of.
        left: how many of them are not there yet.
    """

    start: int
    stop: int
    pieces: list[Piece]
    left: int


class Fetching:
    """A snapshot on its way.

    Args:
        manifest: of it.
        into: memory for its image.
        read: gives a range of the image that lies in one file; called on several threads.
        url: of the tier, for messages.
        progress: told of the bytes of each range.
    """

    def __init__(
        self,
        manifest: Manifest,
        into: memoryview,
        read: Callable[[FileSpan, int, int], bytes],
        url: str,
        progress: Progress | None,
    ) -> None:
        self._manifest, self._into, self._read, self._url = manifest, into, read, url
        self._progress = progress
        self._lock = threading.Lock()

    def jobs(self, nbytes: int) -> Iterator[Job]:
        """What brings all of it, in ranges of at least ``nbytes``.

        The jobs raise CorruptSnapshot if a range is not what was committed, also when it is read once more.
        """
        for start, stop in self._manifest.ranges(nbytes):
            found: list[Piece] = []
            for span, first, last in pieces(self._manifest.spans, start, stop):
                if span is None:
                    self._into[first:last] = bytes(last - first)
                else:
                    found.append((span, first, last))
            part = _Range(start, stop, found, len(found))
            if not found:
                self._check(part)
            for piece in found:
                yield piece[2] - piece[1], functools.partial(self._bring, part, piece)

    def _bring(self, part: _Range, piece: Piece) -> None:
        self._fill(piece)
        with self._lock:
            part.left -= 1
            is_whole = not part.left
        if is_whole:
            self._check(part)

    def _fill(self, piece: Piece) -> None:
        _span, first, last = piece
        try:
            data = self._read(*piece)
        except CorruptSnapshot as error:  # there, or only on its way: what comes now tells
            logger.info("read once more: %s", error)
            data = self._read(*piece)
        self._into[first:last] = data

    def _check(self, part: _Range) -> None:
        view = self._into[part.start : part.stop]
        try:
            self._manifest.verify_range(part.start, view, self._url)
        except CorruptSnapshot as error:
            logger.info("read once more: %s", error)
            for piece in part.pieces:
                self._fill(piece)
            self._manifest.verify_range(part.start, view, self._url)
        if self._progress is not None:
            self._progress(part.stop - part.start)
