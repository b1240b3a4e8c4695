"""Brings one host's portion of a snapshot from this node to a durable tier, where those of the others come, too.

Each node writes the files of the portions that it holds, and a note of each; whoever finds all notes commits the
snapshot, as hosts do that have no memory node (see ``joint_folder``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_spot.errors import CorruptSnapshot
from lightning_spot.image.files import FileSpan, is_note, note_name
from lightning_spot.image.manifest import MANIFEST_FILE, Manifest
from lightning_spot.image.notes import Note
from lightning_spot.memory.joint_folder import JointFolder
from lightning_spot.memory.later import PutOff
from lightning_spot.tiers.store import Store


class NotWhole(PutOff):
    """A portion is at a durable tier, and those of other hosts are not yet, or will never be."""


def put_portion(store: Store, portion: Manifest, image: memoryview, *, attempt: int) -> Manifest:
    """Bring a portion there, and commit the snapshot if it is the last one.

    Args:
        store: the durable tier.
        portion: its sealed manifest.
        image: its bytes.
        attempt: on whose behalf.

    Returns:
        the manifest of the snapshot, which is committed.

    Raises:
        NotWhole: if other portions are still to come, or will never be, or make another snapshot.
        Fenced: if a later attempt has claimed the run.
        CorruptSnapshot: if the bytes are not those of the manifest (any more): nothing of them stays there.
        TierError: if the tier fails.
    """
    note = Note.of_portion(portion)
    folder = JointFolder(store, portion.run_id, portion.snapshot, pauses_s=(), attempt=attempt)
    there, claimed = folder.look()
    if MANIFEST_FILE not in there:
        folder.check_fence(claimed)
        if why := folder.why_torn(there):
            raise NotWhole(f"{portion.snapshot} will not be at {store.url}: {why}", len(there), is_final=True)
        missing = [file for file in portion.files if there.get(file.name) != file.nbytes]
        if missing or note_name(note.host) not in there:
            _write(folder, portion, image, missing)
            folder.write(note_name(note.host), memoryview(note.to_json().encode()))
            there = folder.sizes()
    if MANIFEST_FILE not in there:
        found: dict[int, Note] = {}
        is_whole = _may_be_whole(there, note) and folder.read_notes(there, found)
        try:
            committed = folder.commit(there, found) if is_whole else None
        except CorruptSnapshot as error:  # no host is left to say that another one has another model
            raise NotWhole(str(error), len(there), is_final=True) from error
        if committed is None:
            raise NotWhole(f"{portion.snapshot} is at {store.url} as far as this node has it", len(there))
        return committed
    committed = folder.manifest()
    names = {(span.name, span.nbytes) for span in committed.files}
    if any((file.name, file.nbytes) not in names for file in portion.files):
        raise NotWhole(f"{committed.name} at {store.url} is another one of that name", len(there), is_final=True)
    return committed


def _write(folder: JointFolder, portion: Manifest, image: memoryview, missing: Sequence[FileSpan]) -> None:
    """Write the files that are not there: another node with this portion may have written some."""
    portion.verify(image, "memory")
    folder.write_all(
        {file.name: image[file.offset : file.stop] if file.nbytes else memoryview(b"") for file in missing}
    )
    try:
        portion.verify(image, "memory")  # what was damaged meanwhile may have been written so
    except CorruptSnapshot:
        folder.remove(file.name for file in missing)
        raise


def _may_be_whole(there: Iterable[str], note: Note) -> bool:
    """Whether there are as many notes as hosts: to read those of hundreds takes long."""
    return sum(map(is_note, there)) >= note.hosts
