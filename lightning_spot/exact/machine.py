"""Carries out a pickle as ``torch.save`` writes it (protocol 2), opcode by opcode. No class is imported.

Of classes that torch does not deem safe nothing is called: their objects become placeholders. ``pickletools`` reads the
opcodes.
"""

from __future__ import annotations

import collections
import pickletools
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from pickle import UnpicklingError
from typing import IO, Any

import numpy as np
import torch

from lightning_spot.exact.placeholder import Placeholder, kind_of, parts_of

_BLOCKED = frozenset(["os", "posix", "nt", "sys"])  # torch refuses them even where a user allows them


class Machine:
    """Carries out a pickle. Only what torch deems safe is called; torch sets ``persistent_load`` for the storages."""

    persistent_load: Callable[[Any], Any]

    def __init__(self, file: IO[bytes], unsafe: frozenset[str]) -> None:
        self._file = file
        self._unsafe = unsafe
        self._users = dict(_named(item) for item in torch.serialization.get_safe_globals())
        self._safe: list[Any] = []
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """The object of that name if it is safe, else a placeholder. Nothing is imported."""
        full = f"{module}.{name}"
        if full in self._unsafe or module in _BLOCKED:
            return Placeholder(full)
        found = self._users[full] if full in self._users else getattr(sys.modules.get(module), name, None)
        if found is None:
            return Placeholder(full)
        self._safe.append(found)
        return found

    def load(self) -> Any:
        """What was pickled."""
        for opcode, argument, position in pickletools.genops(self._file):
            if opcode.name == "STOP":
                return self._stack.pop()
            if opcode.name == "GLOBAL":
                self._check_written_plainly(str(argument), position or 0)
            if opcode.name in _VALUES:
                self._stack.append(argument)
            elif opcode.name in _MADE:
                self._stack.append(_MADE[opcode.name]())
            elif opcode.name in _OPERATIONS:
                _OPERATIONS[opcode.name](self, argument)
            else:
                raise UnpicklingError(f"{opcode.name} is no opcode that torch.save writes")
        raise UnpicklingError("the pickle has no end")

    def _check_written_plainly(self, names: str, position: int) -> None:
        """Refuse a name with escapes, which ``pickletools`` takes for another name than torch did that judged it."""
        after = self._file.tell()
        self._file.seek(position + 1)
        written = self._file.readline()[:-1], self._file.readline()[:-1]
        self._file.seek(after)
        if b" ".join(written) != names.encode() or names.count(" ") != 1:
            raise UnpicklingError(f"{names!r} is no name of a class as torch.save writes it")

    def _is_safe(self, value: Any) -> bool:
        return any(value is item for item in self._safe)

    def _since_mark(self) -> list[Any]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    # -- opcodes --------------------------------------------------------------------------------------------------

    def _mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def _pop(self, _: Any) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def _pop_mark(self, _: Any) -> None:
        self._since_mark()

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._since_mark()))

    def _tuple_of(self, count: int) -> None:
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _global(self, names: str) -> None:
        module, name = names.split(" ")
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        else:
            module = IMPORT_MAPPING.get(module, module)
        full = f"{module}.{name}"  # as torch looked at it; its own find_class takes some modules for others
        self._stack.append(Placeholder(full) if full in self._unsafe else self.find_class(module, name))

    def _persistent(self, _: Any) -> None:
        self._stack.append(self.persistent_load(self._stack.pop()))

    def _reduce(self, _: Any) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if isinstance(function, Placeholder):
            # Before 3.11.4 a member of an enumeration is pickled as an attribute of its class.
            if kind_of(function) == "builtins.getattr" and arguments and isinstance(arguments[0], Placeholder):
                function, arguments = arguments[0], arguments[1:]
            result: Any = Placeholder(kind_of(function), *parts_of(function), arguments)
        elif not self._is_safe(function):
            raise UnpicklingError(f"{function!r} is called, which torch does not deem safe")
        elif any(isinstance(item, Placeholder) for item in arguments):
            result = Placeholder(f"{function.__module__}.{function.__qualname__}", arguments)
        else:
            result = function(*arguments)
        self._stack.append(result)

    def _new(self, _: Any) -> None:
        arguments, kind = self._stack.pop(), self._stack.pop()
        if isinstance(kind, Placeholder):
            result: Any = Placeholder(kind_of(kind), *parts_of(kind), arguments)
        elif kind is torch.nn.Parameter:
            result = torch.nn.Parameter(*arguments)
        elif isinstance(kind, type) and self._is_safe(kind):
            result = kind.__new__(kind, *arguments)
        else:
            raise UnpicklingError(f"an object of {kind!r} is made, which torch does not deem safe")
        self._stack.append(result)

    def _build(self, _: Any) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, Placeholder):
            parts_of(target).append(state)
        elif type(target) is torch.Tensor:
            target.set_(*state)
        elif type(target) is torch.nn.Parameter or isinstance(target, np.dtype):
            _set_state(target, state)
        elif type(target) is collections.OrderedDict:
            target.__dict__.update(state)
        elif self._is_safe(type(target)):
            _set_state(target, state)
        else:
            raise UnpicklingError(f"the state of a {type(target)!r} is set, which torch does not deem safe")

    def _append(self, _: Any) -> None:
        item = self._stack.pop()
        self._extend(self._stack[-1], [item])

    def _appends(self, _: Any) -> None:
        items = self._since_mark()
        self._extend(self._stack[-1], items)

    def _extend(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, Placeholder):
            parts_of(target).append(items)
        elif isinstance(target, (list, collections.deque)):
            target.extend(items)
        else:
            raise UnpicklingError(f"items are appended to a {type(target)!r}")

    def _set_item(self, _: Any) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update(self._stack[-1], [key, value])

    def _set_items(self, _: Any) -> None:
        items = self._since_mark()
        self._update(self._stack[-1], items)

    def _update(self, target: Any, items: list[Any]) -> None:
        entries = dict(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, Placeholder):
            parts_of(target).append(entries)
        elif isinstance(target, dict):
            target.update(entries)
        else:
            raise UnpicklingError(f"entries are set in a {type(target)!r}")


