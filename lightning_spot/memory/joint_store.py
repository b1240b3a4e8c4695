"""Storage to which several hosts bring one snapshot, each the files of its own ranks, with no snapshot server.

Every host writes its files to the snapshot's folder, then a note of what it has brought; whoever finds the notes of all
hosts commits it. An attempt begins each name once, so nothing is ever written over.

A host that will never leave its note says so, in a note of another name. So there is never a snapshot where one of
these is, and each host takes back what it has brought. Where there is none, whoever comes later may still commit it.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lightning_spot.config import PART_BYTES
from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    MalformedError,
    SettingsError,
    ShareFault,
    SnapshotFailedError,
    SnapshotNotFoundError,
    TierError,
)
from lightning_spot.image import notes
from lightning_spot.image.files import FileSpan, check_zero, is_note, is_torn_note, note_name, pieces, torn_name
from lightning_spot.image.manifest import MANIFEST_FILE, Manifest, snapshot_order
from lightning_spot.image.notes import Note
from lightning_spot.image.packing import Compression
from lightning_spot.image.parts import checksum
from lightning_spot.image.portion import Image, Portions, cut
from lightning_spot.image.written import Ranges
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.ring import Glance
from lightning_spot.memory.runs import RunInfo
from lightning_spot.memory.tier import Gathering, Sent
from lightning_spot.retry import growing, retried, within
from lightning_spot.say import recovered, say
from lightning_spot.threads import all_at_once, both
from lightning_spot.tiers.fences import check_fence, read_twice
from lightning_spot.tiers.store import LONGEST_MANIFEST_BYTES, HasFolders, Store
from lightning_spot.untrusted import plain, read_object, text

logger = logging.getLogger(__name__)

OUTAGE_S = 600.0
"""A tier that fails is tried again for so long."""

PAUSES_S = (0.2, 1.0, 3.0, 6.0, 10.0)
"""Between these tries; the last one again and again."""

T = TypeVar("T")


def nothing() -> None:
    """Nobody gives it up meanwhile."""


class JointFolder:
    """The folder of one snapshot. What fails at the tier is tried again for a while.

    Args:
        store: of the run.
        run_id: its identity.
        name: of the snapshot.
        goes_on: called between tries; what it raises ends them.
        fails: told why the tier fails, each time, and, with ``""``, that it works.
        pauses_s: see :data:`PAUSES_S`; empty for one try.
        attempt: on whose behalf; 0 for the attempt of the snapshot.

    Raises:
        SettingsError: if no hosts can bring files there, or the name is none of a snapshot.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        name: str,
        goes_on: Callable[[], None] = nothing,
        fails: Callable[[str], None] = lambda _why: None,
        pauses_s: Sequence[float] = PAUSES_S,
        attempt: int = 0,
    ) -> None:
        order = snapshot_order(name)
        if order is None:
            raise SettingsError(f"{name!r} names no snapshot")
        if not isinstance(store, HasFolders):
            raise SettingsError(f"{store.url} is no place to which hosts can bring the files of a snapshot")
        self._store, self._run_id, self._name, self._attempt = store, run_id, name, attempt or order[0]
        self._files = store.folder(name, attempt=self._attempt, run_id=run_id)
        self._goes_on, self._fails, self._pauses_s = goes_on, fails, pauses_s

    def sizes(self) -> dict[str, int]:
        """See :meth:`Folder.sizes`."""
        return self._patiently(self._files.sizes)

    def write(self, name: str, data: memoryview) -> None:
        """See :meth:`Folder.write`."""
        self._patiently(lambda: self._files.write(name, data))

    def write_all(self, contents: Mapping[str, memoryview], goes_on: Callable[[], None] = nothing) -> None:
        """See :meth:`Folder.write_all`. What is there is not written again when the tier has failed in between."""
        left = dict(contents)

        def done(name: str) -> None:
            del left[name]

        self._patiently(lambda: self._files.write_all(dict(left), goes_on, done))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; what stays there is swept later."""
        try:
            self._files.remove([*names])
        except TierError as error:
            logger.debug("some of %s stays for now: %s", self._name, error)

    def check_fence(self, claimed: int | None = None) -> None:
        """Raise if another attempt has claimed the run; it is asked which one has unless that is given."""
        claimed = self._patiently(self._store.claimed) if claimed is None else claimed
        check_fence(self._run_id, self._attempt, claimed)
        self._patiently(self._store.check_owner)

    def look(self) -> tuple[dict[str, int], int]:
        """The files that are there, and the highest attempt that has claimed the run."""
        return self._patiently(self._look)

    def manifest(self) -> Manifest:
        """That of the snapshot, which is committed."""
        return self._patiently(self._manifest)

    def tear(self, why: str) -> None:
        """Note that there will be no such snapshot."""
        self.write(torn_name(), memoryview(json.dumps({"why": why}).encode()))

    def why_torn(self, there: Iterable[str]) -> str:
        """Why there will be no such snapshot, as one of the hosts says; ``""`` if none does.

        Args:
            there: names of the files that are there.
        """
        torn = next(filter(is_torn_note, there), None)
        return _why(self._patiently(lambda: self._files.read(torn))) if torn is not None else ""

    def read_notes(self, there: dict[str, int], known: dict[int, Note]) -> bool:
        """Read the notes that are not ``known`` yet; whether those of all hosts are then.

        Args:
            there: the files that are there, with their sizes.
            known: by the number of the host.
        """
        read = {note_name(host) for host in known}
        new = [
            name
            for name, nbytes in sorted(there.items())
            if is_note(name) and nbytes <= LONGEST_MANIFEST_BYTES and name not in read
        ]
        for note in all_at_once([functools.partial(self._note, name) for name in new], "spot-note"):
            if note is not None:
                known[note.host] = note
        return bool(known) and not notes.missing(known)

    def commit(self, there: dict[str, int], found: dict[int, Note], *, is_left: bool = False) -> Manifest | None:
        """Write the manifest, or read the one that somebody else has written.

        Args:
            there: the files that are there, with their sizes.
            found: the notes of all hosts.
            is_left: whether none of the hosts is left: then a later attempt does it. Where it cannot write, the
                manifest is returned all the same: everything else is there.

        Returns:
            the manifest; ``None`` if a file is not seen yet, or not any more, or a host says that there will be none.
        """
        announced = notes.spans_of(found.values())
        if announced is None or any(there.get(span.name) != span.nbytes for span in announced):
            return None
        try:
            manifest = notes.sealed(found.values(), self._read)
        except SnapshotNotFoundError as error:
            logger.debug("%s: %s", self._name, error)
            return None
        data, needed = memoryview(manifest.to_json().encode()), {span.name for span in manifest.spans}

        def write() -> Manifest | None:
            # Reading takes time: another host may have committed it, and deleted it since.
            now, claimed = self._look()
            if MANIFEST_FILE in now:
                return self._manifest()
            if any(map(is_torn_note, now)):  # a host has said so since, and all take back what they have brought
                return None
            if any(now.get(name) != size for name, size in there.items() if is_note(name) or name in needed):
                return None
            if not is_left:
                self.check_fence(claimed)
            self._files.write(MANIFEST_FILE, data)
            return manifest

        try:
            written = self._patiently(write)
        except TierError as error:
            if not is_left:
                raise
            text = "all parts of {about} are at {url}, but it cannot be committed there: {error}. A resume commits it."
            say(logging.WARNING, "commit-failed", text, about=self._name, url=self._store.url, error=error)
            return manifest
        if written is not None:
            self.remove(filter(is_note, there))
        return written

    # -- inside ---------------------------------------------------------------------------------------------------

    def _look(self) -> tuple[dict[str, int], int]:
        return both(self._files.sizes, self._store.claimed, "spot-ask")

    def _note(self, name: str) -> Note | None:
        """What a host has noted; ``None`` if that is not there any more, or not what it should be."""
        try:
            note = self._patiently(lambda: Note.from_json(self._files.read(name)))
        except (SnapshotNotFoundError, CorruptSnapshotError) as error:  # who has committed it removes them
            logger.debug("%s/%s: %s", self._name, name, error)
            return None
        return note if (note.name, note_name(note.host)) == (self._name, name) else None

    def _manifest(self) -> Manifest:
        return read_twice(lambda: Manifest.from_json(self._files.read(MANIFEST_FILE)))

    def _read(self, span: FileSpan, start: int, stop: int) -> bytes:
        return self._patiently(lambda: self._files.read(span.name, start, stop))

    def _patiently(self, action: Callable[[], T]) -> T:
        def again(error: Exception) -> bool:
            if isinstance(error, TierError):
                self._fails(str(error))
            return isinstance(error, TierError)

        pauses_s = within(OUTAGE_S, self._pauses_s) if self._pauses_s else ()
        result = retried(action, pauses_s, again, lambda _error, _pause_s: self._goes_on())
        self._fails("")
        return result


def commit_left(store: Store, name: str) -> Manifest | None:
    """Commit a snapshot whose hosts are all gone, if each had brought what it has; ``None`` if not.

    The next attempt does so when it looks what there is.

    Raises:
        SpotError: if the tier fails, which is not tried again, or what is there does not fit together.
    """
    if not isinstance(store, HasFolders):
        return None
    folder, found = JointFolder(store, "", name, pauses_s=()), dict[int, Note]()
    there = folder.sizes()
    if MANIFEST_FILE in there:
        return folder.manifest()  # somebody has committed it meanwhile
    if any(map(is_torn_note, there)):
        return None
    if folder.read_notes(there, found):
        return folder.commit(there, found, is_left=True)
    return folder.manifest() if MANIFEST_FILE in folder.sizes() else None  # notes go when that is there


def _why(data: bytes) -> str:
    try:
        return plain(text(read_object(data), "why", None)) or "one of the hosts says so"
    except MalformedError:
        return "another host says that it will not be, and its note is damaged"


WAIT_S = 120.0
"""So much longer than this one, and three times the time that it took, other hosts may take to bring what they have."""

FIRST_S = 10.0
"""So long another host leaves it to the first one to commit: each would read the parts of which several have bytes."""

_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 1.0
_OTHERS_LOOK_S = 0.25  # nobody waits for another host than the first to see it
_MOST_DECIDED = 64
_TORN_S = 1.0  # between two looks whether another host has given up what is being written; no more depends on them


@dataclass(frozen=True, slots=True)
class _Brought:
    """What this host has of a snapshot at the tier.

    Attributes:
        pieces: all bytes of it.
        took_s: seconds that took.
        files: their names.
        goes_on: raises when the snapshot is given up here.
    """

    pieces: tuple[notes.Piece, ...]
    took_s: float
    files: tuple[str, ...]
    goes_on: Callable[[], None]


class ByItself:
    """Begins snapshots as such a :class:`~lightning_spot.memory.tier.JointTier` does."""

    def begin(self, shared: Shared, nbytes: int, *, attempt: int, hosts: int) -> Gathering:
        """See :meth:`JointTier.begin`. Every host begins by itself, and asks nobody."""
        if snapshot_order(shared.name) is None or hosts < 1 or attempt < 1:
            raise SettingsError(f"{shared.name!r} of attempt {attempt} is no snapshot that {hosts} hosts bring")
        return Gathering(shared.name, nbytes, None, shared)

    def join(self, name: str, *, attempt: int, host: int, wait_s: float) -> Gathering:
        """See :meth:`JointTier.join`. There is nobody to ask."""
        raise SnapshotFailedError(
            f"host {host} was not told what of {name} (attempt {attempt}) is its own within {wait_s} s",
            reason=FailureReason.SHARE_MISSING,
        )


def check_gaps(image: Image, ranges: Ranges, files: Sequence[FileSpan]) -> None:
    """Check that what a host has beside its files is zero, as it is when they are read.

    Args:
        image: as far as it is here.
        ranges: that the host brings.
        files: that are cut out of them.

    Raises:
        CorruptSnapshotError: if it is not zero.
    """
    for start, nbytes in ranges:
        for span, first, last in pieces(files, start, start + nbytes):
            if span is None:
                check_zero(image[first:last])


class JointStore(ByItself):
    """Implements :class:`~lightning_spot.memory.tier.JointTier` for one run at its storage.

    Args:
        store: of the run there.
        run_id: its identity.
        committed: told of each snapshot that this host has committed.

    Attributes:
        store: see above.
        why: what fails at the tier at present; ``""`` while it works.
        sent: how went what was brought; all of it counts as whole.
        wait_s: see :data:`WAIT_S`.
        first_s: see :data:`FIRST_S`.
        pauses_s: see :data:`~lightning_spot.memory.joint_store.PAUSES_S`.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        committed: Callable[[Manifest], None] = lambda _manifest: None,
    ) -> None:
        self.store, self._run_id, self._committed = store, run_id, committed
        self.why = ""
        self._brought: dict[str, _Brought] = {}
        self._lock = threading.Lock()
        self._decided: dict[str, bool] = {}  # by the snapshot's name: whether this host leaves its note
        self.sent = Sent()
        self.wait_s, self.first_s, self.pauses_s = WAIT_S, FIRST_S, PAUSES_S

    def know(self, info: RunInfo) -> None:
        """See :meth:`JointTier.know`. Nothing to do: the tier has its claim."""

    def bring(
        self,
        gathering: Gathering,
        image: Image,
        ranges: Ranges,
        earlier: Glance | None,
        goes_on: Callable[[], None],
        compression: Compression = "auto",
    ) -> Sent:
        """See :meth:`JointTier.bring`: write this host's files. If that fails, none of them stays."""
        name, own = gathering.upload, notes.read_own(gathering.shared.layout)
        files, folder, began_s = gathering.files or own.files, self._folder(name, goes_on), time.monotonic()
        there, claimed = folder.look()
        if taken := [file.name for file in files if file.name in there]:
            raise SnapshotFailedError(
                f"{name} has {taken[0]} at {self.store.url} already, and nothing is written over",
                reason=FailureReason.SHARE_MISSING,
            )
        folder.check_fence(claimed)
        if why := folder.why_torn(there):
            self._decide(name, leaves_note=False)
            raise SnapshotFailedError(why, reason=FailureReason.SHARE_MISSING)
        check_gaps(image, ranges, files)
        found = _pieces_of(image, ranges)
        self._write(name, folder, files, image, goes_on, lambda: found == _pieces_of(image, ranges))
        names = tuple(file.name for file in files)
        self._brought[name] = _Brought(found, time.monotonic() - began_s, names, goes_on)
        return self.sent

    def placed(self, gathering: Gathering, host: int, torn: str = "", fault: ShareFault | None = None) -> None:
        """See :meth:`JointTier.placed`."""
        if torn:
            self._tear(gathering.upload, torn)
        else:
            self._note(gathering, host, None)

    def seal(self, gathering: Gathering, manifest: Manifest, goes_on: Callable[[], None]) -> Manifest:
        """See :meth:`JointTier.seal`."""
        self._note(gathering, 0, manifest)
        return self.finish(gathering, 0, goes_on)

    def finish(self, gathering: Gathering, host: int, goes_on: Callable[[], None]) -> Manifest:
        """Return when the snapshot is committed; commit it if all hosts have brought what they have.

        Args:
            gathering: what was brought.
            host: number of this one. The first one commits at once, the others where it does not.
            goes_on: called now and then; what it raises ends this.

        Raises:
            SnapshotFailedError: if another host says that it never will be, or has another layout, or does not bring
                what it has in time.
        """
        name = gathering.upload
        folder, brought = self._folder(name, goes_on), self._brought.pop(name, None)
        bound_s = self.wait_s + 3 * (brought.took_s if brought is not None else 0.0)
        after_s = self.first_s * (10 + host) / 10 if host else 0.0
        waited_s, whole_s = 0.0, 0.0  # of pauses only: time in which the tier fails is none
        pauses = growing(_OTHERS_LOOK_S if host else _FIRST_LOOK_S, _LAST_LOOK_S, 1.5)
        found: dict[int, Note] = {}
        while True:
            there = folder.sizes()
            if MANIFEST_FILE in there:
                return folder.manifest()
            if why := folder.why_torn(there):
                folder.remove([note_name(host), *(brought.files if brought is not None else ())])
                raise SnapshotFailedError(why, reason=FailureReason.SHARE_MISSING)
            is_whole = folder.read_notes(there, found)
            if why := _differ(found, gathering.shared.digest, host):
                folder.remove([note_name(host), *(brought.files if brought is not None else ())])
                folder.tear(why)
                raise SnapshotFailedError(why, reason=FailureReason.SHARE_MISSING)
            is_due = is_whole and whole_s >= after_s
            if is_due and (manifest := folder.commit(there, found)) is not None:
                self._committed(manifest)
                return manifest
            if waited_s >= bound_s and (is_due or not is_whole):
                late = ", ".join(map(str, notes.missing(found))) or "which says that it has"
                raise SnapshotFailedError(
                    f"host {late} has not brought its files of {name} within {bound_s:.0f} s",
                    reason=FailureReason.SHARE_MISSING,
                )
            goes_on()
            time.sleep(pause_s := next(pauses))
            waited_s, whole_s = waited_s + pause_s, whole_s + pause_s if is_whole else 0.0

    def give_up(self, gathering: Gathering) -> None:
        """See :meth:`JointTier.give_up`."""
        self._tear(gathering.upload, "the first host has given it up")

    def decline(self, name: str, *, attempt: int, why: str, host: int = 0) -> None:
        """See :meth:`JointTier.decline`."""
        there = self._folder(name).sizes() if host else {}
        if there.keys().isdisjoint((MANIFEST_FILE, note_name(host))):
            self._tear(name, why)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _folder(self, name: str, goes_on: Callable[[], None] = nothing) -> JointFolder:
        return JointFolder(self.store, self._run_id, name, goes_on, self._heard, self.pauses_s)

    def _heard(self, why: str) -> None:
        """The tier fails, or works."""
        self.why = why
        if why:
            text = "{about} fails ({why}). It is retried; snapshots stay in memory meanwhile. Check the storage."
            say(logging.WARNING, "upload-failing", text, about=self.store.url, why=why)
        else:
            recovered("upload-failing", "{about} works again", about=self.store.url)

    def _decide(self, name: str, *, leaves_note: bool) -> bool:
        """Whether this host leaves its note of a snapshot. What was decided first stands: others act upon it."""
        with self._lock:
            while len(self._decided) >= _MOST_DECIDED:
                del self._decided[next(iter(self._decided))]
            return self._decided.setdefault(name, leaves_note)

    def _write(
        self,
        name: str,
        folder: JointFolder,
        files: Sequence[FileSpan],
        image: Image,
        goes_on: Callable[[], None],
        is_intact: Callable[[], bool],
    ) -> None:
        begun_s, looks = time.monotonic(), threading.Lock()

        def wanted() -> None:
            """Raise if it is given up here, or, as is asked now and then, elsewhere."""
            nonlocal begun_s
            goes_on()
            if time.monotonic() - begun_s > _TORN_S and looks.acquire(blocking=False):
                try:
                    if why := folder.why_torn(folder.sizes()):
                        raise SnapshotFailedError(why, reason=FailureReason.SHARE_MISSING)
                    begun_s = time.monotonic()
                finally:
                    looks.release()

        contents = {file.name: image[file.offset : file.stop] if file.nbytes else memoryview(b"") for file in files}
        try:
            folder.write_all(contents, wanted)
            if not is_intact():
                raise CorruptSnapshotError(f"{name} was damaged in memory while it was written; it is dropped")
        except Exception:
            self._decide(name, leaves_note=False)
            folder.remove(contents)  # before others are told: there may be no room for that
            raise
        self.sent.whole_bytes += sum(file.nbytes for file in files)

    def _note(self, gathering: Gathering, host: int, manifest: Manifest | None) -> None:
        """Say that all that this host brings is there."""
        name, shared = gathering.upload, gathering.shared
        hosts, brought = Portions.read(shared.layout, gathering.nbytes).hosts, self._brought.pop(name, None)
        if brought is None:
            raise SnapshotFailedError(f"{name} was given up", reason=FailureReason.SHARE_MISSING)
        note = Note(name=name, host=host, hosts=hosts, digest=shared.digest, pieces=brought.pieces, manifest=manifest)
        folder = self._folder(name, brought.goes_on)
        folder.check_fence()
        if not self._decide(name, leaves_note=True):
            folder.remove(brought.files)
            raise SnapshotFailedError(f"{name} was given up", reason=FailureReason.SHARE_MISSING)
        folder.write(note_name(host), memoryview(note.to_json().encode()))
        self._brought[name] = brought

    def _tear(self, name: str, why: str) -> None:
        """Say that there will be no such snapshot, unless this host has said that its part is there."""
        if not self._decide(name, leaves_note=False):
            folder, brought = self._folder(name), self._brought.pop(name, None)
            if brought is not None:
                folder.remove(brought.files)  # before others are told: there may be no room for that
            folder.check_fence()
            folder.tear(why)


def _differ(found: Mapping[int, Note], digest: str, host: int) -> str:
    """Why what hosts have noted will never be one snapshot; ``""`` if it may."""
    other = next((note.host for note in found.values() if note.digest != digest), None)
    if other is None:
        return ""
    return f"host {other} has another model, or other optimizers, than host {host}. All ranks must build the same"


def _pieces_of(image: Image, ranges: Ranges) -> tuple[notes.Piece, ...]:
    return tuple((start, stop - start, checksum(image[start:stop])) for start, stop in cut(ranges, PART_BYTES))
