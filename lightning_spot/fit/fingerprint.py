"""What is known of a training before it begins and stays so when its program is started again.

It tells the trainings of one program apart: phases, folds, trials. What may be drawn anew in each start is left out:
times, paths, objects, random ids and seeds. A finished run of which only these differ is this training's; else a
program that is started again after its end would train once more.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import Subset, TensorDataset

from lightning_spot.capture.tensors import shape_of
from lightning_spot.exact import private
from lightning_spot.exact.checkpoint import held
from lightning_spot.exact.compare import without_drawn

if TYPE_CHECKING:
    import lightning.pytorch as pl

_SHOWN = 4096
_TEXT = re.compile(r"([^-]+)-([^-]+)-([^-]+)-(-?\d{1,18})/(-?\d{1,18})-([^-]+)")
_UNKNOWN = "0" * 8
_TIMES = 10**9
"""Numbers from here on may be times since 1970, or seeds drawn at each start."""
_SEEDS = 10**6
"""So may seeds from here on; those of a sweep are smaller, and tell its trials apart."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of one training. Each part is 8 hexadecimal digits.

    Attributes:
        model: classes of the model and the data module, names and shapes of parameters.
        settings: hyperparameters of both that are plain values.
        data: what it is trained on, ``None`` where that is not known yet.
        limits: most epochs and steps, -1 for any number.
        drawn: hyperparameters again, with what may be another one in each start.
    """

    model: str
    settings: str
    data: str | None
    limits: tuple[int, int]
    drawn: str

    @classmethod
    def of(cls, trainer: pl.Trainer) -> Fingerprint:
        """At ``setup``, before the module's own."""
        module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined] # it has one
        named = module.named_parameters()
        shapes = [(name, None if is_lazy(value) else tuple(shape_of(value))) for name, value in named]
        hyperparameters = [owner.hparams for owner in (module, data) if owner is not None]
        return cls(
            _digest(type(module).__qualname__, type(data).__qualname__, shapes),
            _digest(_plain(hyperparameters)),
            _digest_of_data(trainer),
            (trainer.max_epochs if trainer.max_epochs is not None else -1, trainer.max_steps),
            _digest(_plain(hyperparameters, drawn=True)),
        )

    @classmethod
    def of_text(cls, text: str) -> Fingerprint | None:
        """What ``str`` made of one; ``None`` of anything else, such as ``""`` of a snapshot that has none."""
        if (found := _TEXT.fullmatch(text)) is None:
            return None
        model, settings, data, epochs, steps, drawn = found.groups()
        return cls(model, settings, data if data != _UNKNOWN else None, (int(epochs), int(steps)), drawn)

    def __str__(self) -> str:
        epochs, steps = self.limits
        return f"{self.model}-{self.settings}-{self.data or _UNKNOWN}-{epochs}/{steps}-{self.drawn}"

    def is_alike(self, other: Fingerprint) -> bool:
        """Whether the two cannot be told apart but by their data."""
        return (self.model, self.settings) == (other.model, other.settings)

    def asks_for_more_than(self, other: Fingerprint) -> bool:
        """Whether this one may train for more epochs or steps than ``other`` might."""
        limits = zip(self.limits, other.limits, strict=True)
        return any(theirs >= 0 and not 0 <= mine <= theirs for mine, theirs in limits)

    def has_drawn_other(self, other: Fingerprint) -> bool:
        """Whether they differ in what may be drawn anew in each start."""
        return self.drawn != other.drawn

    def has_other_data(self, other: Fingerprint) -> bool:
        """Whether both are known to be trained on something, and not on the same."""
        return None not in (self.data, other.data) and self.data != other.data


def _digest(*facts: Any) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=4).hexdigest()


def _plain(value: Any, name: str = "", *, drawn: bool = False) -> Any:
    """What is plain of a value, without paths' folders, times and what was drawn; ``None`` for what is not.

    Args:
        value: of a hyperparameter, or in one.
        name: of the hyperparameter.
        drawn: whether all of this is kept.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if drawn and isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, str):
        return value if drawn else without_drawn(value)
    if isinstance(value, (bool, int, float)):
        return value if drawn or abs(value) < (_SEEDS if "seed" in name.lower() else _TIMES) else None
    if isinstance(value, Mapping):
        named = ((str(key), _plain(item, str(key), drawn=drawn)) for key, item in held(value))
        return sorted((key, item) for key, item in named if item is not None)
    if isinstance(value, (tuple, MutableSequence)) and not isinstance(value, bytearray):  # also omegaconf's
        return [_plain(item, name, drawn=drawn) for _, item in held(value)]
    return None


def _digest_of_data(trainer: pl.Trainer) -> str | None:
    """Of the data set that was passed to ``fit``: a module or a data module has not made its own yet."""
    try:
        loader = private.DATA_SOURCE.of(trainer.fit_loop).instance
        if not hasattr(loader, "dataset"):
            return None
        order = getattr(getattr(loader, "sampler", None), "indices", ())
        return _digest(_facts(loader.dataset), _digest(np.asarray(order).tobytes()))
    except Exception:  # of a data set of the user's, or of another Lightning: it only helps to tell trainings apart
        return None


def _facts(data: Any) -> list[Any]:
    facts: list[Any] = [type(data).__qualname__, len(data) if hasattr(data, "__len__") else None]
    if isinstance(data, Subset):
        facts += [_digest(np.asarray(data.indices).tobytes()), *_facts(data.dataset)]
    elif isinstance(data, TensorDataset):
        facts += [_sample_of(tensor) for tensor in data.tensors]
    return facts


def _sample_of(tensor: torch.Tensor) -> str:
    """The shape and some of the values."""
    values = tensor.detach().reshape(-1)
    shown = torch.cat([values[:_SHOWN], values[-_SHOWN:]]).cpu()
    return _digest(tuple(tensor.shape), shown.contiguous().view(torch.uint8).numpy().tobytes())
