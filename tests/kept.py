"""fsspec's file system in memory as ``kept://``: under its own name it is refused, since nothing there outlives us."""

from __future__ import annotations

from typing import Any

from fsspec.implementations.memory import MemoryFileSystem


class Kept(MemoryFileSystem):
    """Like any file system that a user has registered; ``conftest`` does."""

    protocol = "kept"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("kept://"))
