"""Loads a file of ``torch.save`` and runs nothing of what it names: torch's restricted unpickler with inert stand-ins.

``torch.load(weights_only=True)`` refuses a file for one object of a class that it does not know, such as a
hyperparameter that nobody reads on a resume. Here a stand-in takes the place of each name that torch does not know: it
notes its arguments and its state, and nothing is imported or called. Afterwards those of a few plain kinds (numbers of
numpy, paths, dates, …) become values, by functions of ours that check every argument; all others stay a
:class:`Placeholder`. What else is safe, torch says (its own list, and the user's ``add_safe_globals``).

A pickle is a program. What torch calls for one is safe to call, yet a few hundred bytes may ask for
``bytearray(2**33)``, or use as a key a tuple nested so deeply that Python's hash of it ends the process. So the program
is followed before it is run: of each object that it would make no more is known than what it is made of, how deep, and
how many objects a walk through it meets.

Another thread may load with ``torch.load(weights_only=True)`` meanwhile, such as one that reads data: torch's list
stays as it is. Nothing of torch says what else is safe to one load, so the functions of its unpickler that look names
up are made again here, with the same code, and find ours.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import io
import itertools
import math
import os
import pathlib
import pickletools
import re
import reprlib
import types
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pickle import UnpicklingError
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np
import torch

from lightning_spot.errors import CorruptSnapshotError, NotSerializableError, SpotError
from lightning_spot.untrusted import LONGEST_TEXT, plain

ADVICE = (
    "Name its class in torch.serialization.add_safe_globals before fit, or pass weights_only=False to trainer.fit, if"
    " you trust what wrote the snapshots; better keep plain values there"
)

SHORT = reprlib.Repr()
"""Describes what a file holds: the full ``repr`` of what holds one thing many times may have no end."""
SHORT.maxother = SHORT.maxstring = 120


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
        return f"<{self._kind}{''.join(f' {SHORT.repr(part)}' for part in self._parts)}, not loaded>"

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
            yield from placeholders_in(item, f"{path}.{key}" if path else str(key), seen)
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        for index, item in enumerate(value):
            yield from placeholders_in(item, f"{path}[{index}]", seen)
    for name, item in ({} if isinstance(value, type) else getattr(value, "__dict__", {})).items():
        yield from placeholders_in(item, f"{path}.{name}", seen)


def _remember_places(value: Any) -> None:
    """Have each placeholder in a nested value know where it is, for the error that its use raises."""
    for where, placeholder in placeholders_in(value):
        placeholder._where = placeholder._where or where


def safe_load(file: IO[bytes] | str, map_location: str = "cpu", *, mapped: str = "") -> Any:
    """Load a file without running anything of a class that torch does not deem safe.

    Args:
        file: as ``torch.save`` wrote it; seekable. Of a path, tensors look at the mapped file, privately: a page is
            copied when it is written to.
        map_location: where tensors go; ``"meta"`` reads none of their bytes.
        mapped: path of a file that begins with the same bytes: tensors look at that, likewise.

    Returns:
        what was saved, with a :class:`Placeholder` for each object of another class. Each knows its place.

    Raises:
        NotSerializableError: if it holds an object that cannot be loaded that way.
        CorruptSnapshotError: if it is damaged or forged.
        NotImplementedError: if torch has a tensor of its kind not on ``"meta"``.
        MemoryError: if there is not enough memory for it.
        OSError: if the file cannot be read.
    """
    stand_ins = _StandIns()
    try:
        _check_bounds(file)
        loaded = _Settling(stand_ins).settled(_restricted_load(file, map_location, stand_ins, mapped))
        if stand_ins.kinds:
            _remember_places(loaded)
    except (OSError, SpotError, MemoryError):
        raise
    except UnpicklingError as error:
        raise NotSerializableError(
            f"the file holds an object that cannot be read safely ({plain(error, LONGEST_TEXT)}). {ADVICE}"
        ) from error
    except Exception as error:  # of a damaged or forged file, torch may raise anything
        if "DefaultCPUAllocator" in str(error):  # torch's only sign of it; such a file is as good as before
            raise MemoryError(str(error)) from error
        if map_location == "meta" and isinstance(error, NotImplementedError):  # a page, about torch's inside
            raise NotImplementedError("torch reads no quantized or nested tensor without its bytes") from error
        if stand_ins.kinds:  # such as a subclass of tensors, which torch cannot make of a stand-in
            raise NotSerializableError(
                f"the file is not read without objects that are not loaded: {', '.join(map(plain, stand_ins.kinds))}"
                f" ({type(error).__name__}: {plain(error)}). {ADVICE}"
            ) from error
        raise CorruptSnapshotError(
            f"the file cannot be read ({type(error).__name__}: {plain(error)}). It is damaged or forged, and not loaded"
        ) from error
    return loaded


class _StandIns(dict[str, Any]):
    """What each name in one file stands for: a class of the user's list, or one that is made when it is asked for.

    A plain kind is read by us even where the user's list has its class, as torch's errors advise for numpy: its own
    constructors take bytes for pointers to objects, and torch would call them for any file.
    """

    def __init__(self) -> None:
        known = ((_name(item), item) for item in torch.serialization.get_safe_globals())
        super().__init__(
            {name: item[0] if isinstance(item, tuple) else item for name, item in known if not _is_ours(name)}
        )
        self.kinds: dict[str, type[_StandIn]] = {}
        self.containers: dict[int, tuple[Any, _StandIn]] = {}
        """Lists and dictionaries that stand for a deque or a defaultdict: torch adds to no others. By their ``id``."""

    def __contains__(self, _: object) -> bool:
        return True

    def __missing__(self, name: str) -> type[_StandIn]:
        module, _, short = name.rpartition(".")
        body = {"__slots__": (), "__module__": module, "_name": name, "_all": self}
        self[name] = self.kinds[name] = type(short, (_StandIn,), body)
        return self.kinds[name]


def _is_ours(name: str) -> bool:
    return name in _VALUES or name.startswith(("numpy.ndarray", "numpy.dtype"))


def _name(item: Any) -> str:
    """Of an entry of torch's list of safe names: its name in pickles."""
    return str(item[1]) if isinstance(item, tuple) else f"{item.__module__}.{item.__qualname__}"


