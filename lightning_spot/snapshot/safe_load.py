"""Loads a file of ``torch.save`` and runs nothing of what it names: an unpickler that imports nothing.

``torch.load(weights_only=True)`` refuses a file for one object of a class that it does not know, such as a
hyperparameter that nobody reads on a resume. Here a :class:`Placeholder` takes the place of each such object: it notes
its arguments and its state. Those of a few plain kinds (numbers of numpy, paths, dates, …) are values, made by
functions of ours that check every argument. What else is safe to call, torch says (its own list, and the user's
``add_safe_globals``).

A pickle is a program. What torch calls for one is safe to call, yet a few hundred bytes may ask for
``bytearray(2**33)``, or use as a key a tuple nested so deeply that Python's hash of it ends the process. So what may
make something of any size is called with what ``torch.save`` writes only, and of each tuple is known how deep it is,
and how many objects a walk through it meets.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import functools
import io
import itertools
import math
import pathlib
import pickle
import pickletools
import re
import reprlib
import struct
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import torch

from lightning_spot.errors import CorruptSnapshotError, NotSerializableError, SpotError
from lightning_spot.untrusted import plain

ADVICE = (
    "Name its class in torch.serialization.add_safe_globals before fit, or pass weights_only=False to trainer.fit, if"
    " you trust what wrote the snapshots; better keep plain values there"
)

SHORT = reprlib.Repr()
"""Describes what a file holds: the full ``repr`` of what holds one thing many times may have no end."""
SHORT.maxother = SHORT.maxstring = 120

_KEY = reprlib.Repr()
_KEY.maxother = _KEY.maxstring = 120
_KEY.maxlevel = 2
_LONGEST_PLACE = 1000


class Placeholder:
    """Stands for an object of a class that is not loaded. To use it raises :class:`NotSerializableError`.

    Args:
        kind: full name of its class, or of the function that makes it.
        parts: what the file has of it: arguments, state, items.
    """

    __slots__ = ("_kind", "_parts", "_where")

    def __init__(self, kind: str, *parts: Any) -> None:
        self._kind = kind
        self._parts = list(parts)
        self._where = ""

    @reprlib.recursive_repr()
    def __repr__(self) -> str:
        return f"<{plain(self._kind)}{''.join(f' {SHORT.repr(part)}' for part in self._parts)}, not loaded>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # python asks for these to find out what an object can do
        _refuse(self)


def _refuse(placeholder: Placeholder, *_: Any) -> NoReturn:
    where = f"{placeholder._where} of the snapshot" if placeholder._where else "what is used here"
    raise NotSerializableError(f"{plain(where)} is a {plain(placeholder._kind)}, which was not loaded. {ADVICE}")


for _operator in (
    *("__call__", "__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__bool__"),
    *("__int__", "__float__", "__index__", "__fspath__", "__enter__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__neg__"),
):
    setattr(Placeholder, _operator, _refuse)


def kind_of(placeholder: Placeholder) -> str:
    """Full name of the class, or of the function that makes the object."""
    return placeholder._kind


def parts_of(placeholder: Placeholder) -> list[Any]:
    """What the file has of the object: arguments, state, items."""
    return placeholder._parts


def placeholders_in(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Placeholder]]:
    """Each placeholder in a nested value, and its place; an object that contains one counts at its own place."""
    seen = set() if seen is None else seen
    if isinstance(value, Placeholder):
        yield path, value
        return
    if isinstance(value, (torch.Tensor, str, bytes, int, float)) or value is None or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key, item in value.items():
            yield from placeholders_in(key, f"a key of {path}", seen)
            shown = key[:_LONGEST_PLACE] if type(key) is str else _KEY.repr(key)
            yield from placeholders_in(item, _place(path, f".{shown}" if path else shown), seen)
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        for index, item in enumerate(value):
            yield from placeholders_in(item, _place(path, f"[{index}]"), seen)
    for name, item in ({} if isinstance(value, type) else getattr(value, "__dict__", {})).items():
        yield from placeholders_in(item, _place(path, f".{name}"), seen)


def _place(path: str, part: str) -> str:
    """Where a part of a value is: each level of a forged file may have the same long key."""
    return path + part if len(path) < _LONGEST_PLACE else path


def safe_load(
    file: IO[bytes] | str, map_location: str = "cpu", *, mapped: str = "", known: Sequence[Any] | None = None
) -> Any:
    """Load a file without running anything of a class that torch does not deem safe.

    Args:
        file: as ``torch.save`` wrote it; seekable. Of a path, tensors look at the mapped file, privately: a page is
            copied when it is written to.
        map_location: where tensors go; ``"meta"`` reads none of their bytes.
        mapped: path of a file that begins with the same bytes: tensors look at that, likewise.
        known: what the user deems safe; by default as torch knows it now.

    Returns:
        what was saved, with a :class:`Placeholder` for each object of another class. Each knows its place.

    Raises:
        NotSerializableError: if it holds an object that cannot be loaded that way.
        CorruptSnapshotError: if it is damaged or forged.
        NotImplementedError: if torch has a tensor of its kind not on ``"meta"``.
        MemoryError: if there is not enough memory for it.
        OSError: if the file cannot be read.
    """
    foreign: list[str] = []
    try:
        loaded = _load(file, map_location, mapped, _SafeNames(known, foreign))
        for where, placeholder in placeholders_in(loaded):
            placeholder._where = placeholder._where or where
    except (OSError, SpotError, MemoryError):
        raise
    except Exception as error:  # of a damaged or forged file, torch may raise anything
        if "DefaultCPUAllocator" in str(error):  # torch's only sign of it; such a file is as good as before
            raise MemoryError(str(error)) from error
        if map_location == "meta" and isinstance(error, NotImplementedError):  # a page, about torch's inside
            raise NotImplementedError("torch reads no quantized or nested tensor without its bytes") from error
        if foreign:  # such as a subclass of tensors, which torch cannot make of a placeholder
            raise NotSerializableError(
                f"the file is not read without objects that are not loaded: {', '.join(map(plain, foreign))}"
                f" ({type(error).__name__}: {plain(error)}). {ADVICE}"
            ) from error
        raise CorruptSnapshotError(
            f"the file cannot be read ({type(error).__name__}: {plain(error)}). It is damaged or forged, and not loaded"
        ) from error
    return loaded


def _load(file: IO[bytes] | str, map_location: str, mapped: str, names: _SafeNames) -> Any:
    """As ``torch.load`` does it, of a zip file, with an unpickler of ours; no other kind of file is read.

    Args:
        file: see :func:`safe_load`.
        map_location: likewise.
        mapped: likewise.
        names: what those in the file stand for.
    """
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        assert archive.fp is not None
        nbytes = archive.fp.seek(0, io.SEEK_END)
        archive.fp.seek(0)  # where torch begins
    inside = sum(record.file_size for record in records)
    if min((record.header_offset for record in records), default=0):  # Python and torch would see other records
        raise _refused("begins with something that is no record of it")
    if inside > nbytes:
        raise _refused(f"claims to hold {inside} bytes and has {nbytes}")
    names.left = max(_MOST_MET, _MOST_AGAIN * nbytes)
    mapped = file if isinstance(file, str) else mapped
    memory = torch.UntypedStorage.from_file(mapped, False, nbytes) if mapped else None
    return torch.serialization._load(  # type: ignore[no-untyped-call] # torch's
        torch._C.PyTorchFileReader(file),
        map_location,
        types.SimpleNamespace(Unpickler=type("Unpickler", (_Unpickler,), {"names": names})),
        overall_storage=memory,
        encoding="utf-8",
    )


def _refused(why: str) -> CorruptSnapshotError:
    return CorruptSnapshotError(f"the file {why}. It is damaged or forged, and is not loaded. Take another one")


# -- what names stand for ---------------------------------------------------------------------------------------------

_GROWS = re.compile(r"torch(\.\w+)*\.\w*(Tensor|Storage)")
"""What torch deems safe to call, and makes something of any size, or that may grow; ``torch.save`` calls none."""


class _SafeNames:
    """What each name in one file stands for, and what is called for it.

    A plain kind is made by us even where the user's list has its class, as torch's errors advise for numpy: its own
    constructors take bytes for pointers to objects, and torch would call them for any file.

    Args:
        known: what the user deems safe; ``None`` for what torch knows now.
        foreign: takes the names that neither torch nor the user nor we know.

    Attributes:
        users: classes and functions of the user's list.
        left: bytes that may still be made of what the file has already: it may ask for one thing again and again.
    """

    left = 0

    def __init__(self, known: Sequence[Any] | None, foreign: list[str]) -> None:
        self._foreign = foreign
        self._found: dict[str, Any] = {}
        self._calls: dict[int, Callable[..., Any]] = {}  # by the identity of what was found
        try:
            listed = torch.serialization.get_safe_globals() if known is None else known
            self._torchs: dict[str, Any] = torch._weights_only_unpickler._get_allowed_globals()
            for owner, name in ((torch.serialization, "_load"), (torch, _COO), (torch, _COMPRESSED)):
                getattr(owner, name)
        except AttributeError as error:
            raise SpotError(
                f"torch {torch.__version__} has another restricted unpickler ({error}). No snapshot is read, as none"
                " can be read safely. Install a torch that this version of lightning_spot was tested with"
            ) from error
        self.users = dict(
            (str(item[1]), item[0]) if isinstance(item, tuple) else (f"{item.__module__}.{item.__qualname__}", item)
            for item in listed
        )

    def find(self, name: str) -> Any:
        """A class, a function or a value that is safe; a placeholder for any other name."""
        if name not in self._found:
            self._found[name], call = self._look_up(name)
            if call is not None:
                self._calls[id(self._found[name])] = call
        return self._found[name]

    def _look_up(self, name: str) -> tuple[Any, Callable[..., Any] | None]:
        if name == "builtins.getattr":
            return Placeholder(name), self._nested
        if name == _DETOUR:
            return Placeholder(name), self._detour
        if name in _PLAIN or name.startswith(("numpy.ndarray", "numpy.dtype")):
            plain_kind = _PLAIN.get(name, _Plain())
            return plain_kind.value or Placeholder(name), functools.partial(_made, name, plain_kind.make)
        if name in self.users:
            return self.users[name], self.users[name]
        if name in self._torchs:
            known = self._torchs[name]
            is_called = callable(known) and not _GROWS.fullmatch(name)
            return known, _CHECKED.get(name, known) if is_called else None
        self._foreign.append(name)
        return Placeholder(name), None

    def call(self, called: Any, arguments: Any, *, is_new: bool = False) -> Any:
        """What a call makes; of a placeholder, a placeholder.

        Args:
            called: what :meth:`find` gave.
            arguments: a tuple, unless the file is forged.
            is_new: whether an object is made without ``__init__``.

        Raises:
            CorruptSnapshotError: if nothing that ``torch.save`` writes is called like that.
        """
        call = self._calls.get(id(called))
        if type(arguments) is not tuple or (call is None and type(called) is not Placeholder):
            raise _refused(f"calls {SHORT.repr(called)} in a way that torch.save does not write")
        if call is None:
            return Placeholder(called._kind, *called._parts, arguments)
        if is_new and call is called and isinstance(called, type) and not issubclass(called, torch.nn.Parameter):
            return called.__new__(called, *arguments)
        if call is torch._utils._rebuild_parameter_with_state:
            _check_state(arguments[-1])
        if call is not called:
            self.spend(arguments)
        return call(*arguments)

    def spend(self, values: tuple[Any, ...]) -> None:
        """Count what is copied of values.

        Raises:
            CorruptSnapshotError: if it is more than a file of this size has.
        """
        self.left -= sum(map(_nbytes_of, values))
        if self.left < 0:
            raise _refused("has the same made again and again")

    def _nested(self, owner: Any, name: Any) -> Any:
        """A class within a class."""
        if type(owner) is Placeholder and not owner._parts and type(name) is str:
            return self.find(f"{owner._kind}.{name}")
        return Placeholder("builtins.getattr", (owner, name))

    def _detour(self, called: Any, kind: Any, arguments: Any, state: Any) -> Any:
        """A subclass of tensors, or a tensor with attributes, of what a call makes."""
        if isinstance(called, type) or self._calls.get(id(called)) is _encoded:
            raise _refused(f"calls {SHORT.repr(called)} for a tensor")
        _check_state(state)
        made = self.call(called, arguments)
        return torch._tensor._rebuild_from_type_v2(lambda: made, kind, (), state)  # type: ignore[no-untyped-call] # torch's


_DETOUR = "torch._tensor._rebuild_from_type_v2"


def _nbytes_of(value: Any) -> int:
    if type(value) in (list, tuple, dict):
        return 8 * len(value)
    if type(value) is torch.Tensor and value.layout is torch.strided:
        return value.numel() * value.element_size()
    return len(value) if type(value) in (str, bytes, bytearray) else 0


def _made(name: str, make: Callable[..., Any] | None, *arguments: Any) -> Any:
    """A value of a plain kind; a placeholder, if its class does not write that."""
    with contextlib.suppress(Exception):  # whatever our checks, python's and numpy's raise: it stays inert
        if make is not None:
            return make(*arguments)
    return Placeholder(name, arguments)


# -- plain kinds: each checks its arguments, and takes no size --------------------------------------------------------


def _checked(make: Callable[..., Any], *kinds: type, least: int = 0) -> Callable[..., Any]:
    """A constructor that takes arguments of just these classes, and at least so many of them."""

    def checked(*arguments: Any) -> Any:
        of_kinds = all(kind in (object, type(value)) for value, kind in zip(arguments, kinds, strict=False))
        if not (of_kinds and least <= len(arguments) <= len(kinds)):
            raise TypeError("these arguments are not those that its class writes")
        return make(*arguments)

    return checked


def _date(state: bytes) -> datetime.date:
    return datetime.date(*struct.unpack(">HBB", state))


def _datetime(state: bytes) -> datetime.datetime:
    seconds = datetime.datetime(*struct.unpack(">H5B", state[:7]))
    return seconds.replace(microsecond=int.from_bytes(state[7:10], "big"))


def _deque(items: Any = (), maxlen: int | None = None) -> collections.deque[Any]:
    if items not in ((), []) or type(maxlen) not in (int, type(None)):
        raise TypeError("no deque writes this")
    return collections.deque(maxlen=maxlen)


_MOST_FOLDERS = 2048  # in a path, which has 4096 characters at most

_FACTORIES: tuple[type, ...] = (
    *(bool, bytes, dict, float, frozenset, int, list, set, str, tuple),
    *(collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque),
)


def _defaultdict(factory: Any = None) -> collections.defaultdict[Any, Any]:
    if factory is not None and factory not in _FACTORIES:
        raise TypeError("a factory that is not loaded")
    return collections.defaultdict(factory)


_CODE = re.compile(r"b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[mM]8|[SU]\d{1,9}")
_UNITS = frozenset(["Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"])
_MOST_EMPTY = 2**20
"""Most rows of an array without a number: a list of them is made of nothing."""


def _dtype(code: str, align: bool, copy: bool, state: tuple[Any, ...]) -> np.dtype[Any]:
    """A dtype of plain numbers, texts or times. Of its state, order and unit count; flags are never handed to numpy."""
    _version, order, *form, itemsize, _alignment, _flags = state[:8]
    if not _CODE.fullmatch(code) or tuple(form) != (None,) * 3 or order not in ("<", ">", "=", "|"):
        raise TypeError("a dtype that is not plain")
    unit = ""
    if code in ("m8", "M8"):
        name, count, divisor, _events = state[8][1]
        name = name.decode() if isinstance(name, bytes) else name
        if name not in _UNITS or type(count) is not int or divisor != 1:
            raise TypeError("no unit of time")
        unit = "" if name == "generic" else f"[{count}{name}]"
    made = np.dtype(f"{order}{code}{unit}")
    if itemsize not in (-1, made.itemsize):
        raise TypeError("a dtype of another size")
    return made


def _array(kind: Any, _shape: Any, _code: Any, state: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    _version, shape, dtype, is_fortran, raw = state
    is_shape = type(shape) is tuple and {int}.issuperset(map(type, shape))
    if kind is not np.ndarray or not isinstance(dtype, np.dtype) or not is_shape or type(raw) is not bytes:
        raise TypeError("an array that is not plain")
    if dtype.kind == "b" and raw.strip(b"\0\1"):
        raise ValueError("truth values other than 0 and 1, of which numpy miscounts")
    if dtype.kind == "U" and raw and np.frombuffer(raw, f"{dtype.byteorder}u4").max() > 0x10FFFF:
        raise ValueError("no text")
    if min(shape, default=0) < 0 or (not raw and math.prod(itertools.takewhile(bool, shape)) > _MOST_EMPTY):
        raise ValueError("a shape that nothing has")
    flat = np.frombuffer(raw, dtype) if raw else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if is_fortran else "C").copy(order="K")


def _scalar(dtype: np.dtype[Any], raw: bytes) -> Any:
    if isinstance(dtype, np.dtype) and dtype.itemsize == 0 and raw == b"":
        return dtype.type()  # an empty text
    return _array(np.ndarray, None, None, (1, (), dtype, False, raw))[()]


class _Plain(NamedTuple):
    """What a name of a plain kind stands for.

    Attributes:
        value: the class, where it is a value itself, such as a hyperparameter ``kind=float``.
        make: makes a value of the arguments of a call.
        make_stated: makes it of these and of the state that follows, which tells all.
    """

    value: type | None = None
    make: Callable[..., Any] | None = None
    make_stated: Callable[..., Any] | None = None


_PLAIN: dict[str, _Plain] = {
    **{f"builtins.{kind.__name__}": _Plain(kind) for kind in (bool, dict, float, int, list, str, tuple)},
    "builtins.bytes": _Plain(bytes, _checked(bytes)),
    "builtins.frozenset": _Plain(frozenset, _checked(frozenset, list, least=1)),
    "builtins.range": _Plain(range, _checked(range, int, int, int, least=3)),
    "builtins.slice": _Plain(slice, _checked(slice, object, object, object, least=3)),
    "collections.defaultdict": _Plain(collections.defaultdict, _defaultdict),
    "collections.deque": _Plain(collections.deque, _deque),
    "datetime.date": _Plain(datetime.date, _checked(_date, bytes, least=1)),
    "datetime.datetime": _Plain(datetime.datetime, _checked(_datetime, bytes, least=1)),
    "datetime.timedelta": _Plain(datetime.timedelta, _checked(datetime.timedelta, int, int, int, least=3)),
    "decimal.Decimal": _Plain(decimal.Decimal, _checked(decimal.Decimal, str, least=1)),
    **{
        f"pathlib.{local}{kind.__name__}": _Plain(kind, _checked(kind, *[str] * _MOST_FOLDERS))
        for kind in (pathlib.PosixPath, pathlib.PurePosixPath)
        for local in ("", "_local.")
    },
    "numpy.dtype": _Plain(np.dtype, None, _dtype),
    "numpy.ndarray": _Plain(np.ndarray),
    **{f"numpy.{core}.multiarray.scalar": _Plain(None, _scalar) for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": _Plain(None, None, _array) for core in ("core", "_core")},
}
"""Kinds of which we make values ourselves; numbers and the like have opcodes of their own."""


# -- the unpickler ----------------------------------------------------------------------------------------------------

_DEEPEST = 500
_MOST_AGAIN = 16
"""How often, in the mean, a byte of a long pickle may be met in a walk through one tuple."""
_MOST_MET = 1_000_000
"""How many objects may be met in a walk through one tuple of a short pickle."""


class _Opcodes(dict[int, Callable[[Any], None]]):
    """What is done for each opcode that ``torch.save`` writes."""

    def __missing__(self, opcode: int) -> NoReturn:
        name = next((each.name for each in pickletools.opcodes if each.code == chr(opcode)), f"{opcode:#x}")
        raise NotSerializableError(
            f"the file has the opcode {name}, which torch.load does not read, either. It is not loaded. Save it"
            " without pickle_protocol, and an integer of more than 255 bytes as text"
        )


class _Unpickler(pickle._Unpickler):
    """Makes what is safe, and placeholders.

    Attributes:
        names: what those in the file stand for.
    """

    names: _SafeNames
    stack: list[Any]  # this and what follows are python's
    memo: dict[int, Any]
    append: Callable[[Any], None]
    load_build: Callable[[], None]

    def __init__(self, file: io.BytesIO, **named: Any) -> None:
        super().__init__(file, **named)
        self._most_met = self._left = max(_MOST_MET, _MOST_AGAIN * file.getbuffer().nbytes)
        self._extents: dict[int, tuple[Any, int, int]] = {}  # of objects: themselves, how deep, and how many are met
        self._places: dict[int, list[int]] = {}  # in the memo, of placeholders

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for, which may be one of Python 2."""
        module, name = torch._utils.NAME_MAPPING.get((module, name), (module, name))
        return self.names.find(f"{torch._utils.IMPORT_MAPPING.get(module, module)}.{name}")

    def _tuple(self, items: list[Any]) -> None:
        self._push(tuple(items), *self._around(items))

    def _around(self, items: list[Any]) -> tuple[int, int]:
        """How deep what holds these items is, and how many are met in it."""
        extents = [self._extent(item) for item in items]
        depth = 1 + max((depth for depth, _ in extents), default=0)
        met = 1 + sum(met for _, met in extents)
        if depth > _DEEPEST or met > self._most_met:
            raise _refused(f"nests tuples {depth} deep, with {met} items")
        return depth, met

    def _walk(self, keys: list[Any]) -> None:
        """Count what is met where keys are hashed and compared."""
        self._left -= sum(self._extent(key)[1] for key in keys)
        if self._left < 0:
            raise _refused("has the same keys again and again")

    def _extent(self, value: Any) -> tuple[int, int]:
        return self._extents[id(value)][1:] if id(value) in self._extents else (0, 1)

    def _push(self, value: Any, depth: int, met: int) -> None:
        self._extents[id(value)] = value, depth, met
        self.append(value)

    def _pop(self, number: int) -> list[Any]:
        items = self.stack[len(self.stack) - number :]
        del self.stack[len(self.stack) - number :]
        return items

    def _call(self, *, is_new: bool) -> None:
        called, arguments = self._pop(2)
        extent = self._extent(arguments)
        if (called is set or called is frozenset) and type(arguments) is tuple and [*map(type, arguments)] == [list]:
            self._walk(arguments[0])
            extent = self._around(arguments[0])
        self._push(self.names.call(called, arguments, is_new=is_new), *extent)

    def _storage(self) -> None:
        (place,) = self._pop(1)
        kinds = [*map(type, place)] if type(place) is tuple else []
        if kinds[:1] + kinds[2:] != [str, str, str, int]:  # torch would make a text of any other one
            raise _refused("names a storage in a way that torch.save does not write")
        self.append(self.persistent_load(place))

    def _build(self) -> None:
        if type(self.stack[-2]) in self.names.users.values():
            self.load_build()
            return
        (state,) = self._pop(1)
        made = self.stack[-1]
        if type(made) is Placeholder:
            made._parts.append(state)
            self._replace(made)
        elif type(made) is collections.OrderedDict and type(state) is dict:
            vars(made).update(state)
        else:
            raise _refused("gives a state that torch.save does not write")

    def _replace(self, placeholder: Placeholder) -> None:
        """Put a value in the place of what stood for it until its state was known."""
        make = _PLAIN.get(placeholder._kind, _Plain()).make_stated
        if make is None or len(placeholder._parts) != 2:
            return
        arguments, state = placeholder._parts
        self.names.spend(state if type(state) is tuple else ())
        try:
            value = make(*arguments, state)
        except Exception:  # see _made
            return
        self.stack[-1] = value
        for place in self._places.get(id(placeholder), ()):
            self.memo[place] = value

    def _put(self, place: int) -> None:
        self.memo[place] = value = self.stack[-1]
        if type(value) is Placeholder:
            self._places.setdefault(id(value), []).append(place)

    def _extend(self, items: list[Any]) -> None:
        self._target(list, collections.deque).extend(items)

    def _update(self, items: list[Any]) -> None:
        target = self._target(dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
        self._walk(items[::2])
        for key, item in zip(items[::2], items[1::2], strict=True):
            target[key] = item  # a Counter would count them in update()

    def _target(self, *kinds: type) -> Any:
        """What takes items: itself, or of a placeholder a container of the first kind."""
        target = self.stack[-1]
        if type(target) is Placeholder:
            if not target._parts or type(target._parts[-1]) is not kinds[0]:
                target._parts.append(kinds[0]())
            return target._parts[-1]
        if type(target) not in kinds:
            raise _refused(f"puts items into a {type(target).__name__}")
        return target

    dispatch: ClassVar = _Opcodes(
        {
            **{
                opcode[0]: pickle._Unpickler.dispatch[opcode[0]]
                for opcode in (
                    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
                    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE),
                    *(pickle.SHORT_BINSTRING, pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET),
                    *(pickle.GLOBAL, pickle.BINGET, pickle.LONG_BINGET),
                )
            },
            pickle.EMPTY_TUPLE[0]: lambda self: self._tuple([]),
            pickle.TUPLE1[0]: lambda self: self._tuple(self._pop(1)),
            pickle.TUPLE2[0]: lambda self: self._tuple(self._pop(2)),
            pickle.TUPLE3[0]: lambda self: self._tuple(self._pop(3)),
            pickle.TUPLE[0]: lambda self: self._tuple(self.pop_mark()),
            pickle.BINPERSID[0]: lambda self: self._storage(),
            pickle.APPEND[0]: lambda self: self._extend(self._pop(1)),
            pickle.APPENDS[0]: lambda self: self._extend(self.pop_mark()),
            pickle.SETITEM[0]: lambda self: self._update(self._pop(2)),
            pickle.SETITEMS[0]: lambda self: self._update(self.pop_mark()),
            pickle.REDUCE[0]: lambda self: self._call(is_new=False),
            pickle.NEWOBJ[0]: lambda self: self._call(is_new=True),
            pickle.BUILD[0]: lambda self: self._build(),
            pickle.BINPUT[0]: lambda self: self._put(self.read(1)[0]),
            pickle.LONG_BINPUT[0]: lambda self: self._put(int.from_bytes(self.read(4), "little")),
        }
    )


