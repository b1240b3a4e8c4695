"""A store on a local or mounted file system: temporary file, fsync, rename, fsync of the directory; manifest last."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_spot.config import PART_BYTES
from lightning_spot.errors import CorruptSnapshotError, SpotError, TierError
from lightning_spot.say import say
from lightning_spot.snapshot.files import FileSpan, cut, is_own_file, pieces
from lightning_spot.snapshot.manifest import MANIFEST_FILE, OWN_DIR, Manifest, Order, snapshot_order
from lightning_spot.snapshot.sealing import NotedParts
from lightning_spot.snapshot.shards import Image, slices
from lightning_spot.store import fences, posix, store
from lightning_spot.store.fences import ATTEMPTS_DIR, Claim
from lightning_spot.store.posix import (
    Beneath,
    open_regular,
    opened,
    temporary_name,
    temporary_owner,
    tier_errors,
)
from lightning_spot.store.store import FileStore, Holdings, Progress, Target, fetch_ranges

_WRITE_BYTES = 128 * 1024 * 1024  # at a time: 0.06 s of the kernel's CPU time a GiB; 0.10 s with 8 MiB, or all at once


class LocalStore(FileStore):
    """Snapshots of one run below a directory; implements :class:`~lightning_spot.store.store.Store`.

    The directory may be a link. Links inside it are read, but nothing they lead to is ever changed or deleted.

    Args:
        root: the run's directory; made when first written to.
        beneath: prefixes below one of which it must be, where a server acts for others: no link below leads out of
            that, and of users' files only those that have a manifest of ours are replaced or deleted. ``None`` for no
            bound.

    Raises:
        TierError: if it is below none of them.
    """

    def __init__(self, root: str | Path, beneath: Sequence[str] | None = None) -> None:
        self._root = Path(root).absolute()
        self._beneath = Beneath(self._root, beneath) if beneath is not None else None
        self.url = str(self._root)

    @property
    def root(self) -> Path:
        """The run's directory."""
        return self._root if self._beneath is None else self._beneath.path()

    # -- what is there --------------------------------------------------------------------------------------------

    def inode(self) -> int:
        """Inode of the attempts directory, by which a copied run is told from a moved one; 0 if there is none."""
        try:
            return os.stat(self.root / ATTEMPTS_DIR).st_ino
        except OSError:
            return 0

    def has(self, manifest: Manifest) -> bool:
        """See :meth:`Store.has`."""
        with tier_errors(self.url):
            try:
                sizes = [os.stat(self.root / manifest.path_of(span)).st_size for span in manifest.spans]
            except FileNotFoundError:
                return False
            return self._manifest_at(manifest) == manifest and sizes == [span.nbytes for span in manifest.spans]

    def fetch(self, manifest: Manifest, into: Target, progress: Progress | None = None) -> None:
        """See :meth:`Store.fetch`."""
        in_place = threading.Lock()  # a disk reads faster from one

        def read(start: int, part: memoryview) -> None:
            with in_place:
                image.read(start, part)
            manifest.verify_range(start, part, self.url)

        with tier_errors(self.url, reading=True), _ImageReader(self.root, manifest, self.url) as image:
            fetch_ranges(read, manifest.ranges(), into, progress, 2)

    def folder(self, name: str, *, attempt: int, run_id: str) -> LocalFolder:
        """See :meth:`HasFolders.folder`."""
        return LocalFolder(self, name, attempt=attempt, run_id=run_id)

    # -- changes --------------------------------------------------------------------------------------------------

    def claim(self, claim: Claim) -> None:
        """See :meth:`Store.claim`. The inode of the attempts directory is noted in it."""
        fences.check_fence(claim.location, claim.attempt, self.claimed())
        with tier_errors(self.url), self.inside(self.made() / ATTEMPTS_DIR, make=True) as folder:
            noted = memoryview(replace(claim, inode=self.inode()).to_json().encode())
            path = folder / fences.claim_name(claim.attempt)
            if not posix.create_exclusively(path, noted, attempt=claim.attempt, run_id=claim.run_id):
                fences.check_claim(claim, self._claim_of(claim.attempt))
                posix.sync_directory(folder)  # the attempt that wrote it may have been killed before it did

    def put(self, manifest: Manifest, image: Image, *, attempt: int) -> None:
        """See :meth:`Store.put`."""
        self._check_fences(manifest, attempt)
        with tier_errors(self.url):
            if self._holds_every_byte(manifest):
                # A server that takes over from a killed one may not know that this was committed, and must not undo it.
                # Its predecessor may have been killed before it synced the names.
                for path in (manifest.path_of(manifest.spans[0]), manifest.manifest_path):
                    posix.sync_directory((self.root / path).parent)
                posix.sync_directory(self.root)
                return
            with self._aside(manifest, slices(image, _WRITE_BYTES), attempt) as (folder, temporaries):
                self._commit(manifest, folder, temporaries, attempt)

    def put_parts(self, manifest: Manifest, parts: Iterable[memoryview], *, attempt: int) -> Manifest:
        """See :meth:`Store.put_parts`."""
        self._check_fences(manifest, attempt)
        noted = NotedParts(manifest, parts)
        with tier_errors(self.url), self._aside(manifest, noted, attempt) as (folder, temporaries):
            sealed = noted.sealed()
            self._commit(sealed, folder, temporaries, attempt)
        return sealed

    def delete(self, manifest: Manifest) -> None:
        """See :meth:`Store.delete`."""
        self._check_owner(manifest.run)
        with tier_errors(self.url):
            if manifest.is_file:
                self._delete_file(manifest)
                return
            folder = (self.root / manifest.manifest_path).parent
            if not posix.is_own_directory(folder):
                return  # not there, or a link to somebody's place
            if store.is_another(self._manifest_at(manifest), manifest):
                why = "it is another one of that name"
                say(logging.INFO, "not-deleted", "{about} stays: {why}", about=f"{self.url}/{manifest.name}", why=why)
                return
            try:
                with self.inside(folder) as folder:
                    posix.remove(folder / MANIFEST_FILE)
                    posix.sync_directory(folder)  # never a manifest without its bytes, also after a loss of power
                    _remove_own(folder)
            except FileNotFoundError:  # of several servers that have portions of it, another one deletes it, too
                if posix.is_there(self.root / manifest.manifest_path):
                    raise
            posix.remove_if_empty(self.root / manifest.name)

    def sweep(self, current: Manifest, seen: Holdings | None = None) -> None:
        """See :meth:`Store.sweep`."""
        self._check_owner(current.run)
        with tier_errors(self.url):
            _sweep_run(self, current)

    def sweep_files(self) -> None:
        """See :meth:`Store.sweep_files`."""
        with tier_errors(self.url):
            _sweep_folder(self)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _errors(self, *, reading: bool = False) -> contextlib.AbstractContextManager[None]:
        return tier_errors(self.url, reading=reading)

    def _all(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        return [job() for job in jobs]

    def _names(self, below: str) -> list[str]:
        return posix.list_directory(self.root / below)

    def _small(self, below: str) -> bytes:
        return posix.read_small(self.root / below)

    def _manifest_at(self, manifest: Manifest) -> Manifest | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, CorruptSnapshotError):
            return fences.read_twice(lambda: Manifest.from_json(self._small(manifest.manifest_path)))
        return None

    def _why(self, error: Exception) -> str:
        return f"{error.strerror} ({error.filename})" if isinstance(error, OSError) else repr(error)

    def made(self) -> Path:
        """The run's directory, made where it is reached without following links."""
        return self._root if self._beneath is None else self._beneath.path(make=True)

    @contextlib.contextmanager
    def inside(self, folder: Path, *, make: bool = False) -> Iterator[Path]:
        """A folder of the run: nothing is changed where a link in its place leads to.

        Args:
            folder: its path.
            make: whether it is made if it is not there.
        """
        if make:
            posix.make_directory(folder, like_parent=folder.name == OWN_DIR and self._beneath is None)
        if not posix.is_own_directory(folder):
            raise TierError(f"{self.url}/{folder.name} is a link; nothing is written where it leads to", tier=self.url)
        if self._beneath is None:
            yield folder
            return
        with opened(folder) as held:
            yield held

    def _holds_every_byte(self, manifest: Manifest) -> bool:
        """Whether this very snapshot is committed already, with every byte as it should be, and on the disk."""
        if not (self.has(manifest) and self._has_the_bytes(manifest)):
            return False  # it is written anew
        for span in manifest.spans:
            posix.sync_file(self.root / manifest.path_of(span))
        return True

    def _has_the_bytes(self, manifest: Manifest) -> bool:
        buffer = memoryview(bytearray(min(manifest.nbytes, max(manifest.part_bytes, PART_BYTES))))
        try:
            with _ImageReader(self.root, manifest, self.url) as image:
                for start, stop in manifest.ranges():
                    image.read(start, buffer[: stop - start])
                    manifest.verify_range(start, buffer[: stop - start], self.url)
        except (SpotError, OSError):
            return False
        return True

    def _spares(self, manifest: Manifest) -> None:
        """Refuse to replace a file that has no manifest of ours on behalf of others.

        One with the very bytes that are to be there is what a writer left that was killed before it noted it.
        """
        if self._beneath is None or self._manifest_at(manifest) is not None:
            return
        if posix.is_there(self.root / manifest.name) and not self._has_the_bytes(manifest):
            raise store.not_ours(self.url, manifest)

    @contextlib.contextmanager
    def _aside(
        self, manifest: Manifest, parts: Iterable[memoryview], attempt: int
    ) -> Iterator[tuple[Path, list[Path]]]:
        """The folder of a manifest and, beside its place, the bytes in temporary files, until they are committed."""
        folder = (self.made() / manifest.manifest_path).parent
        temporaries: list[Path] = []
        try:
            with self.inside(folder, make=True) as held:
                try:
                    for _span, data in cut(manifest.spans, parts):
                        temporaries.append(posix.write_aside(held, data, attempt=attempt, run_id=manifest.run_id))
                    yield held, temporaries
                finally:
                    for temporary in temporaries:
                        posix.remove(temporary)
        except BaseException:
            posix.remove_if_empty(folder)  # a disk that is full for long would have one for each snapshot
            raise

    def _commit(self, manifest: Manifest, folder: Path, temporaries: list[Path], attempt: int) -> None:
        """Put the bytes in place, then the manifest; whatever fails, a manifest never stands beside other bytes."""
        places = [self.root / manifest.name] if manifest.is_file else [folder / span.name for span in manifest.spans]
        data, commit = places[0], folder / Path(manifest.manifest_path).name
        text = memoryview(manifest.to_json().encode())
        noted = posix.write_aside(commit.parent, [text], attempt=attempt, run_id=manifest.run_id)
        before: Path | None = None  # where the manifest of what is there lies, out of the way
        was: dict[Path, Path] = {}  # of several files, those that are there: all of them go back, or none
        try:
            self.check_owner()  # again: it has taken its time
            if manifest.is_file:
                self._check_fences(manifest, attempt)
                self._spares(manifest)
            # Another writer, to whom the run was handed over, may have just committed the very same bytes: its manifest
            # is not taken away, or being killed in the middle would undo what was said to be durable.
            if self._manifest_at(manifest) != manifest:
                aside = commit.parent / temporary_name(attempt, manifest.run_id)
                with contextlib.suppress(FileNotFoundError):
                    os.rename(commit, aside)
                    before = aside
                if commit.parent != data.parent:
                    posix.sync_directory(commit.parent)
            try:
                for temporary, place in zip(temporaries, places, strict=True):
                    if len(places) > 1 and posix.is_there(place):
                        aside = commit.parent / temporary_name(attempt, manifest.run_id)
                        os.rename(place, aside)
                        was[place] = aside
                    os.replace(temporary, place)
                posix.sync_directory(data.parent)
                os.replace(noted, commit)
            except OSError:
                for place, aside in was.items():
                    os.rename(aside, place)
                if before is not None and (len(places) > 1 or posix.is_there(temporaries[0])):
                    os.rename(before, commit)  # what was there has its manifest again
                raise
        finally:
            for aside in (noted, *([before] if before is not None else []), *was.values()):
                posix.remove(aside)
        posix.sync_directory(commit.parent)
        if not manifest.is_file:
            posix.sync_directory(self.root)
        for place, span in zip(places, manifest.spans, strict=True):
            if os.stat(place).st_size != span.nbytes:
                raise TierError(f"{place} was changed while it was committed; it is written again", tier=self.url)

    def _delete_file(self, manifest: Manifest) -> None:
        noted = self._manifest_at(manifest)
        if store.is_newer(noted, manifest) or (noted is None and self._beneath is not None):
            why = "a later attempt has written it anew" if noted is not None else "lightning_spot has not saved it"
            say(logging.INFO, "not-deleted", "{about} stays: {why}", about=f"{self.url}/{manifest.name}", why=why)
            return
        if posix.is_own_directory(self.root / OWN_DIR):
            with self.inside(self.root / OWN_DIR) as folder:
                posix.remove(folder / Path(manifest.manifest_path).name)
        posix.remove(self.root / manifest.data_path)
        posix.remove_if_empty(self.root / OWN_DIR)  # unless the manifests of other files are in it


