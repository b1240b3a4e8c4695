"""Pickles that no pickler writes, for tests of the reader: built by hand, and made up at random from a seed."""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import io
import os
import pathlib
import random
import resource
import signal
import struct
import types
import zipfile
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from lightning_spot.errors import CorruptSnapshotError, NotSerializableError
from lightning_spot.snapshot.safe_load import Placeholder, parts_of, safe_load

MIB = 2**20
NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"


def name(full: str) -> bytes:
    module, _, short = full.rpartition(".")
    return f"c{module}\n{short}\n".encode()


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def items(*values: bytes) -> bytes:
    return b"(" + b"".join(values) + b"t"


def listed(*values: bytes) -> bytes:
    return b"](" + b"".join(values) + b"e"


def entries(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def call(function: str | bytes, *arguments: bytes) -> bytes:
    return (name(function) if isinstance(function, str) else function) + items(*arguments) + b"R"


def raw(data: bytes) -> bytes:
    return call("_codecs.encode", text(data.decode("latin-1")), text("latin1"))


def dtype(
    code: str, order: str = "|", form: tuple[bytes, bytes, bytes] = (NONE,) * 3, size: int = -1, flags: int = 0
) -> bytes:
    made = call("numpy.dtype", text(code), FALSE, TRUE)
    return made + items(number(3), text(order), *form, number(size), number(1), number(flags)) + b"b"


def array(of: bytes, shape: Iterable[int], data: bytes, core: str = "_core", kind: bytes | None = None) -> bytes:
    made = call(f"numpy.{core}.multiarray._reconstruct", kind or name("numpy.ndarray"), items(number(0)), raw(b"b"))
    return made + items(number(1), items(*map(number, shape)), of, FALSE, data) + b"b"


def scalar(of: bytes, data: bytes) -> bytes:
    return call("numpy._core.multiarray.scalar", of, data)


def tensor(numel: int, size: int, stride: int = 1, *, kind: str = "Float", rows: int = 0) -> bytes:
    """A tensor on the storage of :func:`file`, which has 16 bytes."""
    storage = items(text("storage"), name(f"torch.{kind}Storage"), text("0"), text("cpu"), number(numel)) + b"Q"
    first = [number(rows)] if rows else []
    sizes, strides = items(*first, number(size)), items(*first, number(stride))
    hooks = call("collections.OrderedDict")
    return call("torch._utils._rebuild_tensor_v2", storage, number(0), sizes, strides, FALSE, hooks)


def file(value: bytes, method: int = zipfile.ZIP_STORED, nbytes: int = 16) -> io.BytesIO:
    """A file as torch.save writes it, of one value and one storage."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", method) as archive:
        archive.writestr("x/data.pkl", b"\x80\x02" + value + b".")
        archive.writestr("x/byteorder", "little")
        archive.writestr("x/data/0", bytes(nbytes))
        archive.writestr("x/version", "3\n")
    whole.seek(0)
    return whole


# -- made up ----------------------------------------------------------------------------------------------------------

_CODES = "b1 i4 u8 f8 f2 c16 S3 U1 U0 M8 m8 O8 O V8 V0 i4,i4 f8,O S99999999 T ? (2,)f8 f12 >i4 object".split()  # noqa: SIM905
_NAMES = """
numpy.dtype numpy.ndarray numpy.float64 numpy._core.multiarray.scalar numpy.dtypes.ObjectDType numpy.rec.recarray
numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct builtins.bytes builtins.bytearray builtins.list
builtins.range builtins.slice builtins.set builtins.frozenset builtins.getattr builtins.eval __builtin__.bytearray
builtins.str builtins.int collections.deque collections.defaultdict collections.OrderedDict collections.Counter
datetime.date datetime.datetime datetime.timedelta decimal.Decimal pathlib.PosixPath torch.Tensor torch.FloatTensor
torch.Size torch.device torch.nn.parameter.Parameter torch.float32 torch._tensor._rebuild_from_type_v2
torch._utils._rebuild_tensor_v2 torch._utils._rebuild_parameter torch._utils._rebuild_sparse_tensor
torch.storage.UntypedStorage _codecs.encode os.system a.B a.B.C
""".split()  # noqa: SIM905
_NUMBERS = [0, 1, -1, 2, 3, 4, 7, 8, 16, 255, 2**16, 2**31 - 1, 2**31, 2**33, 2**40, 2**63, -(2**63), 2**200]


class _MadeUp:
    """A value of a pickle, at random: mostly well formed, and mostly about what could go wrong."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._kept = 0

    def value(self, depth: int = 0) -> bytes:
        chance = self._chance
        makes: list[Callable[[int], bytes]] = [self._array, self._dtype, self._scalar, self._call, self._call]
        makes += [self._simple] * (1 if depth < 3 else 20) + [self._held] * 2
        made = chance.choice(makes)(depth + 1)
        if chance.random() < 0.1:
            made += self._state(depth + 1) + b"b"
        if chance.random() < 0.1:
            self._kept += 1
            made += b"q" + bytes([self._kept % 256])
        return made

    def _simple(self, _: int) -> bytes:
        chance = self._chance
        simple = [NONE, TRUE, FALSE, b")", b"]", b"}", number(chance.choice(_NUMBERS)), text(chance.choice(_CODES))]
        simple += [raw(self._bytes()), tensor(*chance.choices([0, 1, 4, 5, 2**33], k=2)), name(chance.choice(_NAMES))]
        simple += [b"U\x08AAAA\0\0\0\0", b"G?\xf0\0\0\0\0\0\0", b"h" + bytes([chance.randint(0, self._kept + 1) % 256])]
        return chance.choice(simple)

    def _bytes(self) -> bytes:
        return struct.pack("<Q", 0x41414141) * self._chance.choice([0, 1, 1, 2, 4])

    def _held(self, depth: int) -> bytes:
        values = [self.value(depth) for _ in range(self._chance.randint(0, 3))]
        pairs = [
            (text(str(at)) if self._chance.random() < 0.7 else self.value(depth), value)
            for at, value in enumerate(values)
        ]
        return self._chance.choice([items(*values), listed(*values), entries(*pairs)])

    def _call(self, depth: int) -> bytes:
        values = [self.value(depth) for _ in range(self._chance.randint(0, 3))]
        made = call(self._chance.choice(_NAMES), *values)
        return made if self._chance.random() < 0.8 else made[:-1] + b"\x81"

    def _dtype(self, depth: int) -> bytes:
        chance = self._chance
        fields = entries((text("a"), items(dtype(chance.choice(_CODES)), number(chance.choice(_NUMBERS)))))
        form = [NONE, NONE, NONE]
        if chance.random() < 0.4:
            form = [
                items(dtype(chance.choice(_CODES)), items(number(2))) if chance.random() < 0.3 else NONE,
                items(text("a")),
                fields,
            ]
        if chance.random() < 0.1:
            form[chance.randrange(3)] = self.value(depth)
        size = chance.choice([-1, -1, 8, 0, -8, 2**30])
        return dtype(chance.choice(_CODES), chance.choice("|<>=?"), tuple(form), size, chance.choice([0, 16, 63, -1]))  # type: ignore[arg-type]

    def _state(self, depth: int) -> bytes:
        return self._chance.choice([self.value, self._held])(depth)

    def _array(self, depth: int) -> bytes:
        chance = self._chance
        of = self._dtype(depth) if chance.random() < 0.8 else self.value(depth)
        shape = [chance.choice([0, 1, 2, 4, -1, 2**40]) for _ in range(chance.choice([0, 1, 1, 2]))]
        data = raw(self._bytes()) if chance.random() < 0.8 else self.value(depth)
        return array(of, shape, data, chance.choice(["core", "_core"]))

    def _scalar(self, depth: int) -> bytes:
        return scalar(self._dtype(depth), raw(self._bytes()) if self._chance.random() < 0.8 else self.value(depth))


def made_up(chance: random.Random) -> io.BytesIO:
    """A file with a pickle made up; of one in four, some bytes are others."""
    value = bytearray(entries((text("x"), _MadeUp(chance).value())))
    if chance.random() < 0.25:
        for _ in range(chance.randint(1, 4)):
            value[chance.randrange(len(value))] = chance.choice(
                [*b"(])}tubseR\x81\x85\x86\x87hqcJXQ.N0", chance.randrange(256)]
            )
    return file(bytes(value))


# -- judged -----------------------------------------------------------------------------------------------------------

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, types.FunctionType, decimal.Decimal),
    *(types.BuiltinFunctionType, datetime.date, datetime.timedelta, pathlib.PurePath, torch.Tensor, torch.dtype),
    *(
        torch.device,
        torch.layout,
        torch.storage.TypedStorage,
        torch.storage.UntypedStorage,
        torch.serialization.StorageType,
    ),
)
_HOLDING = (tuple, list, set, frozenset, collections.deque)


