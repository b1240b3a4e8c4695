"""Frozen parameters on GPUs that a slot holds already: they are not copied again, and looked at beside training.

What an optimizer may write is copied from a GPU each time: fused kernels, compiled steps and the replays of CUDA
graphs write there without torch's counting it. To a parameter without gradients nothing of that writes, and where
other code does past the counts, its bytes show it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from lightning_spot.capture.looks import GRAIN, NOTHING, Found, Look, Looks, NoLooks, placed
from lightning_spot.capture.owners import Mark, Owner
from lightning_spot.capture.tensors import local_of
from lightning_spot.capture.turns import CHECK_BYTES, CHECK_EVERY, Turns, Unchecked, dice, share_of
from lightning_spot.errors import SpotError
from lightning_spot.image.pickling import Named
from lightning_spot.image.pieces import Piece
from lightning_spot.staging.copier import Copier, SlotView

logger = logging.getLogger(__name__)

LEAST_BYTES = 1024 * 1024
"""Below, bytes that are looked at cost as much as the copy: each is one more thing to order, which takes as long as
PCIe needs for so many."""

MOST_BYTES = 256 * 1024 * 1024
"""How much is looked at for each snapshot at most, beside some bytes of each (5 to 10 ms of PCIe): of 2.5 GiB or less,
each byte within :data:`CHECK_EVERY` snapshots."""

_SPOT_BYTES = 1024


def may_leave_out(nbytes: int, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether so many bytes on a GPU are worth it, and only read, by what torch says of the tensors there."""
    return nbytes >= LEAST_BYTES and all(
        isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad for tensor in tensors
    )


class _LeftOut(NamedTuple):
    """A piece that was left out; it keeps no memory of a GPU that its tensors have given back.

    Attributes:
        tensors: on its storage.
        owner: they.
        mark: of them, as it was.
        named: the storage.
        place: of the piece in the file, in the storage, and its length.
    """

    tensors: Sequence[torch.Tensor]
    owner: Owner
    mark: Mark
    named: Named | None
    place: tuple[int, int, int]

    @classmethod
    def of(cls, item: Unchecked) -> _LeftOut:
        """What is known of one."""
        piece = item.piece
        return cls(item.tensors, item.owner, item.mark, piece.named, (piece.offset, piece.start, piece.nbytes))

    @property
    def is_there(self) -> bool:
        """Whether it has the memory yet that it had."""
        storage = self._storage
        return self.named is not None and self.named.is_of(storage) and storage.nbytes() == self.named.nbytes

    @property
    def item(self) -> Unchecked:
        """All of it."""
        offset, start, nbytes = self.place
        piece = Piece(self._storage, offset, nbytes, self.named, start)
        return Unchecked(piece, self.tensors, self.owner, self.mark, 0, nbytes)

    @property
    def _storage(self) -> torch.UntypedStorage:
        return local_of(self.tensors[0]).untyped_storage()


