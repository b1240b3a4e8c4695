"""The embedded node: one per run and host, started by the first trainer that needs it, detached, so it outlives it.

Each run has a few files in the runtime directory: ``KEY.lock`` (held while one is being started), ``KEY.alive`` (held
by the node as long as it lives), ``KEY.http`` and ``KEY.fds`` (its sockets) and ``KEY.log``.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_spot.config import read_environment, run_key
from lightning_spot.errors import NodeUnreachable, SettingsError
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.channel import Session
from lightning_spot.memory.client import NodeClient, quoted
from lightning_spot.memory.flusher import TierHealth
from lightning_spot.memory.host import MAX_STALL_S, Lease
from lightning_spot.memory.runs import Opened, RunInfo
from lightning_spot.memory.wire import Address
from lightning_spot.tiers.store import newest_first

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
_OPEN_S = 15.0  # a node may have to ask the tiers below
_SEAL_S, _SEAL_BYTES_PER_S = 60.0, 100e6
_LONGEST_SOCKET_PATH = 100  # the kernel's limit is 107


@dataclass(frozen=True, slots=True)
class Record:
    """Where the embedded node of a run keeps its things.

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
    def fds(self) -> Path:
        """Its descriptor channel."""
        return self.folder / f"{self.key}.fds"

    @property
    def alive(self) -> Path:
        """Locked by the node while it lives."""
        return self.folder / f"{self.key}.alive"

    @property
    def log(self) -> Path:
        """What it writes."""
        return self.folder / f"{self.key}.log"

    def running(self) -> bool:
        """Whether the node lives."""
        try:
            with open(self.alive, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False


def find_record(dirpath: str) -> Record:
    """The record of the embedded node that serves a run's durable URL (whether or not it lives).

    Raises:
        SettingsError: if the runtime directory cannot be used.
    """
    folder = read_environment().runtime_dir
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError("others can write to it")
    except OSError as error:
        raise SettingsError(
            f"the runtime directory {folder} cannot be used ({error}); set LIGHTNING_SPOT_RUNTIME_DIR to a private,"
            " writable one"
        ) from error
    record = Record(folder, run_key(dirpath))
    if len(str(record.http)) > _LONGEST_SOCKET_PATH:
        raise SettingsError(
            f"{folder} is too long for a socket's path; set LIGHTNING_SPOT_RUNTIME_DIR to a shorter one"
        )
    return record


def attach(dirpath: str, run: str, max_stall_s: float = MAX_STALL_S) -> EmbeddedHost | None:
    """Connect to the embedded node of a run if it lives; ``None`` otherwise."""
    record = find_record(dirpath)
    if not record.running():
        return None
    try:
        return EmbeddedHost(record, run, max_stall_s)
    except NodeUnreachable as error:
        logger.debug("the embedded node is on its way out: %s", error)
        return None


def start(
    dirpath: str,
    run: str,
    *,
    slots: int,
    memory_bytes: int,
    idle_timeout_s: float,
    max_stall_s: float = MAX_STALL_S,
) -> EmbeddedHost:
    """Connect to the embedded node of a run; start it first if need be. Trainers that start at once get one node.

    Args:
        dirpath: durable URL of the run.
        run: its name.
        slots: slots of the ring, if it is started now.
        memory_bytes: limit of their memory, likewise.
        idle_timeout_s: it ends when no trainer has been connected for so long, likewise.
        max_stall_s: how long a call may take, see :class:`~lightning_spot.memory.host.Host`.

    Raises:
        NodeUnreachable: if it does not come up; the message holds the end of its log.
    """
    record = find_record(dirpath)
    deadline = time.monotonic() + START_TIMEOUT_S
    with _locked(record.folder / f"{record.key}.lock"):
        while True:
            if (host := attach(dirpath, run, max_stall_s)) is not None:
                return host
            if record.running():  # ending, or just coming up
                if time.monotonic() > deadline:
                    raise NodeUnreachable(f"the embedded node does not answer at {record.http}; see {record.log}")
                time.sleep(0.05)
                continue
            _spawn(record, slots, memory_bytes, idle_timeout_s, deadline)


def _spawn(record: Record, slots: int, memory_bytes: int, idle_timeout_s: float, deadline: float) -> None:
    command = [sys.executable, "-m", "lightning_spot.memory.program", "--embedded", str(record.folder), record.key]
    command += ["--slots", str(slots), "--memory", str(memory_bytes), "--idle-timeout", str(idle_timeout_s)]
    package_home = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package_home, *_python_path()])}
    with open(record.log, "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a signal to the trainer's process group must not reach it
            env=environment,
            cwd="/",
        )
    while not record.fds.exists() or not record.running():
        if process.poll() is not None or time.monotonic() > deadline:
            tail = record.log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise NodeUnreachable(f"the embedded memory node did not start (exit {process.poll()}). Its log:\n{tail}")
        time.sleep(0.02)


