"""Which bytes of one checkpoint file each rank writes: the tensors that all ranks hold alike, cut into equal shares.

Rank 0 lays the file out and says where each tensor lies and where it is cut; the other ranks find their own copies of
these tensors in the same order: that in which their optimizers hold them.
"""

from __future__ import annotations

import ctypes
import functools
import json
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from lightning_spot.capture.tensors import Owners
from lightning_spot.errors import FailureReason, ShareFault, ShareProblem, SnapshotFailedError
from lightning_spot.image.layout import Layout
from lightning_spot.image.pieces import Piece
from lightning_spot.image.portion import Portions, joined
from lightning_spot.image.written import Ranges
from lightning_spot.memory.joint import Shared
from lightning_spot.untrusted import LARGE_BYTES, read_object

_GRAIN = 64
_EXTRA_BYTES = 64 * 1024  # what rank 0 writes besides is rounded up to so much: shares stay as they are
_SAMPLES, _SAMPLE_BYTES = 32, 64


def outgrown(rank: int, nbytes: int, room: int) -> SnapshotFailedError:
    """The error of a rank whose own state has more bytes than there is room for."""
    return SnapshotFailedError(
        f"what only rank {rank} knows has {nbytes} bytes, there is room for {room}",
        reason=FailureReason.SHARE_MISSING,
        fault=ShareFault(ShareProblem.OUTGROWN, rank, nbytes),
    )


def differs(rank: int, how: str) -> SnapshotFailedError:
    """The error of a rank that does not hold what rank 0 does: they never write a snapshot together.

    Args:
        rank: that differs.
        how: for people.
    """
    return SnapshotFailedError(
        f"{how}. All ranks must train one model with one optimizer",
        reason=FailureReason.SHARE_MISSING,
        fault=ShareFault(ShareProblem.DIFFERS, rank),
    )


class HeldTensor(NamedTuple):
    """A tensor's memory as a rank holds it.

    Attributes:
        dtype: as torch names it.
        nbytes: of its storage.
    """

    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class SharingRanks:
    """The ranks that fill one snapshot together.

    Attributes:
        shares: how many, rank 0 among them.
        states: room in the checkpoint for what only one rank knows, by the share of each rank, from 1 on, that writes
            it by itself.
        hosts: how many ranks each host has, if several bring it to a snapshot server; shares are numbered host by host.
        at: URL of the run at that server.
        sent: likewise by the rank, from 1 on, of those that send it to rank 0, which writes it.
    """

    shares: int
    states: Mapping[int, torch.Tensor]
    hosts: tuple[int, ...] = ()
    at: str = ""
    sent: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Number:
    """Which share is a rank's.

    Attributes:
        share: of the whole.
        host: number of its host, 0 for that of rank 0.
        here: the share's number at the server of its host.
        rank: whose it is.
    """

    share: int
    host: int = 0
    here: int = 0
    rank: int = 0

    @classmethod
    def of_hosts(cls, hosts: Sequence[Sequence[int]], rank: int) -> Number:
        """That of a rank, where the ranks of each host are given."""
        host = next(index for index, ranks in enumerate(hosts) if rank in ranks)
        here = hosts[host].index(rank)
        return cls(sum(map(len, hosts[:host])) + here, host, here + bool(host), rank)


