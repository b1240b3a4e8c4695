"""Which snapshots of a tier are deleted once another one is committed there."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_spot.image.manifest import Manifest
from lightning_spot.tiers.store import Store


def worth_keeping(line: Sequence[Manifest]) -> list[Manifest]:
    """Snapshots, newest first, but last those whose state is there as the end of the run, too."""
    ends = {(end.lineage, end.attempt, end.step) for end in line if end.complete}
    twice = [item for item in line if not item.complete and (item.lineage, item.attempt, item.step) in ends]
    return [*(item for item in line if item not in twice), *twice]


def retain(store: Store, keep: int, current: Manifest) -> str:
    """Delete older snapshots of the lineage of ``current`` beyond the newest ``keep``, and what killed writers left.

    Nothing is deleted before the tier has shown that ``current`` is committed there: it is listed, its manifest, read
    back, is equal, and its file has its size (that its bytes arrived, the tier has acknowledged: directories by fsync,
    object stores by the checksum of each request). Snapshots of another lineage, newer ones and those that cannot be
    read stay. So do the newest ``keep`` exact ones, and every exact one until another is put there. One whose state is
    there as the end of the run, too, goes before an older one does.

    Args:
        store: the tier.
        keep: snapshots to keep, ``current`` among them; at least 1.
        current: a snapshot just put there.

    Returns:
        why nothing older was deleted, for people; ``""`` if the tier shows ``current``.

    Raises:
        TierError: if the tier fails; what was not deleted is deleted next time.
    """
    held = store.survey()
    listed = held.manifests
    if current.name not in [manifest.name for manifest in listed]:
        return f"what is written to {store.url} is not listed there at once: nothing older is deleted until it is"
    if not store.has(current):
        return f"what is written to {store.url} is not seen there as it was written: nothing older is deleted"
    older = [manifest for manifest in listed if manifest.lineage == current.lineage and manifest.order < current.order]
    line = worth_keeping([current, *older])
    kept = [*line[: max(1, keep)], *[manifest for manifest in line if manifest.exact][: max(1, keep)]]
    for manifest in older:
        if manifest not in kept and (current.exact or not manifest.exact):
            store.delete(manifest)
    store.sweep(current, held)
    return ""
