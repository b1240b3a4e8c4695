"""In which order an optimizer overwrites storages, and to which parameter each belongs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_spot.capture.tensors import storage_address, tensors_in


def overwritten(optimizers: Iterable[Any], numbers: Mapping[int, int]) -> dict[int, int]:
    """Addresses of storages in the order of ``step()``: each parameter with its state, as they are in their groups.

    Args:
        optimizers: ``torch.optim.Optimizer``, in the order in which they step.
        numbers: of parameters, by ``id``.

    Returns:
        the number of the parameter to which each storage belongs, -1 for one that has none.
    """
    found: dict[int, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                number = numbers.get(id(parameter), -1)
                for tensor in (parameter, *tensors_in(optimizer.state.get(parameter))):
                    found.setdefault(storage_address(tensor), number)
    found.pop(0, None)
    return found
