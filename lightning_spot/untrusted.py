"""What files, servers, buckets and other processes say: read within bounds, checked for damage, made safe to show.

All JSON that this process did not write itself for itself comes in by :func:`read_json`; all text of such origin goes
to terminals, logs and errors by :func:`plain`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import re
import types
import unicodedata
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import xxhash

from lightning_spot.errors import MalformedError

Kind = TypeVar("Kind")

Read = Callable[[Mapping[str, Any], str, Any], Any]
"""Reads one field of an object by its name; it must be there if the third argument is ``None``."""

SMALL_JSON_BYTES = 256 * 1024
"""Longest JSON text that holds no list which grows with a model."""

LARGE_JSON_BYTES = 64 * 1024 * 1024
"""Longest JSON text of all: a checksum for each part of a file, or where the shards of a model lie."""

LONGEST_TEXT = 4096
LONGEST_NAME = 255
MOST_BYTES = 2**46
"""Of a snapshot or a file; larger sizes are damage."""

MOST_UNIX_S = 253_402_300_799.0
"""The end of the year 9999: later times have no date."""

_MOST_DEPTH = 32
_MOST_TEXTS = 1024
_LONGEST_NUMBER = 40
_CHECKSUM = "checksum"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]", re.ASCII)
_OBEYED = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udc7f\udd00-\udfff]")
_SHOWN = 200
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})  # control, bidi and such, no characters, line ends


def plain(said: object, most: int = _SHOWN) -> str:
    """Foreign text as one printable line of ``most`` characters at most: nothing in it moves a cursor or ends a line.

    What is not shown as it is, is escaped as Python does. Rich still reads markup in it: see ``cli.output``.
    """
    text = said if isinstance(said, str) else str(said)
    shortened = text[:most]
    if not (shortened.isascii() and shortened.isprintable()):
        shortened = "".join(map(_escaped, shortened))[:most]
    return shortened if len(text) <= most else shortened[: most - 1] + "…"


def _escaped(character: str) -> str:
    unsafe = unicodedata.category(character) in _UNSAFE
    return character.encode("unicode_escape").decode("ascii") if unsafe else character


class _PlainLines(logging.Formatter):
    """Writes each record as one line, whatever is in its message; a traceback follows on lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return plain(super().formatMessage(record), LONGEST_TEXT)

    def formatException(self, ei: Any) -> str:
        return "\n".join(plain(line, LONGEST_TEXT) for line in super().formatException(ei).split("\n"))


class _JSONLines(logging.Formatter):
    """Writes each record as one JSON object: time (RFC 3339, UTC), level and message; key and facts of a message."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {"time": time, "level": record.levelname, "logger": record.name}
        fields["message"] = plain(record.getMessage(), LONGEST_TEXT)
        if key := getattr(record, "spot_key", ""):
            facts = {name: plain(value, LONGEST_TEXT) for name, value in getattr(record, "spot_facts", {}).items()}
            fields |= {"key": key, **{name: value for name, value in facts.items() if name not in fields}}
        if record.exc_info:
            fields["traceback"] = super().formatException(record.exc_info)
        return json.dumps(fields)


LOG_FORMATS: dict[str, Callable[[], logging.Formatter]] = {
    "text": lambda: _PlainLines("%(asctime)s %(levelname)s %(message)s"),
    "json": _JSONLines,
    "message": lambda: _PlainLines("%(message)s"),
}
"""Forms of log lines; a program that a person watches shows its messages only."""


def log_plainly(level: int, form: str) -> None:
    """Have this program log to standard error, one line for each record; ``form`` is one of :data:`LOG_FORMATS`.

    The last call counts. Handlers of others stay, and log instead.
    """
    root, handler = logging.getLogger(), logging.StreamHandler()
    handler.setFormatter(LOG_FORMATS[form]())
    for earlier in [each for each in root.handlers if isinstance(each.formatter, (_PlainLines, _JSONLines))]:
        root.removeHandler(earlier)
    logging.basicConfig(level=level, handlers=[handler])


def read_json(data: bytes | bytearray | memoryview | str, most_bytes: int = SMALL_JSON_BYTES) -> Any:
    """Read JSON in UTF-8 that may hold anything.

    Its length, its depth and the length of its numbers are bounded; every number is finite, every key is there once.

    Args:
        data: the text.
        most_bytes: longest that is read.

    Raises:
        MalformedError: if it is something else; it is a ``ValueError`` as well.
    """
    if len(data) > most_bytes:
        raise MalformedError(f"JSON of {len(data)} bytes is longer than {most_bytes}")
    try:
        text = data if isinstance(data, str) else bytes(data).decode("utf-8")
        value = _DECODER.decode(text)
    except MalformedError:
        raise
    except ValueError as error:
        raise MalformedError(f"no valid JSON: {plain(error)}") from None  # which would hold the whole text
    except RecursionError:
        raise MalformedError("JSON is nested too deeply") from None
    _check_depth(value)
    if _SURROGATE.search(text) and not _is_unicode(value):
        raise MalformedError("JSON holds half a character")
    return value


def read_object(data: bytes | bytearray | memoryview | str, most_bytes: int = SMALL_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object; see :func:`read_json`."""
    return as_object(read_json(data, most_bytes))


