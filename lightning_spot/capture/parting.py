"""What of a snapshot is copied at once, and what may follow until the optimizer steps.

That is found for each piece, and then known as long as the optimizers have the same tensors in the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress
from operator import not_
from typing import NamedTuple

import torch

from lightning_spot.capture.owners import Owners
from lightning_spot.capture.tensors import Owned, locals_of, storage_addresses
from lightning_spot.image.pieces import Piece, Pieces, some
from lightning_spot.image.rows import identities


class Parted(NamedTuple):
    """The pieces of a snapshot.

    Attributes:
        first: what forward may change.
        later: what only the optimizers do.
        owners: of what is in ``later``.
    """

    first: Sequence[Piece]
    later: Sequence[Piece]
    owners: Sequence[torch.Tensor]


class Parting:
    """Parts one snapshot after the other."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def part(self, pieces: Sequence[Piece], owned: Owners, unsteady: frozenset[int]) -> Parted:
        """Part the pieces of a snapshot.

        Args:
            pieces: all of them.
            owned: tensors that only the optimizers change, by the address of their storage.
            unsteady: addresses of storages that something else changed all the same.
        """
        known, self._known = self._known, None
        if isinstance(pieces, Pieces) and isinstance(owned, Owned):
            if known is not None and known.is_of(pieces, owned, unsteady):
                self._known = known
                return known.part(pieces, owned)
            if pieces.tensors:
                self._known = _Known(pieces, owned, unsteady)
        addresses = [piece.storage.data_ptr() for piece in pieces]
        follow = _follow(addresses, owned, unsteady)
        watched = dict.fromkeys(compress(addresses, follow))  # each once, of however many pieces
        owners = list(chain.from_iterable(map(owned.__getitem__, watched)))
        return Parted(list(compress(pieces, map(not_, follow))), list(compress(pieces, follow)), owners)


class _Known:
    """How pieces were parted, and what tells that those of a later snapshot are parted likewise. It keeps none alive.

    Of the optimizers' tensors that are those of pieces it is known that they are in the same memory: they are the
    same objects. Where the others are is looked up each time.

    Args:
        pieces: that were parted; they have tensors.
        owned: see :meth:`Parting.part`.
        unsteady: see there.
    """

    def __init__(self, pieces: Pieces, owned: Owned, unsteady: frozenset[int]) -> None:
        addresses = [storage.data_ptr() for storage in pieces.storages]
        follow = _follow(addresses, owned, unsteady)
        first = list(map(not_, follow))
        local = locals_of(owned.tensors)
        saved = set(map(id, pieces.tensors))
        followed = set(compress(addresses, follow))
        of_owned = storage_addresses(local)
        self._places, self._unsteady = pieces.places, unsteady
        self._ids = identities(local)
        self._is_elsewhere = [id(tensor) not in saved for tensor in local]
        self._elsewhere = list(compress(of_owned, self._is_elsewhere))
        self._is_watched = [address in followed for address in of_owned]
        self._parts = (
            None if all(follow) else ((first, some(pieces.places, first)), (follow, some(pieces.places, follow)))
        )

    def is_of(self, pieces: Pieces, owned: Owned, unsteady: frozenset[int]) -> bool:
        """Whether these pieces are to be parted in the same way."""
        if pieces.places is not self._places or unsteady != self._unsteady:
            return False
        local = locals_of(owned.tensors)
        return (
            identities(local) == self._ids and storage_addresses(compress(local, self._is_elsewhere)) == self._elsewhere
        )

    def part(self, pieces: Pieces, owned: Owned) -> Parted:
        """Part them."""
        owners = list(compress(owned.tensors, self._is_watched))
        if self._parts is None:
            return Parted((), pieces, owners)
        first, later = (Pieces(list(compress(pieces.storages, which)), places) for which, places in self._parts)
        return Parted(first, later, owners)


def _follow(addresses: Sequence[int], owned: Owners, unsteady: frozenset[int]) -> list[bool]:
    """Of each storage, whether only the optimizers change it."""
    return list(map((owned.keys() - unsteady if unsteady else owned).__contains__, addresses))
