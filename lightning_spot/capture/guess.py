"""Guesses the layout of the next snapshot from the last one, so that copying can start before it is made.

Offsets only move when the length of the pickled part crosses an alignment boundary, or the model changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_spot.image.layout import Layout, Piece


@dataclass(frozen=True, slots=True)
class Guess:
    """Where the storages lay in the last snapshot, and so, most likely, in the next.

    Attributes:
        nbytes: size of the file.
        places: ``address -> (offset, nbytes)`` of each storage, in file order.
    """

    nbytes: int
    places: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, layout: Layout) -> Guess:
        """The guess that ``layout`` gives for the next one."""
        places = {piece.storage.data_ptr(): (piece.offset, piece.nbytes) for piece in layout.pieces}
        return cls(layout.nbytes, places)

    def pieces_of(self, tensors: dict[int, torch.Tensor], wanted: set[int]) -> list[Piece]:
        """Pieces of the wanted storages that are as large as they were."""
        return [
            Piece(tensors[address].untyped_storage(), offset, nbytes)
            for address, (offset, nbytes) in self.places.items()
            if address in wanted and tensors[address].untyped_storage().nbytes() == nbytes
        ]


def same_places(guessed: list[Piece], actual: list[Piece]) -> bool:
    """Whether the guess put every storage where it belongs."""
    return [(piece.storage.data_ptr(), piece.offset) for piece in guessed] == [
        (piece.storage.data_ptr(), piece.offset) for piece in actual
    ]
