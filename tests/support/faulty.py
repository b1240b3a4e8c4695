"""Tiers that fail on demand: buckets, and the system calls of a store.

``faulty-objects://path`` is a directory that behaves like a bucket (an object appears when it is complete),
``faulty-s3://bucket`` is S3 itself. All count their calls and strike by a :class:`Plan`. In another
process (a server) :func:`environment` makes them known and names a file with the plan.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import s3fs
from fsspec.asyn import sync_wrapper
from fsspec.spec import AbstractFileSystem

from lightning_spot.config import BUCKET_SCHEMES

ERRORS = {"EIO": errno.EIO, "EACCES": errno.EACCES, "ESTALE": errno.ESTALE, "ENOSPC": errno.ENOSPC}
KINDS = (*ERRORS, "missing", "lost", "short", "stale")
_PLAN_VARIABLE = "LIGHTNING_SPOT_TEST_FAULTS"
_HOME = Path(__file__).resolve().parents[2]


@dataclass
class Plan:
    """Which calls fail, and how.

    Attributes:
        kind: a name of an error; ``"missing"`` (says that nothing is there), ``"lost"`` (does it, and then fails),
            ``"short"`` (half of a read, half of a write and then an error), ``"stale"`` (a listing from before the
            last change), ``"slow"``, or ``""``.
        at: first call that is struck, from 1.
        span: how many in a row; 0 for all from there on.
        only: calls that count; all if empty.
        delay_s: of every call that counts, and of a slow one.
    """

    kind: str = ""
    at: int = 1
    span: int = 1
    only: tuple[str, ...] = ()
    delay_s: float = 0.0
    calls: int = field(default=0, compare=False)
    struck: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def strike(self, name: str) -> str:
        """Count a call; the kind of its fault, ``""`` for none."""
        if self.only and name not in self.only:
            return ""
        with self._lock:
            self.calls += 1
            hit = bool(self.kind) and self.calls >= self.at and (not self.span or self.calls < self.at + self.span)
            hit = hit and (self.kind != "stale" or name == "ls")
            self.struck += hit
        if self.delay_s and (hit or self.kind == ""):
            time.sleep(self.delay_s)
        return self.kind if hit else ""


plan = Plan()


def use(new: Plan) -> Plan:
    """From now on this plan holds in this process."""
    global plan
    plan = new
    return new


def environment(folder: Path, new: Plan) -> dict[str, str]:
    """Environment for another process of this Python in which these are known, under a plan of its own."""
    values = asdict(new)
    (folder / "plan.json").write_text(json.dumps({name: values[name] for name in values if name != "struck"}))
    (folder / "sitecustomize.py").write_text("import tests.support.faulty\n")
    path = os.pathsep.join([str(folder), str(_HOME), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {"PYTHONPATH": path, _PLAN_VARIABLE: str(folder / "plan.json")}


def raised(kind: str, path: str) -> OSError:
    """The error of a kind of fault."""
    if kind == "missing":
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    number = ERRORS.get(kind, errno.EIO)
    return OSError(number, os.strerror(number), path)


class FaultyObjects(AbstractFileSystem):
    """A directory as a bucket that counts its calls and fails by plan: an object appears when its file is closed."""

    protocol = ("faulty-objects", "gcs")
    cachable = False
    _before: ClassVar[dict[str, list[str]]] = {}  # listings before the last change, for stale ones

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return "/" + str(path).partition("://")[2].strip("/") if "://" in str(path) else str(path).rstrip("/")

    # -- reads

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        path = self._strip_protocol(path)
        names = self._before.get(path) if self._asked("ls", path) == "stale" else sorted(os.listdir(path))
        if names is None:
            raise raised("missing", path)
        found = [f"{path}/{name}" for name in names]
        there = [self._info(item) for item in found if _holds_a_file(item)]
        return there if detail else [item["name"] for item in there]

    def info(self, path: str, **_: Any) -> Any:
        path = self._strip_protocol(path)
        self._asked("info", path)
        return self._info(path)

    def modified(self, path: str) -> datetime:
        self._asked("modified", path)
        return datetime.fromtimestamp(os.stat(self._strip_protocol(path)).st_mtime, UTC)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        kind, data = self._asked("cat_file", path), Path(path).read_bytes()[start:end]
        return data[: len(data) // 2] if kind == "short" else data

    # -- changes

    def pipe_file(self, path: str, value: Any, **_: Any) -> None:
        path = self._strip_protocol(path)
        self._change("pipe_file", path, lambda: Path(path).write_bytes(bytes(value)))

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        self._change("rm_file", path, lambda: os.unlink(path))

    def open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return io.BytesIO(self.cat_file(path)) if "r" in mode else _Written(self, self._strip_protocol(path))

    # -- inside

    def _info(self, path: str) -> dict[str, Any]:
        found = os.stat(path)
        kind = "directory" if os.path.isdir(path) else "file"
        return {"name": path, "size": found.st_size, "type": kind, "ino": found.st_ino, "mtime": found.st_mtime_ns}

    def exists(self, path: str, **_: Any) -> bool:
        if "/" not in str(path).strip("/") or os.path.lexists(self._strip_protocol(path)):
            return True
        self._asked("info", path)
        return False

    def _asked(self, name: str, path: str) -> str:
        kind = plan.strike(name)
        if kind and kind not in ("short", "slow", "stale"):
            raise raised(kind, path)
        return kind

    def _change(self, name: str, path: str, act: Callable[[], Any]) -> None:
        kind = plan.strike(name)
        if kind and kind not in ("lost", "slow"):
            raise raised(kind, path)
        for folder in (os.path.dirname(path), os.path.dirname(os.path.dirname(path))):
            with contextlib.suppress(OSError):
                self._before[folder] = sorted(os.listdir(folder))
        if name in ("pipe_file", "close"):
            os.makedirs(os.path.dirname(path), exist_ok=True)
        act()
        if kind == "lost":
            raise raised(kind, path)


class FaultyS3(s3fs.S3FileSystem):
    """S3, whose requests are counted and fail by plan, as if the library had given up on them.

    Attributes:
        unlisted_s: for how long a new object is not listed.
    """

    protocol = ("s3", "s3a", "faulty-s3")
    unlisted_s: ClassVar[float] = 0.0
    _put_at: ClassVar[dict[str, float]] = {}

    async def _call_s3(self, method: str, *arguments: Any, **more: Any) -> Any:
        answer = await self._struck(method, super()._call_s3, method, *arguments, **more)
        if method in ("put_object", "complete_multipart_upload"):
            self._put_at[more["Key"]] = time.monotonic()
        if method == "list_objects_v2" and self.unlisted_s:
            new = {key for key, put_s in self._put_at.items() if time.monotonic() - put_s < self.unlisted_s}
            answer["Contents"] = [item for item in answer.get("Contents") or [] if item["Key"] not in new]
            folders = {item["Prefix"] for item in answer.get("CommonPrefixes") or []}
            old = {folder for folder in folders if any(key.startswith(folder) for key in self._put_at.keys() - new)}
            answer["CommonPrefixes"] = [{"Prefix": folder} for folder in sorted(old)]
        return answer

    async def _lsdir(self, path: str, *arguments: Any, **more: Any) -> Any:
        return await self._struck("ls", super()._lsdir, path, *arguments, **more)

    async def _struck(self, name: str, act: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        kind = plan.strike(name)
        if kind and kind not in ("lost", "slow"):
            raise raised(kind, name)
        done = await act(*arguments, **more)
        if kind == "lost":
            raise raised(kind, name)
        return done

    call_s3 = sync_wrapper(_call_s3)


class _Written:
    """A file opened for writing."""

    def __init__(self, files: FaultyObjects, path: str) -> None:
        self._files, self._path, self._data = files, path, bytearray()
        self.closed = False

    def write(self, data: Any) -> int:
        self._files._change("write", self._path, lambda: self._data.extend(bytes(data)))
        return len(data)

    def discard(self) -> None:
        self._data.clear()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._files._change("close", self._path, lambda: Path(self._path).write_bytes(self._data))

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _holds_a_file(path: str) -> bool:
    return os.path.isfile(path) or any(names for _, _, names in os.walk(path))


# -- the system calls of LocalStore -----------------------------------------------------------------------------------

CALLS = (
    "open", "read", "write", "preadv", "listdir", "stat", "lstat", "fstat", "link", "rename", "replace", "fsync",
    "unlink", "mkdir", "rmdir",
)  # fmt: skip


@contextlib.contextmanager
def faulty_calls(new: Plan, below: Path) -> Iterator[Plan]:
    """Count, and strike, system calls of this thread that name a path below a directory or one of its open files."""
    real = {name: getattr(os, name) for name in CALLS}
    real_open = builtins.open
    concerns = _concerns(below)

    def struck(name: str, of: Any) -> str:
        kind = new.strike(name)
        if kind and kind not in ("lost", "short", "slow"):
            raise raised(kind, str(of))
        return kind

    def watched(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if not concerns(arguments[0]):
                return real[name](*arguments, **more)
            kind = struck(name, arguments[0])
            if kind == "short" and name in ("read", "preadv"):
                return _short(name, real[name], arguments)
            done = real[name](*arguments, **more)
            if kind in ("lost", "short") and name not in ("open", "read", "preadv"):
                raise raised(kind, str(arguments[0]))
            return done

        return call

    def opened(file: Any, mode: str = "r", *arguments: Any, **more: Any) -> Any:
        if not concerns(file):
            return real_open(file, mode, *arguments, **more)
        return _file(file, mode, struck, **more)

    for name in CALLS:
        setattr(os, name, watched(name))
    builtins.open = opened  # type: ignore[assignment]
    try:
        yield new
    finally:
        builtins.open = real_open
        for name, function in real.items():
            setattr(os, name, function)


class _File(io.FileIO):
    """A file whose reads and writes are struck, too: no function of ``os`` is called for them."""

    def __init__(self, file: Any, mode: str, struck: Callable[[str, Any], str]) -> None:
        super().__init__(file, mode)
        self._struck = struck

    def readinto(self, buffer: Any) -> int | None:
        kind, into = self._struck("read", self.name), memoryview(buffer)
        return super().readinto(into[: max(1, len(into) // 2)] if kind == "short" else into)

    def write(self, data: Any) -> int | None:
        kind = self._struck("write", self.name)
        count = super().write(memoryview(data)[: len(data) // 2] if kind == "short" else data)
        if kind in ("lost", "short"):
            raise raised(kind, str(self.name))
        return count


def _file(file: Any, mode: str, struck: Callable[[str, Any], str], buffering: int = -1) -> Any:
    if not isinstance(file, int):
        struck("open", file)
    raw = _File(file, mode, struck)
    if buffering == 0:
        return raw
    return io.BufferedReader(raw) if mode == "rb" else io.BufferedWriter(raw)


def _concerns(below: Path) -> Callable[[Any], bool]:
    """Tells whether this thread calls with a path below a directory, or one of its open files."""
    thread = threading.get_ident()
    readlink, prefix = os.readlink, os.path.realpath(below)

    def concerns(argument: Any) -> bool:
        if threading.get_ident() != thread:
            return False
        if isinstance(argument, int):
            try:
                argument = readlink(f"/proc/self/fd/{argument}")
            except OSError:
                return False
        return os.fspath(argument).startswith((prefix, str(below)))

    return concerns


def _short(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if name == "read":
        return real(arguments[0], max(1, arguments[1] // 2))
    fd, buffers, place = arguments
    return real(fd, [buffers[0][: max(1, len(buffers[0]) // 2)]], place)


def _register() -> None:
    for name, made in (("faulty-objects", FaultyObjects), ("faulty-s3", FaultyS3)):
        fsspec.register_implementation(name, made, clobber=True)
        BUCKET_SCHEMES.add(name)
    if named := os.environ.get(_PLAN_VARIABLE):
        values = json.loads(Path(named).read_text())
        use(Plan(**{**values, "only": tuple(values["only"])}))


_register()
