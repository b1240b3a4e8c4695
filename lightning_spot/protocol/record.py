"""The files of a local server in the runtime directory: where its sockets are, whether it lives, who it is.

``KEY.lock`` is held while one is being started, ``KEY.alive`` by the server as long as it lives (it names its process),
``KEY.http`` is its socket, ``KEY.log`` is what it writes. ``KEY.attempt-0001.reached`` is how far an attempt got, as
its trainer says. All of it is this user's alone, see :mod:`.ownership`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_spot.config import LARGEST, read_environment, run_key
from lightning_spot.errors import ServerUnreachableError, SettingsError
from lightning_spot.protocol.ownership import (
    OwnDirectory,
    files_in,
    make_directory,
    open_file,
    own_directories,
    read_file,
)
from lightning_spot.protocol.process import ProcessId
from lightning_spot.untrusted import integer, number, read_object

AREA_LOCK = "lock"
"""File in a directory of slots that the server which uses it holds."""

ABANDONED_S = 24 * 3600.0
"""What a killed server left is removed after so long."""

_AREA = "lightning-spot-"
_KEY = re.compile(r"[0-9a-f]{16}(?=[.-]|$)")
_LONGEST_SOCKET_PATH = 100  # the kernel's limit is 107
_LONGEST_NOTE_BYTES = 64 * 1024
_POLL_S = 0.02
_FORGOTTEN_S = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """Where the local server of a run keeps its things.

    Attributes:
        folder: the runtime directory.
        key: of the run, see :func:`~lightning_spot.config.run_key`.
    """

    folder: Path
    key: str

    @property
    def http(self) -> Path:
        """Its HTTP socket."""
        return self.folder / f"{self.key}.http"

    @property
    def alive(self) -> Path:
        """Locked by the server while it lives."""
        return self.folder / f"{self.key}.alive"

    @property
    def log(self) -> Path:
        """What it writes."""
        return self.folder / f"{self.key}.log"

    @property
    def lock(self) -> Path:
        """Locked by a trainer while it starts or replaces the server."""
        return self.folder / f"{self.key}.lock"

    @contextmanager
    def opened(self) -> Iterator[ServerRecord]:
        """The same record by its directory, open: for whoever makes or removes something in it.

        Raises:
            SettingsError: if the directory is not this user's alone.
        """
        with OwnDirectory(self.folder) as directory:
            yield replace(self, folder=directory.here)

    def running(self) -> bool:
        """Whether the server lives.

        Raises:
            SettingsError: if what is in the place of its file is none of this user's; of the methods below likewise.
        """
        return is_held(self.alive)

    def process(self) -> ProcessId | None:
        """The server's process, as it noted it; ``None`` if it has not yet."""
        try:
            return ProcessId.from_json(read_file(self.alive, _LONGEST_NOTE_BYTES))
        except OSError:
            return None

    def note(self, alive: int, *, slots: int | None, memory_bytes: int, server_idle_timeout_s: float) -> None:
        """Write into the held ``alive`` file which process this is and how it is run, for whoever must replace it."""
        process = ProcessId.of(os.getpid())
        how = {"slots": slots, "memory_bytes": memory_bytes, "server_idle_timeout_s": server_idle_timeout_s}
        os.ftruncate(alive, 0)
        os.pwrite(alive, json.dumps({**(asdict(process) if process is not None else {}), **how}).encode(), 0)

    def touch(self) -> None:
        """Keep the ``alive`` file from what removes old files: without it, the living server would not be found."""
        with contextlib.suppress(OSError):
            os.utime(self.alive)

    def settings(self) -> dict[str, Any]:
        """How the last server was run, as :meth:`note` wrote it; empty if nothing of it is left."""
        try:
            return settings_of(read_object(read_file(self.alive, _LONGEST_NOTE_BYTES)))
        except (OSError, SettingsError):
            return {}

    def area(self, shm_dir: Path) -> Path:
        """Its slots in tmpfs; also in directories beside it, see :func:`.own_directories`."""
        return shm_dir / f"{_AREA}{self.key}"

    def areas(self) -> Iterator[OwnDirectory]:
        """The directories of its slots in tmpfs, each open until the next one is asked for."""
        shm_dir = read_environment().shm_dir
        for area in own_directories(self.area(shm_dir)) if shm_dir is not None else ():
            with area:
                yield area

    def left_slots(self) -> bool:
        """Whether slots are in tmpfs: with no server running, a killed one's, which the next one takes over."""
        return bool(self._in_areas("slot-*.json"))

    def left_bytes(self) -> int:
        """Size of the slots in tmpfs, which a server checks before it answers."""
        return sum(self._in_areas("slot-*.img"))

    def _in_areas(self, pattern: str) -> list[int]:
        """Sizes of the files of such names that are in its directories in tmpfs."""
        sizes = []
        for area in self.areas():
            for path in files_in(area.here, pattern):
                with contextlib.suppress(FileNotFoundError):  # a living server's, which lets them go as it likes
                    sizes.append(path.lstat().st_size)
        return sizes

    @contextmanager
    def starting(self, within_s: float) -> Iterator[None]:
        """Be the only one on this host who starts this server.

        Raises:
            ServerUnreachableError: if somebody else has been at it for ``within_s`` seconds.
        """
        fd = hold(self.lock, within_s)
        if fd is None:
            raise ServerUnreachableError(f"another process has been starting this run's server for {within_s:.0f} s")
        try:
            yield
        finally:
            self.lock.unlink(missing_ok=True)
            os.close(fd)

    def remove(self) -> None:
        """Remove what a server that has ended left here."""
        for path in (self.http, self.log, self.lock, self.alive):
            path.unlink(missing_ok=True)


