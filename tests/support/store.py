"""Stores: a local one that can be held up or made to fail, and a file system in memory that a user has registered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from lightning_spot.image.manifest import Manifest
from lightning_spot.tiers.local import LocalStore


class Kept(MemoryFileSystem):
    """Like any file system that a user has registered; ``conftest`` does."""

    protocol = "kept"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("kept://"))


class GatedStore(LocalStore):
    """A local store that can be held up, slowed down, or made to fail.

    Attributes:
        open: nothing is put while this is cleared.
        bytes_per_s: speed of puts.
        errors: called with the kind of each request and its manifest; what it returns is raised.
        tries: ``put NAME``, ``delete NAME``… in order.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.open = threading.Event()
        self.open.set()
        self.bytes_per_s = float("inf")
        self.errors: Callable[[str, Manifest], Exception | None] = lambda _kind, _manifest: None
        self.tries: list[str] = []
        self._pause = threading.Event()

    def put(self, manifest: Manifest, image: memoryview, *, attempt: int) -> None:
        self._note("put", manifest)
        assert self.open.wait(30)
        self._pause.wait(manifest.nbytes / self.bytes_per_s)
        super().put(manifest, image, attempt=attempt)

    def put_parts(self, manifest: Manifest, parts: Iterable[memoryview], *, attempt: int) -> Manifest:
        self._note("put", manifest)
        assert self.open.wait(30)
        return super().put_parts(manifest, parts, attempt=attempt)

    def delete(self, manifest: Manifest) -> None:
        self._note("delete", manifest)
        super().delete(manifest)

    def puts(self) -> list[int]:
        """Steps of the snapshots that were tried, in order."""
        return [int(tried.split("step-")[1][:9]) for tried in self.tries if tried.startswith("put step-")]

    def fail(self, error: Exception | None) -> None:
        """Let every request fail from now on, or none."""
        self.errors = lambda _kind, _manifest: error

    def _note(self, kind: str, manifest: Manifest) -> None:
        self.tries.append(f"{kind} {manifest.name}")
        if (error := self.errors(kind, manifest)) is not None:
            raise error
