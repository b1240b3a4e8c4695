"""Open ``spot://`` files: a reader of ranges, and a writer that sends a file whole or not at all."""

from __future__ import annotations

import io
import logging
import sys
from typing import TYPE_CHECKING, Any

from fsspec.spec import AbstractBufferedFile

from lightning_spot.image.parts import checksum

if TYPE_CHECKING:
    from lightning_spot.client.filesystem import SpotFileSystem

logger = logging.getLogger(__name__)

BLOCK_BYTES = 8 * 1024 * 1024


class SpotReader(AbstractBufferedFile):  # type: ignore[misc] # fsspec has no types
    """Reads ranges of one version of a file; large reads go to the network once, without a second copy.

    Args:
        fs: where it is.
        info: what ``fs.info`` says of it. A file that is replaced while it is read is an error, never a mixture.
        block_size: bytes to ask for at least.
        cache_options: passed to fsspec.
        **kwargs: likewise.
    """

    def __init__(
        self, fs: SpotFileSystem, info: dict[str, Any], block_size: int, cache_options: Any = None, **kwargs: Any
    ) -> None:
        self._info = info
        super().__init__(fs, info["name"], "rb", block_size, cache_options=cache_options, size=info["size"], **kwargs)
        self.details = info

    def readinto(self, target: Any) -> int:
        """Read straight into ``target``, past the cache where it is larger than a block."""
        view = memoryview(target).cast("B")
        if len(view) < self.blocksize:
            data = self.read(len(view))
            view[: len(data)] = data
            return len(data)
        count = max(0, min(len(view), int(self.size) - int(self.loc)))
        self.fs.fill(self._info, self.loc, view[:count])
        self.loc += count
        return count

    def _fetch_range(self, start: int, end: int) -> bytes:
        buffer = bytearray(max(0, min(end, self.size) - start))
        self.fs.fill(self._info, start, memoryview(buffer))
        return bytes(buffer)


class SpotWriter(io.BytesIO):
    """Collects a file and sends it when it is closed (or, in a transaction, when that commits): whole or not at all.

    A file that is closed because of an exception, or never, is not sent: half a checkpoint is none.

    Args:
        fs: where it goes.
        path: its path.
        autocommit: whether closing sends it.
        exclusive: whether it must not be there yet.
    """

    def __init__(self, fs: SpotFileSystem, path: str, *, autocommit: bool, exclusive: bool) -> None:
        super().__init__()
        self.fs = fs
        self.path = path
        self._autocommit = autocommit
        self._exclusive = exclusive
        self._data: memoryview | None = None
        self._handled_at_open = sys.exc_info()[1]

    def close(self) -> None:
        """Send the file, unless a transaction will, or an exception that came up since it was opened ends it."""
        if self.closed:
            return
        failing = sys.exc_info()[1]
        # fsspec's own ``with fsspec.open(…)`` calls nothing but this after an exception.
        if failing is not None and failing is not self._handled_at_open:
            logger.warning("%s is not written: %r came up meanwhile", self.path, failing)
        else:
            self._data = memoryview(self.getvalue())
        super().close()
        if self._autocommit:
            self.commit()

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:
            self.discard()
            super().close()
        else:
            self.close()

    def __del__(self) -> None:
        if not self.closed:  # nobody said that it is whole
            super().close()

    def commit(self) -> None:
        """Send what was written."""
        if self._data is not None:
            data, self._data = self._data, None
            pieces, digest = (lambda: [data]), checksum(data)
            self.fs.store(self.path, pieces, len(data), exclusive=self._exclusive, digest=digest)

    def discard(self) -> None:
        """Forget what was written."""
        self._data = None