# -- of tensors that are in the file ----------------------------------------------------------------------------------


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


def _quantized(storage: Any, offset: Any, size: Any, stride: Any, kind: Any, *more: Any) -> torch.Tensor:
    """A quantized tensor; what else its size and its kind may be, torch would show in an error, and may have no end."""
    if not {int}.issuperset(map(type, size)) or not isinstance(kind[0], torch.qscheme):
        raise TypeError("a size that no tensor has, or a quantisation that is none")
    return _whole(torch._utils._rebuild_qtensor)(storage, offset, size, stride, kind, *more)


def _check_state(state: Any) -> None:
    if isinstance(state, tuple) and len(state) != 2:
        raise TypeError("a state that no tensor has")  # torch would show it, and it may have no end


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


# -- what torch deems safe, called with what torch.save writes only ---------------------------------------------------


def _encoded(value: Any, encoding: Any) -> bytes:
    if type(value) is not str or encoding != "latin1":
        raise TypeError("bytes that are not written as text in latin1")
    return value.encode("latin1")


_CHECKED: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _encoded,
    "builtins.bytearray": _checked(bytearray, bytes),
    "builtins.set": _checked(set, list),
    "collections.Counter": _checked(collections.Counter, dict),
    "collections.OrderedDict": _checked(collections.OrderedDict),
    "torch.Size": _checked(torch.Size, tuple),
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse_tensor,
    # These copy tensors that they are given, or walk through them: one number of the file may be an item without end.
    **{
        f"torch._utils._rebuild_{kind}": _whole(getattr(torch._utils, f"_rebuild_{kind}"))
        for kind in ("device_tensor_from_cpu_tensor", "nested_tensor")
    },
}
