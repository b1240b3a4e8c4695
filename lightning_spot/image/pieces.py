"""What is copied into a file: storages and their places."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_spot.image.pickling import Named


class Piece(NamedTuple):
    """A storage, or some bytes of one, and its place in the file.

    Attributes:
        storage: bytes to copy; on any device. Keeping the piece keeps the storage alive.
        offset: first byte in the file.
        nbytes: length in bytes.
        named: tells the storage from all others, also those that came before it or will come after.
        start: first byte in the storage.
    """

    storage: torch.UntypedStorage
    offset: int
    nbytes: int
    named: Named | None = None
    start: int = 0
