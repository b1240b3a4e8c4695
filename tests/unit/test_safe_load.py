"""Files that would have the reader follow a pointer, allocate, recurse: refused, or inert. What is plain comes back."""

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
import threading
import types
import zipfile
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import PosixPath, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from lightning_spot.errors import CorruptSnapshotError, NotSerializableError
from lightning_spot.sharded.file_plan import load_state
from lightning_spot.sharded.reader import load_value
from lightning_spot.snapshot.safe_load import Placeholder, parts_of, placeholders_in, safe_load
from lightning_spot.state.dump import KEY, read_checkpoint

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


def array(
    of: bytes, shape: Iterable[int | bytes], data: bytes, core: str = "_core", kind: bytes | None = None
) -> bytes:
    made = call(f"numpy.{core}.multiarray._reconstruct", kind or name("numpy.ndarray"), items(number(0)), raw(b"b"))
    sizes = items(*(each if isinstance(each, bytes) else number(each) for each in shape))
    return made + items(number(1), sizes, of, FALSE, data) + b"b"


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


def made_value(chance: random.Random, depth: int = 0) -> bytes:
    """A value of a pickle, at random: mostly well formed, and mostly about what could go wrong."""
    pick = chance.choice

    def some() -> list[bytes]:
        return [made_value(chance, depth + 1) for _ in range(chance.randint(0, 3))]

    def data() -> bytes:
        return raw(struct.pack("<Q", 0x41414141) * pick([0, 1, 1, 2, 4])) if chance.random() < 0.8 else one()

    def kind() -> bytes:
        fields = entries((text("a"), items(dtype(pick(_CODES)), number(pick(_NUMBERS)))))
        forms = [(NONE,) * 3] * 3 + [
            (NONE, items(text("a")), fields),
            (items(dtype(pick(_CODES)), items()), NONE, NONE),
        ]
        return dtype(pick(_CODES), pick("|<>=?"), pick(forms), pick([-1, -1, 8, 0, -8, 2**30]), pick([0, 16, 63, -1]))

    def one() -> bytes:
        return made_value(chance, depth + 1)

    simple = [NONE, TRUE, b")", b"]", b"}", number(pick(_NUMBERS)), text(pick(_CODES)), name(pick(_NAMES))]
    simple += [tensor(*chance.choices([0, 1, 4, 5, 2**33], k=2)), b"U\x08AAAA\0\0\0\0", b"G?\xf0\0\0\0\0\0\0"]
    simple += [data(), b"h" + bytes([pick([1, 2, 3, 9])])] if depth < 5 else []
    makes: list[Callable[[], bytes]] = [
        lambda: pick([items, listed])(*some()),
        lambda: entries(*((text("a") if chance.random() < 0.7 else one(), value) for value in some())),
        *[lambda: call(pick(_NAMES), *some())[:-1] + pick([b"R", b"R", b"R", b"\x81"])] * 2,
        kind,
        lambda: array(kind(), [pick([0, 1, 2, 4, -1, 2**40]) for _ in range(pick([0, 1, 1, 2]))], data()),
        lambda: scalar(kind(), data()),
    ]
    made = pick(makes)() if depth < 3 else pick(simple)
    made += b"q" + bytes([pick([1, 2, 3])]) if chance.random() < 0.1 else b""
    return made + (one() + b"b" if chance.random() < 0.1 else b"")


def made_up(chance: random.Random) -> io.BytesIO:
    """A file with a pickle made up; of one in four, some bytes are others."""
    value = bytearray(entries((text("x"), made_value(chance))))
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


pytestmark = pytest.mark.guarantee("G8")