class _ImageReader:
    """The image of a snapshot that lies in a directory; a context manager. The file that was read last stays open.

    Args:
        root: the run's directory.
        manifest: of the snapshot.
        where: what to call the tier in errors.
    """

    def __init__(self, root: Path, manifest: Manifest, where: str) -> None:
        self._root = root
        self._manifest = manifest
        self._where = where
        self._open: tuple[FileSpan, int] | None = None

    def __enter__(self) -> _ImageReader:
        return self

    def __exit__(self, *_raised: Any) -> None:
        self._close()

    def read(self, start: int, into: memoryview) -> None:
        """Fill ``into`` with the image from byte ``start`` on.

        Raises:
            CorruptSnapshotError: if a file is too short.
            FileNotFoundError: if one is not there.
            OSError: if one cannot be read.
        """
        for span, first, last in pieces(self._manifest.spans, start, start + len(into)):
            target = into[first - start : last - start]
            if span is None:
                target[:] = bytes(len(target))
            else:
                self._fill(span, first - span.offset, target)

    def _fill(self, span: FileSpan, place: int, target: memoryview) -> None:
        if self._open is None or self._open[0] != span:
            self._close()
            self._open = span, open_regular(self._root / self._manifest.path_of(span))
        while target:
            count = os.preadv(self._open[1], [target], place)
            if not count:
                path = self._root / self._manifest.path_of(span)
                raise CorruptSnapshotError(
                    f"{path} is cut short: {place} of {span.nbytes} bytes are there", where=self._where
                )
            target, place = target[count:], place + count

    def _close(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None


class LocalFolder:
    """A folder below a directory; see :class:`Folder`.

    Args:
        store: of the run.
        name: of the snapshot.
        attempt: on whose behalf it is written to.
        run_id: of its run.
    """

    def __init__(self, store: LocalStore, name: str, *, attempt: int, run_id: str) -> None:
        self._store, self._name, self._attempt, self._run_id = store, name, attempt, run_id

    @property
    def _path(self) -> Path:
        return self._store.root / self._name

    def sizes(self) -> dict[str, int]:
        """See :meth:`Folder.sizes`."""
        with posix.tier_errors(self._store.url):
            found: dict[str, int] = {}
            if not posix.is_own_directory(self._path):
                return found
            for name in posix.list_directory(self._path):
                status = posix.if_there(self._path / name, lambda name=name: os.lstat(self._path / name))  # type: ignore[misc]
                if status is not None and stat.S_ISREG(status.st_mode):  # a pipe of such a name keeps nobody waiting
                    found[name] = status.st_size
            return found

    def write(self, name: str, data: Image) -> None:
        """See :meth:`Folder.write`."""
        with posix.tier_errors(self._store.url), self._left_as_it_was():
            parts = slices(data, _WRITE_BYTES)
            with self._store.inside(self._store.made() / self._name, make=True) as folder:
                temporary = posix.write_aside(folder, parts, attempt=self._attempt, run_id=self._run_id)
                try:
                    os.replace(temporary, folder / name)
                except BaseException:
                    posix.remove(temporary)
                    raise
                posix.sync_directory(folder)

    def write_all(self, contents: Mapping[str, Image]) -> None:
        """See :meth:`Folder.write_all`. A disk writes faster at one place."""
        for name, data in contents.items():
            self.write(name, data)

    @contextlib.contextmanager
    def _left_as_it_was(self) -> Iterator[None]:
        """Leave no empty folder where nothing can be written; another host that finds it gone makes it again."""
        try:
            yield
        except BaseException:
            posix.remove_if_empty(self._path)
            raise

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """See :meth:`Folder.read`."""
        with posix.tier_errors(self._store.url, reading=True), open(self._path / name, "rb") as file:
            file.seek(start)
            return file.read(stop - start if stop is not None else -1)

    def remove(self, names: Sequence[str]) -> None:
        """See :meth:`Folder.remove`."""
        problem: OSError | None = None
        with posix.tier_errors(self._store.url):
            if not posix.is_own_directory(self._path):
                return
            with self._store.inside(self._path) as folder:
                for name in names:
                    try:
                        posix.remove(folder / name)
                    except OSError as error:
                        problem = error
            posix.remove_if_empty(self._path)
            if problem is not None:
                raise problem


def _sweep_run(local: LocalStore, current: Manifest) -> None:
    """See :meth:`Store.sweep`."""
    root, problem = local.root, None
    for name in posix.list_directory(root):
        order = snapshot_order(name)
        if not ((name in (ATTEMPTS_DIR, OWN_DIR) or order is not None) and posix.is_own_directory(root / name)):
            continue
        try:
            with local.inside(root / name) as folder:
                _sweep_temporaries(folder, current)
                if order is not None:
                    _sweep_snapshot(folder, order, current)
                elif name == ATTEMPTS_DIR:
                    for old in fences.forgettable(os.listdir(folder), current.attempt):
                        posix.remove(folder / old)
            if order is not None:
                posix.remove_if_empty(root / name)
        except FileNotFoundError:  # it has ended there, or another server removes it, too
            continue
        except OSError as error:  # one place that fails keeps nothing else from being swept
            problem = error
    _sweep_temporaries(root, current)
    if problem is not None:
        raise problem


def _sweep_folder(local: LocalStore) -> None:
    """See :meth:`Store.sweep_files`."""
    _sweep_temporaries(local.root)
    if posix.is_own_directory(local.root / OWN_DIR):
        with local.inside(local.root / OWN_DIR) as folder:
            _sweep_temporaries(folder)


def _remove_own(folder: Path) -> None:
    """Remove our own files in a snapshot's directory; it stays, with what is somebody else's."""
    for name in os.listdir(folder):
        if is_own_file(name) or temporary_owner(name) is not None:
            posix.remove(folder / name)


def _sweep_snapshot(folder: Path, order: Order, current: Manifest) -> None:
    names = os.listdir(folder)
    if order >= current.order or MANIFEST_FILE in names or not all(map(is_own_file, names)):
        return
    newest_s = max(
        os.stat(path, follow_symlinks=path == folder).st_mtime for path in (folder, *(folder / name for name in names))
    )
    if posix.is_there(folder / MANIFEST_FILE):
        return  # a listing may be older than the manifest
    if order[0] < current.attempt or time.time() - newest_s >= store.SETTLED_S:
        _remove_own(folder)


def _sweep_temporaries(folder: Path, current: Manifest | None = None) -> None:
    """Remove those that have no writer any more; of attempts before that of ``current``, at once."""
    run_id, attempt = (current.run_id, current.attempt) if current is not None else ("", 0)
    for name in posix.list_directory(folder):
        if posix.is_left(name, functools.partial(_is_settled, folder / name), run_id, attempt):
            posix.remove(folder / name)


def _is_settled(path: Path) -> bool:
    """Whether a file was not written to for so long that it has no writer any more."""
    try:
        return time.time() - os.lstat(path).st_mtime >= store.SETTLED_S
    except FileNotFoundError:
        return False  # its writer is done
