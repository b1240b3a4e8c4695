"""What places share (weights, views of a tensor, lists), hang on modules of torch, or hold as classes: as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm
from torch.utils.data import DataLoader

from tests.support import exact_models as m
from tests.support.exact_table import Case, equal_or_named
from tests.support.trainer import StopAt


class Part(nn.Identity):
    """A module of the user's."""


class Doing(m.Lean):
    """Does something when it is made, when its first epoch starts, and in each step, which weighs its loss.

    Args:
        make: called with it when it is made.
        start: called with it when the first epoch starts.
        step: called with it and the loss in each step; what it returns weighs that.
        check: called with it in the sanity check.
    """

    def __init__(self, make: Any = None, start: Any = None, step: Any = None, check: Any = None) -> None:
        super().__init__()
        layers = [nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.Linear(8, 1)]
        self.net = nn.Sequential(*layers)
        self.one, self.two, self.plain = Part(), Part(), nn.Identity()
        self.register_buffer("first", torch.zeros(4))
        self.register_buffer("second", torch.zeros(4))
        self.bank, self.part = torch.zeros(4), None
        self.rows: list[float] = []
        self.do = start, step, check
        if make is not None:
            make(self)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0 and self.do[0] is not None:
            self.do[0](self)

    def on_validation_start(self) -> None:
        if self.trainer.sanity_checking and self.do[2] is not None:
            self.do[2](self)

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


def write_nested(module: Any, loss: Any) -> Any:
    module.bank += float(loss)
    module.part["first"].mul_(0.5)
    return module.bank.mean()


def keep_losses(module: Any, loss: Any) -> Any:
    """As programs keep them for the end of an epoch; and the last one is written to."""
    if torch.is_tensor(module.part):
        module.part *= 0.5
    module.part = loss.detach()
    module.rows.append(module.part)
    return sum(module.rows)


def a_row_of_weights(module: Any) -> None:
    module.part = module.net[0].weight.data[:1]


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


def append(module: Any, loss: Any) -> Any:
    module.rows.append(float(loss))
    module.part.append(2.0)
    return len(module.part) + sum(module.rows)


def ties(module: Any) -> None:
    module.net[3].weight = module.net[1].weight


def ties_layers(module: Any) -> None:
    module.net[3] = module.net[1]


def parts(module: Any) -> None:
    module.net[3].weight = nn.Parameter(module.net[1].weight.detach().clone())


def replaces(module: Any) -> None:
    module.net[3] = nn.Linear(8, 8, bias=False)


def replaces_for_the_optimizer(module: Any) -> None:
    replaces(module)
    module.optimizers().optimizer.param_groups[0]["params"] = list(module.parameters())


SHARED_AGAIN = "as the program makes it now: "
TIED = f"{SHARED_AGAIN}net.1.weight, net.3.weight."
REMADE = f"{SHARED_AGAIN}net.3.weight."
VIEWED = f"{SHARED_AGAIN}bank, part."

SHARED: dict[str, tuple[dict[str, Any], str]] = {
    "a view": ({"make": views, "step": write}, ""),
    "a view that training makes": ({"start": views, "step": write}, VIEWED),
    "one tensor": ({"make": same, "step": write}, ""),
    "one tensor that training parts": ({"make": same, "start": apart, "step": write}, ""),
    "a view in another module": ({"make": in_modules, "step": write_in_modules}, ""),
    "views in containers": ({"make": nested, "step": write_nested}, ""),
    "a view of weights": (
        {"start": a_row_of_weights, "step": lambda module, _: module.part.mean()},
        f"{SHARED_AGAIN}net.0.weight, part.",
    ),
    "one buffer": ({"start": buffers, "step": write_to_both}, f"{SHARED_AGAIN}first, second."),
    "one tensor that training keeps twice": ({"step": keep_losses}, ""),
    "one list": ({"make": one_list, "step": append}, ""),
    "one list that training makes": ({"start": one_list, "step": append}, f"{SHARED_AGAIN}part, rows."),
    "one list that training parts": (
        {"make": one_list, "start": two_lists, "step": append},
        f"{SHARED_AGAIN}part, rows.",
    ),
    "tied weights": ({"make": ties}, ""),
    "weights that training ties": ({"start": ties}, TIED),
    "layers that training ties": ({"start": ties_layers}, TIED),
    "weights that training parts": ({"make": ties, "start": parts}, TIED),
    "a layer that training replaces": ({"start": replaces}, REMADE),
    "a layer that training replaces, and its optimizer knows": ({"start": replaces_for_the_optimizer}, ""),
    "weights that the sanity check ties": ({"check": ties}, TIED),
    "a layer that the sanity check replaces": ({"check": replaces}, REMADE),
}