class _StandIn(Placeholder):
    """Takes the place of one class while a file is loaded; a class is made of it for each name."""

    __slots__ = ()
    _name = ""
    _all: _StandIns

    def __new__(cls, *arguments: Any) -> Any:
        if cls._name == "builtins.getattr" and _is_stand_in(arguments[0]):  # a class within a class
            return cls._all[f"{arguments[0]._name}.{arguments[1]}"]
        made = object.__new__(cls)
        Placeholder.__init__(made, cls._name, arguments)
        if (container := _CONTAINERS.get(cls._name)) is None:
            return made
        stands = container()
        cls._all.containers[id(stands)] = stands, made
        return stands

    def __init__(self, *_: Any) -> None:
        """Nothing is left to do."""

    def __setstate__(self, state: Any) -> None:
        parts_of(self).append(state)

    def __setitem__(self, key: Any, item: Any) -> None:
        """It is a dictionary of another class; its items come before its state."""
        parts = parts_of(self)
        if len(parts) == 1:
            parts.append({})
        if type(parts[1]) is not dict:
            raise TypeError("items after a state")
        parts[1][key] = item


def _is_stand_in(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, _StandIn)


class _Settling:
    """Puts values in place of stand-ins, in all that was loaded; each object is looked at once."""

    def __init__(self, stand_ins: _StandIns) -> None:
        self._containers = stand_ins.containers
        self._done: dict[int, tuple[Any, Any]] = {}  # with the object itself, so that its id stays its own

    def settled(self, value: Any) -> Any:
        """The value without stand-ins: containers are changed in place, tuples made again."""
        if isinstance(value, (str, bytes, int, float, complex)) or value is None:
            return value
        if id(value) not in self._done:
            self._done[id(value)] = value, value  # of a tuple or a stand-in that holds itself, this is all there is
            self._done[id(value)] = value, self._settle(value)
        return self._done[id(value)][1]

    def _settle(self, value: Any) -> Any:
        if _is_stand_in(value):
            return _CLASSES[value._name] if value._name in _CLASSES else Placeholder(value._name)
        if isinstance(value, Placeholder):
            return self._value(value)
        if (known := self._containers.get(id(value))) is not None:
            return self._fill(value, known[1])
        if isinstance(value, tuple):
            items = [self.settled(item) for item in value]
            return tuple.__new__(type(value), items) if _differ(items, value) else value
        if isinstance(value, dict):
            self._settle_items(value)
        elif isinstance(value, (list, set)):
            items = [self.settled(item) for item in value]
            if _differ(items, value):
                value.clear()
                value.extend(items) if isinstance(value, list) else value.update(items)
        if not isinstance(value, (type, types.FunctionType)):  # those are torch's, or the user's
            self.settled(getattr(value, "__dict__", None))
        return value

    def _settle_items(self, value: dict[Any, Any]) -> None:
        keys, items = ([self.settled(item) for item in half] for half in (value.keys(), value.values()))
        if _differ(keys, value.keys()) or _differ(items, value.values()):
            value.clear()
            for key, item in zip(keys, items, strict=True):
                value[key] = item  # noqa: PERF403 # a Counter would count them in update()

    def _value(self, placeholder: Placeholder) -> Any:
        """The plain value that it stands for; itself, if it is none, or none as its class writes it."""
        parts = parts_of(placeholder)
        parts[:] = [self.settled(part) for part in parts]
        placeholder.__class__ = Placeholder  # from now on one like all others, which can be pickled
        make = _VALUES.get(kind_of(placeholder))
        if make is None or len(parts) > 2:
            return placeholder
        try:
            return make(*parts[0], **({"state": parts[1]} if parts[1:] else {}))
        except Exception:  # whatever our checks, python's and numpy's raise: it stays inert
            return placeholder

    def _fill(self, content: list[Any] | dict[Any, Any], stands: Placeholder) -> Any:
        """The deque or the defaultdict of which the file has this content."""
        made = self._value(stands)
        self._done[id(content)] = content, made  # it may hold itself
        settled: Any
        if isinstance(content, dict):
            settled = {self.settled(key): self.settled(item) for key, item in content.items()}
        else:
            settled = [self.settled(item) for item in content]
        if isinstance(made, Placeholder):
            parts_of(made).append(settled)
        elif isinstance(made, dict):
            made.update(settled)
        else:
            made.extend(settled)
        return made


