"""A durable tier to which several hosts bring one snapshot, each the files of its own ranks, with no memory node.

Every host writes its files to the snapshot's folder, then a note of what it has brought; whoever finds the notes of all
hosts commits it (see ``joint_folder``). An attempt begins each name once, so nothing is ever written over.

A host that will never leave its note says so, in a note of another name. So there is never a snapshot where one of
these is, and each host takes back what it has brought. Where there is none, whoever comes later may still commit it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_spot.config import PART_BYTES
from lightning_spot.errors import CorruptSnapshot, ShareMissing
from lightning_spot.image import notes
from lightning_spot.image.files import FileSpan, note_name
from lightning_spot.image.manifest import MANIFEST_FILE, Manifest
from lightning_spot.image.notes import Note
from lightning_spot.image.packing import Compression
from lightning_spot.image.parts import checksum
from lightning_spot.image.portion import Image, Portions, cut
from lightning_spot.image.written import Ranges
from lightning_spot.memory.bases import Glance
from lightning_spot.memory.by_itself import ByItself, check_gaps
from lightning_spot.memory.joint_folder import PAUSES_S, JointFolder, nothing
from lightning_spot.memory.runs import RunInfo
from lightning_spot.memory.tier import Gathering, Sent
from lightning_spot.tiers.store import Store

logger = logging.getLogger(__name__)

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


class JointStore(ByItself):
    """Implements :class:`~lightning_spot.memory.tier.JointTier` for one run at its durable tier.

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
        pauses_s: see :data:`~lightning_spot.memory.joint_folder.PAUSES_S`.
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
            raise ShareMissing(f"{name} has {taken[0]} at {self.store.url} already, and nothing is written over")
        folder.check_fence(claimed)
        if why := folder.why_torn(there):
            self._decide(name, leaves_note=False)
            raise ShareMissing(why)
        check_gaps(image, ranges, files)
        found = _pieces_of(image, ranges)
        self._write(name, folder, files, image, goes_on, lambda: found == _pieces_of(image, ranges))
        names = tuple(file.name for file in files)
        self._brought[name] = _Brought(found, time.monotonic() - began_s, names, goes_on)
        return self.sent

    def placed(self, gathering: Gathering, host: int, torn: str = "") -> None:
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
            ShareMissing: if another host says that it never will be, or has another layout, or does not bring what it
                has in time.
        """
        name = gathering.upload
        folder, brought = self._folder(name, goes_on), self._brought.pop(name, None)
        bound_s = self.wait_s + 3 * (brought.took_s if brought is not None else 0.0)
        after_s = self.first_s * (10 + host) / 10 if host else 0.0
        waited_s, whole_s = 0.0, 0.0  # of pauses only: time in which the tier fails is none
        pause_s = _OTHERS_LOOK_S if host else _FIRST_LOOK_S
        found: dict[int, Note] = {}
        while True:
            there = folder.sizes()
            if MANIFEST_FILE in there:
                return folder.manifest()
            if why := folder.why_torn(there):
                folder.remove([note_name(host), *(brought.files if brought is not None else ())])
                raise ShareMissing(why)
            is_whole = folder.read_notes(there, found)
            if why := _differ(found, gathering.shared.digest, host):
                folder.remove([note_name(host), *(brought.files if brought is not None else ())])
                folder.tear(why)
                raise ShareMissing(why)
            is_due = is_whole and whole_s >= after_s
            if is_due and (manifest := folder.commit(there, found)) is not None:
                self._committed(manifest)
                return manifest
            if waited_s >= bound_s and (is_due or not is_whole):
                late = ", ".join(map(str, notes.missing(found))) or "which says that it has"
                raise ShareMissing(f"host {late} has not brought its files of {name} within {bound_s:.0f} s")
            goes_on()
            time.sleep(pause_s)
            waited_s, whole_s = waited_s + pause_s, whole_s + pause_s if is_whole else 0.0
            pause_s = min(_LAST_LOOK_S, 1.5 * pause_s)

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
        if why != self.why:
            self.why = why
            logger.warning("%s %s", self.store.url, f"fails: {why}; it is tried again" if why else "works again")

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
                        raise ShareMissing(why)
                    begun_s = time.monotonic()
                finally:
                    looks.release()

        contents = {file.name: image[file.offset : file.stop] if file.nbytes else memoryview(b"") for file in files}
        try:
            folder.write_all(contents, wanted)
            if not is_intact():
                raise CorruptSnapshot(f"{name} was damaged in memory while it was written; it is dropped")
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
            raise ShareMissing(f"{name} was given up")
        note = Note(name=name, host=host, hosts=hosts, digest=shared.digest, pieces=brought.pieces, manifest=manifest)
        folder = self._folder(name, brought.goes_on)
        folder.check_fence()
        if not self._decide(name, leaves_note=True):
            folder.remove(brought.files)
            raise ShareMissing(f"{name} was given up")
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
