"""Reads ranges of a snapshot's image from its files in a directory. Not for checking what was read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_spot.errors import CorruptSnapshot
from lightning_spot.image.files import FileSpan, pieces
from lightning_spot.image.manifest import Manifest
from lightning_spot.tiers.files import open_regular


class ImageReader:
    """The image of a snapshot that lies in a directory; a context manager. The file that was read last stays open.

    Args:
        root: the run's directory.
        manifest: of the snapshot.
        where: what to call the tier in errors.
    """

    def __init__(self, root: Path, manifest: Manifest, where: str) -> None:
        self._root = root
        self._manifest = manifest
        self._where = where
        self._open: tuple[FileSpan, int] | None = None

    def __enter__(self) -> ImageReader:
        return self

    def __exit__(self, *_raised: Any) -> None:
        self._close()

    def read(self, start: int, into: memoryview, progress: Callable[[int], None] | None = None) -> None:
        """Fill ``into`` with the image from byte ``start`` on.

        Raises:
            CorruptSnapshot: if a file is too short.
            FileNotFoundError: if one is not there.
            OSError: if one cannot be read.
        """
        for span, first, last in pieces(self._manifest.spans, start, start + len(into)):
            target = into[first - start : last - start]
            if span is None:
                target[:] = bytes(len(target))
            else:
                self._fill(span, first - span.offset, target)
            if progress is not None:
                progress(len(target))

    def _fill(self, span: FileSpan, place: int, target: memoryview) -> None:
        if self._open is None or self._open[0] != span:
            self._close()
            self._open = span, open_regular(self._root / self._manifest.path_of(span))
        while target:
            count = os.preadv(self._open[1], [target], place)
            if not count:
                path = self._root / self._manifest.path_of(span)
                raise CorruptSnapshot(
                    f"{path} is cut short: {place} of {span.nbytes} bytes are there", where=self._where
                )
            target, place = target[count:], place + count

    def _close(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None