def check(case: Case, says: str, root: Path, *stops: int) -> None:
    """A run that is stopped after some steps, twice in one epoch by default, says that when it goes on, or is exact."""
    said = equal_or_named(case, root, map(StopAt, stops or (3, 4)))
    assert any(says in text for text in said) if says else said == []


@pytest.mark.parametrize("name", SHARED)
def test_what_a_module_shares_is_shared_after_a_resume_or_named(name: str, tmp_path: Path) -> None:
    doing, says = SHARED[name]
    check(Case(model=lambda: Doing(**doing)), says, tmp_path)


# -- what hangs on modules of torch -----------------------------------------------------------------------------------


def hangs(module: Any) -> None:
    module.plain.seen, module.plain.rows, module.plain.array = torch.zeros(2), [], np.zeros(2)


def writes(module: Any, loss: Any) -> Any:
    module.plain.seen += float(loss)
    return module.plain.seen.mean()


def sets(module: Any, loss: Any) -> Any:
    module.plain.seen = getattr(module.plain, "seen", torch.zeros(2)) + float(loss)
    return module.plain.seen.mean()


def appends(module: Any, loss: Any) -> Any:
    module.plain.rows.append(float(loss))
    return sum(module.plain.rows)


def writes_to_an_array(module: Any, loss: Any) -> Any:
    module.plain.array += float(loss)
    return float(module.plain.array.mean())


