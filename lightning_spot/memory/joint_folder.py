"""The folder of a snapshot that several hosts bring to a durable tier: what they note there, and how it is committed.

Each host writes its files, and beside them a note of what it has brought. When the notes of all hosts are there, so are
all bytes, and whoever sees that writes the manifest, which is the same whoever does. Until then there is no snapshot.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from lightning_spot.errors import CorruptManifest, Malformed, SettingsError, SnapshotNotFound, TierError
from lightning_spot.image import notes
from lightning_spot.image.files import FileSpan, is_note, is_torn_note, note_name, torn_name
from lightning_spot.image.manifest import MANIFEST_FILE, Manifest, snapshot_order
from lightning_spot.image.notes import Note
from lightning_spot.threads import all_at_once, both
from lightning_spot.tiers.claims import check_fence, whole
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
        except SnapshotNotFound as error:
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
            logger.warning("lightning_spot: %s is whole, and cannot be committed there: %s", self._name, error)
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
        except (SnapshotNotFound, CorruptManifest) as error:  # who has committed it removes them
            logger.debug("%s/%s: %s", self._name, name, error)
            return None
        return note if (note.name, note_name(note.host)) == (self._name, name) else None

    def _manifest(self) -> Manifest:
        return whole(lambda: Manifest.from_json(self._files.read(MANIFEST_FILE)))

    def _read(self, span: FileSpan, start: int, stop: int) -> bytes:
        return self._patiently(lambda: self._files.read(span.name, start, stop))

    def _patiently(self, action: Callable[[], T]) -> T:
        deadline_s, pauses_s = time.monotonic() + OUTAGE_S, self._pauses_s
        for pause_s in itertools.chain(pauses_s, itertools.repeat(pauses_s[-1] if pauses_s else OUTAGE_S)):
            try:
                result = action()
            except TierError as error:
                self._fails(str(error))
                if time.monotonic() + pause_s >= deadline_s:
                    raise
            else:
                self._fails("")
                return result
            self._goes_on()
            time.sleep(pause_s)
        raise AssertionError("unreachable")


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
    except Malformed:
        return "another host says that it will not be, and its note is damaged"
