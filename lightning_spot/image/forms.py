"""All by which a tensor on a storage differs from another in a pickle: of one tensor, and of a row of them at once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import compress
from typing import Any, Generic, TypeVar

import torch

from lightning_spot.image.rows import numbers

Form = tuple[Any, ...]
T = TypeVar("T")

_RENEWED_SHARE = 4  # where a fourth of the tensors are others each time, to compare rows of them saves nothing

identity_of = operator.attrgetter("_cdata")
"""Which storage it is, whatever object Python has for it; another one may have the same once it is gone."""


def identities_of(storages: list[torch.UntypedStorage]) -> object:
    """The same of each, to be compared with that of others."""
    return numbers(storages, "_cdata")


_shape, _dtype, _trains = map(operator.attrgetter, ("shape", "dtype", "requires_grad"))


def form_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> Form:
    """The form of a tensor.

    Args:
        tensor: a strided one.
        storage: of it.
    """
    dtype = tensor.dtype
    return (
        storage._cdata,
        storage.nbytes(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        dtype,
        tensor.requires_grad,
        dtype.is_complex and tensor.is_conj(),  # of no other can it be said
        tensor.is_neg(),
    )


def has_form(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one: sparse and nested ones have not."""
    try:
        return bool(form_of(tensor, tensor.untyped_storage()))
    except (NotImplementedError, RuntimeError):
        return False


class Forms:
    """The forms of a row of tensors, held one property beside the other: to compare those takes half as long.

    Only what has no parts is built for that; thousands of small tuples would have Python look for garbage.

    Args:
        tensors: strided ones.
        storages: of them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage]) -> None:
        self._plain = self._plain_of(tensors, storages)
        self._shapes = list(map(_shape, tensors))
        self._strides = [tensor.stride() for tensor in tensors]
        self._dtypes = list(map(_dtype, tensors))
        self._is_known = not any([dtype.is_complex for dtype in self._dtypes])  # those may be conjugates, too

    def are_those_of(self, tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage]) -> bool:
        """Whether other tensors have the same forms, one after the other; if not, or not known here, look closer."""
        return (
            self._is_known
            and len(tensors) == len(self._dtypes)
            and self._plain == self._plain_of(tensors, storages)
            and all(map(operator.is_, map(_dtype, tensors), self._dtypes))
            and all(map(operator.eq, map(_shape, tensors), self._shapes))
            and all(map(operator.eq, map(torch.Tensor.stride, tensors), self._strides))
        )

    @staticmethod
    def _plain_of(tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage]) -> list[list[int]]:
        return [
            list(map(identity_of, storages)),
            [storage.nbytes() for storage in storages],
            [tensor.storage_offset() for tensor in tensors],
            list(map(_trains, tensors)),
            [tensor.is_neg() for tensor in tensors],
        ]


class Row(Generic[T]):
    """What was learned of a row of tensors. Most are still the same the next time.

    Args:
        tensors: the tensors.
        storages: of them.
        learned: what was learned of each; the same objects as long as its form is the same.
        before: the row that this one comes in the place of, if any.

    Attributes:
        learned: see above.
        renewed: numbers of those that are others than before, as a generator's state is each time.
    """

    __slots__ = ("_forms", "_steady", "learned", "renewed")

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        storages: Sequence[torch.UntypedStorage],
        learned: list[T],
        before: Row[T] | None,
    ) -> None:
        self.learned = learned
        same = before is not None and len(before.learned) == len(learned)
        others = before.learned if before is not None and same else learned
        self._steady = steady = list(map(operator.is_, learned, others))
        self.renewed = [number for number, is_steady in enumerate(steady) if not is_steady]
        self._forms: Forms | None = None
        if len(self.renewed) * _RENEWED_SHARE <= len(learned):
            self._forms = Forms(list(compress(tensors, steady)), list(compress(storages, steady)))

    def is_still_of(self, tensors: Sequence[torch.Tensor], storages: Sequence[torch.UntypedStorage]) -> bool:
        """Whether tensors are put together as these are, but for those that are renewed: they are to be looked up."""
        if self._forms is None or len(tensors) != len(self.learned):
            return False
        if not self.renewed:
            return self._forms.are_those_of(tensors, storages)
        return self._forms.are_those_of(list(compress(tensors, self._steady)), list(compress(storages, self._steady)))