_WRITES = [value.__reduce__()[0] for value in (np.float64(1), np.ones(1))]  # numpy's own, by any name
NUMPYS = [np.dtype, np.ndarray, type(np.dtype("f8")), type(np.dtype("O")), *_WRITES]  # as torch's errors advise
POINTERS = raw(b"\x41\x41\x41\x41\0\0\0\0" * 4)
FIELD = (NONE, items(text("a")), entries((text("a"), items(dtype("O8"), number(0)))))
FAR = (NONE, items(text("a")), entries((text("a"), items(dtype("f8"), number(1 << 28)))))
DOUBLE = call("numpy.dtypes.Float64DType")


def endless(first: int) -> bytes:
    """A list that holds one list twice, and so on: its text, or a comparison with another one, has no end."""
    made = b"]q%c" % first
    for place in range(first, first + 40):
        made = b"](" + made + b"h%ceq%c" % (place, place + 1)
    return made


INERT = {
    "a scalar of objects without the flag": scalar(dtype("O8"), raw(b"\x41" * 8)),
    "the same, as text": scalar(dtype("O8"), b"U\x08AAAA\0\0\0\0"),
    "an array of objects without the flag": array(dtype("O8"), [4], POINTERS),
    "a field beyond its item": array(dtype("V8", form=FAR, size=8, flags=16), [4], POINTERS),
    "a field of objects": array(dtype("V8", form=FIELD, size=8), [4], POINTERS),
    "a scalar with a field of objects": scalar(dtype("V8", form=FIELD, size=8), raw(b"\x41" * 8)),
    "numbers with a field of objects": array(dtype("i8", form=FIELD), [4], POINTERS),
    "a subarray": array(dtype("i8", form=(items(dtype("O8"), items(number(4))), NONE, NONE)), [4], POINTERS),
    "an item of negative size": array(dtype("V8", size=-8), [4], POINTERS),
    "an item larger than the bytes": scalar(dtype("S8", size=1 << 30), POINTERS),
    "more items than bytes": array(dtype("f8"), [1 << 40], POINTERS),
    "rows of nothing": array(dtype("f8"), [1 << 40, 0], raw(b"")),
    "truth values that numpy miscounts": array(dtype("b1"), [32], POINTERS),
    "sizes that are lists without end": array(dtype("f8"), [endless(10), endless(100)], POINTERS),
    "no text": array(dtype("U1", "<"), [8], raw(b"\xff" * 32)),
    "an array of objects by its class": call("numpy.ndarray", items(number(4)), text("O8")),
    "a dtype's own class": array(
        DOUBLE + items(number(3), text("|"), *FIELD, *map(number, (8, 8, 63))) + b"b", [4], POINTERS
    ),
    "bytes of a size": call("builtins.bytes", number(1 << 32)),
    "a list of a range": call("builtins.list", call("builtins.range", number(0), number(1 << 25), number(1))),
    "a date that is none": call("datetime.date", raw(b"\x07\xe4\x01\xff")),
    "a function": call("builtins.eval", text("1")),
    "a function of os": call("os.system", text("true")),
}
ENDLESS = 30_000_000
EXPANDED = tensor(4, ENDLESS, 0)
SPARSE = tensor(4, ENDLESS, 0), items(number(4)), FALSE
TAKING = ("builtins.set", "collections.Counter", "collections.OrderedDict", "torch.Size")
GROWING = ("torch.Tensor", "torch.FloatTensor", "torch.storage.TypedStorage", "torch.storage.UntypedStorage")


def sparse(data: bytes) -> bytes:
    layout = call("torch.serialization._get_layout", text("torch.sparse_coo"))
    return call("torch._utils._rebuild_sparse_tensor", layout, data)


def detour(kind: str, argument: bytes) -> bytes:
    return call("torch._tensor._rebuild_from_type_v2", name(kind), name("torch.Tensor"), items(argument), b"}")


def quantized(size: bytes, *parameters: bytes) -> bytes:
    storage = items(text("storage"), name("torch.FloatStorage"), text("0"), text("cpu"), number(4)) + b"Q"
    rest = items(size), items(number(1)), items(*parameters), FALSE, call("collections.OrderedDict")
    return call("torch._utils._rebuild_qtensor", storage, number(0), *rest)


