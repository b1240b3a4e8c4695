"""Where a test process keeps what must not outlive it: folders named by it, so that the next one can clear up.

A test run that is killed leaves its runtime directories and slots behind. Whoever starts the next one ends the servers
that are noted there and removes the folders, of dead test processes of this machine only.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lightning_spot.protocol.process import ProcessId

SHM = Path("/dev/shm")
RUNTIME, SLOTS, WARM = "ls-test-", "lightning-spot-test-", "ls-python-"
_NAME = re.compile(r"(\d+)-(\d+)-(\d+)")
_KILL_S = 30.0
_SURELY_BEGUN_S = 60.0
_ROOM_BYTES = 6 * 2**30


def has_room_in_memory() -> bool:
    """Whether :data:`SHM` can have the temporary files of a whole test run, which are 1 GB."""
    try:
        room = os.statvfs(SHM)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize > _ROOM_BYTES


def homes() -> list[tuple[Path, str]]:
    """Where folders lie, and how their names begin: those of runtime directories and those of slots."""
    return [(Path(tempfile.gettempdir()), RUNTIME), (SHM, SLOTS)]


def own_name(process: ProcessId) -> str:
    """What the folders of a test process are called; the runtime directory's is short, for the sake of sockets."""
    return f"{process.pid}-{process.started}-{re.sub(r'[^0-9]', '', process.namespace) or 0}"


@contextlib.contextmanager
def kept() -> Iterator[list[Path]]:
    """The folders of this process, one in each of :func:`homes`."""
    process = ProcessId.of(os.getpid())
    made = [home / f"{prefix}{own_name(process)}" for home, prefix in homes()]
    for folder in made:
        folder.mkdir(mode=0o700)
    try:
        yield made
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)


def clear_up() -> None:
    """Remove what dead test processes left, and end their servers."""
    here = ProcessId.of(os.getpid())
    for home, prefix in homes():
        for folder in home.glob(f"{prefix}*"):
            named = _NAME.fullmatch(folder.name.removeprefix(prefix))
            if named is None or own_name(here).rpartition("-")[2] != named[3]:
                continue  # of another process namespace: its numbers say nothing here
            if not ProcessId(int(named[1]), int(named[2]), here.namespace).alive:
                end_servers(folder)
                shutil.rmtree(folder, ignore_errors=True)
    for folder in Path(tempfile.gettempdir()).glob(f"{WARM}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > _SURELY_BEGUN_S and not _answers(folder / "servers"):
                shutil.rmtree(folder, ignore_errors=True)


def end_servers(folder: Path) -> None:
    """End the servers whose records lie below ``folder``, also those of hosts that a test has made."""
    for alive in files_below(folder):
        if alive.suffix != ".alive":
            continue
        with contextlib.suppress(FileNotFoundError):  # it ends by itself at this moment
            if (server := ProcessId.from_json(alive.read_bytes())) is not None:
                server.kill(_KILL_S)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


def files_below(folder: Path) -> list[Path]:
    """All files below a folder, in which others may write and remove meanwhile: ``Path.rglob`` fails of that."""
    return [Path(home) / name for home, _, names in os.walk(folder) for name in names]