def as_object(value: object) -> dict[str, Any]:
    """What must be a JSON object.

    Raises:
        MalformedError: if it is none.
    """
    if not isinstance(value, dict):
        raise MalformedError("no JSON object")
    return value


def sealed_json(fields: Mapping[str, Any], *, indent: int | None = None) -> str:
    """A JSON object as text, with a checksum of itself; with ``indent``, for people to read."""
    return json.dumps({**fields, _CHECKSUM: _checksum(fields)}, indent=indent, sort_keys=True)


def unseal(fields: dict[str, Any]) -> bool:
    """Check an object by the checksum that :func:`sealed_json` gave it, and take that out of it.

    Returns:
        whether it had one.

    Raises:
        MalformedError: if it is damaged.
    """
    noted = fields.pop(_CHECKSUM, None)
    if noted is not None and noted != _checksum(fields):
        raise MalformedError("it does not have the checksum that it was written with")
    return noted is not None


def read_sealed(data: bytes | str, most_bytes: int = SMALL_JSON_BYTES) -> dict[str, Any]:
    """Read what :func:`sealed_json` wrote, or such an object of an earlier version, without a checksum.

    Raises:
        MalformedError: if it is damaged.
    """
    fields = read_object(data, most_bytes)
    unseal(fields)
    return fields


def integer(fields: Mapping[str, Any], name: str, default: int | None, low: int, high: int) -> int:
    """A whole number within bounds; ``default=None`` says that it must be there.

    Raises:
        MalformedError: otherwise.
    """
    value = fields.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise MalformedError(f"{name} is no whole number from {low} to {high}")
    return value


def number(fields: Mapping[str, Any], name: str, default: float | None, low: float, high: float) -> float:
    """A finite number within bounds; ``default=None`` says that it must be there.

    Raises:
        MalformedError: otherwise.
    """
    value = fields.get(name, default)
    if type(value) not in (int, float) or not (low <= value <= high and math.isfinite(value)):
        raise MalformedError(f"{name} is no number from {low:g} to {high:g}")
    return float(value)


def text(fields: Mapping[str, Any], name: str, default: str | None = "", *, most: int = LONGEST_TEXT) -> str:
    """A text of bounded length; ``default=None`` says that it must be there.

    Raises:
        MalformedError: otherwise.
    """
    value = fields.get(name, default)
    if not isinstance(value, str) or len(value) > most or "\0" in value:
        raise MalformedError(f"{name} is no text of at most {most} characters")
    return value


def line(fields: Mapping[str, Any], name: str, default: str | None = "", *, most: int = LONGEST_TEXT) -> str:
    """A text in which nothing parts lines, or is obeyed by a terminal; see :func:`text`.

    Raises:
        MalformedError: otherwise.
    """
    value = text(fields, name, default, most=most)
    if not is_line(value):
        raise MalformedError(f"{name} holds what parts lines, or controls a terminal: {plain(value)}")
    return value


def file_name(fields: Mapping[str, Any], name: str, default: str | None = "") -> str:
    """The name of a run, a snapshot or a file, which leads to no other folder; see :func:`line`.

    Raises:
        MalformedError: otherwise.
    """
    value = line(fields, name, default, most=LONGEST_NAME)
    if "/" in value:
        raise MalformedError(f"{name} holds a path separator: {plain(value)}")
    return value


def is_line(value: str) -> bool:
    """Whether nothing in a text parts lines, or is obeyed by a terminal."""
    return _OBEYED.search(value) is None


