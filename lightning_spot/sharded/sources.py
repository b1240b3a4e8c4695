"""The memory that the elements of a sharded snapshot are in: found tensor by tensor.

No tensor, and no memory, is kept alive from one snapshot to the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_spot.errors import NotSerializableError
from lightning_spot.image.pickling import Named
from lightning_spot.image.pieces import Piece
from lightning_spot.image.shards import Path
from lightning_spot.sharded import metadata
from lightning_spot.sharded.places import Placed


class Source:
    """A box of a tensor that this rank writes, and the memory it was in last.

    Args:
        path: of the tensor.
        placed: the box.
        numbers: for storages that come one after the other.

    Attributes:
        sizes: of the box.
        local: gives what this rank had of the tensor, as long as that lives.
        address: of its first element.
    """

    __slots__ = ("_chunk", "_named", "_numbers", "_path", "_place", "address", "local", "sizes")

    def __init__(self, path: Path, placed: Placed, numbers: Iterator[int]) -> None:
        self._path, self._numbers = path, numbers
        self._chunk, self.sizes = placed.chunk, torch.Size(placed.chunk.sizes)
        self._place: Any = (placed.offset + placed.form.data, placed.form.data_nbytes, None, 0)
        self.address = 0
        self.local: Callable[[], torch.Tensor | None] = lambda: None
        self._named: Named | None = None

    def piece(self, tensor: torch.Tensor) -> Piece:
        """The elements, and where they go.

        Raises:
            NotSerializableError: if this rank has others than the tensor's placements say.
        """
        # to_local() asks autograd, which takes 50 times as long
        local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
        if (
            self.local() is not local
            or local.data_ptr() != self.address
            or local.shape != self.sizes
            or not _is_in_order(local)
            or self._named is None
            or not self._named.is_of(local.untyped_storage())
        ):
            local = self._look(local)
        return Piece(local.untyped_storage(), *self._place)

    def _look(self, local: torch.Tensor) -> torch.Tensor:
        """Find out where elements lie that are not where they were; or give them a place, in order."""
        if local.shape != self.sizes:
            raise NotSerializableError(
                f"{metadata.name_of(self._path)} has {tuple(local.shape)} elements on rank {self._chunk.rank}, and"
                f" {tuple(self.sizes)} by its placements: it cannot be saved in shards"
            )
        if not _is_in_order(local):
            local = local.detach().resolve_conj().resolve_neg().contiguous()
        storage = local.untyped_storage()
        if self._named is None or not self._named.is_of(storage):
            self._named = Named(next(self._numbers), storage)
        start = int(local.storage_offset()) * local.element_size()
        self._place = (*self._place[:2], self._named, start)
        self.local, self.address = weakref.ref(local), local.data_ptr()
        return local


def _is_in_order(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor are its elements, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
