"""Torch's restricted unpickler with other safe names than torch's own list, which is one for the whole process.

Another thread may load with ``torch.load(weights_only=True)`` meanwhile, such as one that reads data: that list stays
as it is. Nothing of torch says what else is safe to one load, so the functions of its unpickler that look names up are
made again here, with the same code, and find ours.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Mapping
from typing import IO, Any

import torch

from lightning_spot.errors import SpotError

_SPARSE = "torch._utils._rebuild_sparse_tensor"
_LOOKED_UP = frozenset(["_get_allowed_globals", "_get_user_allowed_globals"])


def restricted_load(file: IO[bytes] | str, map_location: str, names: Mapping[str, Any], takes_items: type) -> Any:
    """As ``torch.load(weights_only=True)`` does it, of a zip file; no other kind of file is read.

    Args:
        file: seekable. Of a path, tensors look at the mapped file, privately.
        map_location: where tensors go.
        names: what each name stands for that is not safe to torch of itself, in the place of the user's list.
        takes_items: class of objects into which the file may put items, as into a dictionary.

    Raises:
        SpotError: if this torch has no such unpickler.
        Exception: what torch raises.
    """
    unpickler = _unpickler(names, takes_items)
    mapped = torch.UntypedStorage.from_file(file, False, os.path.getsize(file)) if isinstance(file, str) else None
    return torch.serialization._load(  # type: ignore[no-untyped-call] # torch's
        torch._C.PyTorchFileReader(file),
        map_location,
        types.SimpleNamespace(Unpickler=unpickler),
        overall_storage=mapped,
        encoding="utf-8",
    )


def _unpickler(names: Mapping[str, Any], takes_items: type) -> type:
    try:
        module: Any = torch._weights_only_unpickler
        safe = {**module._get_allowed_globals(), _SPARSE: _sparse_tensor}
        safe.update((name, _whole(safe[name])) for name in _COPYING & safe.keys())
        own = {**vars(module), **dict.fromkeys(_LOOKED_UP, lambda: names), "_get_allowed_globals": lambda: safe}
        codes = {name: made.__code__ for name, made in vars(module.Unpickler).items() if hasattr(made, "__code__")}
        body = {name: types.FunctionType(code, own) for name, code in codes.items() if _LOOKED_UP & {*code.co_names}}
        found = frozenset[str]().union(*(code.co_names for code in codes.values()))
        if missing := _LOOKED_UP - found:
            raise AttributeError(f"Unpickler does not look up {', '.join(sorted(missing))}")
        for owner, name in ((torch.serialization, "_load"), (torch, _COO), (torch, _COMPRESSED)):
            getattr(owner, name)
    except AttributeError as error:
        raise SpotError(
            f"torch {torch.__version__} has another restricted unpickler ({error}). No snapshot is read, as none can be"
            " read safely. Install a torch that this version of lightning_spot was tested with"
        ) from error

    def check_target(unpickler: Any, opcode: str) -> None:
        if not isinstance(unpickler.stack[-1], takes_items):
            module.Unpickler._check_set_item_target(unpickler, opcode)

    return type("Unpickler", (module.Unpickler,), {**body, "_check_set_item_target": check_target})


# -- of tensors that are in the file ----------------------------------------------------------------------------------

_COPYING = frozenset(
    f"torch._utils._rebuild_{kind}" for kind in ("device_tensor_from_cpu_tensor", "nested_tensor", "qtensor")
)
"""What copies tensors that it is given, or walks through them: one number of the file may be an item without end."""


def _whole(rebuild: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same for tensors of which the file has every item, as torch.save writes them there."""

    def rebuilt(*arguments: Any) -> torch.Tensor:
        for argument in arguments:
            _check_whole(argument if isinstance(argument, tuple) else (argument,))
        return rebuild(*arguments)

    return rebuilt


def _check_whole(values: tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor) and value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"a tensor of {value.numel()} items is larger than its storage")


# -- sparse tensors ---------------------------------------------------------------------------------------------------

_COO, _COMPRESSED = "_validate_sparse_coo_tensor_args", "_validate_sparse_compressed_tensor_args"


def _sparse_tensor(layout: torch.layout, data: tuple[Any, ...]) -> torch.Tensor:
    """A sparse tensor whose indices lie within it; torch checks that only by a setting for the whole process."""
    if type(data) is not tuple:
        raise TypeError("parts of a sparse tensor that are no tuple")
    _check_whole(data[:1] if layout is torch.sparse_coo else data[:2])
    if layout is torch.sparse_coo:
        indices, values, size, *coalesced = data
        made = torch.sparse_coo_tensor(
            indices, values, size, is_coalesced=coalesced[0] if coalesced else None, check_invariants=False
        )
        parts = made._indices(), made._values(), made.size(), made.is_coalesced()
        check = getattr(torch, _COO)
    else:
        made = torch.sparse_compressed_tensor(*data, layout=layout, check_invariants=False)
        parts = *data[:3], made.size(), layout
        check = getattr(torch, _COMPRESSED)
    if not made.is_meta:  # which has no indices
        check(*parts, check_pinning=False)  # that check may start CUDA
    return made
