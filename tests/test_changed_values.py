"""What hooks have changed at the modules of a model, seen one module after the other."""

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

CHANGES: list[Callable[[Any], object]] = [
    lambda module: module.eval(),
    lambda module: setattr(module, "eps", 1e-3),
    lambda module: setattr(module, "normalized_shape", 7),  # of another kind now
    lambda module: setattr(module, "counter", 0),
    lambda module: (delattr(module, "eps"), setattr(module, "other", None)),
]


class Own(nn.Module):
    """A module of the user's, with nothing that may change by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.act, self.sizes = 2.0, torch.relu, (3, 4)
        self.below = nn.Linear(2, 2)


def begun(module: nn.Module) -> tuple[ChangedValues, Callable[[], dict[str, Any]]]:
    """Of a model as it is now, what has changed since."""
    trainer: Any = SimpleNamespace(lightning_module=module)
    changed = ChangedValues()
    changed.begin(trainer)
    return changed, lambda: changed.capture(trainer, list(module.named_modules()))


@pytest.mark.parametrize("change", CHANGES, ids=["training", "number", "kind", "more", "another"])
def test_whatever_changes_is_found(change: Callable[[Any], object]) -> None:
    module: Any = nn.LayerNorm(2)
    _, capture = begun(module)
    assert capture()["attributes"] == {}
    before = {name: value for name, value in vars(module).items() if name not in OF_MODULES}
    change(module)
    now = {name: value for name, value in vars(module).items() if name not in OF_MODULES}
    differ = {name: value for name, value in now.items() if name not in before or before[name] != value}
    assert capture()["attributes"] == {"": differ}


def test_what_torch_keeps_at_a_module_that_fsdp2_has_wrapped_is_not_looked_at() -> None:
    module: Any = Own()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()
    assert any(type(value) is OrderedDict for value in vars(module).values())
    _, capture = begun(module)
    assert capture()["attributes"] == {}
    module.factor = 3.0
    assert capture()["attributes"] == {"": {"factor": 3.0}}
    module.factor, module.registry = 2.0, OrderedDict(a=2)
    assert capture()["attributes"].keys() == {""}


def test_modules_of_the_user_are_looked_at_too() -> None:
    module: Any = Own()
    changed, capture = begun(module)
    module.factor, module.below.training = 3.0, False
    assert capture()["attributes"] == {"": {"factor": 3.0}, "below": {"training": False}}
    module.factor, module.act = 2.0, torch.tanh  # that is nothing plain: all of it is the module's affair
    assert capture()["attributes"] == {"below": {"training": False}}
    changed.before.attributes[""] = {"factor"}
    module.act = torch.relu
    assert capture()["attributes"][""] == {"factor": 2.0}


def test_a_method_in_its_own_place_is_no_change() -> None:
    """Lightning puts ``forward`` there for DDP, in the first step: from then on nothing of the module was kept."""
    module: Any = Own()
    changed, capture = begun(module)
    module.forward, module.factor = module.forward, 3.0
    assert capture()["attributes"] == {"": {"factor": 3.0}}
    assert changed.lost == set()
    module.forward = torch.tanh
    assert capture()["attributes"] == {}
    assert changed.lost == {"Own.forward"}


def with_scripted() -> Any:
    """As models have them: layers that torch has compiled, whose tables are no dictionaries."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))  # type: ignore[no-untyped-call]
    traced = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    return nn.Sequential(scripted, nn.Linear(2, 2), traced)


def test_what_hooks_change_beside_scripted_modules_is_found() -> None:
    root = with_scripted()
    _, capture = begun(root)
    assert not capture()["trains"]
    root[1].weight.requires_grad_(False)
    root[1].counter = 3
    found = capture()
    assert found["trains"] == {"1.weight": False}
    assert found["attributes"] == {"1": {"counter": 3}}


def test_parameters_that_are_trained_or_no_more_are_found_by_their_names() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)))
    root[0].requires_grad_(False)
    _, capture = begun(root)
    assert capture()["trains"] == {}
    root[0].weight.requires_grad_(True)  # type: ignore[operator]
    root[1].requires_grad_(False)
    assert capture()["trains"] == {"0.weight": True, "1.0.weight": False}
