"""What is checked before training: which trainings our callbacks take part in, and that all ranks are alike.

Ranks exchange facts at steps that each of them finds by itself. Ranks that find different steps would wait for ever.
Ranks that have built different models cannot write one snapshot, and torch ends one of them without an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from torch.nn.parameter import is_lazy

from lightning_spot.capture.attempt import versions
from lightning_spot.capture.tensors import shape_of
from lightning_spot.errors import SettingsError
from lightning_spot.say import say
from lightning_spot.session.collectives import Agreement
from lightning_spot.state import compat
from lightning_spot.state.builtin_callbacks import is_tuned
from lightning_spot.state.optimizers import names_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

LATE_S = 60.0
"""A rank that waits so long for the others to begin says what for: one that has none of our callbacks never comes."""

_OF_TRAINER = ("max_epochs", "max_steps", "accumulate_grad_batches", "val_check_interval", "check_val_every_n_epoch")
_START = "start all ranks with the same program and settings"


_INSTEAD = {
    "DeepSpeedStrategy": "its engine keeps weights and optimizers to itself. Use ModelParallelStrategy (FSDP2), or DDP",
    "FSDPStrategy": "torch has deprecated FSDP1. Use ModelParallelStrategy with fully_shard (FSDP2)",
}
"""Strategies that are not supported: why, and what to use."""


def check_alike(trainer: pl.Trainer) -> None:
    """Refuse ranks that differ. Every rank calls it, before any other word; the same error is raised on all.

    Raises:
        SettingsError: naming the first difference.
    """
    ranks = Agreement(trainer)
    if ranks.size == 1:
        return
    with _saying_for_what(ranks.rank):
        everyones = ranks.gather(_facts(trainer))
    if found := _difference(everyones):
        raise SettingsError(f"all ranks must be alike, and {found}: install the same versions everywhere, and {_START}")


def check_one_model(trainer: pl.Trainer) -> None:
    """Refuse ranks that have built different models. Every rank calls it, when they are built.

    Raises:
        SettingsError: naming the first difference, on all ranks.
    """
    _check_same(trainer, "build the same model", lambda: _tensors(trainer.lightning_module))


def check_one_optimizer(trainer: pl.Trainer) -> None:
    """Refuse ranks that train with different optimizers. Every rank calls it, when training begins.

    Of a model in shards there would be no snapshot; with DDP, none that each rank can go on from.

    Raises:
        SettingsError: naming the first difference, on all ranks.
    """
    _check_same(trainer, "train with the same optimizers", lambda: _optimizers(trainer))


def _check_same(trainer: pl.Trainer, do: str, facts: Callable[[], dict[str, str]]) -> None:
    """Refuse ranks with other facts; they are exchanged only where one has others.

    Args:
        trainer: whose ranks they are.
        do: what all must do, for people.
        facts: of this rank, in their order.
    """
    ranks = Agreement(trainer)
    if ranks.size == 1:
        return
    mine = facts()
    if len(set(ranks.gather(hashlib.sha256(repr(mine).encode()).hexdigest()))) == 1:
        return
    found = _difference(ranks.gather(mine)) or "one of them has them in another order"
    raise SettingsError(f"all ranks must {do}, and {found}: {_START}")


@contextlib.contextmanager
def _saying_for_what(rank: int) -> Iterator[None]:
    """Say it if ranks are waited for that do not come, which they cannot say by themselves."""
    text = (
        "rank {about} has waited {seconds:.0f} s for the others to begin. A rank without SpotCheckpoint, or without its"
        " parts, never does. Give each rank the same callbacks"
    )
    late = threading.Timer(LATE_S, lambda: say(logging.WARNING, "ranks-late", text, about=rank, seconds=LATE_S))
    late.daemon = True
    with contextlib.suppress(RuntimeError):  # no more threads can be had: then nobody says it
        late.start()
    try:
        yield
    finally:
        late.cancel()


def _difference(everyones: list[dict[str, str]]) -> str:
    """The first thing that another rank has otherwise than rank 0, for people; ``""`` if there is none."""
    first, *others = everyones
    for rank, facts in enumerate(others, start=1):
        for name in dict.fromkeys((*first, *facts)):
            here, there = first.get(name, "none"), facts.get(name, "none")
            if here != there:
                return f"{name} is {here} on rank 0 and {there} on rank {rank}"
    return ""


def _facts(trainer: pl.Trainer) -> dict[str, str]:
    """What has to be the same on all ranks, for people; what only rank 0 decides by is not asked."""
    parts = list(parts_of(trainer))
    facts = {f"the version of {package}": version for package, version in versions().items()}
    facts["the list of our callbacks"] = ", ".join(type(part).__name__ for part in parts if hasattr(part, "in_common"))
    for name in _OF_TRAINER:
        facts[f"Trainer({name}=…)"] = str(getattr(trainer, name, None))
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # Lightning's Trainer has it
        for part in parts_in(callback):
            for name, value in getattr(part, "in_common", dict)().items():
                facts[f"{type(callback).__name__}({name}=…)"] = str(value)
    return facts


def _tensors(module: Module) -> dict[str, str]:
    """What a model has on every rank, by name: dtype, shape, and whether it is trained.

    Ranks of DDP may have tensors of their own, which it is told to leave alone. A buffer in no checkpoint may be any.
    """
    own = _own_of(module)
    found: dict[str, str] = {}
    for name, parameter in module.named_parameters():
        shape = "" if is_lazy(parameter) else f" {tuple(shape_of(parameter))}"
        found[name] = f"{parameter.dtype}{shape}{'' if parameter.requires_grad else ', frozen'}"
    for above, each in module.named_modules():
        for name, buffer in each.named_buffers(above, recurse=False):
            if name.rpartition(".")[2] not in compat.NON_PERSISTENT.of(each) and not is_lazy(buffer):
                found[name] = f"{buffer.dtype} {tuple(shape_of(buffer))}"
    return {name: text for name, text in found.items() if name not in own}


def _optimizers(trainer: pl.Trainer) -> dict[str, str]:
    """The optimizers of this rank: of which class each is, and which parameters it has."""
    module = trainer.lightning_module
    names, own = names_of(module), _own_of(module)
    found = {f"optimizer {number}": type(each).__name__ for number, each in enumerate(trainer.optimizers)}
    for number, optimizer in enumerate(trainer.optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if (name := names.get(id(parameter), "")) and name not in own:
                    key = f"the place of {name}"
                    found[key] = f"{found.get(key, '')} group {index} of optimizer {number}".strip()
    return found


def _own_of(module: Module) -> set[str]:
    """Names of the tensors that DDP was told to leave to each rank."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def takes_part(trainer: pl.Trainer, stage: str) -> bool:
    """Whether a ``setup`` is that of a training whose state is to be kept.

    Raises:
        SettingsError: if it is, and its strategy is not supported.
    """
    if stage != "fit" or getattr(trainer, "fast_dev_run", False) or is_tuned(trainer):
        return False
    for kind in type(trainer.strategy).__mro__:
        if instead := _INSTEAD.get(kind.__name__):
            raise SettingsError(
                f"{kind.__name__} is not supported: {instead}; or Lightning's ModelCheckpoint with this one"
            )
    return True


def parts_of(trainer: pl.Trainer) -> Iterator[Any]:
    """The callbacks of a trainer, each also by the parts that it is composed of."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # Lightning's Trainer has it
        yield from parts_in(callback)


def parts_in(callback: Any) -> tuple[Any, ...]:
    """The parts that a callback is composed of; itself, if it is not."""
    parts: tuple[Any, ...] = getattr(callback, "parts", (callback,))
    return parts