@dataclass(frozen=True)
class Split:
    """Where in a file the tensors lie that all ranks hold, and which bytes are whose.

    Attributes:
        held: the tensors, in the order in which the optimizers hold them.
        places: of each in the file, -1 for one that is not there.
        ends: share ``k`` has the bytes from ``ends[k]`` to ``ends[k + 1]``, counted over these tensors as they lie.
        states: first byte and length of the room for each rank's own state, by its share.
        hosts: see :class:`SharingRanks`.
    """

    held: tuple[HeldTensor, ...]
    places: tuple[int, ...]
    ends: tuple[int, ...]
    states: Mapping[int, tuple[int, int]]
    hosts: tuple[int, ...] = ()

    @classmethod
    def of(cls, layout: Layout, owned: Owners, kept: Owners, ranks: SharingRanks) -> Split:
        """Cut a file; on rank 0.

        Args:
            layout: of the file.
            owned: tensors that only the optimizers change, by the address of their storage.
            kept: further tensors that seldom change; rank 0 writes them.
            ranks: that fill it.

        Raises:
            SnapshotFailedError: if the file is not one of which several ranks can each write some.
        """
        pieces = {piece.storage.data_ptr(): piece for piece in layout.pieces}
        rooms = _rooms_in(layout, ranks.states)
        others = {id(piece) for piece in rooms.values()}
        extra = sum(
            piece.nbytes
            for address, piece in pieces.items()
            if address not in owned and address not in kept and id(piece) not in others
        )
        places = tuple(pieces[address].offset if address in pieces else -1 for address in owned)
        total = sum(pieces[address].nbytes for address in owned if address in pieces)
        ends = _ends(total, -(-extra // _EXTRA_BYTES) * _EXTRA_BYTES, ranks.shares)
        states = {rank: (piece.offset, piece.nbytes) for rank, piece in rooms.items()}
        return cls(held_by(owned), places, ends, states, ranks.hosts)

    def to_json(self) -> str:
        """As text, for the other ranks, and for the servers of their hosts."""
        states = {str(rank): room for rank, room in self.states.items()}
        fields: dict[str, object] = {"held": self.held, "places": self.places, "ends": self.ends}
        fields |= {"states": states, "hosts": self.hosts}
        if self.hosts:
            others = tuple(self.portion(host) for host in range(1, len(self.hosts)))
            fields |= Portions(others, self.hosts[1:]).to_dict()
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Split:
        """Read what rank 0 wrote."""
        fields = read_object(text, LARGE_BYTES)
        states = {int(rank): (int(start), int(nbytes)) for rank, (start, nbytes) in fields["states"].items()}
        held = tuple(HeldTensor(str(dtype), int(nbytes)) for dtype, nbytes in fields["held"])
        return cls(held, tuple(fields["places"]), tuple(fields["ends"]), states, tuple(fields["hosts"]))

    def portion(self, host: int) -> Ranges:
        """What the ranks of a host write."""
        first = sum(self.hosts[:host])
        shares = range(first, first + self.hosts[host])
        cuts = [
            (self.places[index] + start, nbytes) for number in shares for index, start, nbytes in self.share(number)
        ]
        return joined([*cuts, *(self.states[share] for share in shares if share in self.states)])

    def share(self, number: int) -> list[tuple[int, int, int]]:
        """The bytes of a share: number of the tensor, first byte in it, length; in the order of the file."""
        begin, end, at = self.ends[number], self.ends[number + 1], 0
        found = []
        there = [index for index, place in enumerate(self.places) if place >= 0]
        for index in sorted(there, key=self.places.__getitem__):
            nbytes = self.held[index].nbytes
            first, last = max(begin - at, 0), min(end - at, nbytes)
            if last > first:
                found.append((index, first, last - first))
            at += nbytes
        return found

    def left_to_rank_0(self, layout: Layout) -> Layout:
        """The layout with what rank 0 writes: its share, and all that no other rank holds."""
        cuts, pieces = self._cuts_of_rank_0, []
        for piece in layout.pieces:
            start, nbytes = cuts.get(piece.offset, (0, piece.nbytes))
            if nbytes:
                pieces.append(piece.cut(start, nbytes))
        return Layout(layout.nbytes, layout.frame, tuple(pieces))

    @functools.cached_property  # the same for each snapshot, and the training thread asks
    def _cuts_of_rank_0(self) -> dict[int, tuple[int, int]]:
        """What rank 0 writes of that which others hold: first byte and length, by the place in the file."""
        cuts = dict.fromkeys(self.places, (0, 0))  # not by addresses: one may have several places
        cuts.update({self.places[index]: (start, nbytes) for index, start, nbytes in self.share(0)})
        return cuts | dict.fromkeys((start for start, _ in self.states.values()), (0, 0))

    def difference(self, held: tuple[HeldTensor, ...], rank: int) -> str:
        """The first difference between the tensors of rank 0 and those of another rank, for people; ``""`` if none."""
        if held == self.held:
            return ""
        for index, (first, other) in enumerate(zip(self.held, held, strict=False)):
            if first != other:
                return (
                    f"tensor {index} of rank 0's optimizers has {first.nbytes} bytes of {first.dtype}, that of rank"
                    f" {rank} has {other.nbytes} bytes of {other.dtype}"
                )
        return f"the optimizers of rank 0 hold {len(self.held)} tensors, those of rank {rank} hold {len(held)}"


class Divided(NamedTuple):
    """A file whose bytes are not all rank 0's.

    Attributes:
        shared: what the other ranks of this host are told; ``None`` if none of them writes any.
        layout: what rank 0 copies.
        sent: first byte and length of the room for what ranks send to rank 0, by rank.
    """

    shared: Shared | None
    layout: Layout
    sent: Mapping[int, tuple[int, int]]


class Divider:
    """Divides one snapshot after the other, on rank 0."""

    def __init__(self) -> None:
        self._last: tuple[Split, str] | None = None

    def divide(self, layout: Layout, name: str, owned: Owners, kept: Owners, ranks: SharingRanks | None) -> Divided:
        """Say which bytes are whose. Alone, rank 0 copies all of it.

        Raises:
            SnapshotFailedError: see :meth:`Split.of`.
        """
        if ranks is None:
            return Divided(None, layout, {})
        rooms = _rooms_in(layout, ranks.sent)
        sent = {rank: (piece.offset, piece.nbytes) for rank, piece in rooms.items()}
        if sent:
            others = {id(piece) for piece in rooms.values()}
            left = tuple(piece for piece in layout.pieces if id(piece) not in others)
            layout = Layout(layout.nbytes, layout.frame, left)
        if ranks.shares == 1:
            return Divided(None, layout, sent)
        split = Split.of(layout, owned, kept, ranks)
        if self._last is None or split != self._last[0]:
            self._last = (split, split.to_json())
        split, told = self._last  # the one that knows its cuts
        here = ranks.hosts[0] if ranks.hosts else ranks.shares
        shared = Shared(name=name, shares=here, digest=sample(owned, name), layout=told, at=ranks.at)
        return Divided(shared, split.left_to_rank_0(layout), sent)


def _rooms_in(layout: Layout, rooms: Mapping[int, torch.Tensor]) -> dict[int, Piece]:
    """The pieces of a layout that are rooms for ranks' own states.

    Raises:
        SnapshotFailedError: if one of them is none by itself.
    """
    if not rooms:
        return {}
    wanted = {room.untyped_storage().data_ptr(): rank for rank, room in rooms.items()}
    found = {wanted[address]: piece for piece in layout.pieces if (address := piece.storage.data_ptr()) in wanted}
    if len(found) < len(rooms):
        raise SnapshotFailedError(
            "the state is serialised with plain torch.save, so that one rank alone can write it",
            reason=FailureReason.SHARE_MISSING,
            fault=ShareFault(ShareProblem.ONE_WRITER, 0),
        )
    return found


def held_by(owned: Owners) -> tuple[HeldTensor, ...]:
    """The tensors that optimizers own, in their order."""
    return tuple(
        [HeldTensor(_name_of(tensors[0].dtype), tensors[0].untyped_storage().nbytes()) for tensors in owned.values()]
    )


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sample(owned: Owners, seed: str) -> str:
    """Checksums of a few bytes of what this rank holds, at places that ``seed`` tells: equal states give equal ones.

    Tensors on a GPU are not looked at: that would wait for it.
    """
    dice = random.Random(seed)
    on_cpu = [tensors[0] for tensors in owned.values() if tensors[0].is_cpu]
    sums = []
    for tensor in dice.sample(on_cpu, min(len(on_cpu), _SAMPLES)):
        storage = tensor.untyped_storage()
        start = dice.randrange(max(1, storage.nbytes() - _SAMPLE_BYTES))
        data = ctypes.string_at(storage.data_ptr() + start, min(_SAMPLE_BYTES, storage.nbytes()))
        sums.append(f"{zlib.crc32(data):08x}")
    return ".".join(sums)


def _ends(total: int, extra: int, shares: int) -> tuple[int, ...]:
    """Where a row of bytes is cut so that all shares, and what the first one has besides, are about equally long."""
    each = (total + extra) / shares
    if shares > 1 and each < extra:
        each, first = total / (shares - 1), 0.0
    else:
        first = each - extra
    ends = [0] + [int(first + each * share) // _GRAIN * _GRAIN for share in range(shares - 1)] + [total]
    return tuple(max(0, min(total, end)) for end in ends)
