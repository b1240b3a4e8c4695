"""Writes one rank's share of snapshots that all ranks hold alike, and whose slots rank 0 leases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from lightning_spot.capture.contents import SealedContent
from lightning_spot.capture.following import Follower, Task
from lightning_spot.capture.split import HeldTensor, Number, Split, differs, held_by, outgrown, sample
from lightning_spot.capture.tensors import Owners, copies_of, owners_of
from lightning_spot.capture.unexpected import failure_of
from lightning_spot.errors import SpotError
from lightning_spot.image.layout import Layout
from lightning_spot.image.pickling import Named
from lightning_spot.image.pieces import Piece
from lightning_spot.image.portion import Portion
from lightning_spot.memory.host import Host, Lease
from lightning_spot.staging.copier import Copier, Watches
from lightning_spot.staging.schedule import Schedule


class SizedBytes(Protocol):
    """Bytes, or what becomes some in the background."""

    def __len__(self) -> int: ...

    def __bytes__(self) -> bytes: ...


@dataclass(frozen=True, eq=False, slots=True)
class _Share:
    """What a rank writes, as at the seam.

    Attributes:
        owned: the tensors of which this rank writes some.
        held: what they are.
        versions: torch's counts of the writes to them.
        copies: of the memory of tensors that change while training computes, by address.
        state: what only this rank knows.
        sample: see :func:`~lightning_spot.capture.split.sample`.
    """

    owned: Owners
    held: tuple[HeldTensor, ...]
    versions: list[list[int]]
    copies: dict[int, torch.UntypedStorage]
    state: SizedBytes
    sample: str


class ShareWriter(Follower[_Share | SpotError]):
    """Writes a rank's shares; see :class:`~lightning_spot.capture.following.Follower`.

    Args:
        host: connection to the local server, with run and attempt; closed with the writer.
        connect: makes another one when it was lost.
        number: which share is this rank's where the ranks of rank 0's host write; ``None`` if it is on another one.
        copier: that copies; closed with the writer.
        schedule: when each part is copied; ``None`` for at once.
        across: likewise where all hosts do; ``None`` if they never do.
    """

    def __init__(
        self,
        host: Host,
        connect: Callable[[], Host],
        number: Number | None,
        copier: Copier | None = None,
        schedule: Schedule | None = None,
        across: Number | None = None,
    ) -> None:
        self._number, self._across = number, across
        self._split: tuple[str, Split, Portion | None] = ("", Split((), (), (), {}), None)
        self._named: dict[int, Named] = {}
        super().__init__(host, connect, copier, schedule)  # last: it begins a thread

    def begin(self, name: str, owned: Owners, state: SizedBytes | SpotError, wait_s: float = 0.0, at: str = "") -> None:
        """Begin this rank's share of a snapshot; nothing happens if it has none.

        Args:
            name: of the snapshot.
            owned: tensors that only the optimizer changes, by the address of their storage; they must not change
                until :meth:`copied` returned.
            state: what only this rank knows, for the room that rank 0 has kept for it; or why that is not known.
                (Rank 0 hears of it.)
            wait_s: how long rank 0 may wait for a clean slot, seconds: :meth:`copied` waits as long.
            at: URL of the run at the snapshot server to which all hosts bring it; ``""`` if rank 0's host writes it.
        """
        number = self._across if at else self._number
        if number is None:
            return
        share: _Share | SpotError
        try:
            share = self._share(name, owned, state)
        except Exception as error:
            share = failure_of(error)
        self._put(Task(name, f"rank {number.rank}", number, at if number.host else "", share, wait_s))

    def _share(self, name: str, owned: Owners, state: SizedBytes | SpotError) -> _Share:
        if isinstance(state, SpotError):
            raise state
        at_once = self._unsteady | self._written_past_counts(owned)
        copies = copies_of({address: owned[address][0].untyped_storage() for address in at_once if address in owned})
        return _Share(
            owned=owned,
            held=held_by(owned),
            versions=[
                [tensor._version for tensor in tensors if not tensor.is_inference()] for tensors in owned.values()
            ],
            copies=copies,
            state=state,
            sample=sample(owned, name),
        )

    def _written_past_counts(self, owned: Owners) -> set[int]:
        """Addresses of what was written to past the counts before: nobody would see such a write until it is copied."""
        if not (distrusted := self._unchanged.distrusted):
            return set()
        named = self._named
        return {address for index, address in enumerate(owned) if named.get(index) in distrusted}

    # -- on the background thread ---------------------------------------------------------------------------------

    def _fill(self, host: Host, lease: Lease, task: Task[_Share | SpotError], what: _Share | SpotError) -> None:
        if isinstance(what, SpotError):
            raise what
        split, portion = self._check(lease, task.number, what)
        room = split.states.get(task.number.share)
        if room is not None and len(what.state) > room[1]:
            raise outgrown(task.number.rank, len(what.state), room[1])
        view = self._views.of(host, lease)
        pieces, watches = self._pieces(split, portion, task.number, what)
        known = self._views.take(view, lease.held)
        layout = Layout(lease.nbytes, (), tuple(pieces))
        plan = self._unchanged.plan(layout, owners_of(what.owned, {}), known, view)
        kept = [
            piece._replace(storage=what.copies.get(piece.storage.data_ptr(), piece.storage)) for piece in plan.pieces
        ]
        job = self._copy(task, plan, kept, view, watches)
        plan.pieces = ()
        if room is not None:
            place = portion.place(room[0]) if portion is not None else room[0]
            with self._copier.reading(task.after):
                view.map[place : place + len(what.state)] = bytes(what.state)
        self.copied_bytes += sum(piece.nbytes for piece in kept) + len(what.state)
        kept.clear()
        self._check_steady(task, job)
        self._views.sealed(view, SealedContent(lease.id, (), plan.marks))

    def _check(self, lease: Lease, number: Number, what: _Share) -> tuple[Split, Portion | None]:
        """What rank 0 said of the file, if its tensors are those of this rank; what the slot has of it, if not all."""
        shared = lease.shared
        assert shared is not None
        if shared.layout != self._split[0]:
            split, host = Split.from_json(shared.layout), number.host
            self._split = (shared.layout, split, Portion(split.portion(host)) if host else None)
        _, split, portion = self._split
        if difference := split.difference(what.held, number.rank):
            raise differs(number.rank, difference)
        if shared.digest != what.sample:
            how = "its parameters, or the states of its optimizers, are not those of rank 0"
            raise differs(number.rank, f"{how}; a snapshot of both would be of neither")
        return split, portion

    def _pieces(
        self, split: Split, portion: Portion | None, number: Number, what: _Share
    ) -> tuple[list[Piece], Watches]:
        """What of the file is this rank's to write, and the tensors that must not change meanwhile."""
        owned, named = list(what.owned.values()), {}
        pieces: list[Piece] = []
        watched: list[torch.Tensor] = []
        versions: list[int] = []
        for index, start, nbytes in split.share(number.share):
            storage = owned[index][0].untyped_storage()
            known = self._named.get(index)
            if known is None or not known.is_of(storage) or known.nbytes != storage.nbytes():
                known = Named(index, storage)
            named[index] = known
            place = split.places[index] + start
            at = portion.place(place) if portion is not None else place
            pieces.append(Piece(storage, at, nbytes, known, start))
            if storage.data_ptr() in what.copies:
                self._unchanged.distrusted.add(known)  # its count may be that of a later write
            else:
                watched += [tensor for tensor in owned[index] if not tensor.is_inference()]
                versions += what.versions[index]
        self._named = named
        return pieces, Watches(watched, versions)