def again(made: bytes, one: bytes, times: int = 500) -> bytes:
    """A list of what is made first, and then of one and the same of it."""
    return listed(made + b"q\0", *[one] * times)


def sharing(first: int) -> bytes:
    """A set in which a walk that does not know what it has met has no end."""
    made = call("builtins.frozenset", listed(NONE)) + b"q" + bytes([first])
    for place in range(first, first + 30):
        made = call("builtins.frozenset", listed(items(made, b"h" + bytes([place])))) + b"q" + bytes([place + 1])
    return made


NESTED = items(items(*[NONE] * 900) + b"q\1", *[b"h\1"] * 899)
LONG = "a" * 100_000
REFUSED = {
    "a text encoded again and again": again(text(LONG), name("_codecs.encode") + b"h\0" + text("latin1") + b"\x86R"),
    "bytes copied again and again": again(raw(LONG.encode()), name("builtins.bytearray") + b"h\0\x85R"),
    "an array made again and again": again(raw(LONG.encode()), array(dtype("i1"), [len(LONG)], b"h\0"), 100),
    "a set made again and again": again(listed(*[number(n) for n in range(9999)]), name("builtins.set") + b"h\0\x85R"),
    "a key again and again": again(NESTED, b"}h\0Ns"),
    "an item of a set again and again": call("builtins.set", listed(NESTED + b"q\0", *[b"h\0"] * 500)),
    "equal keys that share": entries((sharing(10), NONE), (sharing(100), NONE)),
    "a set for a tensor": detour("builtins.set", listed(NONE)),
    "a set of a range": call("builtins.set", call("builtins.range", number(0), number(1 << 25), number(1))),
    "a bytearray of a size": call("builtins.bytearray", number(1 << 30)),
    "the same in other words": detour("builtins.bytearray", number(1 << 30)),
    "bytes that double": call("_codecs.encode", call("_codecs.encode", text("ab"), text("latin1")), text("hex")),
    **{f"{kind} of an expanded tensor": call(kind, EXPANDED) for kind in TAKING},
    **{f"the same in other words: {kind}": detour(kind, EXPANDED) for kind in TAKING},
    "arguments that are one": call(
        *("torch._tensor._rebuild_from_type_v2", name("torch._utils._rebuild_tensor_v2"), name("torch.Tensor")),
        *(tensor(4, 2_000_000, 0), b"}"),
    ),
    "the same by a name of Python 2": call("UserList.Counter", EXPANDED),
    "pairs of an expanded tensor": call("collections.OrderedDict", listed(EXPANDED)),
    "a state that is an expanded tensor": call("collections.OrderedDict") + tensor(4, 2_000_000, 0, rows=2) + b"b",
    "a tensor's state that is one": tensor(4, 4) + EXPANDED + b"b",
    "a parameter's state that is one": call("torch._utils._rebuild_parameter", tensor(4, 4), FALSE, b"}")
    + EXPANDED
    + b"b",
    "a sparse tensor of an expanded one": sparse(EXPANDED),
    "a sparse tensor of expanded indices": sparse(items(tensor(2, ENDLESS, 0, kind="Long", rows=1), *SPARSE)),
    "a copy of an expanded tensor": call(
        *("torch._utils._rebuild_device_tensor_from_cpu_tensor", EXPANDED, name("torch.float64"), text("cpu"), FALSE)
    ),
    "a nested tensor of expanded sizes": call(
        *("torch._utils._rebuild_nested_tensor", tensor(4, 4), *[tensor(2, 1, 0, kind="Long", rows=ENDLESS)] * 2),
        tensor(2, ENDLESS, 0, kind="Long"),
    ),
    **{f"an empty {kind}, which may grow": call(kind) for kind in GROWING},
    **{f"the same, made anew: {kind}": name(kind) + b")\x81" for kind in GROWING},
    "a tensor of a size": call("torch.Tensor", number(1 << 31)),
    "a storage larger than its record": tensor(1 << 20, 4),
    "a tensor larger than its storage": tensor(4, 1 << 33),
    "a sparse tensor with indices beyond its end": sparse(
        items(tensor(2, 2, kind="Long", rows=1), tensor(2, 2, kind="Long"), items(number(0)))
    ),
    "a key of tuples within tuples": b"})" + b"\x85" * 200_000 + b"Ns",
    "a key that holds one tuple without end": b"})" + b"q\0h\0\x86" * 60 + b"Ns",
    "a storage without end": items(endless(10), number(4)) + b"Q",
    "a kind of quantisation without end": quantized(number(4), endless(10), number(1), number(0)),
    "a size without end": quantized(
        endless(10), name("torch.per_channel_affine"), tensor(4, 4), tensor(4, 4), number(7)
    ),
    "a state without end": call(
        "torch._utils._rebuild_parameter_with_state", tensor(4, 4), FALSE, b"}", items(endless(10))
    ),
    "the same of a subclass": call(
        *("torch._tensor._rebuild_from_type_v2", name("torch._utils._rebuild_parameter"), name("torch.Tensor")),
        *(items(tensor(4, 4), FALSE, b"}"), items(endless(10))),
    ),
    "lists within lists": b"]" * 5_000 + b"a" * 4_999,
    "stand-ins within stand-ins": name("a.B") * 5_000 + b")\x81" + b"\x85R" * 4_999,
    "no end": b"N(",
}


