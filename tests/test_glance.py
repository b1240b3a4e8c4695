"""A glance at a module tells that nothing has changed, or that a closer look is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_spot.exact.attributes import OF_MODULES
from lightning_spot.exact.changed_values import ChangedValues
from lightning_spot.exact.glance import Glance
from lightning_spot.exact.tree import Modules


def glance_at(module: nn.Module) -> Glance | None:
    return Glance.of(module, [name for name in vars(module) if name not in OF_MODULES])


MODULES = [
    lambda: nn.Linear(2, 2),
    lambda: nn.Sequential(nn.Linear(2, 2)),
    lambda: nn.LayerNorm(2),
    lambda: nn.Dropout(0.25),
    lambda: nn.TransformerEncoderLayer(4, 2, 4),
]


@pytest.mark.parametrize("make", MODULES)
def test_a_module_that_stays_as_it_is_needs_no_closer_look(make: Callable[[], nn.Module]) -> None:
    module = make()
    seen = glance_at(module)
    assert seen is not None
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    assert seen.is_still_of(module)


CHANGES: list[Callable[[Any], object]] = [
    lambda module: module.eval(),
    lambda module: setattr(module, "eps", 1e-3),
    lambda module: setattr(module, "normalized_shape", 7),  # of another kind now
    lambda module: setattr(module, "counter", 0),
    lambda module: (delattr(module, "eps"), setattr(module, "other", None)),
]


@pytest.mark.parametrize("change", CHANGES, ids=["training", "number", "kind", "more", "another"])
def test_whatever_changes_needs_one(change: Callable[[Any], object]) -> None:
    module: Any = nn.LayerNorm(2)
    trainer: Any = SimpleNamespace(lightning_module=module)
    seen, changed = glance_at(module), ChangedValues()
    assert seen is not None
    changed.begin(trainer)
    before = {name: value for name, value in vars(module).items() if name not in OF_MODULES}
    change(module)
    assert not seen.is_still_of(module)
    now = {name: value for name, value in vars(module).items() if name not in OF_MODULES}
    differ = {name: value for name, value in now.items() if name not in before or before[name] != value}
    assert changed.capture(trainer, list(module.named_modules()))["attributes"] == {"": differ}


def test_values_that_may_change_by_themselves_are_not_glanced_at() -> None:
    for value in ([1], {"a": 1}, torch.zeros(2), (1, torch.zeros(2)), object()):
        module = nn.Linear(2, 2)
        module.held = value  # type: ignore[assignment]
        assert glance_at(module) is None


def test_what_torch_keeps_at_a_module_that_fsdp2_has_wrapped_is_not_looked_at() -> None:
    module: Any = Own()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()
    assert any(type(value) is OrderedDict for value in vars(module).values())
    trainer: Any = SimpleNamespace(lightning_module=module)
    changed = ChangedValues()
    changed.begin(trainer)
    parts = list(module.named_modules())
    assert not changed._glances.closer(Modules(parts))
    module.factor = 3.0
    assert changed.capture(trainer, parts)["attributes"] == {"": {"factor": 3.0}}
    module.factor, module.registry = 2.0, OrderedDict(a=2)
    assert changed._glances.closer(Modules(parts))
    assert changed.capture(trainer, parts)["attributes"].keys() == {""}


class Own(nn.Module):
    """A module of the user's, with nothing that may change by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.act, self.sizes = 2.0, torch.relu, (3, 4)
        self.below = nn.Linear(2, 2)


def test_modules_of_the_user_are_glanced_at_too() -> None:
    module: Any = Own()
    trainer: Any = SimpleNamespace(lightning_module=module)
    changed = ChangedValues()
    changed.begin(trainer)
    assert not changed._glances.closer(Modules(module.named_modules()))
    module.factor, module.below.training = 3.0, False
    found = changed.capture(trainer, list(module.named_modules()))["attributes"]
    assert found == {"": {"factor": 3.0}, "below": {"training": False}}
    module.factor, module.act = 2.0, torch.tanh  # that is nothing plain: all of it is the module's affair
    assert changed.capture(trainer, list(module.named_modules()))["attributes"] == {"below": {"training": False}}
    changed.before.attributes[""] = {"factor"}
    module.act = torch.relu
    assert changed.capture(trainer, list(module.named_modules()))["attributes"][""] == {"factor": 2.0}


def test_a_method_in_its_own_place_is_no_change() -> None:
    """Lightning puts ``forward`` there for DDP, in the first step: from then on nothing of the module was kept."""
    module: Any = Own()
    trainer: Any = SimpleNamespace(lightning_module=module)
    changed = ChangedValues()
    changed.begin(trainer)
    module.forward, module.factor = module.forward, 3.0
    assert changed.capture(trainer, list(module.named_modules()))["attributes"] == {"": {"factor": 3.0}}
    assert changed.lost == set()
    module.forward = torch.tanh
    assert changed.capture(trainer, list(module.named_modules()))["attributes"] == {}
    assert changed.lost == {"Own.forward"}
