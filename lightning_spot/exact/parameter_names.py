"""Names of parameters as in a state dict: without those of the wrappers around modules."""

from __future__ import annotations

import torch
from torch.nn import Module

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Of ``torch.compile`` and of activation checkpointing."""


def clean(name: str) -> str:
    """A name without those of wrappers."""
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def names_of(module: Module) -> dict[int, str]:
    """Names of a module's parameters, by their identity."""
    names: dict[int, str] = {}
    parameter: torch.Tensor
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), clean(name))
    return names