def held(value: bytes) -> io.BytesIO:
    return file(entries((text("x"), value)))


@pytest.mark.parametrize("users", [[], NUMPYS], ids=["none", "numpy"])
def test_what_is_hostile_stays_inert_or_is_refused(users: list[Any]) -> None:
    with torch.serialization.safe_globals(users):
        for cases, end in ((INERT, "read"), (REFUSED, "refused")):
            ends = read_apart([lambda value=value: held(value) for value in cases.values()])  # type: ignore[misc]
            assert dict(zip(cases, ends, strict=False)) == dict.fromkeys(cases, end)
    for value in INERT.values():
        assert isinstance(safe_load(held(value))["x"], Placeholder)


def test_the_place_of_a_placeholder_stays_short() -> None:
    nested = text(LONG) + b"q\0" + b"".join([b"}h\0"] * 100) + call("a.B") + b"s" * 100
    ((place, _),) = placeholders_in(safe_load(held(b"}" + nested + b"s")))
    assert len(place) < 4000


def test_a_file_that_claims_to_hold_more_than_it_is_is_refused() -> None:
    packed = file(tensor(1 << 22, 1 << 22), zipfile.ZIP_DEFLATED, 1 << 24)
    with pytest.raises(CorruptSnapshotError, match=r"\b1677\d{4}\b"):
        safe_load(packed)


def test_a_second_directory_hides_nothing() -> None:
    """Python reads the directory that lies before the end, torch the one to which the end points."""
    whole = file(tensor(1 << 22, 1 << 22), zipfile.ZIP_DEFLATED, 1 << 24)
    begin = zipfile.ZipFile(whole).start_dir
    directory, end = whole.getvalue()[begin:-22], whole.getvalue()[-22:]
    small, place = bytearray(directory), 0
    while place < len(small):
        struct.pack_into("<LL", small, place + 20, 0, 0)
        place += 46 + sum(struct.unpack_from("<HHH", small, place + 28))
    with pytest.raises(CorruptSnapshotError, match="begins with something"):
        safe_load(io.BytesIO(whole.getvalue()[:begin] + directory + small + end))


