"""Runs one cell in a process of its own, and counts from outside what it and all that it started have used."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.peers import cell as cells
from benchmarks.peers import processes
from benchmarks.peers.cell import Cell
from benchmarks.peers.sightings import POLL_S, Sightings

MEMORY_EVERY_S, MEMORY_SHARE = 0.25, 0.02
MEMORY_LIMIT = 0.8
PATIENCE_S = 20.0  # for nodes and writers to end by themselves


class CellFailed(Exception):
    """A cell ended with an error, or not in time."""


def measure(cell: Cell, folder: Path, limit_s: float) -> dict[str, Any]:
    """Measure a cell. This process must adopt orphans (:func:`processes.adopt_orphans`) and do nothing else meanwhile.

    Args:
        cell: what to measure.
        folder: on the disk that is the durable tier.
        limit_s: the cell fails after so long.

    Returns:
        the cell's fields, with what was measured.

    Raises:
        CellFailed: with what is known of the cause.
    """
    place = Path(tempfile.mkdtemp(prefix="cell-", dir=folder))
    shm = Path(tempfile.mkdtemp(prefix="ls-peers-", dir="/dev/shm"))
    spent, peak_bytes = processes.Spent(), 0
    spare = set(processes.descendants(os.getpid()))
    # A forked process shares what was imported; CUDA must not be touched before it is forked, and is safer without.
    context = multiprocessing.get_context("fork" if cell.device == "cpu" else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_inside, args=(cell, place, shm, os.getpid(), theirs))
    process.start()
    theirs.close()
    deadline_s, memory_at_s = time.monotonic() + limit_s, 0.0
    run = place / "work" / "run"
    sightings = Sightings({"durable": str(run), "host": str(shm), "peer": str(shm / "far")})
    found: dict[str, Any] | None = None
    try:
        while found is None and time.monotonic() < deadline_s:
            sightings.look()
            if (now_s := time.monotonic()) >= memory_at_s:
                peak_bytes = max(peak_bytes, processes.memory_bytes(os.getpid(), shm))
                if peak_bytes > MEMORY_LIMIT * processes.total_bytes():
                    raise CellFailed(f"needs more than {MEMORY_LIMIT:.0%} of this machine's memory")
                looked_s = time.monotonic() - now_s  # in which the processes looked at can map nothing
                memory_at_s = time.monotonic() + max(MEMORY_EVERY_S, looked_s / MEMORY_SHARE)
            if ours.poll(POLL_S):
                with contextlib.suppress(EOFError):
                    found = ours.recv()
                break
        sightings.look()
        if found is None:
            raise CellFailed(_last_line(place / "log") or f"not done after {limit_s:g} s")
        process.join(PATIENCE_S)
        killed = processes.reap(PATIENCE_S, spare)
    finally:
        ours.close()
        process.kill()
        process.join()
        processes.reap(0.0, spare)
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)
    cpu_s = spent.cpu_s() - found.pop("cpu_before_s") - found.pop("restore_cpu_s")
    found["safe"] = [event for event in [*found["safe"], *sightings.safe] if event[0] in found["begun"]]
    return {
        **asdict(cell),
        "measured_steps": cell.measured,
        **_of_snapshots(found),
        "cpu_s": cpu_s,
        "peak_bytes": peak_bytes,
        "written_bytes": spent.written_bytes(),
        "killed": len(killed),
    }


def _of_snapshots(found: dict[str, Any]) -> dict[str, Any]:
    """What was noted of single snapshots, in few numbers."""
    begun, safe = found.pop("begun"), found.pop("safe")
    begin_s, end_s = found.pop("window")
    inside = [step for step, at in begun.items() if begin_s <= at < end_s]
    found["inside"] = len(inside)
    last_ones = found.pop("last_ones")
    found["after_begin"] = sum(at >= begin_s for at in begun.values()) + last_ones
    found["snapshots"] = len(begun) + last_ones
    found["safe_after_s"] = {
        tier: [at - begun[step] for step, reached, at in safe if reached == tier and step in inside]
        for tier in ("host", "peer", "durable")
    }
    return found


def _inside(cell: Cell, place: Path, shm: Path, command: int, answer: Connection) -> None:
    """In the cell's process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["LIGHTNING_SPOT_RUNTIME_DIR"] = str(shm / "nodes")  # short enough for sockets
    os.environ["LIGHTNING_SPOT_SHM_DIR"] = str(shm)
    log = os.open(place / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    work = place / "work"
    work.mkdir()
    try:
        answer.send(cells.run(cell, work, command))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads of what has failed may never end


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return lines[-1].strip() if lines else ""
