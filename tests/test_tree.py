"""The modules of a model, and its state, known again: the same as torch finds, whatever has changed since."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_spot.exact.changed_values import ChangedValues
from lightning_spot.exact.parameter_names import clean
from lightning_spot.exact.tree import modules_of, state_of


class Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: Any) -> None: ...


class Saves(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}bias"]


def model() -> Any:
    shared = nn.Linear(2, 2)
    return nn.Sequential(
        nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(shared, nn.Linear(2, 2, bias=False)), shared, nn.ReLU()
    )


def with_scripted() -> Any:
    """As models have them: layers that torch has compiled, whose tables are no dictionaries."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))  # type: ignore[no-untyped-call]
    traced = torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))
    return nn.Sequential(scripted, nn.Linear(2, 2), traced)


def by_torch(root: nn.Module) -> dict[str, int]:
    return {clean(name): id(value) for name, value in root.state_dict(keep_vars=True).items()}


def found(root: nn.Module) -> dict[str, int] | None:
    state = state_of(root)
    return None if state is None else {name: id(value) for name, value in state.items()}


def hook(module: Any, state: Any, *_: Any) -> None:
    state["added"] = torch.ones(1)


def replaces(module: nn.Module, *_: Any) -> None:
    module.weight = nn.Parameter(torch.ones(2, 2))


def of_fsdp(module: nn.Module, *_: Any) -> None:
    replaces(module)


of_fsdp.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_param_group"

CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda root: None,
    "value": lambda root: root[0].weight.data.zero_(),
    "parameter": lambda root: setattr(root[0], "weight", nn.Parameter(torch.ones(2, 2))),
    "tied": lambda root: setattr(root[2][1], "weight", root[0].weight),
    "module": lambda root: root.__setitem__(0, nn.Linear(2, 2)),
    "deep module": lambda root: root[2].__setitem__(1, nn.Linear(2, 2)),
    "another kind": lambda root: root.__setitem__(4, nn.Dropout()),
    "more": lambda root: root.append(nn.Linear(2, 2)),
    "less": lambda root: root.__delitem__(0),
    "shared no more": lambda root: root.__setitem__(3, nn.Linear(2, 2)),
    "turned round": lambda root: root._modules.update({"0": root[2], "2": root[0]}),
    "renamed": lambda root: root._modules.update({"other": root._modules.pop("4")}),
    "no bias": lambda root: root[0].register_parameter("bias", None),
    "a bias": lambda root: root[2][1].register_parameter("bias", nn.Parameter(torch.ones(2))),
    "another parameter": lambda root: root[0].register_parameter("more", nn.Parameter(torch.ones(2))),
    "renamed parameter": lambda root: root[0]._parameters.update({"other": root[0]._parameters.pop("bias")}),
    "buffer": lambda root: root[0].register_buffer("seen", torch.ones(2)),
    "unsaved buffer": lambda root: root[0].register_buffer("seen", torch.ones(2), persistent=False),
    "buffer is unsaved": lambda root: root[1].register_buffer("running_mean", torch.ones(2), persistent=False),
    "no module": lambda root: root.__setitem__(4, None),
    "table": lambda root: setattr(root[0], "_parameters", dict(nn.Linear(2, 2)._parameters)),
    "fsdp": lambda root: root[0].register_state_dict_pre_hook(of_fsdp),
}
OWN_WAYS: dict[str, Callable[[Any], object]] = {
    "extra state": lambda root: root.append(Extra(2, 2)),
    "class": lambda root: setattr(root[0], "__class__", Saves),
    "method": lambda root: setattr(root, "state_dict", lambda **_: {}),
    "inner method": lambda root: setattr(
        root[0], "_save_to_state_dict", types.MethodType(Saves._save_to_state_dict, root[0])
    ),
    "hook": lambda root: root._register_state_dict_hook(hook),
    "inner hook": lambda root: root[2][1].register_state_dict_post_hook(hook),
    "hook before": lambda root: root[0].register_state_dict_pre_hook(replaces),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_it_is_what_torch_finds(change: str) -> None:
    root = model()
    for _ in range(3):
        assert modules_of(root) == list(root.named_modules())
        assert found(root) == by_torch(root)
    CHANGES[change](root)
    for _ in range(3):
        assert modules_of(root) == list(root.named_modules())
        state = state_of(root)
        assert state is not None
        assert change != "fsdp" or state["0.weight"] is root[0].weight  # as the hook has made it
        assert list(state) == list(by_torch(root))
        assert change == "fsdp" or found(root) == by_torch(root)  # that hook makes another each time


def test_scripted_modules_are_known_again_too() -> None:
    root = with_scripted()
    for _ in range(3):
        assert modules_of(root) == list(root.named_modules())
        state = state_of(root)
        assert state is None or list(state) == list(by_torch(root))
    root[0] = nn.Linear(2, 2)
    assert modules_of(root) == list(root.named_modules())


def test_what_hooks_change_beside_scripted_modules_is_found() -> None:
    root = with_scripted()
    trainer: Any = types.SimpleNamespace(lightning_module=root)
    values = ChangedValues()
    values.begin(trainer)
    assert not values.capture(trainer, modules_of(root))["trains"]
    root[1].weight.requires_grad_(False)
    root[1].counter = 3
    found = values.capture(trainer, modules_of(root))
    assert found["trains"] == {"1.weight": False}
    assert found["attributes"] == {"1": {"counter": 3}}


def test_hooks_of_fsdp_have_run() -> None:
    root = model()
    root[0].register_state_dict_pre_hook(of_fsdp)
    before = root[0].weight
    state = state_of(root)
    assert state is not None
    assert state["0.weight"] is root[0].weight is not before


@pytest.mark.parametrize("change", OWN_WAYS)
def test_what_a_module_does_in_a_way_of_its_own_is_left_to_it(change: str) -> None:
    root = model()
    for _ in range(3):
        assert found(root) == by_torch(root)
    OWN_WAYS[change](root)
    assert state_of(root) is None


def test_a_class_that_is_patched_has_a_way_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    root = model()
    assert state_of(root) is not None
    monkeypatch.setattr(nn.ReLU, "state_dict", lambda *_, **__: {}, raising=False)
    assert state_of(root) is None


@pytest.mark.parametrize("name", ["_state_dict_hooks", "_non_persistent_buffers_set"])
def test_without_a_private_name_of_torch_modules_are_asked(name: str) -> None:
    root = model()
    delattr(root, name)
    assert state_of(root) is None


def test_nothing_is_kept_alive() -> None:
    root = model()
    for _ in range(3):
        modules_of(root), state_of(root)
    gone = weakref.ref(root[2])
    root[2] = nn.ReLU()
    gc.collect()
    assert gone() is None


def exchange(modules: dict[str, Any]) -> None:
    """Have two modules each other's name, in the order in which they are."""
    first, second = modules.pop("0"), modules.pop("1")
    modules.update({"1": first, "0": second})


AT_MODULES: dict[str, Callable[[Any], object]] = {
    "frozen": lambda root: root[1].weight.requires_grad_(False),
    "trained": lambda root: root[0].weight.requires_grad_(True),
    "names exchanged": lambda root: exchange(root[2]._modules),
    "frozen below": lambda root: root[2].requires_grad_(False),
    "number": lambda root: setattr(root[1], "eps", 0.5),
    "evaluated": lambda root: root[2].eval(),
    "several": lambda root: (setattr(root[1], "momentum", 0.5), root[0].eval()),
    "more": lambda root: (root.append(nn.Dropout()), setattr(root[1], "eps", 0.5)),
    "moved": lambda root: root._modules.update({"0": root[2], "2": root[0]}),
    "renamed": lambda root: (root._modules.update({"x": root._modules.pop("1")}), setattr(root[3], "inplace", True)),
    "attribute": lambda root: setattr(root[4], "counter", 3),
    "gone": lambda root: delattr(root[0], "in_features"),
}


@pytest.mark.parametrize("change", AT_MODULES)
def test_what_has_changed_at_modules_is_found_as_one_by_one(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = model()
    root[0].requires_grad_(False)
    root[2][0] = nn.Linear(2, 2, bias=False).requires_grad_(False)
    trainer: Any = types.SimpleNamespace(lightning_module=root)
    values = ChangedValues()
    values.begin(trainer)
    unchanged = values.capture(trainer, modules_of(root))
    AT_MODULES[change](root)
    quick = values.capture(trainer, modules_of(root))
    monkeypatch.setattr(values._trained, "are_those_of", lambda _: False)
    assert quick == values.capture(trainer, list(root.named_modules()))
    assert change in ("moved", "gone") or quick != unchanged
