"""Which numbers of a snapshot may be approximated (``compression="topk"``): large ones that only optimizers change."""

from __future__ import annotations

import torch

from lightning_spot.capture.owners import Owners
from lightning_spot.image.floats import WIDTHS, Floats
from lightning_spot.image.layout import Layout

LEAST_BYTES = 64 * 1024
"""Less is sent as it is: counters of optimizers are floating-point numbers, too."""

_NAMES = {getattr(torch, name): name for name in WIDTHS}


def floats_of(layout: Layout, owned: Owners) -> tuple[Floats, ...]:
    """Where weights and moments lie in a file; not what is small, of another type, or not the optimizers' own.

    Args:
        layout: of the file.
        owned: tensors that only optimizers change, by the address of their storage.
    """
    found = []
    for piece in layout.pieces:
        tensors = owned.get(piece.storage.data_ptr(), ()) if piece.nbytes >= LEAST_BYTES else ()
        names = {_NAMES.get(tensor.dtype) for tensor in tensors}
        if len(names) == 1 and (name := names.pop()) is not None:
            found.append(Floats(piece.offset, piece.nbytes // WIDTHS[name] * WIDTHS[name], name))
    return tuple(found)
