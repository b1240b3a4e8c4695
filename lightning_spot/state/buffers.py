"""Buffers that a checkpoint lacks: those outside ``state_dict`` that change, and those of ranks but the first.

Likewise parameters that a ``state_dict`` of the user's own leaves out, and that training changes all the same. What a
lazy layer is still to make is not there yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lightning_spot.capture.tensors import shape_of, storage_address
from lightning_spot.state import compat
from lightning_spot.state.optimizers import clean

_NORMS = (
    *(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm),
    *(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d),
)
_ROUNDED = (torch.bfloat16, torch.float16, torch.float32)
Values = dict[str, torch.Tensor]
Marks = dict[str, tuple[int, object]]
"""Tell of each tensor whether it has been written to since, or is another."""


class Buffers:
    """The buffers of one module. Statistics of BatchNorm differ from rank to rank, and torch does not count writes."""

    def __init__(self) -> None:
        self._first: Marks = {}
        self._changed: set[str] = set()
        self._left_out: set[str] = set()  # parameters
        self._norms: list[tuple[str, torch.nn.Module]] = []

    def begin(self, module: torch.nn.Module) -> None:
        """Note how they are when training begins."""
        live = module.state_dict(keep_vars=True)
        self._left_out = {name for name, _ in module.named_parameters() if name not in live}
        norms = ((name, part) for name, part in module.named_modules() if isinstance(part, _NORMS))
        self._norms = [(name, part) for name, part in norms if f"{name}.running_mean" not in live]
        self._first = _marks(self._values(module))

    def _values(self, module: torch.nn.Module) -> Values:
        values = _there(dict(module.named_buffers()))
        if self._left_out:
            values.update((name, each) for name, each in module.named_parameters() if name in self._left_out)
        return values

    def note_changed(self, module: torch.nn.Module, before: Marks) -> None:
        """Count as changed, too, what differs from how they were before training began."""
        self._changed |= _differing(self._values(module), before)

    def capture(self, module: torch.nn.Module, *, is_first: bool) -> Values:
        """Copies of the non-persistent ones that changed, and of all others where the rank is not the first.

        Args:
            module: that has them.
            is_first: whether this is the first rank.
        """
        buffers = self._values(module)
        self._changed |= _differing(buffers, self._first)
        for name, part in self._norms:  # torch does not count what it writes to their statistics
            if part.training:
                self._changed |= {f"{name}.running_mean", f"{name}.running_var"} & buffers.keys()
        if not buffers or (is_first and not self._changed):
            return {}
        in_checkpoint = set(module.state_dict(keep_vars=True)) & set(buffers)
        lacking = self._changed - in_checkpoint
        if not is_first:
            lacking |= in_checkpoint
        return {name: buffers[name].detach().clone() for name in sorted(lacking) if name in buffers}

    def restore(self, module: torch.nn.Module, saved: Values) -> None:
        """Give them the values that :meth:`capture` found, where they have the shape that they had."""
        present = _all(module)
        for name, value in saved.items():
            if name in present and not write(present[name], value) and shape_of(present[name]) == shape_of(value):
                _replace(module, name, value, present[name])
        self._changed |= set(saved)


def made_in_training(module: torch.nn.Module, saved: Values) -> Iterator[str]:
    """Those of saved buffers that a module has not from its start, or in another shape or dtype: they do not come back.

    Those in its ``state_dict`` come back as far as it loads them.
    """
    present, in_checkpoint = _all(module), module.state_dict(keep_vars=True)
    for name, value in saved.items():
        if name not in in_checkpoint and (name not in present or _form(present[name]) != _form(value)):
            yield f"{name} (a buffer)"


def marks_of(module: torch.nn.Module) -> Marks:
    """How its buffers are now, but for those that a lazy layer is still to make."""
    return _marks(_there(dict(module.named_buffers())))


def write(present: torch.Tensor, value: torch.Tensor) -> bool:
    """Write a value into a tensor; ``False`` if that cannot be, since it has another shape or layout."""
    if present.is_nested or value.is_nested:  # torch takes none for another one's shape
        return False
    if present.shape != value.shape or not present.layout == value.layout == torch.strided:
        return False
    once, written = present, value
    for dim, (size, stride) in enumerate(zip(present.shape, present.stride(), strict=True)):
        if size > 1 and stride == 0:  # one element stands for a row, and torch refuses to write to it as to a row
            once, written = once.narrow(dim, 0, 1), written.narrow(dim, 0, 1)
    if written is not value and not torch.equal(written.expand(value.shape), value):
        return False
    with torch.inference_mode() if present.is_inference() else torch.no_grad():
        once.copy_(written)
    return True


def _replace(module: torch.nn.Module, name: str, value: torch.Tensor, present: torch.Tensor) -> None:
    """Have a buffer be another tensor."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in compat.BUFFERS.of(owner):
        setattr(owner, leaf, value.to(present.device))


