"""Storage to which several places bring the shards of one snapshot: whoever sees all of them commits it.

Each place writes the files of the shards that it has, then a note for each of these: the shard's manifest. Of the notes
of all writers, the manifest of the snapshot is made, by anybody; then the notes go. Why a writer will never have its
shard is a note, too. An attempt begins each name once, so nothing is ever written over.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    FencedError,
    SettingsError,
    SnapshotFailedError,
    SnapshotNotFoundError,
    TierError,
)
from lightning_spot.say import say
from lightning_spot.snapshot.files import MODEL_FILE, is_note, note_name
from lightning_spot.snapshot.manifest import MANIFEST_FILE, Manifest, ShardOf, snapshot_order
from lightning_spot.snapshot.shards import (
    Image,
    Status,
    assemble,
    cut_out,
    failed,
    registers_of,
    shard_of,
    shared_file,
    status,
    why_aborted,
)
from lightning_spot.store.fences import check_fence, read_twice
from lightning_spot.store.store import Folder, Store
from lightning_spot.threads import all_at_once
from lightning_spot.untrusted import LARGE_JSON_BYTES

logger = logging.getLogger(__name__)

_MOST_NOTES_BYTES = 2 * LARGE_JSON_BYTES  # of one snapshot: its manifest has what they have, and is no longer

_MOST_FAILED = 64

Shard = tuple[Manifest, Image]
"""Manifest and bytes of what one writer has of a snapshot."""


@dataclass(slots=True)
class Look:
    """What storage has of a snapshot.

    Attributes:
        sizes: of the files that are there, by name.
        manifest: of the snapshot, if it is committed.
        notes: manifests of shards, by the number of the writer, as far as they were read: all of them, once there are
            as many as writers.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    manifest: Manifest | None = None
    notes: dict[int, Manifest] = field(default_factory=dict)

    @property
    def registers(self) -> dict[int, ShardOf]:
        """What the notes say, by the number of the writer."""
        return registers_of(self.notes.values())

    @property
    def why_aborted(self) -> str:
        """Why there will be no such snapshot, for people; ``""`` if nobody says so."""
        return why_aborted(self.registers) if self.manifest is None else ""


def look(store: Store, name: str, known: Mapping[int, Manifest] | None = None) -> Look:
    """What storage has of a snapshot.

    Args:
        store: of the run.
        name: of the snapshot.
        known: notes that were read before, or are of this place's shards: they are not read once more.

    Raises:
        SettingsError: if the name is none of a snapshot.
        TierError: if the tier fails.
    """
    folder = _folder(store, name)
    sizes = folder.sizes()
    found = Look(sizes, notes=dict(known or {}))
    if MANIFEST_FILE in sizes:
        found.manifest = read_twice(lambda: Manifest.from_json(folder.read(MANIFEST_FILE)))
        return found
    there = _readable(sizes)
    writers = max((shard.writers for shard in found.registers.values()), default=0)
    mine = {_note_name(shard) for shard in found.registers.values()}
    # To read those of thousands takes long: as long as some are missing, only why there will be none is read.
    is_complete = len(there) >= writers
    wanted = [file for file in there if file not in mine and is_complete and file.startswith("shard")]
    # The last ones: of a writer with both, all see the failure. One that says why is enough.
    wanted += [file for file in there if file not in mine and file.startswith("failed")][:_MOST_FAILED]
    for note in all_at_once([functools.partial(_note, folder, name, file) for file in wanted], "spot-note"):
        if note is not None and note.shard is not None:
            found.notes[note.shard.writer] = note
    return found


def put_shards(store: Store, shards: Sequence[Shard], *, attempt: int) -> Look:
    """Bring what this place has of a snapshot, and commit it if nothing is missing then.

    Args:
        store: of the run.
        shards: what this place has of it; those that failed, too.
        attempt: on whose behalf.

    Returns:
        what is there now. If the snapshot is aborted, what this place has brought is not there any more.

    Raises:
        FencedError: if a later attempt has claimed the run.
        CorruptSnapshotError: if the bytes are not those of a shard (any more): nothing of them stays there.
        SnapshotFailedError: if another snapshot of that name is there, or the shards of it don't fit each other.
        TierError: if the tier fails.
    """
    first = shards[0][0]
    mine = {shard_of(each).writer: each for each, _ in shards}
    folder = _folder(store, first.snapshot, first.run_id)
    found = look(store, first.snapshot, mine)
    if found.manifest is None and not _has_notes(found, mine):
        store.check_fence(first.run_id, attempt)
        _write(folder, found, shards, {writer for writer, each in mine.items() if not _is_noted(found, each)})
        found = look(store, first.snapshot, found.notes)
    if found.manifest is not None:
        if not all(contains(found.manifest, each) for each in mine.values()):
            raise _failed(f"{first.snapshot} at {store.url} is another one of that name")
        _remove(folder, list(filter(is_note, found.sizes)))
        return found
    if found.why_aborted:
        _take_back(folder, found, mine)
        return found
    if status(found.registers, first.order) is Status.COMMITTED and _has_notes(found, found.notes):
        if others := _noted_by_others(folder, mine):
            store.check_owner()
            _write(folder, found, shards, others)
        found.manifest = _commit(store, folder, found, attempt=attempt)
    return found


