"""A store in a bucket of S3, Google Cloud or Azure: an object appears whole or not at all; manifest last."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_spot.config import PART_BYTES
from lightning_spot.errors import CorruptSnapshotError, FencedError, SnapshotNotFoundError, TierError
from lightning_spot.say import say
from lightning_spot.snapshot.files import FileSpan, is_own_file, pieces
from lightning_spot.snapshot.manifest import MANIFEST_FILE, Manifest, snapshot_order
from lightning_spot.snapshot.sealing import NotedParts
from lightning_spot.snapshot.shards import Image, JoinedImage, slices
from lightning_spot.store import fences, s3, store
from lightning_spot.store.fences import ATTEMPTS_DIR, Claim
from lightning_spot.store.fsspec_client import (
    check_bucket,
    move,
    tier_errors,
    words_of,
)
from lightning_spot.store.object_files import (
    READERS,
    ObjectFiles,
    Parts,
    write_files,
    write_whole,
)
from lightning_spot.store.s3 import abort_dead_uploads
from lightning_spot.store.store import FileStore, Holdings, Progress, Target
from lightning_spot.threads import all_at_once, both

_Mark = dict[str, object]


@dataclass(frozen=True, slots=True)
class _Noted:
    """The manifest at a place.

    Attributes:
        data: its bytes; ``None`` if there is none.
        manifest: what it says; ``None`` if it cannot be used.
    """

    data: bytes | None
    manifest: Manifest | None


class ObjectStore(FileStore):
    """Snapshots of one run in a bucket; implements :class:`~lightning_spot.store.store.Store`.

    Credentials and endpoints come from where the file system's own library looks (environment, config files). A
    bucket is never made.

    Args:
        url: the run's URL, such as ``s3://bucket/run-1``.
        is_lent: whether a server acts for others: then of users' files only those that have a manifest of ours are
            replaced or deleted.

    Raises:
        SettingsError: if the URL is malformed or its file system is not installed.
    """

    def __init__(self, url: str, *, is_lent: bool = False) -> None:
        self._is_lent = is_lent
        self._files = ObjectFiles(url)
        self.url, self._fs, self._root = self._files.url, self._files.fs, self._files.root
        self._swept_for = 0

    # -- what is there --------------------------------------------------------------------------------------------

    def survey(self) -> Holdings:
        """See :meth:`Store.survey`."""
        found = super().survey()
        if not found.highest_attempt:
            with tier_errors(self.url):
                check_bucket(self._fs, self._root, self.url)
        return found

    def has(self, manifest: Manifest) -> bool:
        """See :meth:`Store.has`."""
        with tier_errors(self.url):
            noted, sizes = both(lambda: self._noted(manifest), lambda: self._sizes(manifest), "spot-ask")
            return noted.manifest == manifest and sizes == [span.nbytes for span in manifest.spans]

    def fetch(self, manifest: Manifest, into: Target, progress: Progress | None = None) -> None:
        """See :meth:`Store.fetch`; by several requests at once."""
        with tier_errors(self.url, reading=True):
            for span, nbytes in zip(manifest.spans, self._sizes(manifest), strict=True):
                if nbytes is None:
                    raise SnapshotNotFoundError(f"{self.url}/{manifest.path_of(span)} does not exist")
                if nbytes < span.nbytes:
                    raise CorruptSnapshotError(
                        f"{self.url}/{manifest.path_of(span)} is cut short: {nbytes} of {span.nbytes} bytes are there",
                        where=self.url,
                    )
            size = max(PART_BYTES, manifest.part_bytes)
            ranges = manifest.ranges(size)
            bring = functools.partial(self._bring, manifest, into, progress)
            move(((stop - start, functools.partial(bring, start, stop)) for start, stop in ranges), size)

    def folder(self, name: str, *, attempt: int, run_id: str) -> ObjectFolder:
        """See :meth:`HasFolders.folder`."""
        return ObjectFolder(self._files, name)

    # -- changes --------------------------------------------------------------------------------------------------

    def claim(self, claim: Claim) -> None:
        """See :meth:`Store.claim`."""
        below = f"{ATTEMPTS_DIR}/{fences.claim_name(claim.attempt)}"
        with tier_errors(self.url):
            # Looked at before, too: three of four servers that speak S3 create over what is there, without an error.
            claimed, existing = both(self.claimed, lambda: self._claim_of(claim.attempt), "spot-ask")
            fences.check_fence(claim.location, claim.attempt, claimed)
            if existing is None:
                self._create(below, claim.to_json().encode())
                existing = self._claim_of(claim.attempt)  # of two writers, the last one may have won
            fences.check_claim(claim, existing)

    def put(self, manifest: Manifest, image: Image, *, attempt: int) -> None:
        """See :meth:`Store.put`."""
        _, noted = both(lambda: self._check_fences(manifest, attempt), lambda: self._seen(manifest), "spot-ask")
        if noted.manifest == manifest and self.has(manifest):
            return  # durable already: a server that takes over from a killed one may not know, and must not undo it
        parts = image if isinstance(image, (memoryview, JoinedImage)) else slices(image, PART_BYTES)
        self._commit(manifest, parts, lambda: manifest, attempt)

    def put_parts(self, manifest: Manifest, parts: Iterable[memoryview], *, attempt: int) -> Manifest:
        """See :meth:`Store.put_parts`."""
        self._check_fences(manifest, attempt)
        noted = NotedParts(manifest, parts)
        return self._commit(manifest, iter(noted), noted.sealed, attempt)

    def delete(self, manifest: Manifest) -> None:
        """See :meth:`Store.delete`."""
        _, noted = both(lambda: self._check_owner(manifest.run), lambda: self._seen(manifest), "spot-ask")
        is_foreign = self._is_lent and manifest.is_file and noted.manifest is None
        if is_foreign or store.is_newer(noted.manifest, manifest) or store.is_another(noted.manifest, manifest):
            why = "it is another one, or not ours"
            say(logging.INFO, "not-deleted", "{about} stays: {why}", about=f"{self.url}/{manifest.name}", why=why)
            return
        with tier_errors(self.url):
            self._files.remove(manifest.manifest_path)  # and never at once with the others: not without its bytes
            self._files.remove_all([*map(manifest.path_of, manifest.spans)])

    def sweep(self, current: Manifest, seen: Holdings | None = None) -> None:
        """See :meth:`Store.sweep`. Unfinished uploads are looked for once an attempt."""
        self._check_owner(current.run)
        seen = seen or self.survey()
        with tier_errors(self.url):
            _sweep_run(self._files, current, seen)
            if self._files.is_s3 and self._swept_for != current.attempt:
                abort_dead_uploads(self._fs, self._root, current)
            self._swept_for = current.attempt

    def sweep_files(self) -> None:
        """See :meth:`Store.sweep_files`. In a bucket nothing is written aside."""

    # -- inside ---------------------------------------------------------------------------------------------------

    def _errors(self, *, reading: bool = False) -> contextlib.AbstractContextManager[None]:
        return tier_errors(self.url, reading=reading)

    def _all(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        return all_at_once(jobs, "spot-ask", READERS)

    def _names(self, below: str) -> list[str]:
        return self._files.names(below)

    def _small(self, below: str) -> bytes:
        return self._files.read_small(below)

    def _manifest_at(self, manifest: Manifest) -> Manifest | None:
        return self._noted(manifest).manifest

    def _why(self, error: Exception) -> str:
        return words_of(error)

    def _noted(self, manifest: Manifest) -> _Noted:
        """The manifest that is at the place of one."""
        data = b""
        try:
            for _ in range(2):  # what seems damaged is read once more, since a read may end early
                data = self._files.read_small(manifest.manifest_path)
                with contextlib.suppress(CorruptSnapshotError):
                    return _Noted(data, Manifest.from_json(data))
            return _Noted(data, None)
        except FileNotFoundError:
            return _Noted(None, None)
        except CorruptSnapshotError:  # it is too long for one
            return _Noted(bytes(self._fs.cat_file(self._files.path(manifest.manifest_path))), None)

    def _seen(self, manifest: Manifest) -> _Noted:
        with tier_errors(self.url):
            return self._noted(manifest)

    def _bring(self, manifest: Manifest, into: Target, progress: Progress | None, start: int, stop: int) -> None:
        """Read a range of the image, and check it; once more if it is not what was committed, perhaps on its way."""
        for is_last in (False, True):
            try:
                read = [
                    bytes(last - first) if span is None else self._range(manifest, span, first, last)
                    for span, first, last in pieces(manifest.spans, start, stop)
                ]
                part = memoryview(b"".join(read))  # which copies nothing if it is one
                manifest.verify_range(start, part, self.url)
                into[start:stop] = part
                break
            except CorruptSnapshotError as error:
                if is_last:
                    raise
                say(logging.INFO, "read-again", "read once more: {error}", error=error)
        if progress is not None:
            progress(stop - start)

    def _range(self, manifest: Manifest, span: FileSpan, start: int, stop: int) -> bytes:
        """A range of the image that lies in one file."""
        path, first, last = self._files.path(manifest.path_of(span)), start - span.offset, stop - span.offset
        data = bytes(self._files.patiently(lambda: self._fs.cat_file(path, start=first, end=last)))
        if len(data) != stop - start:
            where = f"{self.url}/{manifest.path_of(span)}"
            raise CorruptSnapshotError(f"{where} is cut short: {len(data)} bytes came from byte {first}", where=where)
        return data

    def _sizes(self, manifest: Manifest) -> list[int | None]:
        """Size of each file of a snapshot, ``None`` for one that is not there; in one request if all are listed."""
        if not manifest.files:
            return [self._files.size(manifest.data_path)]
        sizes = self._files.sizes(manifest.name)
        asked = (sizes.get(span.name) for span in manifest.files)  # some stores list a new object seconds later
        return [
            self._files.size(manifest.path_of(span)) if nbytes is None else nbytes
            for span, nbytes in zip(manifest.files, asked, strict=True)
        ]

    def _marks(self, manifest: Manifest) -> list[_Mark]:
        """The mark of each file of a snapshot, none of one that is not there. Any may be the first that is replaced."""
        marks: list[_Mark] = []
        for span in manifest.spans:
            marks.append({})
            with contextlib.suppress(FileNotFoundError):
                marks[-1] = self._files.mark(manifest.path_of(span))
        return marks

    def _create(self, below: str, data: bytes) -> None:
        """Create an object unless there is one."""
        path = self._files.path(below)
        try:
            s3.create_object(self._fs, path, data)
        except NotImplementedError:
            if not self._fs.exists(path):
                self._fs.pipe_file(path, data)

    def _commit(self, manifest: Manifest, parts: Parts, seal: Callable[[], Manifest], attempt: int) -> Manifest:
        """Write the bytes, then the manifest; whatever fails, a manifest never stands beside other bytes.

        Args:
            manifest: of it, with no checksums yet if it comes in parts.
            parts: the bytes.
            seal: gives the manifest once all of them have been taken.
            attempt: on whose behalf.
        """
        commit = self._files.path(manifest.manifest_path)
        before: tuple[bytes, list[_Mark]] | None = None  # manifest of what is there, and the marks of its files

        def ready() -> None:
            """The first file is about to become visible."""
            nonlocal before
            # What is not what was announced never becomes visible; of several files, never with a manifest.
            sealed = manifest if manifest.files else seal()
            self.check_owner()  # again: it has taken its time
            if manifest.is_file:
                self._check_fences(manifest, attempt)
            noted = self._noted(manifest)
            if self._is_lent and manifest.is_file and noted.manifest is None and self._sizes(manifest) != [None]:
                raise store.not_ours(self.url, manifest)
            if _is_same(noted.manifest, sealed):
                return  # the very same, once more: it stays durable meanwhile
            if noted.data is not None:
                before = (noted.data, self._marks(manifest))
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(commit)

        with tier_errors(self.url):
            try:
                write_files(self._fs, self._root, manifest, parts, ready)
                sealed = seal()
            except BaseException:
                with contextlib.suppress(Exception):
                    if before is not None and before[1] == self._marks(manifest):  # nothing was replaced
                        self._fs.pipe_file(commit, before[0])
                raise
            for span, size in zip(manifest.spans, self._sizes(manifest), strict=True):
                if size != span.nbytes:
                    what = manifest.path_of(span)
                    raise TierError(f"{self.url} shows {size} of {span.nbytes} bytes of {what}", tier=self.url)
            self.check_owner()
            text = sealed.to_json().encode()
            self._fs.pipe_file(commit, text)
            try:
                self.check_owner()
            except FencedError:  # of two starts at once, the other one has just taken the number, and keeps it
                if not manifest.is_file and self._noted(manifest).data == text:
                    self._files.remove(manifest.manifest_path)  # the other one may write the same files: they are swept
                raise
            return sealed


def _is_same(noted: Manifest | None, manifest: Manifest) -> bool:
    """Whether this very snapshot is there; ``manifest`` may have no checksums yet."""
    return noted is not None and manifest == (noted if manifest.checksums else replace(noted, checksums=()))


class ObjectFolder:
    """A folder in a bucket; see :class:`Folder`.

    Args:
        objects: the run's.
        name: of the snapshot.
    """

    def __init__(self, objects: ObjectFiles, name: str) -> None:
        self._objects, self._name, self._url = objects, name, objects.url

    def sizes(self) -> dict[str, int]:
        """See :meth:`Folder.sizes`."""
        with tier_errors(self._url):
            return self._objects.sizes(self._name)

    def write(self, name: str, data: Image) -> None:
        """See :meth:`Folder.write`."""
        self.write_all({name: data})

    def write_all(self, contents: Mapping[str, Image]) -> None:
        """See :meth:`Folder.write_all`."""
        with tier_errors(self._url):
            objects = {self._path(name): data for name, data in contents.items()}
            write_whole(self._objects.fs, objects, lambda: None)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """See :meth:`Folder.read`."""
        with tier_errors(self._url, reading=True):
            return bytes(self._objects.fs.cat_file(self._path(name), start=start, end=stop))

    def remove(self, names: Sequence[str]) -> None:
        """See :meth:`Folder.remove`."""
        with tier_errors(self._url):
            self._objects.remove_all([f"{self._name}/{name}" for name in names])

    def _path(self, name: str) -> str:
        return self._objects.path(f"{self._name}/{name}")


def _sweep_run(objects: ObjectFiles, current: Manifest, seen: Holdings) -> None:
    """Remove uncommitted snapshots older than ``current``, and claims that nobody asks for any more."""
    orders = {name: snapshot_order(name) for name in seen.unfinished}
    older = [name for name, order in orders.items() if order is not None and order < current.order]
    insides = all_at_once([functools.partial(objects.names, name) for name in older], "spot-list", READERS)
    for name, inside in zip(older, insides, strict=True):
        _sweep_snapshot(objects, name, inside, current)
    objects.remove_all([f"{ATTEMPTS_DIR}/{name}" for name in fences.forgettable(seen.attempts, current.attempt)])


def _sweep_snapshot(objects: ObjectFiles, name: str, names: list[str], current: Manifest) -> None:
    """Remove an uncommitted snapshot that holds nothing but our own files."""
    order = snapshot_order(name)
    if not names or not all(map(is_own_file, names)) or order is None or order[0] > current.attempt:
        return
    paths = [f"{name}/{item}" for item in names]
    if order[0] == current.attempt and not all(map(objects.is_settled, paths)):
        return
    if not objects.fs.exists(objects.path(f"{name}/{MANIFEST_FILE}")):  # a listing may be older than the manifest
        objects.remove_all(paths)