def _named(item: Any) -> tuple[str, Any]:
    """A user's safe class, by its name in pickles."""
    return (item[1], item[0]) if isinstance(item, tuple) else (f"{item.__module__}.{item.__qualname__}", item)


def _set_state(target: Any, state: Any) -> None:
    """As pickle does, for a class that is safe."""
    if hasattr(target, "__setstate__"):
        target.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    target.__dict__.update(state or {})
    for name, value in (slots or {}).items():
        setattr(target, name, value)


_VALUES = frozenset(["BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING"])
_MADE: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_OPERATIONS: dict[str, Callable[[Machine, Any], None]] = {
    "PROTO": lambda _machine, _version: None,
    "MARK": Machine._mark,
    "POP": Machine._pop,
    "POP_MARK": Machine._pop_mark,
    "TUPLE": Machine._tuple,
    "TUPLE1": lambda machine, _: machine._tuple_of(1),
    "TUPLE2": lambda machine, _: machine._tuple_of(2),
    "TUPLE3": lambda machine, _: machine._tuple_of(3),
    "BINPUT": Machine._put,
    "LONG_BINPUT": Machine._put,
    "BINGET": Machine._get,
    "LONG_BINGET": Machine._get,
    "GLOBAL": Machine._global,
    "BINPERSID": Machine._persistent,
    "REDUCE": Machine._reduce,
    "NEWOBJ": Machine._new,
    "BUILD": Machine._build,
    "APPEND": Machine._append,
    "APPENDS": Machine._appends,
    "SETITEM": Machine._set_item,
    "SETITEMS": Machine._set_items,
}
