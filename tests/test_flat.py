"""What FSDP1 shards is found on each rank without asking the others: ranks of runs whose collectives do nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lightning_spot.errors import NotSerialisable, SettingsError
from lightning_spot.exact import private
from lightning_spot.exact.flat import Flat, Kinds
from lightning_spot.exact.sharded import _put_back_optimizer, holder_of
from lightning_spot.fit.own_states import OwnFiles
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.sealing import Sealing
from lightning_spot.sharded.layout import ShardedLayouter, state_archive
from lightning_spot.sharded.plan import Planner
from lightning_spot.sharded.reader import ImageReader, load, load_all
from tests.sharded_states import as_rank, fill
from tests.test_sharded import same

SHARD, WHOLE = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
Way = tuple[int, ShardingStrategy, bool, bool]
"""Number of ranks, sharding strategy, ``use_orig_params``, and whether each layer has a flat parameter of its own."""

WAYS: list[Way] = [(2, SHARD, True, False), (3, SHARD, False, True), (5, SHARD, True, True), (2, WHOLE, True, False)]
Ranks = list[tuple[Flat, torch.optim.Optimizer]]


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3), nn.Linear(3, 1), nn.Linear(3, 2))
    layers[2].requires_grad_(False)
    layers[3].extra = layers[3].weight  # tied
    return layers


def step(parameters: Sequence[tuple[str, Any, torch.Tensor]], optimizer: torch.optim.Optimizer) -> None:
    """Two steps with gradients that tell elements apart; the last layer has none."""
    for times in (1.0, -3.0):
        for name, parameter, numbers in parameters:
            if parameter.requires_grad and not name.startswith("4."):
                parameter.grad = times * (numbers + 0.5)
        optimizer.step()


def trained() -> dict[str, Any]:
    """The state of the model on one device, by names."""
    module = model(1)
    named = [(name, one, torch.arange(float(one.numel())).view(one.shape)) for name, one in module.named_parameters()]
    optimizer = torch.optim.AdamW([one for _, one, _ in named if one.requires_grad], 0.1)
    step(named, optimizer)
    states = {name: optimizer.state[one] for name, one, _ in named if one in optimizer.state}
    return {"model": module.state_dict(), "optimizer_0": {"state": states}}


def sharded(way: Way, seed: int, *, trains: bool) -> tuple[Flat, torch.optim.Optimizer]:
    """What the rank that this process is has of it."""
    _, strategy, own, by_layer = way
    module = FullyShardedDataParallel(
        model(seed),
        device_id=torch.device("cpu"),  # type: ignore[arg-type]
        sharding_strategy=strategy,
        use_orig_params=own,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}) if by_layer else None,
    )
    optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], 0.1)
    flat = Flat(module)
    if trains:
        step(list(pieces(flat)), optimizer)
    return flat, optimizer


def pieces(flat: Flat) -> Any:
    """Its parameters as an optimizer has them, with the numbers of their elements."""
    for part in flat._parts:
        start, stop = part.ranges[dist.get_rank()]
        if part.own is not None and part.numel:
            yield part.name, part.own, torch.arange(float(start), float(stop)).view(part.own.shape)


def saved(way: Way, make: Callable[[], tuple[Flat, torch.optim.Optimizer]]) -> tuple[bytes, Manifest]:
    """The snapshot that all ranks write."""
    world, image, files = way[0], bytearray(), ()
    kinds: list[Kinds] = []
    for writes in (False, True):
        for rank in range(world):
            with as_rank(rank, (world,)):
                flat, optimizer = make()
                state = {"model": flat.model_state(), "optimizer_0": flat.optimizer_state(optimizer)}
                if not writes:
                    kinds.append(flat.kinds(state))
                    continue
                flat.complete(state, kinds)
                sizes = [4096] * world
                written = ShardedLayouter(rank, world).lay_out(state, state_archive({}, 4096), sizes, {})
                if rank == 0:
                    image, files = bytearray(b"\xa5") * written.layout.nbytes, written.files
                fill(image, written)
    name = "step-000000001-attempt-0001"
    manifest = Manifest(run="run", name=name, step=1, attempt=1, nbytes=len(image), files=files)
    manifest = Sealing(manifest, memoryview(image)).run(2)
    return bytes(image), manifest


@pytest.mark.parametrize("way", [way for way in WAYS if way[2]])
@pytest.mark.parametrize("other", WAYS)
def test_any_number_of_ranks_goes_on_from_any(way: Way, other: Way) -> None:
    wanted = trained()
    image, manifest = saved(way, lambda: sharded(way, 1, trains=True))
    reader = ImageReader(memoryview(image), manifest)
    check(load_all(reader), wanted)

    def restored() -> tuple[Flat, torch.optim.Optimizer]:
        flat, optimizer = sharded(other, 2, trains=False)
        load({"model": flat.to_load()}, reader, whole=("model",))
        _put_back_optimizer(flat, optimizer, reader, "optimizer_0", "model")
        return flat, optimizer

    image, manifest = saved(other, restored)
    check(load_all(ImageReader(memoryview(image), manifest)), wanted)


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert same(dict(sorted(found["model"].items())), dict(sorted(wanted["model"].items())))
    states = found["optimizer_0"]["state"]
    assert [name for name in states if not name.startswith("4.")] == sorted(wanted["optimizer_0"]["state"])
    for name, values in wanted["optimizer_0"]["state"].items():
        assert same(states[name], dict(sorted(values.items()))), name


def test_a_rank_that_has_nothing_of_a_late_state_is_told_of_it_with_the_next_snapshot() -> None:
    way: Way = (3, SHARD, True, False)

    def plans(told: list[Kinds] | None, *, trains: bool) -> tuple[set[str], list[Kinds]]:
        """Digests of the ranks' plans, and what each has of others."""
        digests, kinds = set(), []
        for rank in range(3):
            with as_rank(rank, (3,)):
                flat, optimizer = sharded(way, 1, trains=trains)
                state = {"model": flat.model_state(), "optimizer_0": flat.optimizer_state(optimizer)}
                kinds.append(flat.kinds(state))
                if told is not None:
                    flat.complete(state, told)
                    digests.add(Planner(3).plan(state).plan.digest)
        return digests, kinds

    _, before = plans(None, trains=False)
    assert len(plans(before, trains=False)[0]) == 1
    differing, now = plans(before, trains=True)  # the first steps came after the first snapshot
    assert len(differing) > 1
    assert len(plans(now, trains=True)[0]) == 1

    ranks = [OwnFiles(cast(Any, Trainer(rank, 3))) for rank in range(3)]
    board: list[bytes | None] = [None] * 3
    for rank, files in enumerate(ranks):
        files._shown = cast(Any, Board(board, rank))
    for kinds, own_bytes in ((before, 500), (now, 0), (now, 700)):
        assert [files.show(own_bytes * rank, kinds[rank]) for rank, files in enumerate(ranks)] == [None] * 3
        assert [files.see() for files in ranks] == [False] * 3
        assert [files.kinds for files in ranks] == [kinds] * 3
    assert [files.most_bytes for files in ranks] == [1400] * 3
    assert max(len(shown or b"") for shown in board) < 30  # what has not changed is not shown again
    board[1] = None  # it was too long
    assert [files.see() for files in ranks] == [True] * 3


