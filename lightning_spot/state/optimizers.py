"""Optimizers and the names of their parameters: states of another dtype than their parameters, and toggled optimizers.

``Optimizer.load_state_dict`` casts all tensors, but for counts of steps, to the dtype of the parameter, if that is a
floating-point one: what an optimizer keeps in float32 beside parameters in bfloat16 (a product, master weights) comes
back as bfloat16, and a mask, or a count of its own, as floating-point numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_spot.capture.tensors import local_of
from lightning_spot.errors import SettingsError
from lightning_spot.say import say
from lightning_spot.state import compat
from lightning_spot.trees import laid_over, leaves, walk

if TYPE_CHECKING:
    import lightning.pytorch as pl

State = dict[str, Any]
DtypeOf = Callable[[torch.Tensor], "torch.dtype | None"]
"""The dtype that a parameter had when its optimizer's state was saved; ``None`` if that is not known."""

_KEYS = {"state", "param_groups"}
"""Of what torch's own ``state_dict`` gives; an optimizer around another one may give anything."""


def precise_of(checkpoint: Mapping[str, Any]) -> list[State]:
    """The optimizers' states of a checkpoint, if torch may cast some of it; else none of them."""
    states: list[State] = checkpoint.get("optimizer_states", [])
    found = (item for path, item in walk(states) if path[-1] != "step")  # which torch never casts
    dtypes = {item.dtype for item in found if isinstance(item, torch.Tensor)}
    of_parameters = {tensor.dtype for tensor in leaves(checkpoint.get("state_dict", {}), torch.Tensor)}
    floating = {dtype for dtype in dtypes | of_parameters if dtype.is_floating_point}
    return states if len(floating) > 1 or not dtypes <= floating else []


def keep_dtypes(optimizer: torch.optim.Optimizer, saved: State, dtype_of: DtypeOf) -> None:
    """Give an optimizer back what torch has cast when it loaded a state.

    Where the program has changed the dtype of a parameter since, torch's cast is what is wanted; and an optimizer that
    loads its state in a way of its own knows what it does.

    Args:
        optimizer: that has loaded the state.
        saved: that state, as it was saved.
        dtype_of: the dtype that a parameter had then.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict or not saved.keys() >= _KEYS:
        return
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):
        before, now = saved["state"].get(number), optimizer.state.get(parameter)
        if isinstance(before, dict) and isinstance(now, dict) and dtype_of(parameter) in (None, parameter.dtype):
            now.update({key: laid_over(now[key], value, _as_saved) for key, value in before.items() if key in now})


def _as_saved(loaded: Any, saved: Any) -> Any:
    """What was saved, on the device on which it is now, if what was loaded is nothing but that, cast."""
    if not isinstance(saved, torch.Tensor) or not isinstance(loaded, torch.Tensor):
        return loaded
    if saved.dtype == loaded.dtype or saved.shape != loaded.shape:
        return loaded
    mine, cast = local_of(saved), local_of(loaded)
    mine = mine.real if mine.is_complex() and not cast.is_complex() else mine
    is_that = torch.allclose(mine.to(cast.device, cast.dtype), cast, rtol=0.0, atol=0.0, equal_nan=True)
    return saved.to(loaded.device, copy=True) if is_that else loaded


# -- an optimizer that is toggled in one batch and back in a later one: Lightning keeps what was trained in the module -


def toggled(trainer: pl.Trainer) -> dict[str, bool]:
    """Which parameters are to be trained again when the optimizer is toggled back; by their names."""
    module = trainer.lightning_module
    kept = compat.TOGGLED.of(module)
    return {name: kept[parameter] for name, parameter in module.named_parameters() if parameter in kept} if kept else {}


def restore_toggled(trainer: pl.Trainer, saved: dict[str, bool]) -> None:
    """Give the module what :func:`toggled` returned."""
    parameters = dict(trainer.lightning_module.named_parameters())
    kept = {parameters[name]: trains for name, trains in saved.items() if name in parameters}
    if kept:
        compat.TOGGLED.set(trainer.lightning_module, kept)


# -- names of parameters as in a state dict: without those of the wrappers around modules ----------------------------

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Of ``torch.compile`` and of activation checkpointing."""


def clean(name: str) -> str:
    """A name without those of wrappers."""
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def names_of(module: torch.nn.Module) -> dict[int, str]:
    """Names of a module's parameters, by their identity."""
    names: dict[int, str] = {}
    parameter: torch.Tensor
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), clean(name))
    return names


# -- schedulers that come back with the number of steps they had ------------------------------------------------------


class FixedSteps:
    """Schedulers for a fixed number of steps: of the program, and as they come back with the number that they had."""

    def __init__(self) -> None:
        self._made: dict[str, int] = {}

    def note(self, trainer: pl.Trainer) -> None:
        """Before their states are loaded: how many steps the program has made them for."""
        self._made = {name: last for name, last, _ in _fixed_steps(trainer, float("inf"))}

    def check(self, trainer: pl.Trainer) -> None:
        """When training begins: refuse what torch ends in the step after a scheduler's last one.

        A program that makes them for too few steps itself is left alone: its run may end sooner than it could.

        Raises:
            SettingsError: naming the scheduler.
        """
        if not self._made or not trainer.lightning_module.automatic_optimization:
            return
        for name, last, steps in _fixed_steps(trainer, None):
            if not last < steps <= self._made.get(name, 0):
                continue
            # The error alone may be caught by the program, which then would not know which step is meant.
            text = "the scheduler {about} ends at its step {last}, this run at {steps}: the run is refused"
            facts: dict[str, Any] = {"about": name, "last": last, "steps": steps}
            say(logging.WARNING, "scheduler-too-short", text, only_rank_zero=True, **facts)
            raise SettingsError(
                f"scheduler {name} is restored with total_steps={last}, and this run takes {steps} steps. Train for"
                " as many epochs and steps as before, or give the run its own dirpath"
            )


def _fixed_steps(trainer: pl.Trainer, planned: float | None) -> Iterator[tuple[str, int, float]]:
    """Name, ``total_steps`` and steps to come of each scheduler that has these.

    Args:
        trainer: whose schedulers they are.
        planned: steps of the run, ``None`` for what the trainer says, which asks for its loaders.
    """
    for number, config in enumerate(trainer.lr_scheduler_configs):
        steps = planned
        if steps is None:
            steps = trainer.max_epochs if config.interval == "epoch" else trainer.estimated_stepping_batches
        if steps is None or steps < 0:
            steps = float("inf")
        if isinstance(last := getattr(config.scheduler, "total_steps", None), int):
            yield type(config.scheduler).__name__ + (f" {number}" if number else ""), last, steps // config.frequency
