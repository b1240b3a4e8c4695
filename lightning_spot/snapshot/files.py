"""The files into which a snapshot's image is cut at rest: their places and names. Not for reading or writing them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from lightning_spot.errors import CorruptSnapshotError
from lightning_spot.untrusted import MOST_BYTES, FileName, whole

MODEL_FILE = "model.ckpt"
FILE_ALIGNMENT_BYTES = 4096
"""Each file begins at a multiple of this in the image, so that it is written past the page cache."""

_CHECKED_BYTES = 1024 * 1024
MOST_FILES = 2**16
"""Of one snapshot."""

_NOTE = re.compile(r"(shard|failed)-\d{5}\.json", re.ASCII)
_SHARDED_FILE = re.compile(r"\.metadata|meta\.pt|shards\.json|rank-\d{4,6}\.pt|__\d{1,6}_\d{1,6}\.distcp", re.ASCII)


def is_data_file(name: str) -> bool:
    """Whether a snapshot's data may have this name: a checkpoint, or a part of a torch distributed checkpoint.

    No snapshot has other files, so that what a killed writer left, without a manifest, is known as ours by its names.
    """
    return name == MODEL_FILE or _SHARDED_FILE.fullmatch(name) is not None


def note_name(writer: int, *, failed: bool = False) -> str:
    """Name of what says, beside the files of a writer's shard, that they are there; or that they never will be."""
    return f"{'failed' if failed else 'shard'}-{writer:05d}.json"


def is_note(name: str) -> bool:
    """Whether a name is that of a writer's note."""
    return _NOTE.fullmatch(name) is not None


def is_own_file(name: str) -> bool:
    """Whether a file in a snapshot's directory, beside its manifest, is ours."""
    return is_data_file(name) or is_note(name)


@dataclass(frozen=True, slots=True)
class FileSpan:
    """One of the files of a snapshot, and its place in the image.

    Attributes:
        name: within the snapshot's directory.
        offset: of its first byte in the image, a multiple of 4096.
        nbytes: its size.
    """

    name: FileName
    offset: Annotated[int, whole(0, MOST_BYTES)]
    nbytes: Annotated[int, whole(0, MOST_BYTES)]

    @property
    def stop(self) -> int:
        """Offset behind its last byte in the image."""
        return self.offset + self.nbytes


def check_files(files: Sequence[FileSpan], nbytes: int) -> str | None:
    """What is wrong with the files of an image of ``nbytes`` bytes; ``None`` if nothing is."""
    end, names = 0, set()
    for file in files:
        if not is_data_file(file.name) or file.name in names:
            return f"{file.name!r} is no name of a snapshot's file, or it is there twice"
        if file.offset < end or file.offset % FILE_ALIGNMENT_BYTES:
            return f"{file.name} does not begin at a multiple of {FILE_ALIGNMENT_BYTES} behind the file before it"
        end = file.stop
        names.add(file.name)
    return f"its files reach beyond its {nbytes} bytes" if end > nbytes else None


def pieces(files: Sequence[FileSpan], start: int, stop: int) -> Iterator[tuple[FileSpan | None, int, int]]:
    """Yield what lies in a range of the image, in order, without empty pieces.

    Args:
        files: of the image.
        start: of the range.
        stop: of the range.

    Yields:
        ``(file, start, stop)``: the file, ``None`` for bytes that are in none, and a range of the image.
    """
    for index in range(bisect_right(files, start, key=lambda file: file.stop), len(files)):
        file = files[index]
        if file.offset >= stop:
            break
        if start < file.offset:
            yield None, start, file.offset
        start, end = max(start, file.offset), min(file.stop, stop)
        if start < end:
            yield file, start, end
        start = max(start, end)
    if start < stop:
        yield None, start, stop


def check_zero(gap: memoryview) -> None:
    """Check bytes between files.

    Raises:
        CorruptSnapshotError: if one is not zero.
    """
    for start in range(0, len(gap), _CHECKED_BYTES):
        piece = bytes(gap[start : start + _CHECKED_BYTES])
        if piece != bytes(len(piece)):
            raise CorruptSnapshotError("bytes that are in no file of the snapshot are not zero; it is not committed")
