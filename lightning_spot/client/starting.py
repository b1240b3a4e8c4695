"""Starts, ends and clears the local server: one per run and host.

The first trainer that needs it starts it, detached, so it outlives the trainer.

A server that holds its lock but does not answer (stopped, or blocked) is ended, and a new one takes its place and its
slots. A server of another version is refused: whoever ends it has it upload its snapshots first.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_spot.client.local_server import LocalServer
from lightning_spot.config import SERVER_CALL_TIMEOUT_S, UPLOAD_TIMEOUT_S, environment_of_server
from lightning_spot.errors import ServerRefusedError, ServerUnreachableError, TierReason
from lightning_spot.protocol.ownership import open_file, remove_file, tail_of
from lightning_spot.protocol.process import ProcessId
from lightning_spot.protocol.record import ServerRecord, find_record, hold
from lightning_spot.say import say
from lightning_spot.server.area import remove_abandoned

START_TIMEOUT_S = 30.0
_CHECKED_BYTES_PER_S = 200e6  # of what it takes over before it answers; measured in GB/s, but a host may be busy
_KILL_TIMEOUT_S = 5.0
_DRAIN_S = UPLOAD_TIMEOUT_S + 30.0  # after SIGTERM a server uploads for so long, and closes
_SHOWN_BYTES = 2000


def attach(dirpath: str, run: str) -> LocalServer | None:
    """Connect to the local server of a run, see :func:`revived`.

    Args:
        dirpath: durable URL of the run.
        run: its name.
    """
    return revived(find_record(dirpath), run)


def revived(
    record: ServerRecord, run: str = "", settings: Mapping[str, Any] = MappingProxyType({})
) -> LocalServer | None:
    """Connect to a local server; for slots that a killed one left, start one; ``None`` if there is neither.

    Args:
        record: of the server.
        run: its run, as ``NAME@ID`` or ``NAME``.
        settings: how to run it, as :func:`start` is told, if the last one left no note; without, none is started then.

    Raises:
        ServerUnreachableError: if there is something in memory, but no server gives it out.
    """

    def wanted() -> Mapping[str, Any]:
        return (record.settings() or settings) if record.left_slots() else {}

    try:
        return _connect(record, run, SERVER_CALL_TIMEOUT_S, wanted)
    except ServerUnreachableError:
        raise
    except OSError as error:  # such as a full disk, or no more descriptors
        raise ServerUnreachableError(f"no snapshot server can be reached or started on this host: {error}") from error


def start(
    dirpath: str,
    run: str,
    *,
    slots: int,
    memory_bytes: int,
    server_idle_timeout_s: float,
    server_call_timeout_s: float = SERVER_CALL_TIMEOUT_S,
) -> LocalServer:
    """Connect to the local server of a run; start it first if need be. Trainers that start at once get one server.

    Args:
        dirpath: durable URL of the run.
        run: its name.
        slots: slots of the ring, if it is started now.
        memory_bytes: limit of their memory, likewise.
        server_idle_timeout_s: it ends when no trainer has been connected for so long, likewise.
        server_call_timeout_s: a server that does not answer for so long is ended and replaced; bound on later calls,
            see :class:`~lightning_spot.server.host.Host`.

    Raises:
        ServerUnreachableError: if it does not come up; the message holds the end of its log.
    """
    settings = {"slots": slots, "memory_bytes": memory_bytes, "server_idle_timeout_s": server_idle_timeout_s}
    host = _connect(find_record(dirpath), run, server_call_timeout_s, lambda: settings)
    assert host is not None
    return host


def end_server(record: ServerRecord, *, discard: bool = False) -> bool:
    """Have a local server upload what it holds, and end; whether it has ended. Nothing that is stored is left of it.

    Args:
        record: of the server; it may have ended already.
        discard: whether it ends at once instead, and its slots are removed as well.
    """
    with record.opened() as opened, opened.starting(_DRAIN_S):  # no other server begins meanwhile
        if (process := opened.process()) is not None:
            end_process(process, discard=discard)
        if (alive := hold(opened.alive, _KILL_TIMEOUT_S)) is None:
            return False
        if discard or not record.left_slots():
            for area in record.areas():
                remove_abandoned(area)
            opened.remove()
        opened.alive.unlink(missing_ok=True)
        os.close(alive)
    return True


def end_process(process: ProcessId, *, discard: bool) -> bool:
    """Have a server end once it has uploaded what it holds, or at once; whether it has ended."""
    return process.kill(_KILL_TIMEOUT_S) if discard else process.kill(_DRAIN_S, signal.SIGTERM)


def _connect(
    record: ServerRecord, run: str, server_call_timeout_s: float, settings: Callable[[], Mapping[str, Any]]
) -> LocalServer | None:
    """Connect to a server; where none lives, start one with ``settings()``, or return ``None`` if that is empty."""
    if not record.running() and not settings():
        return None
    limit_s = START_TIMEOUT_S + record.left_bytes() / _CHECKED_BYTES_PER_S
    deadline = time.monotonic() + limit_s
    with record.opened() as opened, opened.starting(limit_s):
        while True:
            if record.running():
                try:
                    return LocalServer(record, run, server_call_timeout_s)
                except ServerUnreachableError as error:
                    _wait_or_end(record, error, deadline)
                except ServerRefusedError as error:
                    if error.reason is not TierReason.PROTOCOL:
                        raise
                    raise ServerRefusedError(
                        f"the server of this run on this host is of another version ({error}). End it with"
                        " `lightning-spot stop RUN`: it uploads its snapshots first",
                        tier=str(record.http),
                        reason=TierReason.PROTOCOL,
                    ) from error
            elif wanted := settings():
                _spawn(record, opened, deadline, wanted)
            else:
                return None


def _wait_or_end(record: ServerRecord, error: ServerUnreachableError, deadline: float) -> None:
    """Give a server that is coming up or leaving a little time; end one that has stopped answering."""
    if time.monotonic() > deadline:
        raise ServerUnreachableError(f"the local server does not answer at {record.http}; see {record.log}") from error
    process = record.process()
    silent = isinstance(error.__cause__, TimeoutError)
    if process is None or not process.alive or not (silent or process.stopped):
        time.sleep(0.05)
        return
    say(
        logging.WARNING,
        "local-server-hung",
        "the server on this host (pid {about}) does not answer. It is ended, and a new one takes over its snapshots",
        about=process.pid,
    )
    if not process.kill(_KILL_TIMEOUT_S):
        raise ServerUnreachableError(
            f"the local server (pid {process.pid}) does not answer and cannot be ended"
        ) from error


def _spawn(record: ServerRecord, opened: ServerRecord, deadline: float, settings: Mapping[str, Any]) -> None:
    command = [sys.executable, "-m", "lightning_spot.http.program", str(record.folder), record.key]
    package_home = str(Path(__file__).resolve().parents[2])
    environment, token = environment_of_server()
    environment["PYTHONPATH"] = os.pathsep.join([package_home, *_python_path()])
    remove_file(opened.http)  # a killed server's: nothing may be taken for the new one's socket
    with (
        open(open_file(opened.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log,
        open(os.memfd_create("settings"), "w+b") as given,
    ):
        given.write(json.dumps({**settings, "token": token}).encode())
        given.seek(0)
        process = subprocess.Popen(
            command,
            stdin=given,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a signal to the trainer's process group must not reach it
            env=environment,
            cwd="/",
        )
    try:
        while not opened.http.exists() or not opened.running():
            if (code := process.poll()) is not None or time.monotonic() > deadline:
                # One that is slow is let go on: what it has checked and taken over, the next try finds.
                how = f"exit {code}" if code is not None else f"pid {process.pid} is still starting"
                tail = tail_of(opened.log, _SHOWN_BYTES)
                raise ServerUnreachableError(f"the local server has not started ({how}). Its log:\n{tail}")
            time.sleep(0.02)
    finally:
        with warnings.catch_warnings():  # it outlives whoever has started it: that is no leak
            warnings.simplefilter("ignore", ResourceWarning)
            del process


def _python_path() -> list[str]:
    """``PYTHONPATH`` with absolute entries: the server does not run in the trainer's working directory."""
    return [os.path.abspath(item) for item in os.environ.get("PYTHONPATH", "").split(os.pathsep) if item]