def flag(fields: Mapping[str, Any], name: str, default: bool | None = False) -> bool:
    """True or false; ``default=None`` says that it must be there.

    Raises:
        MalformedError: if it is something else.
    """
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise MalformedError(f"{name} is neither true nor false")
    return value


def items(fields: Mapping[str, Any], name: str, most: int) -> list[Any]:
    """A list of bounded length; empty if it is missing.

    Raises:
        MalformedError: if it is something else.
    """
    value = fields.get(name, [])
    if not isinstance(value, list | tuple) or len(value) > most:
        raise MalformedError(f"{name} is no list of at most {most}")
    return list(value)


def texts(fields: Mapping[str, Any], name: str, most: int = _MOST_TEXTS) -> list[str]:
    """A list of bounded length of texts, see :func:`text`; empty if it is missing.

    Raises:
        MalformedError: if it is something else.
    """
    return [text({name: item}, name, None) for item in items(fields, name, most)]


def whole(low: int, high: int) -> Read:
    """Reads a whole number within bounds, see :func:`integer`."""
    return functools.partial(integer, low=low, high=high)


def finite(low: float, high: float) -> Read:
    """Reads a number within bounds, see :func:`number`."""
    return functools.partial(number, low=low, high=high)


def short(most: int) -> Read:
    """Reads a text of so many characters at most, see :func:`text`."""
    return functools.partial(text, most=most)


def listed(kind: type[Any], most: int) -> Read:
    """Reads a list of so many objects at most, each by :func:`decoded`."""
    return lambda fields, name, _default: [decoded(kind, as_object(item)) for item in items(fields, name, most)]


Line = Annotated[str, line]
FileName = Annotated[str, file_name]
UnixSeconds = Annotated[float, finite(0, MOST_UNIX_S)]


def decoded(kind: Callable[..., Kind], fields: Mapping[str, Any]) -> Kind:
    """Make a dataclass of a JSON object. The way back is :func:`dataclasses.asdict`.

    Each field is read as its annotation says: ``Annotated[int, whole(0, 9)]``, ``bool``, another dataclass, or one of
    these ``| None``. A field without a default must be there. What a later version may have added is left out.

    Args:
        kind: the dataclass.
        fields: the object.

    Raises:
        MalformedError: if a field is missing, or is not within its bounds.
    """
    plan = _plan(kind)
    return kind(**{name: read(fields, name, None) for name, must, read in plan if must or name in fields})


@functools.cache
def _plan(kind: Any) -> list[tuple[str, bool, Read]]:
    """Name of each field of a dataclass, whether it must be there, and what reads it."""
    hints, nothing = get_type_hints(kind, include_extras=True), dataclasses.MISSING
    return [
        (each.name, each.default is nothing and each.default_factory is nothing, _reader(hints[each.name]))
        for each in dataclasses.fields(kind)
    ]


def _reader(hint: Any) -> Read:
    if get_origin(hint) in (Union, types.UnionType):
        read = _reader(next(each for each in get_args(hint) if each is not types.NoneType))
        return lambda fields, name, default: None if fields.get(name) is None else read(fields, name, default)
    if get_origin(hint) is Annotated:
        marked: Read = hint.__metadata__[0]
        return marked
    if hint is bool:
        return flag
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return lambda fields, name, _default: decoded(hint, as_object(fields.get(name)))
    raise TypeError(f"{hint} does not say how it is read")


def _checksum(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def _whole_number(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise MalformedError("JSON holds a number that is too long")
    return int(digits)


def _finite_number(digits: str) -> float:
    value = float(digits) if len(digits) <= _LONGEST_NUMBER else math.inf
    if not math.isfinite(value):
        raise MalformedError("JSON holds a number that is too long or too large")
    return value


def _no_number(name: str) -> float:
    raise MalformedError(f"JSON holds {name}, which is no number")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise MalformedError("JSON holds a key twice")
    return fields


_DECODER = json.JSONDecoder(
    parse_int=_whole_number, parse_float=_finite_number, parse_constant=_no_number, object_pairs_hook=_each_once
)


def _check_depth(value: Any) -> None:
    """Refuse what is nested so deeply that who walks through it would fail."""
    level = [value]
    for _ in range(_MOST_DEPTH):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return
        level = [each for item in level for each in (item.values() if isinstance(item, dict) else item)]
    raise MalformedError(f"JSON is nested more than {_MOST_DEPTH} deep")


def _is_unicode(value: Any) -> bool:
    """Whether all text in it can be written as UTF-8, or is a path that is none."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True