def _all(module: torch.nn.Module) -> Values:
    return _there({**dict(module.named_buffers()), **dict(module.named_parameters())})


def _there(values: Values) -> Values:
    """Those that are not still to be made by a lazy layer."""
    return {name: value for name, value in values.items() if not is_lazy(value)}


def _marks(buffers: Values) -> Marks:
    return {name: (storage_address(buffer), _writes_of(buffer)) for name, buffer in buffers.items()}


def _differing(buffers: Values, before: Marks) -> set[str]:
    return {name for name, mark in _marks(buffers).items() if before.get(name) != mark}


def _writes_of(buffer: torch.Tensor) -> object:
    """Torch's count of the writes. It does not count those to values of sparse and nested tensors: no two are alike."""
    return compat.writes_of(buffer) if buffer.layout is torch.strided and not buffer.is_nested else object()


def _form(buffer: torch.Tensor) -> tuple[tuple[object, ...], torch.dtype, torch.layout]:
    return shape_of(buffer), buffer.dtype, buffer.layout


def _tensors_in(saved: dict[str, Any]) -> Values:
    """A module may give anything as its extra state."""
    return {name: value for name, value in saved.items() if isinstance(value, torch.Tensor)}


def dtypes_of(checkpoint: dict[str, Any]) -> dict[str, torch.dtype]:
    """The dtypes of a checkpoint's weights, by name."""
    return {clean(name): value.dtype for name, value in _tensors_in(checkpoint.get("state_dict", {})).items()}


def loaded(module: torch.nn.Module, checkpoint: dict[str, Any]) -> Values:
    """Weights that a module has as the checkpoint has them, now that Lightning has loaded it, or rounded.

    Lightning rounds what it loads: it converts a module to double precision only after that.
    """
    present = _all(module)
    saved = checkpoint.get("current_model_state", checkpoint.get("state_dict", {}))  # the first one of averaging ones
    both = ((name, value, present[name]) for name, value in _tensors_in(saved).items() if name in present)
    return {
        name: value
        for name, value, here in both
        if _is_equal(here, value.to(here.dtype) if value.is_floating_point() else value)
    }


def put_loaded(module: torch.nn.Module, values: Values) -> list[str]:
    """Write those again that the module does not have any more; the names of those that were not only rounded.

    Lightning converts a module to half precision after it has loaded a checkpoint; what the module keeps in full
    precision all the same is rounded on the way.
    """
    present, written = _all(module), []
    for name, value in values.items():
        here = present.get(name)
        if here is None or _form(here) != _form(value) or _is_equal(here, value):
            continue
        if not any(_is_equal(here, value.to(kind).to(value.dtype)) for kind in _ROUNDED):
            written.append(name)
        write(here, value)
    _keep_kinds(module, values)
    return sorted(written)


def _keep_kinds(module: torch.nn.Module, values: Values) -> None:
    """Have buffers be of the dtype that they had, in a module whose parameters are, too."""
    parameters = module.named_parameters()
    if any(name in values and each.dtype != values[name].dtype for name, each in parameters):
        return  # the user has chosen another precision
    for name, buffer in _there(dict(module.named_buffers())).items():
        value = values.get(name, buffer)
        if value.dtype != buffer.dtype and shape_of(value) == shape_of(buffer):
            _replace(module, name, value.clone(), buffer)


def _is_equal(present: torch.Tensor | None, value: torch.Tensor) -> bool:
    if present is None or value.layout is not torch.strided or _form(present) != _form(value):
        return False
    return torch.equal(present, value.to(present.device))