def contains(whole: Manifest, shard: Manifest) -> bool:
    """Whether a shard, by its manifest, is one of those that a snapshot was made of."""
    names = {span.name for span in whole.files}
    is_of_it = (whole.name, whole.lineage) == (shard.snapshot, shard.lineage)
    return is_of_it and {*shard.checksums} <= {*whole.checksums} and names.issuperset(each.name for each in shard.files)


def commit_left(store: Store, name: str) -> Look:
    """What storage has of a snapshot, which is committed if all of it is there: nobody may be left to do so.

    The next attempt does so when it looks what there is. Where it cannot write, the manifest is found all the same:
    everything else is there.

    Raises:
        SpotError: if the tier fails, or what is there does not fit together.
    """
    found = look(store, name)
    if found.manifest is None and status(found.registers, (0, 0, 0)) is Status.COMMITTED:
        found.manifest = _commit(store, _folder(store, name), found, attempt=None)
        if found.manifest is not None:
            text = "all shards of {about} were uploaded, and nobody was left to commit it. It is committed now"
            say(logging.INFO, "late-commit", text, about=name)
    return found


# -- inside -----------------------------------------------------------------------------------------------------------


def _folder(store: Store, name: str, run_id: str = "") -> Folder:
    order = snapshot_order(name)
    if order is None:
        raise SettingsError(f"{name!r} names no snapshot")
    return store.folder(name, attempt=order[0], run_id=run_id)


def _note_name(shard: ShardOf) -> str:
    return note_name(shard.writer, failed=bool(shard.failed))


def _note(folder: Folder, name: str, file: str) -> Manifest | None:
    """What a writer's note says; ``None`` if it is not there any more, or not what it should be."""
    try:
        note = Manifest.from_json(folder.read(file))
    except (SnapshotNotFoundError, CorruptSnapshotError) as error:  # who has committed the snapshot removes them
        logger.debug("%s/%s: %s", name, file, error)
        return None
    is_meant = note.shard is not None and _note_name(note.shard) == file
    return note if is_meant and note.snapshot == name else None


def _readable(sizes: Mapping[str, int]) -> list[str]:
    """The notes of a folder, as many as may be read at once: strangers may have written there, too."""
    found: list[str] = []
    left = _MOST_NOTES_BYTES
    for file in sorted(filter(is_note, sizes), key=sizes.__getitem__):
        left -= sizes[file]
        if left < 0 or sizes[file] > LARGE_JSON_BYTES:
            break
        found.append(file)
    return found


def _is_noted(found: Look, shard: Manifest) -> bool:
    return _note_name(shard_of(shard)) in found.sizes


def _noted_by_others(folder: Folder, mine: Mapping[int, Manifest]) -> set[int]:
    """The writers whose notes say something else: of two starts at once, the other one has written over ours.

    It is asked when everything is there, not at each look while others are awaited.
    """
    notes = [functools.partial(_note, folder, each.snapshot, note_name(writer)) for writer, each in mine.items()]
    found = zip(mine.items(), all_at_once(notes, "spot-note"), strict=True)
    return {writer for (writer, each), note in found if note is None or _says(note) != _says(each)}


def _says(note: Manifest) -> tuple[object, ...]:
    return note.lineage, note.checksums, note.files, note.shard


def _has_notes(found: Look, notes: Mapping[int, Manifest]) -> bool:
    """Whether the notes of these shards are there, and their files."""
    sizes: dict[str, int] = {}
    for note in notes.values():
        for span in note.files:
            sizes[span.name] = sizes.get(span.name, 0) + span.nbytes
    is_whole = all(found.sizes.get(name, -1) >= nbytes for name, nbytes in sizes.items())
    return is_whole and all(_is_noted(found, note) for note in notes.values())


