"""Some bytes of storages, noted when their copy is ordered: a write that torch does not count shows in them."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable, Iterable, Sequence

import torch

from lightning_spot.image.pieces import Piece
from lightning_spot.staging.spans import address_in

STORAGES = 32
"""Of how many storages some bytes are noted each time; of all, from when one has shown such a write."""

_BYTES, _WARY_BYTES = 64, 4096
_Place = tuple[torch.UntypedStorage, int, int]
_dice = random.Random()  # training's own generator is left alone


class Samples:
    """Bytes of storages as they were, and must stay until :meth:`changed` was asked.

    Args:
        pieces: storages that are about to be copied, first byte, and length; of those on a GPU nothing is noted.
        nbytes: how many bytes of each.

    Raises:
        SpotError: if a storage is shorter than it was said to be.
    """

    def __init__(self, pieces: Iterable[_Place], nbytes: int) -> None:
        self._noted: list[tuple[torch.UntypedStorage, int, int, bytes]] = []
        for storage, start, length in pieces:
            if storage.device.type == "cpu":
                size = min(nbytes, length)
                place = start + int(_dice.random() * (length - size + 1))
                here = address_in(storage, place, size)
                self._noted.append((storage, place, here - place, ctypes.string_at(here, size)))

    def changed(self) -> frozenset[int]:
        """Addresses of the storages whose bytes are others now. They are let go: it is asked once."""
        noted, self._noted = self._noted, []
        return frozenset(
            address
            for storage, place, address, was in noted
            if storage.data_ptr() == address  # else it has other memory by now, and what was copied is not said
            and storage.nbytes() >= place + len(was)
            and ctypes.string_at(address + place, len(was)) != was
        )


class Sampler:
    """Notes some bytes of what is copied.

    Attributes:
        is_wary: whether a write that torch does not count was seen: more is noted then, of every storage.
    """

    def __init__(self) -> None:
        self.is_wary = False

    def take(self, pieces: Sequence[Piece]) -> Samples:
        """Note bytes of some of the storages."""
        if self.is_wary:
            return Samples(_places(pieces), _WARY_BYTES)
        if len(pieces) <= STORAGES:
            return Samples(_places(pieces), _BYTES)
        return Samples(_places([pieces[number] for number in _drawn(len(pieces))]), _BYTES)

    def note(self, count: int, nth: Callable[[int], torch.UntypedStorage]) -> Samples:
        """Note bytes of some of ``count`` storages, each given by its number."""
        drawn = range(count) if self.is_wary or count <= STORAGES else _drawn(count)
        places = ((storage, 0, storage.nbytes()) for storage in map(nth, drawn))
        return Samples(places, _WARY_BYTES if self.is_wary else _BYTES)


def _drawn(count: int) -> list[int]:
    """One of each share of so many: to draw from all takes four times as long."""
    ends = [count * number // STORAGES for number in range(STORAGES + 1)]
    return [first + int(_dice.random() * (end - first)) for first, end in itertools.pairwise(ends)]


def _places(pieces: Iterable[Piece]) -> list[_Place]:
    return [(piece.storage, piece.start, piece.nbytes) for piece in pieces]
