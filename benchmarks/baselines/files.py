"""Files that are whole or not there. Imports no torch: the peer's process uses it."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, *blocks: memoryview | bytes) -> None:
    """A file that is at its path whole and synced, or not at all (most of the papers leave that to the reader)."""
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb", buffering=0) as file:
        for block in blocks:
            rest = memoryview(block).cast("B")
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    temporary.replace(path)


def newest(folder: Path, pattern: str) -> Path:
    """The file of the greatest step.

    Raises:
        FileNotFoundError: if there is none.
    """
    found = sorted(folder.glob(pattern))
    if not found:
        raise FileNotFoundError(f"no {pattern} in {folder}: no snapshot was saved there")
    return found[-1]


def read_whole(path: Path) -> bytearray:
    """A file's content, read once."""
    data = bytearray(path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.readinto(rest) :]
    return data


def keep_two(folder: Path, pattern: str) -> None:
    """Delete all but the files of the two greatest steps."""
    for older in sorted(folder.glob(pattern))[:-2]:
        older.unlink()