def judge(value: Any, seen: set[int] | None = None) -> None:
    """Look at all of what was read: it holds nothing but what may come out of a file."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (np.ndarray, np.generic, np.dtype)):
        kind = value if isinstance(value, np.dtype) else value.dtype
        assert not kind.hasobject
        assert kind.fields is None
        assert kind.subdtype is None
        repr(value if isinstance(value, (np.dtype, np.generic)) else value.tolist())
    elif isinstance(value, Placeholder):
        assert type(value) is Placeholder
        repr(value)
        judge(parts_of(value), seen)
    elif isinstance(value, type):
        assert not issubclass(value, Placeholder)
    elif isinstance(value, dict):
        for pair in value.items():
            judge(pair, seen)
    elif isinstance(value, _HOLDING):
        for item in list(value):
            judge(item, seen)
    else:
        assert isinstance(value, _PLAIN), type(value)


def read(made: io.BytesIO) -> str:
    """Read a file as a resume does, and judge it.

    Returns:
        ``"read"`` or ``"refused"``.
    """
    try:
        found = safe_load(made)
    except (CorruptSnapshotError, NotSerializableError):
        return "refused"
    judge(found)
    return "read"


def read_apart(makes: Iterable[Callable[[], io.BytesIO]], most_mib: int = 256) -> list[str]:
    """Read files in a process of its own, which may die of them.

    Returns:
        what became of each; the last is the name of a signal, if the process died, or what was raised.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(ours)
            signal.alarm(120)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for make in makes:
                try:
                    end = read(make())
                    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
                    end = end if grown < most_mib else f"{grown} MiB"
                except BaseException as error:
                    end = f"{type(error).__name__}: {error}"[:300].replace("\n", " ")
                os.write(theirs, f"{end}\n".encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as said:
        ends = said.read().splitlines()
    _, status = os.waitpid(child, 0)
    return ends + ([signal.Signals(os.WTERMSIG(status)).name] if os.WIFSIGNALED(status) else [])


def hunt(seed: int, count: int, batch: int = 500) -> collections.Counter[str]:
    """Read files made up from a seed, in processes that may die.

    Returns:
        how many were read, and refused.

    Raises:
        AssertionError: naming the first that did anything else, by its seed.
    """
    ends: collections.Counter[str] = collections.Counter()
    for first in range(0, count, batch):
        numbers = range(first, min(first + batch, count))
        makes = [lambda at=at: made_up(random.Random(f"{seed}-{at}")) for at in numbers]  # type: ignore[misc]
        found = read_apart(makes)
        for at, end in zip(numbers, found, strict=False):
            assert end in ("read", "refused"), f"{end}: of random.Random('{seed}-{at}')"
        assert len(found) == len(numbers), f"{found[-1:]} behind random.Random('{seed}-{first + len(found) - 1}')"
        ends.update(found)
    return ends
