"""Buffers that a checkpoint lacks: those outside ``state_dict`` that change, and those of ranks but the first."""

from __future__ import annotations

import torch

from lightning_spot.capture.tensors import storage_address
from lightning_spot.exact import private
from lightning_spot.exact.flat import live_state

Values = dict[str, torch.Tensor]
Mark = tuple[int, int]


class Buffers:
    """The buffers of one module. Statistics of BatchNorm differ from rank to rank, and torch does not count writes."""

    def __init__(self) -> None:
        self._steady: dict[str, Mark] = {}
        self._changed: set[str] = set()

    def begin(self, module: torch.nn.Module) -> None:
        """Note how they are when training begins."""
        self._steady = marks_of(module)

    def note_changed(self, module: torch.nn.Module, before: dict[str, Mark]) -> None:
        """Count as changed, too, what differs from marks that were made before training began."""
        self._note_changed(dict(module.named_buffers()), before)

    def _note_changed(self, buffers: Values, before: dict[str, Mark]) -> None:
        self._changed |= {name for name, mark in _marks(buffers).items() if before.get(name) != mark}

    def capture(self, module: torch.nn.Module, *, is_first: bool, has_any: bool = True) -> Values:
        """Copies of the non-persistent ones that changed, and of all others where the rank is not the first.

        Args:
            module: that has them.
            is_first: whether this is the first rank.
            has_any: whether there may be any.
        """
        buffers = dict(module.named_buffers()) if has_any else {}
        self._note_changed(buffers, self._steady)
        if not buffers or (is_first and not self._changed):
            return {}
        in_checkpoint = set(live_state(module)) & set(buffers)
        lacking = self._changed - in_checkpoint
        if not is_first:
            lacking |= in_checkpoint
        return {name: buffers[name].detach().clone() for name in sorted(lacking) if name in buffers}

    def restore(self, module: torch.nn.Module, saved: Values) -> None:
        """Give them the values that :meth:`capture` found."""
        put(module, saved)
        self._changed |= set(saved)


def copied(module: torch.nn.Module) -> Values:
    """Copies of its parameters and buffers, to be :func:`put` back."""
    return {name: value.detach().clone() for name, value in _all(module).items()}


def put(module: torch.nn.Module, values: Values) -> None:
    """Write into the parameters and buffers of these names."""
    present = _all(module)
    for name, value in values.items():
        if name in present and present[name].shape == value.shape:
            with torch.inference_mode() if present[name].is_inference() else torch.no_grad():
                present[name].copy_(value)


def _all(module: torch.nn.Module) -> Values:
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}


def marks_of(module: torch.nn.Module) -> dict[str, Mark]:
    """What tells of each buffer whether it has been written to, or is another."""
    return _marks(dict(module.named_buffers()))


def _marks(buffers: Values) -> dict[str, Mark]:
    return {name: (storage_address(buffer), private.writes_of(buffer)) for name, buffer in buffers.items()}
