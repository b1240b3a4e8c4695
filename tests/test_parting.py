"""What is copied at once and what may follow: as it is found for the first time, whatever has changed since."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch.distributed.tensor import Shard

from lightning_spot.capture.copying import Parting
from lightning_spot.capture.tensors import Owned
from lightning_spot.image.pieces import Piece, Pieces
from lightning_spot.sharded.layout import ShardedLayouter, state_archive
from tests.sharded_states import Sharded, as_rank

OWN = state_archive({}, 4096)


@dataclass
class Training:
    """Two weights, one of them in shards, their moments, and a buffer."""

    model: dict[str, torch.Tensor]
    moments: list[torch.Tensor]
    elsewhere: torch.Tensor = field(default_factory=lambda: torch.rand(8))
    unsteady: frozenset[int] = frozenset()
    stand_in: torch.Tensor | None = None
    layouter: ShardedLayouter = field(default_factory=lambda: ShardedLayouter(0, 2))

    @property
    def owned(self) -> list[torch.Tensor]:
        first = self.moments[0] if self.stand_in is None else self.stand_in
        return [self.model["rows"], self.model["plain"], first, *self.moments[1:], self.elsewhere]

    def pieces(self) -> Sequence[Piece]:
        state = {"model": dict(self.model), "optimizer": {f"{at}": one for at, one in enumerate(self.moments)}}
        return self.layouter.lay_out(state, OWN, [4096, 4096], {}).layout.pieces


def address(tensor: torch.Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()  # type: ignore[no-any-return]


def parted(training: Training, parting: Parting) -> tuple[list[int], list[int], list[int]]:
    """Where what is copied at once lies, what may follow, and the tensors to watch, by identity."""
    found = parting.part(training.pieces(), Owned(training.owned), training.unsteady)
    first, later = ([piece.storage.data_ptr() for piece in pieces] for pieces in (found.first, found.later))
    return first, later, sorted(map(id, found.owners))


def another_moment(training: Training) -> None:
    training.moments[0] = torch.rand(4, 4)


def moments_turned_round(training: Training) -> None:
    training.moments.reverse()


def moment_elsewhere(training: Training) -> None:
    training.moments[0].data = torch.rand(4, 4)


def one_is_no_state_any_more(training: Training) -> None:
    training.elsewhere = training.moments.pop()
    training.moments.append(torch.rand(8))


def another_has_taken_its_place(training: Training) -> None:
    training.stand_in = torch.rand(4, 4)


def buffer_is_a_state(training: Training) -> None:
    training.elsewhere = training.model["buffer"]


def state_in_the_memory_of_a_buffer(training: Training) -> None:
    training.elsewhere.data = training.model["buffer"].data


def view_of_a_buffer(training: Training) -> None:
    training.elsewhere = training.model["buffer"][:3]


def unsteady(training: Training) -> None:
    training.unsteady = frozenset((address(training.model["plain"]),))


def sharded_elsewhere(training: Training) -> None:
    training.model["rows"]._local_tensor.data = torch.rand(4, 4)  # type: ignore[attr-defined]


def another_wrapper(training: Training) -> None:
    training.model["rows"] = training.model["rows"].detach()


CHANGES: list[Callable[[Training], None]] = [
    *(another_has_taken_its_place, another_moment, moments_turned_round, moment_elsewhere, one_is_no_state_any_more),
    *(buffer_is_a_state, state_in_the_memory_of_a_buffer, view_of_a_buffer, unsteady, sharded_elsewhere),
    another_wrapper,
]


@pytest.mark.parametrize("has_buffer", [True, False], ids=["buffer", "all owned"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_changes_is_seen(change: Callable[[Training], None], has_buffer: bool) -> None:
    with as_rank(0, (2,)) as mesh:
        model = {"rows": Sharded(torch.rand(8, 4), (Shard(0),)).on(mesh), "plain": torch.rand(3, 2)}
        buffer = torch.rand(8)
        training = Training(model | ({"buffer": buffer} if has_buffer else {}), [torch.rand(4, 4), torch.rand(8)])
        parting = Parting()
        before = [parted(training, parting) for _ in range(4)]
        assert before == [parted(training, Parting())] * 4
        assert isinstance(training.pieces(), Pieces)
        assert len(before[0][0]) == has_buffer
        training.model.setdefault("buffer", buffer)
        change(training)
        for _ in range(3):
            assert parted(training, parting) == parted(training, Parting())


def test_where_nothing_has_changed_nobody_looks_where_each_lies() -> None:
    training = Training({"rows": torch.rand(4, 4), "plain": torch.rand(3, 2)}, [torch.rand(4, 4)])
    parting = Parting()
    looked = []
    for _ in range(4):
        owned = Owned(training.owned)
        with as_rank(0, (2,)):
            parting.part(training.pieces(), owned, frozenset())
        looked.append("by_storage" in vars(owned))
    assert looked == [True, True, False, False]  # the first time, tensors are met; the second time, known again


def test_no_tensor_is_kept_alive() -> None:
    with as_rank(0, (2,)) as mesh:
        rows = Sharded(torch.rand(8, 4), (Shard(0),)).on(mesh)
        training = Training({"rows": rows, "plain": torch.rand(3, 2)}, [torch.rand(4, 4)])
        parting = Parting()
        for _ in range(3):
            parted(training, parting)
        named = [piece.named for piece in training.pieces()]
        del rows
        training.model.clear()
        training.moments.clear()
        assert [one is not None and one._alive.expired() for one in named] == [True] * len(named)
