"""A store on any fsspec file system (S3, GCS, Azure, …): an object appears whole or not at all; manifest last."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from lightning_spot.config import PART_BYTES
from lightning_spot.errors import CorruptManifest, CorruptSnapshot, SnapshotNotFound, TierError
from lightning_spot.image.files import FileSpan, pieces
from lightning_spot.image.manifest import MANIFEST_FILE, OWN_DIR, Manifest, snapshot_order
from lightning_spot.image.sealing import NotedParts
from lightning_spot.tiers import claims, store
from lightning_spot.tiers.claims import ATTEMPTS_DIR, Claim
from lightning_spot.tiers.filesystem import check_bucket, make_parent, speaks, tier_errors
from lightning_spot.tiers.folder import ObjectFolder
from lightning_spot.tiers.lanes import Job, Lanes
from lightning_spot.tiers.multipart import S3, abort_dead_uploads, create_object
from lightning_spot.tiers.object_files import READERS, ObjectFiles
from lightning_spot.tiers.store import Holdings, Progress
from lightning_spot.tiers.sweeping import sweep_folder, sweep_run
from lightning_spot.tiers.temporaries import temporary_name
from lightning_spot.tiers.writing import Parts, write_files, write_small

logger = logging.getLogger(__name__)


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
        self._files = ObjectFiles(url)
        self.url, self._fs, self._root = self._files.url, self._files.fs, self._files.root
        self._lanes = Lanes()
        self._uploads_swept_for = 0

    # -- what is there --------------------------------------------------------------------------------------------

    def survey(self) -> Holdings:
        """See :meth:`Store.survey`."""
        found = Holdings()
        with tier_errors(self.url):
            names = self._files.names("")
            if not names:
                check_bucket(self._fs, self._root, self.url)
            names = [name for name in names if snapshot_order(name) is not None]
            with ThreadPoolExecutor(READERS) as pool:
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
            return claims.highest_claim(self._files.names(ATTEMPTS_DIR))

    def newest_claim(self) -> Claim | None:
        """See :meth:`Store.newest_claim`."""
        with tier_errors(self.url):
            names = self._files.names(ATTEMPTS_DIR)
            return claims.first_readable(names, lambda name: self._files.read_small(f"{ATTEMPTS_DIR}/{name}"), self.url)

    def has(self, manifest: Manifest) -> bool:
        """See :meth:`Store.has`."""
        with tier_errors(self.url):
            return self._noted(manifest) == manifest and self._sizes(manifest) == [
                item.nbytes for item in manifest.spans
            ]

    def fetch(self, manifest: Manifest, into: memoryview, progress: Progress | None = None) -> None:
        """See :meth:`Store.fetch`; by several requests at once."""

        def fill(start: int, stop: int) -> None:
            for span, first, last in pieces(manifest.spans, start, stop):
                into[first:last] = bytes(last - first) if span is None else self._range(manifest, span, first, last)
            manifest.verify_range(start, into[start:stop], self.url)

        def read(start: int, stop: int) -> None:
            try:
                fill(start, stop)
            except CorruptSnapshot as error:  # there, or only on its way: what comes now tells
                logger.info("read once more: %s", error)
                fill(start, stop)
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
            make_parent(self._fs, self._files.path(below))
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
                self._files.remove(path)
            self._files.remove_directory(OWN_DIR if manifest.is_file else manifest.name)

    def sweep(self, current: Manifest) -> None:
        """See :meth:`Store.sweep`. Unfinished multipart uploads are looked for once an attempt."""
        with tier_errors(self.url):
            sweep_run(self._files, current)
            if speaks(self._fs, S3) and self._uploads_swept_for != current.attempt:
                abort_dead_uploads(self._fs, self._root, current)
                self._uploads_swept_for = current.attempt

    def sweep_files(self) -> None:
        """See :meth:`Store.sweep_files`."""
        with tier_errors(self.url):
            sweep_folder(self._files)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _committed(self, name: str) -> Manifest | str | None:
        """Manifest of a snapshot, ``None`` if it has none, or why it cannot be read."""
        try:
            manifest = claims.whole(lambda: Manifest.from_json(self._files.read_small(f"{name}/{MANIFEST_FILE}")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # every cloud library has errors of its own
            return f"{type(error).__name__}: {error}"
        return manifest if manifest.name == name else f"its manifest is that of {manifest.name}"

    def _noted(self, manifest: Manifest) -> Manifest | None:
        with contextlib.suppress(FileNotFoundError, CorruptManifest):
            return claims.whole(lambda: Manifest.from_json(self._files.read_small(manifest.manifest_path)))
        return None

    def _range(self, manifest: Manifest, span: FileSpan, start: int, stop: int) -> bytes:
        """A range of the image that lies in one file."""
        path, first, last = self._files.path(manifest.path_of(span)), start - span.offset, stop - span.offset
        data = bytes(self._files.patiently(lambda: self._fs.cat_file(path, start=first, end=last)))
        if len(data) != stop - start:
            where = f"{self.url}/{manifest.path_of(span)}"
            raise CorruptSnapshot(f"{where} is cut short: {len(data)} bytes came from byte {first}", where=where)
        return data

    def _sizes(self, manifest: Manifest) -> list[int | None]:
        """Size of each file of a snapshot, ``None`` for one that is not there; in one request."""
        if not manifest.files:
            return [self._files.size(manifest.data_path)]
        try:
            listed = self._files.twice(lambda: self._fs.ls(self._files.path(manifest.name), detail=True))
        except FileNotFoundError:
            listed = []
        sizes = {str(item["name"]).rpartition("/")[2]: int(item["size"]) for item in listed}
        return [sizes.get(span.name) for span in manifest.files]

    def _claim_in(self, below: str) -> Claim | None:
        try:
            return claims.whole(lambda: Claim.from_json(self._files.read_small(below)))
        except (FileNotFoundError, CorruptManifest):
            return None

    def _check_fences(self, manifest: Manifest, attempt: int) -> None:
        claims.check_fence(manifest.run, attempt, self.claimed())
        if manifest.is_file:
            with tier_errors(self.url):
                store.check_file_fence(manifest, self._noted(manifest))

    def _create(self, below: str, data: bytes, claim: Claim) -> None:
        """Create an object unless there is one."""
        path = self._files.path(below)
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
        data, commit = manifest.path_of(manifest.spans[0]), self._files.path(manifest.manifest_path)
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
                before = (bytes(self._fs.cat_file(commit)), self._files.mark(data))
                self._fs.rm_file(commit)

        with tier_errors(self.url):
            temporary = f"{commit.rpartition('/')[0]}/{temporary_name(attempt, manifest.run_id)}"
            try:
                make_parent(self._fs, commit)
                write_files(self._fs, self._root, manifest, parts, lanes=self._lanes, temporary=temporary, ready=ready)
                sealed = seal()
            except BaseException:
                with contextlib.suppress(Exception):
                    if before is not None and before[1] == self._files.mark(data):  # nothing was replaced
                        write_small(self._fs, commit, before[0], temporary)
                with contextlib.suppress(Exception):
                    if not manifest.is_file:
                        self._files.remove_directory(manifest.name)
                raise
            for span, size in zip(manifest.spans, self._sizes(manifest), strict=True):
                if size != span.nbytes:
                    what = manifest.path_of(span)
                    raise TierError(f"{self.url} shows {size} of {span.nbytes} bytes of {what}", tier=self.url)
            write_small(self._fs, commit, sealed.to_json().encode(), temporary)
            return sealed


def _is_same(noted: Manifest | None, manifest: Manifest) -> bool:
    """Whether this very snapshot is there; ``manifest`` may have no checksums yet."""
    return noted is not None and manifest == (noted if manifest.checksums else replace(noted, checksums=()))