class Trainer(nn.Module):
    """As much of a trainer as is asked."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.global_rank, self.world_size = rank, size


class Board:
    """What all ranks have shown; see :class:`~lightning_spot.fit.word.Shown`."""

    def __init__(self, shown: list[bytes | None], rank: int) -> None:
        self.shown, self.rank = shown, rank

    def show(self, mine: bytes) -> None:
        self.shown[self.rank] = mine

    def seen(self) -> list[bytes | None]:
        return self.shown


@pytest.mark.parametrize(
    ("value", "problem"), [(3, "rank 0, which writes those, has nothing"), (torch.zeros(2, 2), "its shape, \\(2, 2\\)")]
)
def test_what_is_not_known_to_be_sharded_alike_is_refused(value: Any, problem: str) -> None:
    way = WAYS[0]
    with as_rank(1, (2,)):
        flat, optimizer = sharded(way, 1, trains=True)
        part = next(part for part in flat._parts if part.numel and part.ranges[0] == (0, 0))
        assert part.own is not None
        optimizer.state[part.own]["more"] = value
        state = {"model": flat.model_state(), "optimizer_0": flat.optimizer_state(optimizer)}
        with pytest.raises(NotSerialisable, match=f"more cannot be saved in shards: .*{problem}"):
            Planner(2).plan(state)


def test_each_private_name_of_fsdp1_is_needed_and_its_lack_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name.name for name in private.ALL if name.part == private.FLAT]
    real = private.Name.of
    missed: set[str] = set()
    with as_rank(1, (2,)):
        module = sharded(WAYS[0], 1, trains=False)[0]._module
        trainer: Any = SimpleNamespace(strategy=FSDPStrategy(state_dict_type="sharded"))
        trainer.strategy.model = module
        assert isinstance(holder_of(trainer), Flat)
        for hidden in names:
            with monkeypatch.context() as patch:
                patch.setattr(private.Name, "of", _without(hidden, real, missed))
                with pytest.raises(SettingsError, match=rf"FSDPStrategy is not supported with torch .*{hidden}.*FSDP2"):
                    holder_of(trainer)
    assert missed == set(names)


def _without(hidden: str, real: Callable[..., Any], missed: set[str]) -> Callable[..., Any]:
    def of(self: private.Name, owner: Any) -> Any:
        if self.name == hidden:
            missed.add(hidden)
            raise AttributeError(f"no attribute {hidden!r}")
        return real(self, owner)

    return of


def test_weights_that_are_others_than_those_in_the_flat_parameter_are_refused() -> None:
    with as_rank(0, (2,)):
        flat, _ = sharded(WAYS[0], 1, trains=True)
        Planner(2).plan({"model": flat.model_state()})
        part = next(part for part in flat._parts if part.numel)
        assert part.own is not None
        part.own.data = part.own.data.clone()
        with pytest.raises(NotSerialisable, match="its data was replaced"):
            Planner(2).plan({"model": flat.model_state()})
