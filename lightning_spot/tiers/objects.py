"""A store on any fsspec file system (S3, GCS, Azure, …): an object appears whole or not at all; manifest last."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec

from lightning_spot.config import PART_BYTES
from lightning_spot.errors import (
    CorruptManifest,
    CorruptSnapshot,
    SettingsError,
    SnapshotNotFound,
    SpotError,
    TierError,
)
from lightning_spot.image.manifest import MANIFEST_FILE, MODEL_FILE, Manifest, snapshot_order
from lightning_spot.image.parts import checksum, part_ranges
from lightning_spot.tiers import store
from lightning_spot.tiers.store import ATTEMPTS_DIR, LONGEST_MANIFEST_BYTES, Claim, Holdings, Progress

logger = logging.getLogger(__name__)

_READERS = 8  # S3 gives 45–90 MB/s per stream, so several
_WRITE_BYTES = 32 * 1024 * 1024  # one upload part; S3 wants at least 5 MiB and at most 10,000 of them
_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "obs", "cos"})
_EXCLUSIVE = frozenset({"s3", "s3a"})


class ObjectStore:
    """Snapshots of one run below an fsspec URL; implements :class:`~lightning_spot.tiers.store.Store`.

    Credentials and endpoints come from where the file system's own library looks (environment, config files). A
    bucket is never made.

    Args:
        url: the run's URL, such as ``s3://bucket/run-1``.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise SettingsError(f"{url!r} cannot be used as a tier: {error}") from error
        self._root = root.rstrip("/")
        protocol = self._fs.protocol
        self._protocols = frozenset(protocol if isinstance(protocol, (tuple, list)) else (protocol,))

    # -- what is there --------------------------------------------------------------------------------------------

    def survey(self) -> Holdings:
        """See :meth:`Store.survey`."""
        found = Holdings()
        with _tier_errors(self.url):
            names = self._list("")
            if not names:
                self._check_bucket()
            names = [name for name in names if snapshot_order(name) is not None]
            with ThreadPoolExecutor(_READERS) as pool:
                for name, manifest in zip(names, pool.map(self._committed, names), strict=True):
                    if isinstance(manifest, Manifest):
                        found.manifests.append(manifest)
                    elif manifest:
                        found.unreadable[name] = manifest
        found.manifests = store.newest_first(found.manifests)
        found.highest_attempt = store.highest_attempt(self.claimed(), names, found.manifests)
        return found

    def claimed(self) -> int:
        """See :meth:`Store.claimed`."""
        with _tier_errors(self.url):
            return store.highest_claim(self._list(ATTEMPTS_DIR))

    def newest_claim(self) -> Claim | None:
        """See :meth:`Store.newest_claim`."""
        with _tier_errors(self.url):
            names = self._list(ATTEMPTS_DIR)
            return store.first_readable(names, lambda name: self._read_small(f"{ATTEMPTS_DIR}/{name}"), self.url)

    def holds(self, manifest: Manifest) -> bool:
        """See :meth:`Store.holds`."""
        with _tier_errors(self.url):
            if self._noted(manifest) != manifest:
                return False
            try:
                return int(self._fs.info(self._path(manifest.data_path))["size"]) == manifest.nbytes
            except FileNotFoundError:
                return False

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """See :meth:`Store.fetch`."""
        path = self._path(manifest.data_path)

        def read(bounds: tuple[int, int]) -> None:
            start, stop = bounds
            data = self._fs.cat_file(path, start=start, end=stop)
            if len(data) != stop - start:
                raise CorruptSnapshot(f"{self.url}/{manifest.data_path} is cut short", where=self.url)
            into[start:stop] = data
            if progress is not None:
                progress(stop - start)

        with _tier_errors(self.url, reading=True), ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(read, part_ranges(manifest.nbytes, PART_BYTES)))

    # -- changes --------------------------------------------------------------------------------------------------

    def claim(self, claim: Claim) -> None:
        """See :meth:`Store.claim`."""
        store.check_fence(claim.location, claim.attempt, self.claimed())
        with _tier_errors(self.url):
            below = f"{ATTEMPTS_DIR}/{store.claim_name(claim.attempt)}"
            self._make_directory(below)
            if not self._create(below, claim.to_json().encode()):
                store.check_claim(claim, self._claim_in(below))

    def put(self, manifest: Manifest, image: memoryview, *, attempt: int) -> None:
        """See :meth:`Store.put`."""
        self._check_fences(manifest, attempt)
        if self.holds(manifest):
            return  # durable already: a node that takes over from a killed one may not know, and must not undo it
        slices = (image[start:stop] for start, stop in part_ranges(len(image)))
        self._commit(manifest, lambda: self._write(manifest, slices) and manifest)

    def put_parts(self, manifest: Manifest, parts: Iterable[memoryview], *, attempt: int) -> Manifest:
        """See :meth:`Store.put_parts`."""
        self._check_fences(manifest, attempt)
        checksums: list[str] = []
        sizes: list[int] = []

        def noted() -> Iterator[memoryview]:
            for part in parts:
                checksums.append(checksum(part))
                sizes.append(len(part))
                yield part
            store.seal_parts(manifest, checksums, sizes)

        def write() -> Manifest:
            self._write(manifest, noted())
            return store.seal_parts(manifest, checksums, sizes)

        return self._commit(manifest, write)

    def delete(self, manifest: Manifest) -> None:
        """See :meth:`Store.delete`."""
        with _tier_errors(self.url):
            for below in (manifest.manifest_path, manifest.data_path):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(below))
            if not manifest.is_file:
                self._remove_directory(manifest.name)

    def sweep(self, current: Manifest) -> None:
        """See :meth:`Store.sweep`."""
        with _tier_errors(self.url):
            for name in self._list(""):
                order = snapshot_order(name)
                if order is not None and order < current.order and self._list(name) == [MODEL_FILE]:
                    self._fs.rm_file(self._path(f"{name}/{MODEL_FILE}"))
                    self._remove_directory(name)
            for name in store.forgettable(self._list(ATTEMPTS_DIR)):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(f"{ATTEMPTS_DIR}/{name}"))

    # -- inside ---------------------------------------------------------------------------------------------------

    def _path(self, below: str) -> str:
        return f"{self._root}/{below}" if below else self._root

    def _list(self, below: str) -> list[str]:
        """Names in a folder; empty if there is none."""
        path = self._path(below)
        try:
            listed = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return [name for item in listed if (name := str(item).rstrip("/").rpartition("/")[2])]

    def _check_bucket(self) -> None:
        if not (self._protocols & _BUCKETS):
            return
        bucket = self._root.split("/")[0]
        try:
            there = self._fs.exists(bucket)
        except FileNotFoundError:
            there = False
        if not there:
            raise TierError(
                f"bucket {bucket!r} of {self.url} does not exist (or may not be listed); make it first, lightning_spot"
                " makes none",
                tier=self.url,
            )

    def _read_small(self, below: str) -> bytes:
        data = bytes(self._fs.cat_file(self._path(below), start=0, end=LONGEST_MANIFEST_BYTES + 1))
        if len(data) > LONGEST_MANIFEST_BYTES:
            raise CorruptManifest(f"{self.url}/{below} is too long for what it should be")
        return data

    def _committed(self, name: str) -> Manifest | str | None:
        """Manifest of a snapshot, ``None`` if it has none, or why it cannot be read."""
        try:
            manifest = Manifest.from_json(self._read_small(f"{name}/{MANIFEST_FILE}"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # every cloud library has errors of its own
            return f"{type(error).__name__}: {error}"
        return manifest if manifest.name == name else f"its manifest is that of {manifest.name}"

    def _noted(self, manifest: Manifest) -> Manifest | None:
        try:
            return Manifest.from_json(self._read_small(manifest.manifest_path))
        except (FileNotFoundError, CorruptManifest):
            return None

    def _claim_in(self, below: str) -> Claim | None:
        try:
            return Claim.from_json(self._read_small(below))
        except (FileNotFoundError, CorruptManifest):
            return None

    def _check_fences(self, manifest: Manifest, attempt: int) -> None:
        store.check_fence(manifest.run, attempt, self.claimed())
        if manifest.is_file:
            with _tier_errors(self.url):
                store.check_file_fence(manifest, attempt, self._noted(manifest))

    def _create(self, below: str, data: bytes) -> bool:
        """Create an object unless it exists; whether that was done."""
        path = self._path(below)
        if self._protocols & _EXCLUSIVE:
            try:
                self._fs.pipe_file(path, data, mode="create")
            except Exception as error:
                if not _is_there_already(error):
                    raise
                return False
            return True
        if self._fs.exists(path):
            return False
        self._fs.pipe_file(path, data)
        return True

    def _make_directory(self, below: str) -> None:
        """Where there are real directories; object stores have none, and s3fs would make the bucket."""
        if not self._protocols & _BUCKETS:
            self._fs.makedirs(self._path(below).rpartition("/")[0], exist_ok=True)

    def _commit(self, manifest: Manifest, write: Callable[[], Any]) -> Manifest:
        with _tier_errors(self.url):
            self._make_directory(manifest.data_path)
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(manifest.manifest_path))
            sealed: Manifest = write()
            self._fs.pipe_file(self._path(manifest.manifest_path), sealed.to_json().encode())
            return sealed

    def _write(self, manifest: Manifest, parts: Iterable[memoryview]) -> bool:
        file = self._fs.open(self._path(manifest.data_path), "wb", block_size=_WRITE_BYTES)
        try:
            for part in parts:
                file.write(part)
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True
            raise
        file.close()
        return True

    def _remove_directory(self, name: str) -> None:
        """Object stores have no directories; elsewhere one that is not empty stays."""
        if not self._protocols & _BUCKETS:
            with contextlib.suppress(OSError, NotImplementedError):
                self._fs.rmdir(self._path(name))


def _is_there_already(error: BaseException) -> bool:
    if isinstance(error, FileExistsError):
        return True
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
    return code in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409") or "PreconditionFailed" in str(
        error
    )


@contextlib.contextmanager
def _tier_errors(url: str, *, reading: bool = False) -> Iterator[None]:
    try:
        yield
    except SpotError:
        raise
    except FileNotFoundError as error:
        if reading:
            raise SnapshotNotFound(f"{url}: {error} does not exist") from error
        raise TierError(f"{url}: {error} does not exist", tier=url) from error
    except Exception as error:  # every cloud library has errors of its own; all mean that this tier failed
        raise TierError(f"{url}: {type(error).__name__}: {error}", tier=url) from error
