"""What places of a module share (weights, views of a tensor, lists) and what classes hold: as before after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_spot.exact.compare import differences
from tests.integration.test_exact import final
from tests.support import exact_models as m
from tests.support.exact_table import Case, train
from tests.support.trainer import Stop, StopAt


class Part(nn.Identity):
    """A module of the user's."""


class Doing(m.Lean):
    """Does something when it is made, when its first epoch starts, and in each step, which weighs its loss.

    Args:
        make: called with it when it is made.
        start: called with it when the first epoch starts.
        step: called with it and the loss in each step; what it returns weighs that.
    """

    def __init__(self, make: Any = None, start: Any = None, step: Any = None) -> None:
        super().__init__()
        layers = [nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.Linear(8, 1)]
        self.net = nn.Sequential(*layers)
        self.one, self.two = Part(), Part()
        self.register_buffer("first", torch.zeros(4))
        self.register_buffer("second", torch.zeros(4))
        self.bank, self.part = torch.zeros(4), None
        self.rows: list[float] = []
        self.named: dict[str, Any] = {"rows": []}
        self.do = start, step
        if make is not None:
            make(self)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0 and self.do[0] is not None:
            self.do[0](self)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if self.do[1] is None else loss * (1 + 0.1 * self.do[1](self, loss.detach()))


def views(module: Any) -> None:
    module.part = module.bank[:2]


def same(module: Any) -> None:
    module.part = module.bank


def apart(module: Any) -> None:
    module.part = module.bank.clone()


def write(module: Any, loss: Any) -> Any:
    module.bank += float(loss)
    module.part *= 0.9
    return module.bank.mean() + module.part.mean()


def in_modules(module: Any) -> None:
    module.one.part = torch.zeros(4)
    module.two.part = module.one.part.view(2, 2)


def write_in_modules(module: Any, loss: Any) -> Any:
    module.one.part += float(loss)
    module.two.part *= 0.9
    return module.one.part.mean()


def nested(module: Any) -> None:
    module.part = {"first": module.bank[:2], "rest": [module.bank[2:]]}


def in_a_tuple(module: Any) -> None:
    module.part = (module.bank[:2], 1.0)


def write_nested(module: Any, loss: Any) -> Any:
    module.bank += float(loss)
    (module.part if type(module.part) is tuple else list(module.part.values()))[0].mul_(0.5)
    return module.bank.mean()


def overlapping(module: Any) -> None:
    row = torch.zeros(6)
    module.bank, module.part = row[:4], row[2:]


def a_row_of_weights(module: Any) -> None:
    module.part = module.net[0].weight.data[:1]


def a_row_of_a_buffer(module: Any) -> None:
    module.part = module.first[1:3]


def write_to_the_buffer(module: Any, loss: Any) -> Any:
    module.first += float(loss)
    module.part *= 0.5
    return module.first.mean()


def buffers(module: Any) -> None:
    module.second = module.first


def write_to_both(module: Any, loss: Any) -> Any:
    module.first += float(loss)
    module.second *= 0.5
    return module.first.mean()


def one_list(module: Any) -> None:
    module.part = module.rows


def two_lists(module: Any) -> None:
    module.part = []


def a_list_within(module: Any) -> None:
    module.part = module.named["rows"]


def append(module: Any, loss: Any) -> Any:
    module.rows.append(float(loss))
    module.named["rows"].append(1.0)
    module.part.append(2.0)
    return len(module.part) + sum(module.rows)


def ties(module: Any) -> None:
    module.net[3].weight = module.net[1].weight


def ties_back(module: Any) -> None:
    module.net[1].weight = module.net[3].weight


def ties_layers(module: Any) -> None:
    module.net[3] = module.net[1]


def ties_data(module: Any) -> None:
    module.net[3].weight.data = module.net[1].weight.data


def parts(module: Any) -> None:
    module.net[3].weight = nn.Parameter(module.net[1].weight.detach().clone())


def replaces(module: Any) -> None:
    module.net[3] = nn.Linear(8, 8, bias=False)


def replaces_for_the_optimizer(module: Any) -> None:
    replaces(module)
    module.optimizers().optimizer.param_groups[0]["params"] = list(module.parameters())


WEIGHTS = "net.3.weight (a parameter made in training)"

SHARED: dict[str, tuple[dict[str, Any], str]] = {
    "a view": ({"make": views, "step": write}, ""),
    "a view that training makes": ({"start": views, "step": write}, ""),
    "one tensor": ({"make": same, "step": write}, ""),
    "one tensor that training makes": ({"start": same, "step": write}, ""),
    "one tensor that training parts": ({"make": same, "start": apart, "step": write}, ""),
    "a view in another module": ({"make": in_modules, "step": write_in_modules}, ""),
    "views in containers": ({"make": nested, "step": write_nested}, ""),
    "a view in a tuple": ({"make": in_a_tuple, "step": write_nested}, "part.0 (shares memory with bank)"),
    "views that overlap": ({"make": overlapping, "step": write}, "part (shares memory with bank)"),
    "a view of weights": ({"start": a_row_of_weights, "step": lambda module, _: module.part.mean()}, ""),
    "a view of a buffer": ({"start": a_row_of_a_buffer, "step": write_to_the_buffer}, ""),
    "one buffer": ({"start": buffers, "step": write_to_both}, ""),
    "one list": ({"make": one_list, "step": append}, ""),
    "one list that training makes": ({"start": one_list, "step": append}, ""),
    "one list that training parts": ({"make": one_list, "start": two_lists, "step": append}, ""),
    "a list within": ({"start": a_list_within, "step": append}, ""),
    "tied weights": ({"start": ties}, ""),
    "tied weights, the later first": ({"start": ties_back}, ""),
    "tied layers": ({"start": ties_layers}, ""),
    "tied data": ({"start": ties_data}, ""),
    "weights that training parts": ({"make": ties, "start": parts}, WEIGHTS),
    "a layer that training replaces": ({"start": replaces}, WEIGHTS),
    "a layer that training replaces, and its optimizer knows": ({"start": replaces_for_the_optimizer}, ""),
}