def _differ(new: Any, old: Any) -> bool:
    return any(one is not other for one, other in zip(new, old, strict=True))


# -- plain kinds: each checks its arguments, and takes no size --------------------------------------------------------


def _checked(make: Callable[..., Any], *kinds: type, least: int = 0) -> Callable[..., Any]:
    """A constructor that takes arguments of just these classes, and at least so many of them."""

    def checked(*arguments: Any) -> Any:
        if not least <= len(arguments) <= len(kinds) or any(map(_is_no, arguments, kinds)):
            raise TypeError("these arguments are not those that its class writes")
        return make(*arguments)

    return checked


def _is_no(value: Any, kind: type) -> bool:
    return kind is not object and type(value) is not kind


def _path(kind: type[pathlib.PurePath]) -> Callable[..., Any]:
    return lambda *parts: kind(*map(_text, parts))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("no text")
    return value


def _date(state: bytes) -> datetime.date:
    year, month, day = state[0] << 8 | state[1], *state[2:]
    return datetime.date(year, month, day)


def _datetime(state: bytes) -> datetime.datetime:
    year, microsecond = (int.from_bytes(part, "big") for part in (state[:2], state[7:10]))
    month, day, hour, minute, second = state[2:7]
    return datetime.datetime(year, month, day, hour, minute, second, microsecond)


