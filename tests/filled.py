"""A laid-out file, filled the slow way: what copiers and streams are compared with."""

from __future__ import annotations

import torch

from lightning_spot.image.layout import Layout
from tests.gated import write_crcs


def unsealed(layout: Layout) -> bytearray:
    """The file before its CRCs are written."""
    image = bytearray(b"\xaa" * layout.nbytes)  # dirty memory: every byte must be written
    for offset, data in layout.frame:
        image[offset : offset + len(data)] = data
    for piece in layout.pieces:
        source = torch.empty(0, dtype=torch.uint8).set_(piece.storage)
        image[piece.offset : piece.offset + piece.nbytes] = source.numpy().tobytes()
    return image


def fill(layout: Layout) -> bytearray:
    """The whole file."""
    image = unsealed(layout)
    write_crcs(memoryview(image))
    return image
