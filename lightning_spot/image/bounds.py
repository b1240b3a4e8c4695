"""Refuses a file that would have torch's unpickler allocate, or recurse, out of all proportion to the file's size.

A pickle is a program. ``torch.load(weights_only=True)`` calls nothing but what is safe to call, yet a few hundred bytes
may ask for ``bytearray(2**33)``, or use as a key a tuple nested so deeply that Python's hash of it ends the process.
The program is followed here before it is run: of each object that it would make no more is known than what it is made
of, how deep, and how many objects a walk through it meets.
"""

from __future__ import annotations

import io
import os
import pickletools
import re
import zipfile
from collections.abc import Iterable
from typing import IO, Any, NamedTuple

import torch

from lightning_spot.errors import CorruptSnapshotError, NotSerializableError

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
_VALUES = frozenset(["BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE", "SHORT_BINSTRING"])
_NUMBERS = frozenset(["BININT", "BININT1", "BININT2", "LONG1"])
_EMPTY = {"EMPTY_DICT": "dict", "EMPTY_LIST": "list", "EMPTY_SET": "set"}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_POPS = {"APPEND": 1, "BUILD": 1, "SETITEM": 2}


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


_ANY = _Made("")


def check_bounds(file: IO[bytes] | str) -> None:
    """Refuse a file of ``torch.save`` that asks for more than it is; its place in the end is its beginning.

    Raises:
        CorruptSnapshotError: saying what it asks for.
        NotSerializableError: if it is written in another protocol than ours.
    """
    with zipfile.ZipFile(file) as archive:
        inside = sum(record.file_size for record in archive.infolist())
    if isinstance(file, str):
        nbytes = os.path.getsize(file)
    else:
        file.seek(0, io.SEEK_END)
        nbytes = file.tell()
        file.seek(0)
    if inside > nbytes:
        raise _refused(f"claims to hold {inside} bytes and has {nbytes}")
    pickled = torch._C.PyTorchFileReader(file).get_record("data.pkl")  # the very bytes that torch will read
    if not isinstance(file, str):
        file.seek(0)
    _follow(pickled)


def _follow(pickled: bytes) -> None:
    stack: list[_Made] = []
    marked: list[list[_Made]] = []
    memo: dict[int, _Made] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "BINUNICODE":
            stack.append(_Made("latin1" if argument == "latin1" else "text"))
        elif name in _VALUES or name in _NUMBERS:
            stack.append(_ANY)
        elif name in _EMPTY:
            stack.append(_Made(_EMPTY[name]))
        elif name == "MARK":
            marked.append(stack)
            stack = []
        elif name == "TUPLE":
            items, stack = stack, marked.pop()
            stack.append(_tuple(items, len(pickled)))
        elif name in _TUPLES:
            first = len(stack) - _TUPLES[name]
            stack[first:] = [_tuple(stack[first:], len(pickled))]
        elif name in ("APPENDS", "SETITEMS"):
            stack = marked.pop()
        elif name == "BUILD" and stack[-2].kind == "made" and stack[-1].kind not in ("dict", "list", "tuple"):
            raise _refused("gives a state that torch.save does not write")
        elif name in _POPS:
            del stack[-_POPS[name] :]
        elif name == "BINPERSID":
            stack[-1] = _Made("made")
        elif name == "GLOBAL":
            stack.append(_Made(_global(argument)))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, called = stack.pop(), stack.pop()
            stack.append(_call(called, arguments))
        elif name == "LONG4":
            raise NotSerializableError(
                "the file has an integer of more than 255 bytes, which torch does not read. It is not loaded. Keep"
                " such a number as text"
            )
        elif name not in ("PROTO", "STOP"):
            raise NotSerializableError(
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