def _python_path() -> list[str]:
    """``PYTHONPATH`` with absolute entries: the node does not run in the trainer's working directory."""
    return [os.path.abspath(item) for item in os.environ.get("PYTHONPATH", "").split(os.pathsep) if item]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class EmbeddedHost:
    """The embedded node as its trainer sees it; implements :class:`~lightning_spot.memory.host.Host`.

    Args:
        record: where it is.
        run: the run, as ``NAME@ID`` or ``NAME``.
        max_stall_s: how long a call may take, see :class:`~lightning_spot.memory.host.Host`.
    """

    def __init__(self, record: Record, run: str, max_stall_s: float = MAX_STALL_S) -> None:
        self.run = run
        self.attempt = 0
        self.max_stall_s = max_stall_s
        self.client = NodeClient(Address(socket_path=str(record.http)))
        self.session = Session(record.fds, read_environment().token)
        self._maps: dict[tuple[int, int], mmap.mmap] = {}

    def open_run(self, info: RunInfo) -> Opened:
        """See :meth:`Host.open_run`."""
        body = {**asdict(info), "session": self.session.id, "nodes": list(info.nodes)}
        path = f"/v1/runs/{quoted(info.text)}/open"
        opened = self.client.call("POST", path, body, timeout_s=max(self.max_stall_s, _OPEN_S))
        self.run, self.attempt = info.text, int(opened["attempt"])
        return Opened(self.attempt, bool(opened["carries"]), str(opened["why_not"]))

    def lease(self, nbytes: int, wait_s: float) -> Lease:
        """See :meth:`Host.lease`."""
        body = {"attempt": self.attempt, "nbytes": nbytes, "wait_s": wait_s, "session": self.session.id}
        path = f"/v1/runs/{quoted(self.run)}/uploads"
        leased = self.client.call("POST", path, body, timeout_s=wait_s + self.max_stall_s)
        key = (int(leased["slot"]), int(leased["generation"]))
        if key not in self._maps:
            for old in [item for item in self._maps if item[0] == key[0]]:
                del self._maps[old]
            self._maps[key] = self.session.map_slot(key[0])
        return Lease(str(leased["upload"]), self._maps[key], nbytes, str(leased["backing"]))

    def seal(self, lease: Lease, manifest: Manifest, destinations: list[str] | None = None) -> None:
        """See :meth:`Host.seal`."""
        body = {"manifest": asdict(manifest), "destinations": destinations}
        self.client.call(
            "POST", f"/v1/uploads/{lease.id}/seal", body, timeout_s=_SEAL_S + lease.nbytes / _SEAL_BYTES_PER_S
        )

    def abort(self, lease: Lease) -> None:
        """See :meth:`Host.abort`."""
        self.client.call("DELETE", f"/v1/uploads/{lease.id}", timeout_s=self.max_stall_s)

    def flush(self, wait_s: float) -> list[str]:
        """See :meth:`Host.flush`."""
        body = {"run": None, "wait_s": wait_s}
        answer = self.client.call("POST", "/v1/flush", body, timeout_s=wait_s + self.max_stall_s)
        return [str(line) for line in answer["unreached"]]

    def remove(self, name: str) -> None:
        """See :meth:`Host.remove`."""
        self.client.call("DELETE", f"/v1/files/{quoted(self.run, name)}", timeout_s=self.max_stall_s)

    def tiers(self) -> dict[str, TierHealth]:
        """See :meth:`Host.tiers`."""
        tiers = self.client.call("GET", "/v1/status", timeout_s=self.max_stall_s)["tiers"]
        return {url: TierHealth(**health) for url, health in tiers.items()}

    def safe_step(self) -> int | None:
        """See :meth:`Host.safe_step`."""
        return max((manifest.step for manifest, _, safe in self.held() if safe), default=None)

    def held(self) -> list[tuple[Manifest, list[str], list[str]]]:
        """Everything the node holds of the run: manifest, tiers it is dirty for, tiers it is safe at."""
        path = f"/v1/runs/{quoted(self.run)}/snapshots"
        listed = self.client.call("GET", path, timeout_s=self.max_stall_s)["snapshots"]
        return [(Manifest.from_dict(item["manifest"]), item["dirty"], item["safe"]) for item in listed]

    def manifests(self) -> list[Manifest]:
        """Committed snapshots of the run in this node's memory, newest first."""
        return newest_first([manifest for manifest, _, _ in self.held() if not manifest.is_file])

    def open_snapshot(self, manifest: Manifest) -> int:
        """Descriptor of a snapshot's memory, see :meth:`Session.open_snapshot`."""
        return self.session.open_snapshot(self.run, manifest.name)

    def leave(self, *, complete: bool) -> None:
        """See :meth:`Host.leave`."""
        path = f"/v1/runs/{quoted(self.run)}/close"
        try:
            self.client.call("POST", path, {"complete": complete}, timeout_s=self.max_stall_s)
        finally:
            self.disconnect()

    def disconnect(self) -> None:
        """See :meth:`Host.disconnect`."""
        self.session.close()
        self.client.close()
        self._maps.clear()
