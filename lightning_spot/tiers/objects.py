"""A store on any fsspec file system (S3, GCS, Azure, …): an object appears whole or not at all; manifest last."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
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
from lightning_spot.image.manifest import MANIFEST_FILE, Manifest, snapshot_order
from lightning_spot.image.parts import part_ranges
from lightning_spot.tiers.store import (
    ATTEMPTS_DIR,
    Progress,
    check_fence,
    claim_name,
    highest_claim,
    newest_first,
)

logger = logging.getLogger(__name__)

_READERS = 8  # S3 gives 45–90 MB/s per stream, so several
_WRITE_BYTES = 32 * 1024 * 1024  # one upload part; S3 wants at least 5 MiB and at most 10,000 of them


class ObjectStore:
    """Snapshots of one run below an fsspec URL; implements :class:`~lightning_spot.tiers.store.Store`.

    Credentials and endpoints come from where the file system's own library looks (environment, config files).

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

    def put(self, manifest: Manifest, image: memoryview, *, writer: int) -> None:
        """See :meth:`Store.put`."""
        if not manifest.is_file:
            check_fence(manifest.run, writer, self.claimed())
        with _tier_errors(self.url):
            commit, data = self._path(manifest.manifest_path), self._path(manifest.data_path)
            if self._holds(commit, manifest) and self._fs.exists(data) and self._fs.size(data) == manifest.nbytes:
                return  # durable already: a node that takes over from a killed one may not know, and must not undo it
            self._fs.makedirs(data.rpartition("/")[0], exist_ok=True)
            if self._fs.exists(commit):
                self._fs.rm_file(commit)
            self._write(data, image)
            self._fs.pipe_file(commit, manifest.to_json().encode())

    def manifests(self) -> list[Manifest]:
        """See :meth:`Store.manifests`."""
        found = []
        with _tier_errors(self.url):
            for path in self._fs.glob(f"{self._root}/*/{MANIFEST_FILE}"):
                try:
                    manifest = Manifest.from_json(self._fs.cat_file(path))
                except FileNotFoundError:
                    continue  # deleted meanwhile
                except CorruptManifest as error:
                    logger.warning("%s is left out: %s", path, error)
                    continue
                if manifest.name == str(path).split("/")[-2]:
                    found.append(manifest)
        return newest_first(found)

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

        with _tier_errors(self.url), ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(read, part_ranges(manifest.nbytes, PART_BYTES)))

    def delete(self, manifest: Manifest) -> None:
        """See :meth:`Store.delete`."""
        with _tier_errors(self.url):
            for path in (manifest.manifest_path, manifest.data_path):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(path))
            self._remove_directory(manifest)

    def sweep(self, current: Manifest) -> None:
        """See :meth:`Store.sweep`."""
        with _tier_errors(self.url):
            committed = {manifest.name for manifest in self.manifests()}
            for path in self._fs.glob(f"{self._root}/step-*-attempt-*/*"):
                name = str(path).split("/")[-2]
                order = snapshot_order(name)
                if order is not None and order < current.order and name not in committed:
                    self._fs.rm_file(path)

    def claimed(self) -> int:
        """See :meth:`Store.claimed`."""
        with _tier_errors(self.url):
            try:
                paths = self._fs.ls(self._path(ATTEMPTS_DIR), detail=False)
            except FileNotFoundError:
                return 0
            return highest_claim([str(path).rpartition("/")[2] for path in paths])

    def claim(self, attempt: int, record: dict[str, Any]) -> None:
        """See :meth:`Store.claim`."""
        with _tier_errors(self.url):
            self._fs.makedirs(self._path(ATTEMPTS_DIR), exist_ok=True)
            self._fs.pipe_file(self._path(f"{ATTEMPTS_DIR}/{claim_name(attempt)}"), json.dumps(record).encode())

    def _path(self, below: str) -> str:
        return f"{self._root}/{below}"

    def _holds(self, commit: str, manifest: Manifest) -> bool:
        try:
            return Manifest.from_json(self._fs.cat_file(commit)) == manifest
        except (FileNotFoundError, CorruptManifest):
            return False

    def _write(self, path: str, image: memoryview) -> None:
        with self._fs.open(path, "wb", block_size=_WRITE_BYTES) as file:
            for start in range(0, len(image), PART_BYTES):
                file.write(image[start : start + PART_BYTES])

    def _remove_directory(self, manifest: Manifest) -> None:
        """Object stores have no directories; others leave an empty one behind, which is no harm."""
        if not manifest.is_file:
            with contextlib.suppress(OSError, NotImplementedError):
                self._fs.rmdir(self._path(manifest.name))


@contextlib.contextmanager
def _tier_errors(url: str) -> Iterator[None]:
    try:
        yield
    except SpotError:
        raise
    except FileNotFoundError as error:
        raise SnapshotNotFound(f"{url}: {error} does not exist") from error
    except Exception as error:  # every cloud library has errors of its own; all mean that this tier failed
        raise TierError(f"{url}: {type(error).__name__}: {error}", tier=url) from error