@pytest.mark.parametrize("content", [b"", b"PK", b"not a file of torch", torch.save])
def test_any_other_file_is_one_clear_error(content: Any) -> None:
    old = io.BytesIO()
    if callable(content):
        content([1], old, _use_new_zipfile_serialization=False)
    with pytest.raises(CorruptSnapshotError):
        safe_load(old if old.getvalue() else io.BytesIO(content))


def test_nested_files_are_read_in_the_same_way() -> None:
    value = INERT["an array of objects without the flag"]
    with pytest.raises(CorruptSnapshotError, match=r"optimizer\.lr"):
        load_value(held(value), "optimizer.lr")
    assert isinstance(load_state(memoryview(held(value).getvalue()))["x"], Placeholder)
    room = bytearray(8)
    inner = held(value).getvalue()
    room[:8] = len(inner).to_bytes(8, "little")
    outer = io.BytesIO()
    torch.save({KEY: {"ranks": [torch.frombuffer(room + bytearray(inner), dtype=torch.uint8)]}}, outer)
    assert isinstance(read_checkpoint(outer)[KEY]["ranks"][0]["x"], Placeholder)


# -- what is plain ----------------------------------------------------------------------------------------------------

DICTS: tuple[type[dict[Any, Any]], ...] = (dict, collections.OrderedDict, collections.Counter)
PLAIN: list[Any] = [
    *(np.dtype(code) for code in ("f4", ">i4", "S3", "U2", "M8[3D]", "m8")),
    *(np.array([1, 0, 1]).astype(code) for code in "?bhilqBHILQefdFD"),
    *(np.array([1, 2], code) for code in (">i4", ">f8", "M8[D]", "m8[3s]", "S3", ">U2")),
    np.array(["a", "", "bc\N{SNOWMAN}"]),
    np.array([b"x\0", b""]),
    np.array([], "U"),
    np.zeros((0, 3)),
    np.array(3.0),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(12).reshape(3, 4)[::2, ::3],
    *(np.float32(1.5), np.float64("nan"), np.int64(3), np.bool_(True), np.complex64(1j), np.longdouble(2) / 3),
    *(np.str_("ab"), np.str_(""), np.bytes_(b"x"), np.bytes_(b""), np.datetime64("2020-01-01"), np.timedelta64(3, "s")),
    np.datetime64("NaT"),
    *(PosixPath("/a/b"), PurePosixPath("c"), PosixPath()),
    *(datetime.date(1, 1, 1), datetime.date(9999, 12, 31), datetime.timedelta(-1, 5, 7)),
    *(datetime.datetime(2026, 1, 2, 3, 4, 5, 678901), datetime.datetime.max, datetime.datetime.min),
    *(Decimal("1.50"), Decimal("NaN").copy_sign(Decimal(-1)), Decimal("1E+999999")),
    *(range(3), range(5, -5, -2), slice(None, 2), frozenset([1, (2, "x")]), frozenset()),
    *(collections.deque([1, 2], maxlen=3), collections.deque([[1]]), collections.deque()),
    *(collections.defaultdict(list, a=[1]), collections.defaultdict(None, {1: 2}), collections.Counter("aab")),
    collections.OrderedDict(a=np.int64(1)),
    *(kind(b) for kind in DICTS for b in ({PosixPath("b"): 3, "a": 1, np.int64(2): 2}, {"b": np.int64(5), "a": 1})),
    *(np.zeros(shape) for shape in ((0, 3_000_000), (2, 0, 3_000_000), (0, 0))),
    *(collections.defaultdict(kind, a=1) for kind in (*DICTS, collections.deque, collections.defaultdict)),
    collections.defaultdict(list, {PosixPath("b"): [1], "a": [np.int64(2)]}),
    collections.Counter([np.int64(3), frozenset([1]), np.int64(3), datetime.date(2020, 1, 1)]),
    *(float, list, np.ndarray, Decimal, b"", b"\xff", bytearray(b"x"), 2**999, {1, 2}, 1j, None, True),
    {np.int64(3): (np.ones(2), [PosixPath("a")]), (PosixPath("b"), 1): {frozenset([np.float32(1)])}},
]