def settings_of(noted: Mapping[str, Any]) -> dict[str, Any]:
    """How a local server is run, as a trainer or the last server wrote it.

    Raises:
        MalformedError: if it is nothing such.
    """
    return {
        "slots": integer(noted, "slots", None, 1, LARGEST),
        "memory_bytes": integer(noted, "memory_bytes", None, 0, 2**63),
        "server_idle_timeout_s": number(noted, "server_idle_timeout_s", None, 0, LARGEST),
    }


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock of a file. Others who look at that moment do not count.

    Raises:
        SettingsError: if it is no file of this user's.
    """
    try:
        with open(open_file(path), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def hold(path: Path, within_s: float) -> int | None:
    """Lock a file, making it if need be, and return its descriptor; ``None`` if somebody holds it all the time.

    The lock goes when the descriptor is closed. Who holds it may remove the file: those who waited for the lock of the
    removed one notice.
    """
    deadline = time.monotonic() + within_s
    while True:
        fd = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.lstat(path)):
                    return fd
        except OSError:
            if time.monotonic() > deadline:
                os.close(fd)
                return None
            time.sleep(_POLL_S)
        os.close(fd)


def find_record(dirpath: str) -> ServerRecord:
    """The record of the local server that serves a run's durable URL (whether or not it lives).

    Raises:
        SettingsError: if the runtime directory cannot be used.
    """
    folder = read_environment().runtime_dir
    try:
        make_directory(folder)
        OwnDirectory(folder).close()
    except (OSError, SettingsError) as error:
        raise SettingsError(
            f"the runtime directory cannot be used: {error}. Set LIGHTNING_SPOT_RUNTIME_DIR to a private, writable"
            " one, such as a folder below it that is not there yet"
        ) from error
    place = os.path.realpath(dirpath) if dirpath.startswith("/") else dirpath  # one server, whatever links lead there
    record = ServerRecord(folder, run_key(place))
    if len(str(record.http)) > _LONGEST_SOCKET_PATH:
        raise SettingsError(
            f"{folder} is too long for a socket's path; set LIGHTNING_SPOT_RUNTIME_DIR to a shorter one"
        )
    return record


def port_area(shm_dir: Path, port: int) -> Path:
    """The slots in tmpfs of a server that listens at a port."""
    return shm_dir / f"{_AREA}{os.getuid()}-port-{port}"


def local_areas(shm_dir: Path | None) -> Iterator[tuple[str, OwnDirectory]]:
    """The slots in tmpfs of all local servers: the key of each, and its directory, open until the next one."""
    for area in own_directories(shm_dir / _AREA[:-1]) if shm_dir is not None else ():
        with area:
            if match := _KEY.match(area.path.name.removeprefix(_AREA)):
                yield match[0], area


def local_records() -> list[ServerRecord]:
    """The records of this host's local servers that live, or have left a log, a record or slots.

    A living server of another runtime directory, whose slots lie in the same tmpfs, is none of them.

    Raises:
        SettingsError: if the runtime directory is not this user's alone.
    """
    environment = read_environment()
    try:
        OwnDirectory(environment.runtime_dir).close()
    except FileNotFoundError:
        return []
    names = [path.name for kind in ("alive", "log") for path in environment.runtime_dir.glob(f"*.{kind}")]
    keys = {match[0] for name in names if (match := _KEY.match(name))}
    for key, area in local_areas(environment.shm_dir):
        with contextlib.suppress(SettingsError):  # its lock is no server's
            if not is_held(area.here / AREA_LOCK):
                keys.add(key)
    return [ServerRecord(environment.runtime_dir, key) for key in sorted(keys)]


def sweep(folder: Path) -> None:
    """Remove files of local servers that were killed more than a day ago and that nobody replaced.

    How far a killed attempt got is kept for a month: its run may go on until then.
    """
    now_s = time.time()
    for path in folder.glob("*.reached"):
        with contextlib.suppress(OSError):
            if now_s - path.lstat().st_mtime > _FORGOTTEN_S:
                path.unlink()
    for path in folder.glob("*.alive"):
        record = ServerRecord(folder, path.name.removesuffix(".alive"))
        with contextlib.suppress(OSError, SettingsError):  # another server may be sweeping it too
            fd = hold(path, 0.0) if now_s - path.lstat().st_mtime > ABANDONED_S else None
            if fd is not None:
                record.remove()
                os.close(fd)
