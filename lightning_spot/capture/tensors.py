"""The tensors of a checkpoint: which of them only the optimizer may change, and where they lie."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from lightning_spot.trees import leaves

logger = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V", torch.Tensor, torch.UntypedStorage)

_STRIDED = torch.strided
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_GLANCE_BYTES = 64
_OUTLINE_BYTES = 4 * 1024 * 1024  # everything in a checkpoint that is no tensor, generously
_PER_TENSOR_BYTES = 1024


def expected_nbytes(state: Any, part: float) -> int:
    """About the bytes of a snapshot with the tensors of ``state``, and what goes with them, or of a part of it."""
    tensors = tensors_in(state)
    return int(part * sum(item.numel() * item.element_size() + _PER_TENSOR_BYTES for item in tensors)) + _OUTLINE_BYTES


def copies_of(values: Mapping[K, V]) -> dict[K, V]:
    """Copies of what training will change: on its GPU, or in memory of the host where that has no room for them.

    To have them on the GPU is faster, and training may need that memory when it computes on. So they go there only if
    they fit beside the most that it ever had: it is not to end for the sake of a snapshot.

    Args:
        values: tensors or storages.
    """
    if _have_room(values.values()):
        try:
            return {key: value.clone() for key, value in values.items()}  # type: ignore[no-untyped-call] # torch's
        except torch.cuda.OutOfMemoryError:  # its memory is in pieces, or another process has taken some
            logger.debug("a GPU has no room for copies of %d tensors", len(values))
    return {key: _copy_on_host(value) for key, value in values.items()}


def _copy_on_host(value: V) -> V:
    copy: V = value.clone() if value.device.type == "cpu" else value.cpu()  # type: ignore[no-untyped-call] # torch's
    return copy


def _have_room(values: Iterable[torch.Tensor | torch.UntypedStorage]) -> bool:
    """Whether copies fit on each GPU beside the most that this process has had there."""
    needed: Counter[torch.device] = Counter()
    for value in values:
        if value.device.type == "cuda":
            needed[value.device] += _nbytes_of(value)
    return all(nbytes <= _spare_bytes(device) for device, nbytes in needed.items())


def _nbytes_of(value: torch.Tensor | torch.UntypedStorage) -> int:
    if isinstance(value, torch.UntypedStorage):
        return value.nbytes()
    if value.is_sparse:  # torch tells no size of such a gradient, which an embedding may have
        return int(value._indices().nbytes + value._values().nbytes)
    return value.nbytes


def _spare_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device))


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested dicts, lists and tuples. Tensors inside other objects are not seen."""
    return leaves(state, torch.Tensor)


def shape_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The shape; of a nested tensor those of its parts: it has none itself, or one like no other's."""
    return tuple(part.shape for part in tensor.unbind()) if tensor.is_nested else tensor.shape


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a ``DTensor``; of others, the tensor itself."""
    if type(tensor) in _PLAIN:
        return tensor
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


_HAS_NO_STORAGE = (NotImplementedError, RuntimeError, ValueError)
"""What torch raises where a tensor has none of its own; the last one of those that a lazy layer is still to make."""


def storage_address(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage, 0 if it has none of its own (sparse, quantised, lazy, most wrapper subclasses).

    That of a ``DTensor`` is the storage of what this rank has of it.
    """
    tensor = local_of(tensor)  # first: to ask a DTensor for anything else takes long
    if tensor.layout is not _STRIDED:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except _HAS_NO_STORAGE:
        return 0


def by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, Sequence[torch.Tensor]]:
    """Tensors by the address of their storage; those without one of their own are left out."""
    all_of: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        if address := storage_address(tensor):
            all_of.setdefault(address, {})[id(tensor)] = tensor
    return {address: [*of_one.values()] for address, of_one in all_of.items()}


def optimizer_owned(optimizers: Iterable[Any]) -> dict[int, Sequence[torch.Tensor]]:
    """Tensors that change in ``optimizer.step()`` and nowhere else, parameters and their state; :func:`by_storage`.

    Args:
        optimizers: ``torch.optim.Optimizer`` or Lightning's wrappers.
    """
    owned: list[torch.Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            owned += group["params"]
        for state in optimizer.state.values():
            owned += tensors_in(state)
    return by_storage(owned)


class Watches:
    """Tensors that must not change until they are copied; on any device, and kept alive meanwhile.

    Args:
        tensors: the tensors, as they are when the copy begins. Those of inference have no version counters and are
            left out: nothing tracks them.
    """

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._tensors]

    def changed(self) -> list[torch.Tensor]:
        """Those that were written to since."""
        pairs = zip(self._tensors, self._versions, strict=True)
        return [tensor for tensor, version in pairs if tensor._version != version]


class Noted:
    """How tensors are: torch's counts of the writes to them, and some of their bytes, on their device.

    The bytes show where most numbers change, whether torch counts it or not: averages of weights are put in place past
    the counts. Tensors made in inference mode have no counts, and those without a storage of their own no bytes.

    Args:
        tensors: to note; they are kept alive.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._watches, self._bytes = Watches(self._tensors), list(map(_glance, self._tensors))

    @property
    def are_unchanged(self) -> bool:
        """Whether all are as they were. A GPU is waited for."""
        return not self._watches.changed() and all(
            torch.equal(seen, now) if seen is not None and now is not None else seen is now
            for seen, now in zip(self._bytes, map(_glance, self._tensors), strict=True)
        )


def _glance(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of the bytes in the middle of a tensor; ``None`` of one without a storage of its own."""
    if not storage_address(tensor):
        return None
    tensor = local_of(tensor)
    storage = tensor.untyped_storage()
    middle = (tensor.storage_offset() + tensor.numel() // 2) * tensor.element_size()
    start = max(0, min(middle, storage.nbytes() - _GLANCE_BYTES))
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole[start : start + _GLANCE_BYTES].clone()


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


Owners = Mapping[int, Sequence[torch.Tensor]]
"""Tensors whose counts of writes count, by the address of their storage."""

NOBODY: Owners = {}


def owned_nbytes(owners: Owners) -> int:
    """Bytes of the storages of some tensors."""
    return sum(tensors[0].untyped_storage().nbytes() for tensors in owners.values())
