"""Where the elements of tensors lie: told by C as by torch, so that what is equal for one is equal for the other."""

from __future__ import annotations

import ctypes
import itertools
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

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


class Described(ctypes.Structure):
    """DLPack's ``DLTensor``."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


Describe = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Described))


class Table(ctypes.Structure):
    """DLPack's table of functions, of a library that describes tensors in another way."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("unused", ctypes.c_void_p * 4),
        ("describe", Describe),
        ("stream", ctypes.c_void_p),
    )


SIZES, STEPS = (ctypes.c_int64 * 2)(4, 3), (ctypes.c_int64 * 2)(3, 1)


@pytest.fixture
def other_table(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts such a table in torch's place."""
    kept: list[object] = []

    def install(major: int = 1, **told: object) -> None:
        def describe(tensor: torch.Tensor, found: ctypes._Pointer[Described]) -> int:
            for name, value in told.items():
                setattr(found.contents, name, value)
            return 0

        table = Table(version=(ctypes.c_uint32 * 2)(major, 1), describe=Describe(describe))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        name = b"dlpack_exchange_api"
        kept.extend((table, name))
        monkeypatch.setattr(rows, "_exchange", new(ctypes.addressof(table), name, None))

    return install


def said(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, sys.byteorder) for number in numbers)


@compiled
def test_what_another_library_says_is_read_as_dlpack_has_it(other_table: Callable[..., None]) -> None:
    row = [MEMORY, torch.nn.Parameter(MEMORY)]
    other_table(data=1000, byte_offset=24, ndim=2, shape=SIZES, strides=STEPS)
    assert whereabouts(row) == said(1024, 2, 4, 3, 3, 1) * 2
    other_table(data=1000, ndim=0)  # no dimensions, no sizes
    assert whereabouts(row) == said(1000, 0) * 2


@compiled
@pytest.mark.parametrize(
    "told",
    [
        {"major": 2, "ndim": 0},
        {"ndim": -1, "shape": SIZES, "strides": STEPS},
        {"ndim": 65, "shape": (ctypes.c_int64 * 65)(), "strides": (ctypes.c_int64 * 65)()},
        {"ndim": 2, "shape": SIZES},
        {"ndim": 2, "strides": STEPS},
    ],
    ids=["of another version", "too few dimensions", "too many", "no strides", "no sizes"],
)
def test_what_c_cannot_read_is_asked_of_torch(other_table: Callable[..., None], told: dict[str, Any]) -> None:
    other_table(**told)
    assert whereabouts([MEMORY]) == by_torch([MEMORY])
    with pytest.raises(ValueError, match=r"DLPack|dimensions|strides"):
        rows._compiled(rows._exchange, torch.Tensor, torch.nn.Parameter, [MEMORY])


@compiled
def test_without_a_word_from_dlpack_there_is_none_from_c() -> None:
    row = [torch.eye(2).to_sparse()]  # of which torch has no elements to describe
    with pytest.raises((BufferError, RuntimeError)):
        rows._compiled(rows._exchange, torch.Tensor, torch.nn.Parameter, row)


@compiled
def test_memory_is_given_back() -> None:
    many = [MEMORY[number:] for number in range(40)]
    tracemalloc.start()
    try:
        whereabouts(many)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(50):
            whereabouts(many)
        assert tracemalloc.get_traced_memory()[0] - before < 1000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("error", [BufferError, RuntimeError, TypeError, ValueError])
def test_what_dlpack_refuses_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def refuses(*_: object) -> bytes:
        raise error

    monkeypatch.setattr(rows, "_compiled", refuses)
    monkeypatch.setattr(rows, "_exchange", object())
    assert whereabouts([MEMORY]) == by_torch([MEMORY])


def test_without_a_compiler_or_with_an_older_torch_each_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_compiled", None)
    assert whereabouts([MEMORY]) == by_torch([MEMORY])
    monkeypatch.undo()
    monkeypatch.setattr(rows, "_exchange", None)
    assert whereabouts([MEMORY]) == by_torch([MEMORY])
