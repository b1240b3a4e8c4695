"""Where the elements of tensors lie: told by C as by torch, so that what is equal for one is equal for the other."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable

import pytest
import torch

from lightning_spot.image import whereabouts as rows
from lightning_spot.image.whereabouts import by_torch, whereabouts

compiled = pytest.mark.skipif(
    rows._compiled is None or rows._exchange is None, reason="installed where there was no compiler, or torch is older"
)
MEMORY = torch.arange(48.0)

ROWS: list[list[torch.Tensor]] = [
    [],
    [MEMORY],
    [MEMORY[:]],  # another tensor, the same elements
    [torch.nn.Parameter(MEMORY)],
    [MEMORY[1:]],
    [MEMORY[:-1]],
    [MEMORY.view(6, 8)],
    [MEMORY.view(8, 6)],
    [MEMORY.view(8, 6).T],
    [MEMORY.view(48, 1), MEMORY],
    [MEMORY, MEMORY.view(48, 1)],
    [MEMORY.view(6, 8)[:, :2]],
    [MEMORY.view(6, 8)[:3], MEMORY.view(6, 8)[3:]],
    [MEMORY[0], MEMORY[1]],
    [MEMORY[1], MEMORY[0]],
    [MEMORY.view(2, 3, 2, 2, 2)],
    [MEMORY[:1].expand(48)],
    [MEMORY.clone()],
    [torch.zeros(0)],
    [torch.zeros(0, 3)],
    [torch.zeros(2, 2, dtype=torch.complex64).conj()],
]


@compiled
def test_what_is_equal_for_torch_is_equal_for_c_and_what_differs_differs() -> None:
    told = [whereabouts(row) for row in ROWS]
    assert all(type(one) is bytes for one in told)
    by_each = [by_torch(row) for row in ROWS]
    for left, right in itertools.product(range(len(ROWS)), repeat=2):
        assert (told[left] == told[right]) == (by_each[left] == by_each[right]), (left, right)
    assert sum(one == told[1] for one in told) == 3


@compiled
def test_thousands_of_dimensions_have_room() -> None:
    many = [torch.zeros([1] * dimensions) for dimensions in range(65)] * 20
    assert whereabouts(many) == whereabouts(list(many)) != whereabouts(many[::-1])


@compiled
def test_nothing_is_kept_and_nothing_let_go() -> None:
    tensor = torch.zeros(3)
    row = [tensor] * 5
    alive = weakref.ref(tensor)
    before = sys.getrefcount(tensor), sys.getrefcount(torch.Tensor)
    for _ in range(1000):
        whereabouts(row)
    assert (sys.getrefcount(tensor), sys.getrefcount(torch.Tensor)) == before
    del tensor
    row.clear()
    assert alive() is None


class Other(torch.Tensor):
    """A class that C is not told of."""


UNKNOWN: list[Callable[[], torch.Tensor]] = [
    lambda: torch.zeros(3).as_subclass(Other),
    lambda: torch.zeros(3, device="meta"),
]


@pytest.mark.parametrize("make", UNKNOWN)
def test_torch_says_of_what_c_does_not(make: Callable[[], torch.Tensor]) -> None:
    row = [torch.zeros(2), make()]
    assert whereabouts(row) == by_torch(row)


def test_what_lies_nowhere_is_refused() -> None:
    with pytest.raises(RuntimeError, match="storage"):
        whereabouts([torch.eye(2).to_sparse()])


@compiled
@pytest.mark.parametrize("what", [None, 7, "text", [1], (torch.zeros(1),)])
def test_c_refuses_what_is_no_row_of_tensors(what: object) -> None:
    with pytest.raises(TypeError):
        rows._compiled(rows._exchange, torch.Tensor, torch.nn.Parameter, what)


@compiled
def test_c_refuses_another_table_of_functions() -> None:
    with pytest.raises((TypeError, ValueError)):
        rows._compiled(object(), torch.Tensor, torch.nn.Parameter, [])


def test_without_a_compiler_or_with_an_older_torch_each_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_compiled", None)
    assert whereabouts([MEMORY]) == by_torch([MEMORY])
    monkeypatch.undo()
    monkeypatch.setattr(rows, "_exchange", None)
    assert whereabouts([MEMORY]) == by_torch([MEMORY])