@pytest.mark.parametrize("core", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_what_python_and_numpy_write_comes_back_equal(core: bytes) -> None:
    for value in PLAIN:
        written = io.BytesIO()
        torch.save({"x": value, "again": value}, written)
        pickled = zipfile.ZipFile(written).read("archive/data.pkl")
        for known in (b"numpy.core.multiarray", b"numpy._core.multiarray"):  # as numpy 1 and 2 call it
            pickled = pickled.replace(b"c" + known + b"\n", b"c" + core + b"\n")
        found = safe_load(file(pickled[2:-1]))
        assert same(found["x"], value), (value, found)
        assert found["again"] is found["x"] or isinstance(value, (int, float, complex, str, bytes, np.generic))


def same(found: Any, value: Any) -> bool:
    """Whether two are equal, of one class, down to the items."""
    if isinstance(value, (np.ndarray, np.generic)):
        kinds = type(found) is type(value) and found.dtype == value.dtype
        forms = kinds and found.shape == value.shape and getattr(found, "flags", None) is not None
        return bool(forms and np.array_equal(found, value, equal_nan=value.dtype.kind in "fcmM"))
    if type(found) is not type(value):
        return False
    if isinstance(value, dict):
        more = getattr(found, "default_factory", None) is getattr(value, "default_factory", None)
        return more and same(list(found.items()), list(value.items()))
    if isinstance(value, collections.deque):
        return found.maxlen == value.maxlen and same(list(found), list(value))
    if isinstance(value, (list, tuple)):
        return len(found) == len(value) and all(map(same, found, value))
    return bool(repr(found) == repr(value)) if isinstance(value, Decimal) else bool(found == value)


class Tagged(torch.Tensor):
    """A subclass of tensors that keeps an attribute."""


def tagged(value: torch.Tensor) -> Tagged:
    made = value.as_subclass(Tagged)
    made.tag = collections.OrderedDict(a=1)  # type: ignore[attr-defined]
    return made


TENSORS: dict[str, Callable[[], Any]] = {
    "expanded": lambda: torch.ones(1).expand(5),
    "parameter": lambda: torch.nn.Parameter(tagged(torch.ones(2)).as_subclass(torch.Tensor)),
    "subclass": lambda: tagged(torch.ones(2)),
    "buffer": lambda: torch.nn.Buffer(torch.ones(2)),
    "lazy": lambda: torch.nn.UninitializedParameter(),
    "meta": lambda: torch.empty(3, device="meta"),
    "storage": lambda: torch.ones(3).untyped_storage(),
    "class": lambda: torch.FloatTensor,
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "of one value": lambda: torch.sparse_coo_tensor(torch.arange(3)[None], torch.ones(1).expand(3), (3,)),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "bsc": lambda: torch.eye(4).to_sparse_bsc(2),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "by channel": lambda: torch.quantize_per_channel(torch.ones(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "state": lambda: torch.nn.BatchNorm1d(2).state_dict(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TENSORS)
def test_every_kind_of_tensor_is_read(kind: str) -> None:
    written = io.BytesIO()
    with torch.serialization.safe_globals([Tagged, torch.nn.UninitializedParameter]):
        value = TENSORS[kind]()
        torch.save({"x": value}, written)
        found = safe_load(written)["x"]
        plain = torch.load(io.BytesIO(written.getvalue()), weights_only=True)["x"]
        assert type(found) is type(plain)
        assert repr(found) == repr(plain)
        if kind not in ("quantized", "by channel", "nested"):  # torch itself has none of them there
            safe_load(written, "meta")


@pytest.mark.parametrize("value", [np.array([1, None]), np.ones(2, "i4,f8"), np.void(b"ab"), np.matrix([[1]])])
def test_other_arrays_of_numpy_are_inert(value: Any) -> None:
    written = io.BytesIO()
    torch.save(value, written)
    assert isinstance(safe_load(written), Placeholder)


def test_other_protocols_are_one_clear_error() -> None:
    written = io.BytesIO()
    torch.save({"x": np.ones(2)}, written, pickle_protocol=5)
    with pytest.raises(NotSerializableError, match=r"\b\d+\b"):
        safe_load(written)


def test_an_integer_that_torch_does_not_read_is_named() -> None:
    written = io.BytesIO()
    torch.save({"x": 10**700}, written)
    with pytest.raises(NotSerializableError, match=r"\b255\b"):
        safe_load(written)


class Attributes(dict[str, Any]):
    """As Lightning's ``AttributeDict``, which models keep among their hyperparameters."""


def test_a_dictionary_of_another_class_is_inert_with_its_items() -> None:
    saved, buffer = Attributes(width=3, kind=Attributes(path=PosixPath("a"))), io.BytesIO()
    saved["itself"] = saved
    saved.note = "of its own"  # type: ignore[attr-defined]
    torch.save({"hyper_parameters": saved, "step": 5}, buffer)
    buffer.seek(0)
    loaded = safe_load(buffer)
    found = loaded["hyper_parameters"]
    assert loaded["step"] == 5
    assert isinstance(found, Placeholder)
    _, held, state = parts_of(found)
    assert (held["width"], held["itself"], state) == (3, found, {"note": "of its own"})
    assert parts_of(held["kind"])[1] == {"path": PosixPath("a")}
    with pytest.raises(NotSerializableError):
        found["width"] = 4


def test_a_container_may_hold_itself() -> None:
    value: Any = collections.deque()
    value.append({"me": value, "again": [np.float32(1), value]})
    written = io.BytesIO()
    torch.save(value, written)
    found = safe_load(written)
    assert found[0]["me"] is found is found[0]["again"][1]
    assert found[0]["again"][0] == np.float32(1)


# -- beside other threads ---------------------------------------------------------------------------------------------


def test_a_load_changes_nothing_that_other_threads_share() -> None:
    users: list[Any] = [*NUMPYS, (threading.Event, "a.B")]
    numbers, ours = io.BytesIO(), io.BytesIO()
    torch.save({"x": np.arange(4.0)}, numbers)
    torch.save({"x": [np.float64(1)], "sparse": torch.eye(3).to_sparse(), **{str(at): None for at in range(999)}}, ours)
    done = threading.Event()
    found: list[Any] = []
    others: list[Any] = []

    def read() -> None:
        try:
            found.extend(safe_load(io.BytesIO(ours.getvalue()))["x"][0] for _ in range(60))
        finally:
            done.set()

    with torch.serialization.safe_globals(users):
        before = set(torch.serialization.get_safe_globals())
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        while not done.is_set():
            others.append(torch.load(io.BytesIO(numbers.getvalue()), weights_only=True)["x"])
            assert set(torch.serialization.get_safe_globals()) == before
            assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()
        for thread in threads:
            thread.join()
    assert {type(value) for value in others} == {np.ndarray}
    assert found == [np.float64(1)] * 120


# -- made up ----------------------------------------------------------------------------------------------------------


def test_pickles_made_up_at_random(seed: int) -> None:
    ends = hunt(seed, 1_000)
    assert min(ends["read"], ends["refused"]) > 200  # it is neither all noise nor all plain


@pytest.mark.soak
@pytest.mark.parametrize("part", range(20))
def test_many_pickles_made_up_at_random(part: int, seed: int) -> None:
    hunt(seed + part, 5_000)


def test_a_name_in_a_file_moves_no_cursor() -> None:
    found = safe_load(held(b"cm\nEvil\x1b[31m\n)\x81"))["x"]
    assert repr(found).isprintable()
    with pytest.raises(NotSerializableError) as caught:
        found()
    assert str(caught.value).isprintable()
