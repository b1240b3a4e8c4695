"""Gives small tensors of a checkpoint memory of their own, where they look at the memory of the whole."""

from __future__ import annotations

from typing import Any

import torch

_SMALL_BYTES = 1024 * 1024


def own_small(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Copy the storages below 1 MiB of a checkpoint that looks at mapped memory.

    That memory is kept for as long as one tensor looks at it.
    Weights and moments are copied into the model and the optimizer, but a callback may keep a score for the whole run.
    Tensors that share a storage share it still.

    Returns:
        the same checkpoint.
    """
    _Owner().visit(checkpoint)
    return checkpoint


class _Owner:
    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._copies: dict[int, torch.UntypedStorage] = {}

    def visit(self, item: Any) -> None:
        if isinstance(item, torch.Tensor):
            self._own(item)
        elif isinstance(item, (dict, list, tuple, set)) and id(item) not in self._seen:
            self._seen.add(id(item))
            for value in item.values() if isinstance(item, dict) else item:
                self.visit(value)

    def _own(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return
        if tensor.device.type != "cpu" or tensor.is_quantized:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() >= _SMALL_BYTES or not storage.nbytes() or id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        copy = self._copies.get(storage.data_ptr())
        if copy is None:
            copy = self._copies[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            tensor.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())
