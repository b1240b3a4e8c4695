"""Names below a node: ``RUN/SNAPSHOT/model.ckpt``, ``RUN/FILE``, and ``RUN/last.ckpt`` for the newest snapshot."""

from __future__ import annotations

from lightning_spot.errors import SnapshotNotFound
from lightning_spot.image.manifest import MANIFEST_FILE, Manifest
from lightning_spot.memory.ring import Ring, Slot

LAST = "last.ckpt"


def resolve(ring: Ring, run: str, path: str) -> tuple[Slot, Manifest]:
    """The slot a path names.

    A file that a user stored as ``last.ckpt`` wins over the alias.

    Raises:
        SnapshotNotFound: if nothing committed has that name.
    """
    held = [(slot, slot.manifest) for slot in ring.committed(run)]
    committed = [(slot, manifest) for slot, manifest in held if manifest is not None]
    wanted = path.strip("/")
    for slot, manifest in committed:
        if wanted in (manifest.data_path, manifest.manifest_path, manifest.name):
            return slot, manifest
    snapshots = [(slot, manifest) for slot, manifest in committed if not manifest.is_file]
    if wanted == LAST and snapshots:
        return max(snapshots, key=lambda item: item[1].order)
    names = ", ".join(manifest.name for _, manifest in committed) or "nothing"
    raise SnapshotNotFound(f"no {wanted!r} in run {run!r} at this node; it holds {names} (and {MANIFEST_FILE} of each)")