class OnGpus:
    """Finds which frozen parameters on GPUs need not be copied, and what of them is looked at.

    One is left out only after it was found as it was in a snapshot that copied it all the same: where other code
    writes it past the counts each time (``parameter.data``, as averages often are), no snapshot is lost by that. If
    one that was left out is found to differ, none is left out any more: what wrote it may have written others too.

    Args:
        copier: that brings what is looked at.
        put: has something done beside training.

    Attributes:
        looked_bytes: brought to the host so far to be looked at.
    """

    def __init__(self, copier: Copier, put: Callable[[Callable[[], None]], None]) -> None:
        self.looked_bytes = 0
        self._copier, self._put = copier, put
        self._trusts = True
        self._proven: set[Named] = set()
        self._turns = Turns()
        self._of_newest: tuple[list[_LeftOut], SlotView] | None = None  # if a share of it is looked at only

    def which(self, pieces: Sequence[Piece]) -> Sequence[bool] | None:
        """Of each piece whether it lies on a GPU; ``None`` if none does."""
        return self._copier.which_on_gpu(pieces)

    def plan(
        self, frozen: Sequence[Piece], same: Sequence[Unchecked], view: SlotView, *, trusts: bool
    ) -> tuple[NoLooks, list[Piece]]:
        """What is looked at for a snapshot, and which pieces are copied all the same.

        Args:
            frozen: pieces that are only read.
            same: those of them that the slot holds, as far as counts tell.
            view: the slot.
            trusts: whether anything may be left out.
        """
        self._of_newest = None
        self._proven &= {piece.named for piece in frozen if piece.named is not None}
        every = [item.piece for item in same]
        if not frozen or not trusts or not self._trusts or self._copier.records_graphs:
            return NOTHING, every
        wanted = _room_for(sum(piece.nbytes for piece in frozen), len(frozen))
        scratch = self._copier.scratch.take(wanted)
        if scratch is None:
            self._put(partial(self._copier.scratch.make, wanted, self._copier.gpu_of(frozen[0])))
            return NOTHING, every
        if not same:
            self._copier.scratch.give_back(scratch)
            return NOTHING, every
        try:
            return self._looks(same, scratch, view)
        except BaseException:  # Ctrl-C, or want of memory: it would be lent for good
            self._copier.scratch.give_back(scratch)
            raise

    def _looks(self, same: Sequence[Unchecked], scratch: SlotView, view: SlotView) -> tuple[NoLooks, list[Piece]]:
        """The looks at what a slot holds, and what of it is copied all the same."""
        proven = frozenset(self._proven)  # the background may add some meanwhile
        left_out = [item for item in same if item.piece.named in proven]
        copied = [item for item in same if item.piece.named not in proven]
        among = _turns_for(left_out)
        if among > 1:
            self._of_newest = list(map(_LeftOut.of, left_out)), view
        to_prove = [(spot, _held(spot, view)) for spot in map(_spot_in, copied)]
        spots = placed([*((_spot_in(item), None) for item in left_out), *to_prove])
        share = placed([(item, None) for item in _share(left_out, self._turns.next(among), among)], spots[-1].end)
        looks = Looks(self._copier, scratch, view, spots, share, max(among, CHECK_EVERY))
        self.looked_bytes += looks.nbytes
        return looks, [item.piece for item in copied]

    def found(self, looks: NoLooks) -> Found:
        """See :meth:`Looks.found`; what it tells of others is remembered."""
        found = looks.found()
        self._proven |= found.alike
        self._trusts &= not found.past_counts
        return found

    def newest_differs(self) -> frozenset[Named]:
        """See :meth:`Unchanged.newest_differs`: which differ. The calling thread waits for the GPU."""
        newest, self._of_newest = self._of_newest, None
        if newest is None:
            return frozenset()
        left_out, view = newest
        items = [each.item for each in left_out if each.is_there]
        past_counts: frozenset[Named] = frozenset()
        try:
            for start in range(0, sum(item.stop for item in items), CHECK_BYTES):
                part = placed([(item, None) for item in share_of(items, start, CHECK_BYTES)])
                past_counts |= self._seen_now(part, view).past_counts
        except SpotError as error:  # what is committed is all that there will be
            logger.debug("the newest snapshot is not compared: %s", error)
        return past_counts

    def _seen_now(self, part: Sequence[Look], view: SlotView) -> Found:
        """What is seen at once, while training stands still."""
        wanted = part[-1].end
        lent = self._copier.scratch.take(wanted)
        scratch = lent if lent is not None else SlotView(mmap.mmap(-1, wanted))
        looks = Looks(self._copier, scratch, view, (), part, CHECK_EVERY)
        try:
            looks.begin()
            looks.close()
            return self.found(looks)
        finally:
            looks.end()
            if lent is None:
                self._copier.unpin(scratch)


def _turns_for(left_out: Iterable[Unchecked]) -> int:
    """In how many snapshots each byte of it has its turn."""
    nbytes = sum(item.stop for item in left_out)
    return max(min(CHECK_EVERY, -(-nbytes // CHECK_BYTES)), -(-nbytes // MOST_BYTES), 1)


def _share(left_out: Sequence[Unchecked], number: int, among: int) -> list[Unchecked]:
    """One of so many equal shares of all bytes."""
    nbytes = -(-sum(item.stop for item in left_out) // among)
    return list(share_of(left_out, nbytes * number, nbytes))


def _room_for(nbytes: int, pieces: int) -> int:
    """What the looks at so many pieces, of so many bytes or less, need together."""
    share = min(nbytes, MOST_BYTES, max(CHECK_BYTES, -(-nbytes // CHECK_EVERY)))
    return share + pieces * (_SPOT_BYTES + 2 * GRAIN)


def _spot_in(item: Unchecked) -> Unchecked:
    """Some bytes of a piece, drawn anew each time."""
    start = dice.randrange(max(1, item.piece.nbytes - _SPOT_BYTES)) // GRAIN * GRAIN
    return item._replace(start=start, stop=min(start + _SPOT_BYTES, item.piece.nbytes))


def _held(item: Unchecked, view: SlotView) -> bytes:
    """What a slot holds of it, before it is filled."""
    nbytes = item.stop - item.start
    return ctypes.string_at(view.at(item.piece.offset + item.start, nbytes), nbytes)
