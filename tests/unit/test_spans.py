"""Storages are cut into batches of bytes, each once, in order."""

from __future__ import annotations

import mmap
from itertools import accumulate

import pytest
import torch

from lightning_spot.capture import batch as batch_module
from lightning_spot.capture.batch import SlotView, batches_of
from lightning_spot.snapshot.pieces import Piece


@pytest.mark.parametrize("sizes", [(), (1,), (64,), (64, 64, 0, 64), (63, 1, 64), (1000,), (1, 200, 3, 128, 5)])
def test_batches_end_where_they_are_full(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of what is left each, and 64 bytes at least; the last may have less."""
    monkeypatch.setattr(batch_module, "_LEAST_BATCH_BYTES", 64)
    slot = SlotView(mmap.mmap(-1, 4096))
    source = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8)
    starts = [0, *accumulate(sizes)]
    pieces = [
        Piece(source.untyped_storage(), start, nbytes, start=start)
        for start, nbytes in zip(starts, sizes, strict=False)
    ]
    left, filled = sum(sizes), 0
    for number, batch in enumerate(batches_of(pieces, slot, 0, 0.0, 0.0)):
        full = max(left // 3, 64)
        before = slot.tensor.clone()
        (batch.helping if number % 2 else batch.at_once)()
        wrote = min(full, left)
        assert torch.equal(slot.tensor[filled : filled + wrote], source[filled : filled + wrote])
        slot.tensor[filled : filled + wrote] = before[filled : filled + wrote]
        assert torch.equal(slot.tensor, before)
        slot.tensor[filled : filled + wrote] = source[filled : filled + wrote]
        left, filled = left - wrote, filled + wrote
    assert left == 0
