"""What is compared for a snapshot of that which is not copied again: each byte in its turn."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from lightning_spot.capture.owners import Mark, Owner
from lightning_spot.image.pieces import Piece

CHECK_BYTES = 64 * 1024 * 1024
"""How much is compared for each snapshot (some 5 ms in the background), of which nothing is left to be found later."""

CHECK_EVERY = 10
"""Every byte that is not copied again is compared with the tensor once in so many snapshots, if not each time."""

dice = random.Random()
"""Draws what is looked at; training's own generator is left alone."""


_memcmp = ctypes.CDLL(None).memcmp  # lets go of the GIL
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def same_bytes(first: int, other: int, nbytes: int) -> bool:
    """Whether so many bytes at two addresses are the same."""
    return not _memcmp(first, other, nbytes)


class Unchecked(NamedTuple):
    """A piece that its slot holds already, as far as the counts of its storage's owners tell.

    Attributes:
        start: first byte of it that is compared this time.
        stop: behind the last one.
    """

    piece: Piece
    tensors: Sequence[torch.Tensor]
    owner: Owner
    mark: Mark
    start: int
    stop: int


class Turns:
    """Which share is compared for a snapshot: each in its turn, in an order drawn anew each time around.

    An old byte may lie in one slot only. With a fixed order, slots that are used one after the other might meet the
    same share each time.
    """

    def __init__(self) -> None:
        self._among = 0
        self._left: list[int] = []

    def next(self, among: int) -> int:
        """The share, of so many."""
        if not self._left or among != self._among:
            self._among, self._left = among, dice.sample(range(among), among)
        return self._left.pop()


def share_of(unchecked: Iterable[Unchecked], start: int, nbytes: int) -> Iterator[Unchecked]:
    """What lies in a range of all bytes, one piece behind the other: one may be larger than all others together."""
    before = 0
    for item in unchecked:
        first, last = max(start - before, 0), min(start + nbytes - before, item.stop)
        if first < last:
            yield item._replace(start=first, stop=last)
        before += item.stop