def equal_or_named(case: Case, says: str, root: Path, stops: tuple[int, ...] = (3, 4)) -> None:
    """A run that is stopped ends as one that is not, or the first resume names it."""
    told: list[list[str]] = []
    for attempt, stop in enumerate(stops):
        told.append([])
        with pytest.raises(Stop):
            train(case, root / "broken", StopAt(stop), seed=11 + attempt, every=1, told=told[-1])
    told[-1] += train(case, root / "broken", seed=200, every=1000)
    said = [text for text in told[-1] if "StopAt.left" not in text]
    assert any(says in text for text in said) if says else said == []
    if not says:
        train(case, root / "twin", seed=11, every=1000)
        assert list(differences(final(root / "twin"), final(root / "broken"))) == []


@pytest.mark.parametrize("name", SHARED)
def test_what_a_module_shares_is_shared_after_a_resume_or_named(name: str, tmp_path: Path) -> None:
    doing, says = SHARED[name]
    equal_or_named(Case(model=lambda: Doing(**doing)), says, tmp_path)


# -- classes ----------------------------------------------------------------------------------------------------------


def of_the_module() -> Case:
    class Counting(m.Lean):
        scale = 1.0
        seen: dict[int, float] = {}  # noqa: RUF012 # as programs have it

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            type(self).scale += 0.1
            self.seen[len(self.seen)] = 1.0
            return super().training_step(batch, batch_idx) * (self.scale + len(self.seen))

    return Case(model=Counting)


def of_a_layer() -> Case:
    class Layer(nn.Linear):
        gain = 1.0

    class Gaining(m.Lean):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            Layer.gain += 0.1
            return super().training_step(batch, batch_idx) * self.layer.gain

    return Case(model=Gaining)


def of_a_callback() -> Case:
    class Slowing(pl.Callback):
        factor = 1.0

        def on_train_batch_end(self, *_: Any) -> None:
            type(self).factor *= 0.9

    return Case(callbacks=lambda: [Slowing()])


def of_the_data() -> Case:
    class Rows(m.Rows):
        gain = 1.0

    class Dimming(m.Lean):
        def on_train_batch_end(self, *_: Any) -> None:
            Rows.gain *= 0.9

    return Case(model=Dimming, loaders=lambda: DataLoader(Rows(), m.BATCH))


CLASSES: list[tuple[Callable[[], Case], str]] = [
    (of_the_module, ""),
    (of_a_layer, ""),
    (of_a_callback, "Slowing.factor"),
    (of_the_data, "had changed dataset.gain"),
]


@pytest.mark.parametrize(("make", "says"), CLASSES)
def test_what_training_changes_in_a_class_comes_back_or_is_named(make: Any, says: str, tmp_path: Path) -> None:
    """Each attempt has classes of its own, as in a process of its own."""
    with pytest.raises(Stop):
        train(make(), tmp_path / "broken", StopAt(8), seed=11, every=1)
    said = train(make(), tmp_path / "broken", seed=200, every=1000)
    assert any(says in text for text in said) if says else said == []
    if not says:
        train(make(), tmp_path / "twin", seed=11, every=1000)
        assert list(differences(final(tmp_path / "twin"), final(tmp_path / "broken"))) == []


# -- what optimizers and callbacks share with weights -----------------------------------------------------------------


class Mirroring(m.ByParameter):
    """Writes to its parameters by what it keeps beside them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def update(self, group: dict[str, Any], parameter: Any, state: dict[str, Any]) -> None:
        state.setdefault("weights", parameter.data)
        parameter -= group["lr"] * parameter.grad
        state["weights"] *= 0.99


class Fading(pl.Callback):
    """Has a row of the weights in its state, and maybe finds it again."""

    def __init__(self, again: bool) -> None:
        self.row: Any = None
        self.again = again

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if self.row is None or self.again:
            self.row = module.net[0].weight.data[:1]

    def state_dict(self) -> dict[str, Any]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.row = state["row"]

    def on_train_batch_end(self, *_: Any) -> None:
        self.row *= 0.99


WITH_WEIGHTS = [
    (Case(model=lambda: m.Optimized(Mirroring)), "the state of optimizer 0 held tensors"),
    (Case(callbacks=lambda: [Fading(again=False)]), "the state of Fading held tensors"),
    (Case(callbacks=lambda: [Fading(again=True)]), ""),
]


@pytest.mark.parametrize(("case", "says"), WITH_WEIGHTS)
def test_states_that_share_memory_with_weights_are_named(case: Case, says: str, tmp_path: Path) -> None:
    equal_or_named(case, says, tmp_path, stops=(8,))
