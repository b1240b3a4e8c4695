"""Earlier snapshots that both ends hold, from which parts of the next one are made instead of being sent.

The receiver pins its base as long as an upload needs it. The sender only looks at its own: if it kept the slot from
being filled, it would need one slot more, or training would pay with snapshots that are skipped. What it makes of a
base that was taken meanwhile is not used, and would not have the right checksum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from lightning_spot.image.manifest import Manifest
from lightning_spot.image.portion import Image
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.slots import Slot


class Base:
    """A committed snapshot, pinned so that it stays as it is.

    Args:
        ring: that holds it.
        slot: its slot.
        manifest: of it.
    """

    def __init__(self, ring: Ring, slot: Slot, manifest: Manifest) -> None:
        self.manifest = manifest
        self.image = slot.view(manifest.nbytes)
        self._ring, self._slot = ring, slot

    @classmethod
    def newest(cls, ring: Ring, run: str, host: int | None = None) -> Base | None:
        """Pin the snapshot of a run that was committed last; ``None`` if there is none.

        Args:
            ring: that holds it.
            run: key of the run.
            host: if the portion of a host is meant, its number.
        """
        with ring.changed:
            for slot, manifest in ring.readable(run):
                if not manifest.is_file and (manifest.portion.host if manifest.portion else None) == host:
                    slot.readers += 1
                    return cls(ring, slot, manifest)
        return None

    def let_go(self) -> None:
        """Pin it no longer. Nobody may read :attr:`image` any more."""
        self.image = memoryview(b"")
        self._ring.unpin(self._slot)


@dataclass(frozen=True, slots=True)
class Glance:
    """A committed snapshot that is looked at without being pinned.

    Attributes:
        manifest: of it.
        image: its bytes, as long as it is there.
        is_there: whether what was read until now was the snapshot.
    """

    manifest: Manifest
    image: Image
    is_there: Callable[[], bool]


FindEarlier = Callable[[str, str], Glance | None]
"""Looks for a snapshot by its run's key and its name, see :func:`glance`."""


def nothing_earlier(_run: str, _name: str) -> Glance | None:
    """Where no earlier snapshot is at hand."""
    return None


def glance(ring: Ring, run: str, name: str) -> Glance | None:
    """Look at a snapshot; ``None`` if it is not here."""
    with ring.changed:
        for slot, manifest in ring.readable(run, name):
            if not manifest.is_file:
                return Glance(manifest, slot.view(manifest.nbytes), functools.partial(_holds, slot, manifest))
    return None


def _holds(slot: Slot, manifest: Manifest) -> bool:
    return slot.manifest is manifest