def _deque(items: Any = (), maxlen: int | None = None) -> collections.deque[Any]:
    if items not in ((), []) or type(maxlen) not in (int, type(None)):
        raise TypeError("no deque writes this")
    return collections.deque(maxlen=maxlen)


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
_NO_FIELDS = (None, None, None)
_MOST_EMPTY = 2**20
"""Most rows of an array without a number: a list of them is made of nothing."""

_AS_IT_IS = (3, "=", *_NO_FIELDS, -1, -1, 0)


def _dtype(code: str, align: bool, copy: bool, state: tuple[Any, ...] = _AS_IT_IS) -> np.dtype[Any]:
    """A dtype of plain numbers, texts or times. Of its state, order and unit count; flags are never handed to numpy."""
    _version, order, *form, itemsize, _alignment, _flags = state[:8]
    if not _CODE.fullmatch(code) or tuple(form) != _NO_FIELDS or order not in ("<", ">", "=", "|"):
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
    if kind is not np.ndarray or not isinstance(dtype, np.dtype) or type(shape) is not tuple or type(raw) is not bytes:
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


_CONTAINERS: dict[str, type] = {"collections.deque": list, "collections.defaultdict": dict}
_VALUES: dict[str, Callable[..., Any]] = {
    "builtins.bytes": _checked(bytes),
    "builtins.frozenset": _checked(frozenset, list, least=1),
    "builtins.range": _checked(range, int, int, int, least=3),
    "builtins.slice": _checked(slice, object, object, object, least=3),
    "collections.defaultdict": _defaultdict,
    "collections.deque": _deque,
    "datetime.date": _checked(_date, bytes, least=1),
    "datetime.datetime": _checked(_datetime, bytes, least=1),
    "datetime.timedelta": _checked(datetime.timedelta, int, int, int, least=3),
    "decimal.Decimal": _checked(decimal.Decimal, str, least=1),
    "numpy.dtype": _dtype,
    **{f"pathlib.{local}PosixPath": _path(pathlib.PosixPath) for local in ("", "_local.")},
    **{f"pathlib.{local}PurePosixPath": _path(pathlib.PurePosixPath) for local in ("", "_local.")},
    **{f"numpy.{core}.multiarray._reconstruct": _array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}
_CLASSES: dict[str, type] = {
    **{f"builtins.{kind.__name__}": kind for kind in (bool, bytes, dict, float, frozenset, int, list)},
    **{f"builtins.{kind.__name__}": kind for kind in (range, slice, str, tuple)},
    **{f"collections.{kind.__name__}": kind for kind in (collections.defaultdict, collections.deque)},
    **{f"datetime.{kind.__name__}": kind for kind in (datetime.date, datetime.datetime, datetime.timedelta)},
    "decimal.Decimal": decimal.Decimal,
    **{f"pathlib.{local}PosixPath": pathlib.PosixPath for local in ("", "_local.")},
    **{f"pathlib.{local}PurePosixPath": pathlib.PurePosixPath for local in ("", "_local.")},
    "numpy.dtype": np.dtype,
    "numpy.ndarray": np.ndarray,
}
"""Classes that are values themselves, such as a hyperparameter ``kind=float``."""


# -- what a pickle would have the unpickler do, followed before it is run ---------------------------------------------


_DEEPEST = 500
_MOST_AGAIN = 16
"""How often, in the mean, a byte of a long pickle may be met in a walk through one tuple."""
_MOST_MET = 1_000_000
"""How many objects may be met in a walk through one tuple of a short pickle."""

_GROWS = re.compile(r"torch(\.\w+)*\.\w*(Tensor|Storage)")
"""What torch deems safe to call, and makes something of any size, or that may grow; ``torch.save`` calls none."""

_FILLED = {
    "builtins.bytearray": ("text", "latin1", "bytes"),
    "builtins.set": ("list",),
    "collections.Counter": ("dict",),
    "collections.OrderedDict": (),
    "torch.Size": ("tuple",),
}
"""What may fill an object that takes all that can be walked through: a tensor of few bytes may have endless items."""

_DETOUR = "torch._tensor._rebuild_from_type_v2"
_OF_TORCH = ("torch.", "collections.")
_EMPTY_OPS = {"EMPTY_DICT": "dict", "EMPTY_LIST": "list", "EMPTY_SET": "set"}
_PLAIN_OPS = ("BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE", "SHORT_BINSTRING", "BININT", "BININT1", "BININT2", "LONG1")
_PUSH_OPS = frozenset([*_PLAIN_OPS, *_EMPTY_OPS, "BINGET", "LONG_BINGET", "BINUNICODE", "GLOBAL"])
_TUPLE_OPS = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_POP_OPS = {"APPEND": 1, "BUILD": 1, "SETITEM": 2}


class _Made(NamedTuple):
    """An object that a pickle would make.

    Attributes:
        kind: ``"text"``, ``"latin1"`` (that text), ``"bytes"``, ``"tuple"``, ``"list"``, ``"dict"``, ``"set"``,
            ``"made"`` (by what torch deems safe), a full name, or ``""`` for anything else.
        items: kinds of the items of a tuple.
        depth: of tuples in it.
        met: how many objects a walk through it meets.
    """

    kind: str
    items: tuple[str, ...] = ()
    depth: int = 0
    met: int = 1


def _check_bounds(file: IO[bytes] | str) -> None:
    """Refuse a file of ``torch.save`` that asks for more than it is; its place in the end is its beginning.

    Raises:
        CorruptSnapshotError: saying what it asks for.
        NotSerializableError: if it is written in another protocol than ours.
    """
    with zipfile.ZipFile(file) as archive:
        inside = sum(record.file_size for record in archive.infolist())
    if inside > (nbytes := _nbytes(file)):
        raise _refused(f"claims to hold {inside} bytes and has {nbytes}")
    pickled = torch._C.PyTorchFileReader(file).get_record("data.pkl")  # the very bytes that torch will read
    if not isinstance(file, str):
        file.seek(0)
    _follow(pickled)


def _nbytes(file: IO[bytes] | str) -> int:
    """Length of a file, which is at its beginning then."""
    if isinstance(file, str):
        return os.path.getsize(file)
    file.seek(0, io.SEEK_END)
    nbytes = file.tell()
    file.seek(0)
    return nbytes


def _follow(pickled: bytes) -> None:
    stack: list[_Made] = []
    marked: list[list[_Made]] = []
    memo: dict[int, _Made] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in _PUSH_OPS:
            stack.append(_pushed(name, argument, memo))
        elif name == "MARK":
            marked.append(stack)
            stack = []
        elif name == "TUPLE":
            items, stack = stack, marked.pop()
            stack.append(_tuple(items, len(pickled)))
        elif name in _TUPLE_OPS:
            first = len(stack) - _TUPLE_OPS[name]
            stack[first:] = [_tuple(stack[first:], len(pickled))]
        elif name in ("APPENDS", "SETITEMS"):
            stack = marked.pop()
        elif name in _POP_OPS:
            _check_state(name, stack)
            del stack[-_POP_OPS[name] :]
        elif name == "BINPERSID":
            stack[-1] = _Made("made")
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, called = stack.pop(), stack.pop()
            stack.append(_call(called, arguments))
        elif name not in ("PROTO", "STOP"):
            raise _not_written(name)


def _check_state(name: str, stack: list[_Made]) -> None:
    if name == "BUILD" and stack[-2].kind == "made" and stack[-1].kind not in ("dict", "list", "tuple"):
        raise _refused("gives a state that torch.save does not write")


def _pushed(name: str, argument: Any, memo: Mapping[int, _Made]) -> _Made:
    """What an opcode of ``_PUSH_OPS`` puts on the stack."""
    if name in ("BINGET", "LONG_BINGET"):
        return memo[argument]
    if name == "BINUNICODE":
        return _Made("latin1" if argument == "latin1" else "text")
    return _Made(_global(argument)) if name == "GLOBAL" else _Made(_EMPTY_OPS.get(name, ""))


def _not_written(name: str) -> NotSerializableError:
    """The error for an opcode that our files do not have."""
    if name == "LONG4":
        return NotSerializableError(
            "the file has an integer of more than 255 bytes, which torch does not read. It is not loaded. Keep"
            " such a number as text"
        )
    return NotSerializableError(
        f"the file has the opcode {name}, of another protocol than torch.save's own. It is not loaded. Save it"
        " without pickle_protocol"
    )


def _tuple(items: Iterable[_Made], nbytes: int) -> _Made:
    kinds, depth, met = [], 0, 1
    for item in items:
        kinds.append(item.kind)
        depth = max(depth, item.depth)
        met += item.met
    if depth >= _DEEPEST or met > max(_MOST_MET, _MOST_AGAIN * nbytes):
        raise _refused(f"nests tuples {depth + 1} deep, with {met} items")
    return _Made("tuple", tuple(kinds), depth + 1, met)


def _call(called: _Made, arguments: _Made) -> _Made:
    """What a call makes.

    Raises:
        CorruptSnapshotError: if it could be of any size.
    """
    kind, kinds = called.kind, arguments.items
    is_encoding = kind == "_codecs.encode"
    is_wrong = arguments.kind != "tuple" or _GROWS.fullmatch(kind) is not None
    is_wrong |= kind in _FILLED and bool(kinds) and not (len(kinds) == 1 and kinds[0] in _FILLED[kind])
    is_wrong |= is_encoding and (kinds[:1] not in (("text",), ("latin1",)) or kinds[1:] != ("latin1",))
    if kind == _DETOUR:  # calls its first argument: a function by its name, and none of those that are looked at
        first = kinds[0] if kinds else ""
        is_wrong |= "." not in first or first in (_DETOUR, "_codecs.encode", *_FILLED) or bool(_GROWS.fullmatch(first))
        is_wrong |= kinds[2:3] != ("tuple",)
    if is_wrong:
        raise _refused(f"calls {kind or 'an object'} in a way that torch.save does not write")
    if is_encoding:
        return _Made("bytes")
    return _Made("made" if kind.startswith(_OF_TORCH) else "", (), arguments.depth, arguments.met)


def _global(argument: str) -> str:
    """The full name that torch makes of one in a pickle, which may be of Python 2."""
    module, _, name = argument.partition(" ")
    module, name = torch._utils.NAME_MAPPING.get((module, name), (module, name))
    return f"{torch._utils.IMPORT_MAPPING.get(module, module)}.{name}"


def _refused(why: str) -> CorruptSnapshotError:
    return CorruptSnapshotError(f"the file {why}. It is damaged or forged, and is not loaded. Take another one")


# -- torch's restricted unpickler with other safe names than torch's own list, which is one for the whole process -----


_SPARSE = "torch._utils._rebuild_sparse_tensor"
_LOOKED_UP = frozenset(["_get_allowed_globals", "_get_user_allowed_globals"])


def _restricted_load(file: IO[bytes] | str, map_location: str, names: Mapping[str, Any], mapped: str) -> Any:
    """As ``torch.load(weights_only=True)`` does it, of a zip file; no other kind of file is read.

    Args:
        file: seekable. Of a path, tensors look at the mapped file, privately.
        map_location: where tensors go.
        names: what each name stands for that is not safe to torch of itself, in the place of the user's list.
        mapped: path of a file that begins with the same bytes, at which tensors look; ``""`` if there is none.

    Raises:
        SpotError: if this torch has no such unpickler.
        Exception: what torch raises.
    """
    unpickler = _unpickler(names)
    mapped = file if isinstance(file, str) else mapped
    memory = torch.UntypedStorage.from_file(mapped, False, _nbytes(file)) if mapped else None
    return torch.serialization._load(  # type: ignore[no-untyped-call] # torch's
        torch._C.PyTorchFileReader(file),
        map_location,
        types.SimpleNamespace(Unpickler=unpickler),
        overall_storage=memory,
        encoding="utf-8",
    )


def _unpickler(names: Mapping[str, Any]) -> type:
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
        if not isinstance(unpickler.stack[-1], _StandIn):
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