HUNG: dict[str, tuple[dict[str, Any], str]] = {
    "a tensor that is written to": ({"make": hangs, "step": writes}, ""),
    "a tensor that is replaced": ({"make": hangs, "step": sets}, ""),
    "a tensor that training makes": ({"step": sets}, ""),
    "a list": ({"make": hangs, "step": appends}, ""),
    "an array": ({"make": hangs, "step": writes_to_an_array}, ""),
    "weight norm": ({"make": lambda module: weight_norm(module.net[1])}, ""),
    "spectral norm": ({"make": lambda module: spectral_norm(module.net[1])}, ""),
    "pruning": ({"make": lambda module: prune.l1_unstructured(module.net[1], "weight", 0.2)}, ""),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", HUNG)
def test_what_hangs_on_modules_of_torch_comes_back_or_is_named(name: str, tmp_path: Path) -> None:
    doing, says = HUNG[name]
    check(Case(model=lambda: Doing(**doing)), says, tmp_path)


# -- classes ----------------------------------------------------------------------------------------------------------


def of_the_module() -> Any:
    class Counting(m.Lean):
        scale = 1.0
        seen: dict[int, float] = {}  # noqa: RUF012 # as programs have it

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            type(self).scale += 0.1
            self.seen[len(self.seen)] = 1.0
            return super().training_step(batch, batch_idx) * (self.scale + len(self.seen))

    return Counting()


def of_a_layer() -> Any:
    class Layer(nn.Linear):
        gain = 1.0

    class Gaining(m.Lean):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            Layer.gain += 0.1
            return super().training_step(batch, batch_idx) * self.layer.gain

    return Gaining()


def of_a_callback() -> list[pl.Callback]:
    class Slowing(pl.Callback):
        factor = 1.0

        def on_train_batch_end(self, *_: Any) -> None:
            type(self).factor *= 0.9

    return [Slowing()]


def of_the_data() -> Any:
    class Rows(m.Rows):
        gain = 1.0

    return DataLoader(Rows(), m.BATCH)


class Dimming(m.Lean):
    def on_train_batch_end(self, *_: Any) -> None:
        type(self.trainer.train_dataloader.dataset).gain *= 0.9


CLASSES = [
    (Case(model=of_the_module), ""),
    (Case(model=of_a_layer), ""),
    (Case(callbacks=of_a_callback), "Slowing.factor"),
    (Case(model=Dimming, loaders=of_the_data), "had changed dataset.gain"),
]


@pytest.mark.parametrize(("case", "says"), CLASSES)
def test_what_training_changes_in_a_class_comes_back_or_is_named(case: Case, says: str, tmp_path: Path) -> None:
    """Each attempt has classes of its own, as in a process of its own."""
    check(case, says, tmp_path, 8)


# -- what optimizers and callbacks share ------------------------------------------------------------------------------


class Mirroring(m.ByParameter):
    """Writes to its parameters by what it keeps beside them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def update(self, group: dict[str, Any], parameter: Any, state: dict[str, Any]) -> None:
        state.setdefault("weights", parameter.data)
        parameter -= group["lr"] * parameter.grad
        state["weights"] *= 0.99


class Fading(pl.Callback):
    """Has a row of what the module holds in its state, and maybe finds it again."""

    def __init__(self, again: bool = False, of: str = "weights") -> None:
        self.row: Any = None
        self.again, self.of = again, of

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if self.row is None or self.again:
            row = module.net[0].weight.data if self.of == "weights" else module.bank
            self.row = row if self.of == "whole bank" else row[:1]

    def state_dict(self) -> dict[str, Any]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.row = state["row"]

    def on_train_batch_end(self, *_: Any) -> None:
        self.row *= 0.99


class Parting(Fading):
    """Has the module's bank, until the third batch, and later a copy."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            self.row = self.row.clone()
        super().on_train_batch_end()


class Bank(m.Data):
    """A data module that fades what the module holds."""

    bank: Any = None

    def fade(self, module: Any) -> None:
        self.bank = module.bank if self.bank is None else self.bank
        self.bank *= 0.99

    def state_dict(self) -> dict[str, Any]:
        return {"bank": self.bank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bank = state["bank"]


class Viewing(pl.Callback):
    """Has a tensor and a view of it in its state."""

    def __init__(self, copies: bool) -> None:
        self.rows = torch.zeros(4)
        self.first, self.copies = self.rows[:2], copies

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows, self.first = (each.clone() if self.copies else each for each in (state["rows"], state["first"]))

    def on_train_batch_end(self, *_: Any) -> None:
        self.rows += 1
        self.first *= 0.9


class Scoring(pl.Callback):
    """Has the last score, which is the best one, and two that lie side by side."""

    def __init__(self) -> None:
        self.scores: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.scores)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scores = {name: score.clone() for name, score in state.items()}

    def on_train_batch_end(self, *_: Any) -> None:
        last, first, second = torch.zeros(()), *torch.zeros(2).unbind()
        self.scores = {"last": last, "best": last, "first": first, "second": second}


def sums(module: Any, _: Any) -> Any:
    module.bank += 1.0
    return module.bank.mean()


def sums_and_fades(module: Any, _: Any) -> Any:
    module.trainer.datamodule.fade(module)
    return sums(module, _)


OUTSIDE = [
    (
        Case(model=lambda: m.Optimized(Mirroring)),
        f"{SHARED_AGAIN}net.0.bias, net.0.weight, net.1.bias",
    ),
    (Case(callbacks=lambda: [Fading()]), f"{SHARED_AGAIN}Fading.row, net.0.weight."),
    (Case(callbacks=lambda: [Fading(again=True)]), ""),
    (Case(model=lambda: Doing(step=sums), callbacks=lambda: [Fading(of="bank")]), f"{SHARED_AGAIN}Fading.row, bank."),
    (Case(model=lambda: Doing(step=sums), callbacks=lambda: [Parting(of="whole bank")]), ""),
    (
        Case(model=lambda: Doing(step=sums_and_fades), data=Bank, loaders=None, val=None),
        f"{SHARED_AGAIN}Bank.bank, bank.",
    ),
    (Case(callbacks=lambda: [Scoring()]), ""),
    (Case(callbacks=lambda: [Viewing(copies=True)]), f"{SHARED_AGAIN}Viewing.first, Viewing.rows."),
]


@pytest.mark.parametrize(("case", "says"), OUTSIDE)
def test_what_callbacks_and_optimizers_share_is_shared_or_named(case: Case, says: str, tmp_path: Path) -> None:
    check(case, says, tmp_path, 8)
