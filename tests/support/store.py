"""Stores and what they hold: a local one that can be held up or made to fail, a file system that a user registered."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.store.local import LocalStore
from lightning_spot.store.store import Store


def snapshot(
    step: int, *, attempt: int = 1, nbytes: int = 1000, part_bytes: int = 256, **more: Any
) -> tuple[Manifest, bytes]:
    """A snapshot of random bytes, or what ``more`` makes of it."""
    data = random.Random(step).randbytes(nbytes)
    made = Manifest(
        run="run", name=snapshot_name(step, attempt), step=step, attempt=attempt, nbytes=nbytes, part_bytes=part_bytes
    )
    return replace(made, **more).sealed(memoryview(data)), data


def put(store: Store, step: int, *, by: int | None = None, **more: Any) -> Manifest:
    """Store one on behalf of an attempt, by default its own."""
    manifest, data = snapshot(step, **more)
    store.put(manifest, memoryview(data), attempt=by or manifest.attempt)
    return manifest


def parts_of(image: bytes, nbytes: int = 256, fail_at: int | None = None) -> Iterator[memoryview]:
    """The bytes of a snapshot, part by part."""
    for index, start in enumerate(range(0, len(image), nbytes)):
        if index == fail_at:
            raise OSError("the source is gone")
        scratch = bytearray(image[start : start + nbytes])
        yield memoryview(scratch)
        scratch[:] = bytes(len(scratch))  # done with when the next one is asked for


def fetched(store: Store, manifest: Manifest) -> memoryview:
    buffer = memoryview(bytearray(manifest.nbytes))
    store.fetch(manifest, buffer)
    return buffer


class Kept(MemoryFileSystem):
    """A bucket in memory, not of S3: an object appears when it is complete. ``conftest`` registers it."""

    protocol = "kept"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("kept://"))

    def info(self, path: str, **more: Any) -> Any:
        found = super().info(path, **more)
        return {**found, "ETag": hash(self.cat_file(path))} if found["type"] == "file" else found

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        return _Coming(self, path) if mode == "wb" and "data" not in more else super().open(path, mode, **more)


class _Coming:
    """An object on its way."""

    def __init__(self, files: Kept, path: str) -> None:
        self._files, self._path, self._data, self.closed = files, path, bytearray(), False

    def write(self, data: memoryview) -> None:
        self._data += data

    def discard(self) -> None:
        self._data.clear()

    def close(self) -> None:
        self.closed = True
        self._files.pipe_file(self._path, bytes(self._data))


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
        assert self.open.wait(120)
        self._pause.wait(manifest.nbytes / self.bytes_per_s)
        super().put(manifest, image, attempt=attempt)

    def put_parts(self, manifest: Manifest, parts: Iterable[memoryview], *, attempt: int) -> Manifest:
        self._note("put", manifest)
        assert self.open.wait(120)
        return super().put_parts(manifest, parts, attempt=attempt)

    def delete(self, manifest: Manifest, **more: Any) -> bool:
        self._note("delete", manifest)
        return super().delete(manifest, **more)

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
