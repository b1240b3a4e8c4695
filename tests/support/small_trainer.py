"""A trainer without torch for tests that kill it: takes snapshots of a local server, and stops where it is told.

Its argument is a JSON object: ``dirpath``, ``phase``, ``committed`` (snapshots before that phase), ``nbytes``,
``slots``, ``attempt``, ``worker`` (whether a forked child holds copies of its connections). It prints a line when it
is in the phase (its number, and that of the child), and goes on when it reads one.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from typing import Any

from lightning_spot.client import starting
from lightning_spot.client.local_server import LocalServer
from lightning_spot.server.host import Lease
from lightning_spot.server.runs import RunInfo
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.store.retention import Keep

RUN_ID = "0123456789ab"
PHASES = ("leasing", "filling", "sealing", "committed", "flushing", "leaving")


def info_of(dirpath: str, attempt: int) -> RunInfo:
    return RunInfo(
        name="run",
        id=RUN_ID,
        location=f"file://{dirpath}",
        attempt=attempt,
        token=f"token-{attempt}",
        keep=Keep(newest=1000),
        durable_url=dirpath,
        pid=os.getpid(),
    )


@functools.cache
def image_of(step: int, nbytes: int) -> bytes:
    """A file of ``nbytes`` bytes that no other step has."""
    return bytes([step % 251]) * nbytes


def manifest_of(step: int, attempt: int, nbytes: int) -> Manifest:
    name = snapshot_name(step, attempt)
    return Manifest(run="run", run_id=RUN_ID, name=name, step=step, attempt=attempt, nbytes=nbytes, created_unix_s=1.0)


def fill(lease: Lease, step: int) -> None:
    lease.map[: lease.nbytes] = image_of(step, lease.nbytes)


def take(host: LocalServer, step: int, nbytes: int) -> Manifest:
    """Commit the snapshot of a step."""
    lease, manifest = host.lease(nbytes, 10.0), manifest_of(step, host.attempt, nbytes)
    fill(lease, step)
    host.seal(lease, manifest)
    return manifest


def reach(host: LocalServer, phase: str, step: int, nbytes: int) -> list[threading.Thread]:
    """Bring a host into a phase; what goes on there goes on in threads."""
    if phase == "leasing":
        while True:  # until no slot is left
            try:
                host.lease(nbytes, 0.0)
            except Exception:
                return [_in_background(lambda: host.lease(nbytes, 60.0))]
    lease = host.lease(nbytes, 10.0)
    if phase == "filling":
        lease.map[: nbytes // 2] = image_of(step, nbytes)[: nbytes // 2]
        return []
    fill(lease, step)
    if phase == "sealing":
        return [_in_background(lambda: host.seal(lease, manifest_of(step, host.attempt, nbytes)))]
    host.seal(lease, manifest_of(step, host.attempt, nbytes))
    if phase == "flushing":
        return [_in_background(lambda: host.flush(60.0))]
    if phase == "leaving":
        return [_in_background(lambda: host.leave(complete=False))]
    return []


def _in_background(call: Any) -> threading.Thread:
    def run() -> None:
        try:
            call()
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def main() -> None:
    wish = json.loads(sys.argv[1])
    host = starting.start(
        wish["dirpath"],
        "run",
        slots=wish["slots"],
        memory_bytes=2**28,
        server_idle_timeout_s=30.0,
        server_call_timeout_s=20.0,
    )
    host.open_run(info_of(wish["dirpath"], wish["attempt"]))
    for step in range(1, wish["committed"] + 1):
        take(host, step, wish["nbytes"])
    threads = reach(host, wish["phase"], wish["committed"] + 1, wish["nbytes"])
    worker = 0
    if wish["worker"]:
        time.sleep(0.1)
        idle = [connection.sock for connection in host.client._pool._idle]
        for copied in [host.session._socket, *idle, *host.client._pool._taken]:
            os.dup(copied.fileno())  # what the fork hooks do not know of, as with a fork outside of Python
        worker = os.fork()
        if worker == 0:
            time.sleep(600)  # whoever has started this ends it
            os._exit(0)
    print(json.dumps({"pid": os.getpid(), "worker": worker}), flush=True)
    sys.stdin.readline()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
