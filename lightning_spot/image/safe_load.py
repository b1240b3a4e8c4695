"""Loads a file of ``torch.save`` and runs nothing of what it names: torch's restricted unpickler with inert stand-ins.

``torch.load(weights_only=True)`` refuses a file for one object of a class that it does not know, such as a
hyperparameter that nobody reads on a resume. Here a stand-in takes the place of each name that torch does not know: it
notes its arguments and its state, and nothing is imported or called. Afterwards those of a few plain kinds (numbers of
numpy, paths, dates, …) become values, by functions of ours that check every argument; all others stay a
:class:`Placeholder`. What else is safe, torch says (its own list, and the user's ``add_safe_globals``).
"""

from __future__ import annotations

import collections
import datetime
import decimal
import itertools
import math
import pathlib
import re
import types
from collections.abc import Callable
from pickle import UnpicklingError
from typing import IO, Any

import numpy as np
import torch

from lightning_spot.errors import CorruptSnapshotError, NotSerializableError, SpotError
from lightning_spot.image.bounds import check_bounds
from lightning_spot.image.placeholder import ADVICE, Placeholder, kind_of, parts_of, remember_places
from lightning_spot.image.restricted import restricted_load
from lightning_spot.untrusted import LONGEST_TEXT, plain


def safe_load(file: IO[bytes] | str, map_location: str = "cpu") -> Any:
    """Load a file without running anything of a class that torch does not deem safe.

    Args:
        file: as ``torch.save`` wrote it; seekable. Of a path, tensors look at the mapped file, privately: a page is
            copied when it is written to.
        map_location: where tensors go; ``"meta"`` reads none of their bytes.

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
        check_bounds(file)
        loaded = _Settling(stand_ins).settled(restricted_load(file, map_location, stand_ins, _StandIn))
        if stand_ins.kinds:
            remember_places(loaded)
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
        if isinstance(value, list):
            items = [self.settled(item) for item in value]
            if _differ(items, value):
                value[:] = items
        elif isinstance(value, dict):
            keys, items = ([self.settled(item) for item in half] for half in (value.keys(), value.values()))
            if _differ(keys, value.keys()) or _differ(items, value.values()):
                value.clear()
                for key, item in zip(keys, items, strict=True):  # a Counter would count them in update()
                    value[key] = item
        elif isinstance(value, set):
            items = [self.settled(item) for item in value]
            if _differ(items, value):
                value.clear()
                value.update(items)
        if not isinstance(value, (type, types.FunctionType)):  # those are torch's, or the user's
            self.settled(getattr(value, "__dict__", None))
        return value

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
