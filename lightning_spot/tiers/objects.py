"""A store on any fsspec file system (S3, GCS, Azure, …): an object appears whole or not at all; manifest last."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from lightning_spot.config import PART_BYTES
from lightning_spot.errors import CorruptManifest, CorruptSnapshot, SnapshotNotFound, TierError
from lightning_spot.image.files import FileSpan, is_own_file, pieces
from lightning_spot.image.manifest import MANIFEST_FILE, OWN_DIR, Manifest, snapshot_order
from lightning_spot.image.sealing import NotedParts
from lightning_spot.tiers import claims, store
from lightning_spot.tiers.claims import ATTEMPTS_DIR, Claim
from lightning_spot.tiers.filesystem import check_bucket, make_parent, open_filesystem, speaks, tier_errors
from lightning_spot.tiers.folder import ObjectFolder
from lightning_spot.tiers.lanes import Job, Lanes
from lightning_spot.tiers.multipart import S3, abort_dead_uploads, abort_noted, create_object
from lightning_spot.tiers.store import LONGEST_MANIFEST_BYTES, Holdings, Progress
from lightning_spot.tiers.temporaries import temporary_name, temporary_owner, writer_has_ended
from lightning_spot.tiers.writing import Parts, write_files, write_small

logger = logging.getLogger(__name__)

_READERS = 8  # small requests at once
_PAUSES_S = (0.1, 0.5)
_LONGEST_UPLOAD = 24  # times SETTLED_S: a day
_CHANGES_WITH_CONTENT = ("size", "ETag", "etag", "LastModified", "last_modified", "mtime", "generation", "ino")

Result = TypeVar("Result")


class ObjectStore:
    """Snapshots of one run below an fsspec URL; implements :class:`~lightning_spot.tiers.store.Store`.

    Credentials and endpoints come from where the file system's own library looks (environment, config files). A
    bucket is never made.

    Args:
        url: the run's URL, such as ``s3://bucket/run-1``.

    Raises:
        SettingsError: if the URL is malformed or its file system is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = open_filesystem(url)
        self._lanes = Lanes()
        self._uploads_swept_for = 0

    # -- what is there --------------------------------------------------------------------------------------------

    def survey(self) -> Holdings:
        """See :meth:`Store.survey`."""
        found = Holdings()
        with tier_errors(self.url):
            names = self._list("")
            if not names:
                check_bucket(self._fs, self._root, self.url)
            names = [name for name in names if snapshot_order(name) is not None]
            with ThreadPoolExecutor(_READERS) as pool:
                for name, manifest in zip(names, pool.map(self._committed, names), strict=True):
                    if isinstance(manifest, Manifest):
                        found.manifests.append(manifest)
                    elif manifest:
                        found.unreadable[name] = manifest
                    else:
                        found.unfinished.append(name)
        found.manifests = store.newest_first(found.manifests)
        found.highest_attempt = store.highest_attempt(self.claimed(), names, found.manifests)
        return found

    def claimed(self) -> int:
        """See :meth:`Store.claimed`."""
        with tier_errors(self.url):
            return claims.highest_claim(self._list(ATTEMPTS_DIR))

    def newest_claim(self) -> Claim | None:
        """See :meth:`Store.newest_claim`."""
        with tier_errors(self.url):
            names = self._list(ATTEMPTS_DIR)
            return claims.first_readable(names, lambda name: self._read_small(f"{ATTEMPTS_DIR}/{name}"), self.url)

    def has(self, manifest: Manifest) -> bool:
        """See :meth:`Store.has`."""
        with tier_errors(self.url):
            return self._noted(manifest) == manifest and self._sizes(manifest) == [
                item.nbytes for item in manifest.spans
            ]

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """See :meth:`Store.fetch`; by several requests at once."""

        def read(start: int, stop: int) -> None:
            for span, first, last in pieces(manifest.spans, start, stop):
                into[first:last] = bytes(last - first) if span is None else self._range(manifest, span, first, last)
            manifest.verify_range(start, into[start:stop], self.url)
            if progress is not None:
                progress(stop - start)

        def jobs() -> Iterator[Job]:
            for start, stop in manifest.ranges(size):
                yield stop - start, lambda start=start, stop=stop: read(start, stop)  # type: ignore[misc]

        with tier_errors(self.url, reading=True):
            began_s = time.monotonic()
            sizes = self._sizes(manifest)
            self._lanes.pace.answered(time.monotonic() - began_s)
            size = self._lanes.part_bytes(manifest.nbytes, max(PART_BYTES, manifest.part_bytes))
            for span, nbytes in zip(manifest.spans, sizes, strict=True):
                if nbytes is None:
                    raise SnapshotNotFound(f"{self.url}/{manifest.path_of(span)} does not exist")
                if nbytes < span.nbytes:
                    raise CorruptSnapshot(
                        f"{self.url}/{manifest.path_of(span)} is cut short: {nbytes} of {span.nbytes} bytes are there",
                        where=self.url,
                    )
            self._lanes.run(jobs(), size)

    def folder(self, name: str, *, attempt: int, run_id: str) -> ObjectFolder:
        """See :meth:`HasFolders.folder`."""
        return ObjectFolder(self._fs, self._root, self.url, self._lanes, name, attempt=attempt, run_id=run_id)

    # -- changes --------------------------------------------------------------------------------------------------

    def claim(self, claim: Claim) -> None:
        """See :meth:`Store.claim`."""
        claims.check_fence(claim.location, claim.attempt, self.claimed())
        with tier_errors(self.url):
            below = f"{ATTEMPTS_DIR}/{claims.claim_name(claim.attempt)}"
            make_parent(self._fs, self._path(below))
            self._create(below, claim.to_json().encode(), claim)
            # Read back in any case: where the store cannot create exclusively, the last of two writers has won.
            claims.check_claim(claim, self._claim_in(below))

    def put(self, manifest: Manifest, image: memoryview, *, attempt: int) -> None:
        """See :meth:`Store.put`."""
        self._check_fences(manifest, attempt)
        if self.has(manifest):
            return  # durable already: a node that takes over from a killed one may not know, and must not undo it
        self._commit(manifest, image, lambda: manifest, attempt)

    def put_parts(self, manifest: Manifest, parts: Iterable[memoryview], *, attempt: int) -> Manifest:
        """See :meth:`Store.put_parts`."""
        self._check_fences(manifest, attempt)
        noted = NotedParts(manifest, parts)
        return self._commit(manifest, iter(noted), noted.sealed, attempt)

    def delete(self, manifest: Manifest) -> None:
        """See :meth:`Store.delete`."""
        with tier_errors(self.url):
            if manifest.is_file and store.is_newer(self._noted(manifest), manifest):
                logger.info("%s stays at %s: a later attempt has written it anew", manifest.name, self.url)
                return
            for path in (manifest.manifest_path, *map(manifest.path_of, manifest.spans)):
                self._remove(path)
            self._remove_directory(OWN_DIR if manifest.is_file else manifest.name)

    def sweep(self, current: Manifest) -> None:
        """See :meth:`Store.sweep`. Unfinished multipart uploads are looked for once an attempt."""
        with tier_errors(self.url):
            names = self._list("")
            older = [name for name in names if (order := snapshot_order(name)) is not None and order < current.order]
            with ThreadPoolExecutor(_READERS) as pool:
                for name, names in zip(older, pool.map(self._list, older), strict=True):
                    self._sweep_snapshot(name, names, current)
            attempts = self._list(ATTEMPTS_DIR)
            self._sweep_temporaries("", names, current)
            self._sweep_temporaries(f"{ATTEMPTS_DIR}/", attempts, current)
            self._sweep_temporaries(f"{OWN_DIR}/", self._list(OWN_DIR) if OWN_DIR in names else [], current)
            for name in claims.forgettable(attempts):
                self._remove(f"{ATTEMPTS_DIR}/{name}")
            if speaks(self._fs, S3) and self._uploads_swept_for != current.attempt:
                abort_dead_uploads(self._fs, self._root, current)
                self._uploads_swept_for = current.attempt

    def sweep_files(self) -> None:
        """See :meth:`Store.sweep_files`."""
        with tier_errors(self.url):
            for below in [*self._list(""), *(f"{OWN_DIR}/{name}" for name in self._list(OWN_DIR))]:
                name = below.rpartition("/")[2]
                times = _LONGEST_UPLOAD if speaks(self._fs, S3) else 1  # S3's are notes of uploads, and not touched
                if temporary_owner(name) is not None and (writer_has_ended(name) or self._is_settled(below, times)):
                    self._remove_temporary(below)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _path(self, below: str) -> str:
        return f"{self._root}/{below}" if below else self._root

    def _list(self, below: str) -> list[str]:
        """Names in a folder; empty if there is none."""
        path = self._path(below)
        try:
            listed = self._twice(lambda: self._fs.ls(path, detail=False))
        except FileNotFoundError:
            return []
        return [name for item in listed if (name := str(item).rstrip("/").rpartition("/")[2])]

    def _patiently(self, action: Callable[[], Result]) -> Result:
        """Do what only reads; try again where the library does not do that itself."""
        for pause_s in () if speaks(self._fs, S3) else _PAUSES_S:
            try:
                return action()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
                raise
            except Exception as error:  # every library has errors of its own
                logger.debug("%s: %s; tried again", self.url, error)
                time.sleep(pause_s)
        return action()

    def _twice(self, action: Callable[[], Result]) -> Result:
        """The same, and "nothing there" is asked for twice: a file server that fails over has said so wrongly."""
        try:
            return self._patiently(action)
        except FileNotFoundError:
            return self._patiently(action)

    def _read_small(self, below: str) -> bytes:
        path = self._path(below)
        data = bytes(self._twice(lambda: self._fs.cat_file(path, start=0, end=LONGEST_MANIFEST_BYTES + 1)))
        if len(data) > LONGEST_MANIFEST_BYTES:
            raise CorruptManifest(f"{self.url}/{below} is too long for what it should be")
        return data

    def _committed(self, name: str) -> Manifest | str | None:
        """Manifest of a snapshot, ``None`` if it has none, or why it cannot be read."""
        try:
            manifest = claims.whole(lambda: Manifest.from_json(self._read_small(f"{name}/{MANIFEST_FILE}")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # every cloud library has errors of its own
            return f"{type(error).__name__}: {error}"
        return manifest if manifest.name == name else f"its manifest is that of {manifest.name}"

    def _noted(self, manifest: Manifest) -> Manifest | None:
        with contextlib.suppress(FileNotFoundError, CorruptManifest):
            return claims.whole(lambda: Manifest.from_json(self._read_small(manifest.manifest_path)))
        return None

    def _size(self, below: str) -> int | None:
        try:
            return int(self._twice(lambda: self._fs.info(self._path(below)))["size"])
        except FileNotFoundError:
            return None

    def _range(self, manifest: Manifest, span: FileSpan, start: int, stop: int) -> bytes:
        """A range of the image that lies in one file."""
        path, first, last = self._path(manifest.path_of(span)), start - span.offset, stop - span.offset
        data = bytes(self._patiently(lambda: self._fs.cat_file(path, start=first, end=last)))
        if len(data) != stop - start:
            where = f"{self.url}/{manifest.path_of(span)}"
            raise CorruptSnapshot(f"{where} is cut short: {len(data)} bytes came from byte {first}", where=where)
        return data

    def _sizes(self, manifest: Manifest) -> list[int | None]:
        """Size of each file of a snapshot, ``None`` for one that is not there; in one request."""
        if not manifest.files:
            return [self._size(manifest.data_path)]
        try:
            listed = self._twice(lambda: self._fs.ls(self._path(manifest.name), detail=True))
        except FileNotFoundError:
            listed = []
        sizes = {str(item["name"]).rpartition("/")[2]: int(item["size"]) for item in listed}
        return [sizes.get(span.name) for span in manifest.files]

    def _claim_in(self, below: str) -> Claim | None:
        try:
            return claims.whole(lambda: Claim.from_json(self._read_small(below)))
        except (FileNotFoundError, CorruptManifest):
            return None

    def _check_fences(self, manifest: Manifest, attempt: int) -> None:
        claims.check_fence(manifest.run, attempt, self.claimed())
        if manifest.is_file:
            with tier_errors(self.url):
                store.check_file_fence(manifest, self._noted(manifest))

    def _create(self, below: str, data: bytes, claim: Claim) -> None:
        """Create an object unless there is one."""
        path = self._path(below)
        if speaks(self._fs, S3):
            with contextlib.suppress(NotImplementedError):
                create_object(self._fs, path, data)
                return
        if not self._fs.exists(path):
            write_small(
                self._fs, path, data, f"{path.rpartition('/')[0]}/{temporary_name(claim.attempt, claim.run_id)}"
            )

    def _commit(self, manifest: Manifest, parts: Parts, seal: Callable[[], Manifest], attempt: int) -> Manifest:
        """Write the bytes, then the manifest; whatever fails, a manifest never stands beside other bytes."""
        data, commit = self._path(manifest.path_of(manifest.spans[0])), self._path(manifest.manifest_path)
        before: tuple[bytes, dict[str, object]] | None = None  # manifest of what is there, and the mark of its bytes

        def ready() -> None:
            """The first file is about to become visible."""
            nonlocal before
            # What is not what was announced never becomes visible; of several files, never with a manifest.
            sealed = manifest if manifest.files else seal()
            if manifest.is_file:
                self._check_fences(manifest, attempt)  # again: a large file takes its time
            if _is_same(self._noted(manifest), sealed):
                return  # the very same, once more: it stays durable meanwhile
            with contextlib.suppress(FileNotFoundError):
                before = (bytes(self._fs.cat_file(commit)), self._mark(data))
                self._fs.rm_file(commit)

        with tier_errors(self.url):
            make_parent(self._fs, commit)
            temporary = f"{commit.rpartition('/')[0]}/{temporary_name(attempt, manifest.run_id)}"
            try:
                write_files(self._fs, self._root, manifest, parts, lanes=self._lanes, temporary=temporary, ready=ready)
                sealed = seal()
            except BaseException:
                with contextlib.suppress(Exception):
                    if before is not None and before[1] == self._mark(data):  # nothing was replaced
                        write_small(self._fs, commit, before[0], temporary)
                raise
            for span, size in zip(manifest.spans, self._sizes(manifest), strict=True):
                if size != span.nbytes:
                    what = manifest.path_of(span)
                    raise TierError(f"{self.url} shows {size} of {span.nbytes} bytes of {what}", tier=self.url)
            write_small(self._fs, commit, sealed.to_json().encode(), temporary)
            return sealed

    def _mark(self, path: str) -> dict[str, object]:
        """What changes when an object is replaced."""
        info = self._fs.info(path)
        return {name: info[name] for name in _CHANGES_WITH_CONTENT if name in info}

    def _sweep_snapshot(self, name: str, names: list[str], current: Manifest) -> None:
        """Remove an uncommitted snapshot that holds nothing but our own files."""
        self._sweep_temporaries(f"{name}/", names, current)
        order = snapshot_order(name)
        names = [item for item in names if temporary_owner(item) is None]
        if not names or not all(map(is_own_file, names)) or order is None or order[0] > current.attempt:
            return
        paths = [f"{name}/{item}" for item in names]
        if order[0] == current.attempt and not all(map(self._is_settled, paths)):
            return
        if not self._fs.exists(self._path(f"{name}/{MANIFEST_FILE}")):  # a listing may be older than the manifest
            for below in paths:
                self._remove(below)
            self._remove_directory(name)

    def _sweep_temporaries(self, folder: str, names: list[str], current: Manifest) -> None:
        for name in names:
            if (owner := temporary_owner(name)) is None:
                continue
            of_earlier = owner[0] == current.run_id and 0 < owner[1] < current.attempt
            if of_earlier or self._is_settled(f"{folder}{name}"):
                self._remove_temporary(f"{folder}{name}")

    def _remove_temporary(self, below: str) -> None:
        """Remove a temporary; if it is the note of an unfinished upload, that is aborted first."""
        if speaks(self._fs, S3):
            abort_noted(self._fs, self._path(below))
        self._remove(below)

    def _is_settled(self, below: str, times: int = 1) -> bool:
        """Whether an object was not written to for so long that it has no writer any more."""
        try:
            return time.time() - float(self._fs.modified(self._path(below)).timestamp()) >= times * store.SETTLED_S
        except (FileNotFoundError, NotImplementedError, AttributeError, KeyError):
            return False

    def _remove(self, below: str) -> None:
        path = self._path(below)
        try:
            self._fs.rm_file(path)
        except FileNotFoundError:
            if self._fs.exists(path):  # a file server that fails over may have said so wrongly
                self._fs.rm_file(path)

    def _remove_directory(self, name: str) -> None:
        """Object stores have no directories; elsewhere one that is not empty stays."""
        if not speaks(self._fs):
            with contextlib.suppress(OSError, NotImplementedError):
                self._fs.rmdir(self._path(name))


def _is_same(noted: Manifest | None, manifest: Manifest) -> bool:
    """Whether this very snapshot is there; ``manifest`` may have no checksums yet."""
    return noted is not None and manifest == (noted if manifest.checksums else replace(noted, checksums=()))
