"""What modules give with ``get_extra_state`` comes back to a model in shards, whatever it is made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_spot.capture.layouts import ShardedCheckpoint, ShardedCheckpointLayouter
from lightning_spot.errors import ModelChangedError, NotSerializableError
from lightning_spot.session.selection import load_shards
from lightning_spot.sharded.file_plan import ShardedLayouter
from lightning_spot.sharded.reader import consolidated
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.state.dump import KEY
from lightning_spot.state.sharded import holder_of, split
from tests.distributed.test_sharded import same
from tests.support.ranks import as_rank, joined, manifest_of, sealed

PLAIN = {"counts": {1: 5, "two": [torch.arange(3.0), 2]}, "empty": {}, "pair": (1, None), "scale": torch.ones(2)}


class Own:
    """Of no class that torch loads safely."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)

    __hash__ = None  # type: ignore[assignment]


class Counting(nn.Linear):
    """A layer with extra state."""

    def __init__(self, extra: Any) -> None:
        super().__init__(4, 4)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def on_rank(strategy: Any, mesh: Any, *layers: nn.Module) -> Any:
    """A trainer, as far as it is asked, of a model in shards."""
    model: nn.Module = nn.Sequential(*layers)
    fully_shard(model, mesh=mesh)
    strategy._device_mesh = {"data_parallel": mesh}
    strategy.model, strategy.optimizers = model, []
    return SimpleNamespace(
        strategy=strategy,
        precision_plugin=None,
        callbacks=[],
        lightning_module=model,
        world_size=2,
        global_rank=torch.distributed.get_rank(),
    )


def saved(strategy: Any, extra: Any) -> tuple[memoryview, Manifest]:
    shards = []
    for rank in range(2):
        with as_rank(rank, (2,)) as mesh:
            holder = holder_of(on_rank(strategy, mesh, nn.Linear(4, 4), Counting(extra)))
            exact = {KEY: {"world_size": 2, "ranks": []}}
            state, rest = split({"state_dict": holder.model_state(), "optimizer_states": [], **exact})
            tried = ShardedLayouter(rank, 2)
            tried.lay_out(state, rest)
            assert tried.unreadable == ""  # which counts for what is read from the shards
            content = ShardedCheckpoint(state, {}, rest)
            layouter = ShardedCheckpointLayouter(rank, 2)
            shards.append(sealed(layouter.lay_out(content, manifest_of(rank, 2), {})))
    image, manifest = joined(shards)
    return memoryview(image), manifest


@pytest.fixture
def strategy() -> Any:
    return ModelParallelStrategy()


@pytest.mark.parametrize("extra", [PLAIN, torch.arange(4), None, {}, 3], ids=str)
def test_it_comes_back_as_it_was(strategy: Any, extra: Any) -> None:
    image, manifest = saved(strategy, extra)
    with as_rank(1, (2,)) as mesh:
        layer = Counting({"of": ["another", torch.zeros(7)]})
        trainer = on_rank(strategy, mesh, nn.Linear(4, 4), layer)
        load_shards(trainer, image, manifest, trusts=False)
    assert same(layer.extra, extra)
    plain = consolidated(image, manifest)["state_dict"]
    assert plain.keys() == nn.Sequential(nn.Linear(4, 4), layer).state_dict().keys()
    assert same(plain["1._extra_state"], extra)


def test_what_torch_does_not_load_safely_is_refused_or_trusted(strategy: Any) -> None:
    image, manifest = saved(strategy, {"own": Own()})
    with as_rank(0, (2,)) as mesh:
        layer = Counting("unchanged")
        trainer = on_rank(strategy, mesh, nn.Linear(4, 4), layer)
        before = [each.detach().clone() for each in trainer.lightning_module.parameters()]
        with pytest.raises(NotSerializableError, match=r"1\._extra_state\.own is a tests\..*\.Own.*safe_globals"):
            load_shards(trainer, image, manifest, trusts=False)
        assert layer.extra == "unchanged"
        after = [each.detach() for each in trainer.lightning_module.parameters()]
        assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [True] * 4
        load_shards(trainer, image, manifest, trusts=True)
        assert layer.extra == {"own": Own()}


def test_a_model_that_has_it_elsewhere_is_another_one(strategy: Any) -> None:
    image, manifest = saved(strategy, 3)
    with as_rank(0, (2,)) as mesh:
        trainer = on_rank(strategy, mesh, nn.Linear(4, 4), nn.Linear(4, 4))
        with pytest.raises(ModelChangedError, match=r"1\._extra_state"):
            load_shards(trainer, image, manifest, trusts=False)