def _write(folder: Folder, found: Look, shards: Sequence[Shard], writers: Set[int]) -> None:
    """Write the files, then the notes, of some writers, and of the others the files that are not whole.

    Args:
        folder: of the snapshot.
        found: what is there.
        shards: what this place has.
        writers: those whose notes are not there, or not ours: their files may be those of another start, too.
    """
    noted = [each for each, _ in shards if each.why_failed]
    good = [] if found.why_aborted else [(each, image) for each, image in shards if not each.why_failed]
    images = {shard_of(each).writer: image for each, image in good}
    shared = shared_file([each for each, _ in good], images)
    if shared is None:  # whoever has all ranges of the checkpoint writes it, and notes these shards
        good = [(each, image) for each, image in good if all(span.name != MODEL_FILE for span in each.files)]
    contents: dict[str, Image] = {}
    for each, image in good:
        for span in each.files:
            whole = shared if span.name == MODEL_FILE else None
            data = whole if whole is not None else cut_out(image, span.offset, span.stop)
            if shard_of(each).writer in writers or found.sizes.get(span.name) != len(data):
                contents[span.name] = data
    if contents:
        _verify(good)
        folder.write_all(contents)
        try:
            _verify(good)  # what was damaged meanwhile may have been written so
        except CorruptSnapshotError:
            _remove(folder, list(contents))
            raise
    noted += [each for each, _ in good]
    if notes := {_note_name(shard_of(each)): _text(each) for each in noted if shard_of(each).writer in writers}:
        folder.write_all(notes)


def _text(note: Manifest) -> Image:
    return memoryview(note.to_json().encode())


def _take_back(folder: Folder, found: Look, mine: Mapping[int, Manifest]) -> None:
    """What this place has of an aborted snapshot goes, and its writers count as failed.

    Other places still see why. The one by which all writers have failed leaves nothing: nobody is left to see it.
    """
    good = {writer: each for writer, each in mine.items() if not each.why_failed}
    noted = {note_name(writer, failed=True): failed(each, found.why_aborted) for writer, each in good.items()}
    if noted:
        folder.write_all({name: _text(each) for name, each in noted.items()})
    _remove(folder, [span.name for each in good.values() for span in each.files if span.name in found.sizes])
    _remove(folder, [note for writer in mine if (note := note_name(writer)) in found.sizes])
    of_all = [note_name(writer, failed=True) for writer in range(shard_of(next(iter(mine.values()))).writers)]
    if found.sizes.keys() | noted.keys() >= set(of_all):
        _remove(folder, of_all)


def _verify(shards: Sequence[Shard]) -> None:
    for each, image in shards:
        each.verify(image, "memory")


def _failed(why: str) -> SnapshotFailedError:
    return SnapshotFailedError(why, reason=FailureReason.SHARD_MISSING)


def _commit(store: Store, folder: Folder, found: Look, *, attempt: int | None) -> Manifest | None:
    """Write the manifest of a snapshot of which all is there; ``None`` if that is not so any more.

    Args:
        store: of the run.
        folder: of the snapshot.
        found: what is there.
        attempt: on whose behalf; ``None`` if none of those is left that brought it.
    """
    try:
        manifest = assemble(found.notes.values())
    except CorruptSnapshotError as error:
        raise _failed(str(error)) from error
    # Reading takes time: another place may have committed it, and deleted it since, or a writer have failed.
    now = look(store, manifest.name, found.notes)
    is_whole = all(now.sizes.get(span.name) == span.nbytes for span in manifest.spans)
    if now.manifest is not None or now.why_aborted or not (is_whole and _has_notes(now, found.notes)):
        return now.manifest
    notes = list(filter(is_note, now.sizes))
    if attempt is not None:
        check_fence(manifest.run_id, attempt, store.claimed())
    try:
        store.note(manifest, attempt=manifest.attempt)
    except FencedError:  # nobody else commits it; where the other one of two starts has the same shards, it notes them
        _remove(folder, notes)
        raise
    except TierError as error:
        if attempt is not None:
            raise
        text = "all shards of {about} are at {url}, but it cannot be committed there: {error}. A resume commits it."
        say(logging.WARNING, "commit-failed", text, about=manifest.name, url=store.url, error=error)
        return manifest
    _remove(folder, notes)
    return manifest


def _remove(folder: Folder, names: Sequence[str]) -> None:
    """Remove files; what stays there is swept later."""
    try:
        folder.remove(names)
    except TierError as error:
        logger.debug("some of %s stays for now: %s", names, error)
