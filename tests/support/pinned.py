"""Slots that are pinned for a GPU, and unpinned before they are unmapped, whatever a test did with them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_spot.capture.batch import SlotView
from lightning_spot.capture.copier import Copier
from lightning_spot.protocol.slot import SlotMemory, slot_capacity


class Desk:
    """Slots in memory, and copiers into them."""

    def __init__(self) -> None:
        self._made: list[tuple[Copier, SlotView]] = []

    def slot(self, nbytes: int) -> SlotView:
        memory = SlotMemory.create(slot_capacity(nbytes), Path(os.environ["LIGHTNING_SPOT_SHM_DIR"]) / "slot")
        memory.unlink()
        os.close(memory.fd)
        return SlotView(memory.map)

    def copier(self, view: SlotView, buffer_bytes: int = 0) -> Copier:
        copier = Copier(buffer_bytes=buffer_bytes)
        copier.pin(view, 0)
        self._made.append((copier, view))
        return copier


@contextmanager
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    for copier, view in made._made:
        copier.close()
        copier.unpin(view)
        assert not view.tensor.is_pinned()
