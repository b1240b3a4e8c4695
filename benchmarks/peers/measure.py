"""Runs one cell, or one training in turns, in a process of its own, and counts from outside what it has used."""

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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.baselines.baseline import DURABLE, HOST, PEER
from benchmarks.peers import cell as cells
from benchmarks.peers import processes, turns
from benchmarks.peers.cell import Cell
from benchmarks.peers.sightings import POLL_S, Sightings
from benchmarks.peers.turns import Training
from benchmarks.peers.ways import far_folder

MEMORY_EVERY_S, MEMORY_SHARE = 0.25, 0.02
MEMORY_LIMIT = 0.8
PATIENCE_S = 20.0  # for servers and writers to end by themselves
START_S = 120.0  # for all ways of a training to start, and to end
TIERS = (HOST, PEER, DURABLE)


class CellFailed(Exception):
    """A process ended with an error, or not in time."""


@dataclass(frozen=True)
class Started:
    """A process that measures.

    Attributes:
        place: its directory on the disk.
        shm: its directory in memory.
        answers: what it tells.
        process: it.
        spare: processes that are none of its own.
    """

    place: Path
    shm: Path
    answers: Connection
    process: Any
    spare: set[int]

    @property
    def work(self) -> Path:
        """Where it saves to."""
        return self.place / "work"

    def told(self, limit_s: float, look: Callable[[], None]) -> Iterator[dict[str, Any]]:
        """All that it tells until it ends. Calls ``look`` every now and then.

        Raises:
            CellFailed: if it ends with an error, or not in time.
        """
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            look()
            if self.answers.poll(POLL_S):
                try:
                    said = self.answers.recv()
                except EOFError:
                    raise CellFailed(_last_line(self.place / "log") or "ended without a word") from None
                if said is None:
                    look()
                    return
                yield said
        raise CellFailed(f"not done after {limit_s:g} s")


@contextlib.contextmanager
def started(run: Callable[..., None], what: Cell | Training, folder: Path) -> Iterator[Started]:
    """Run ``run(what, ...)`` in a process of its own. This one must adopt orphans (:func:`processes.adopt_orphans`)."""
    place = Path(tempfile.mkdtemp(prefix="cell-", dir=folder))
    shm = Path(tempfile.mkdtemp(prefix="ls-peers-", dir="/dev/shm"))
    # A forked process shares what was imported; CUDA must not be touched before it is forked, and is safer without.
    context = multiprocessing.get_context("fork" if what.device == "cpu" else "spawn")
    if what.device != "cpu":
        resource_tracker.ensure_running()  # else the first process that is spawned begins it, and it is none of its own
    spare = set(processes.descendants(os.getpid()))
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_inside, args=(run, what, place, shm, os.getpid(), theirs))
    process.start()
    theirs.close()
    try:
        yield Started(place, shm, ours, process, spare)
    finally:
        ours.close()
        process.kill()
        process.join()
        processes.reap(0.0, spare)
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)


class _Memory:
    """The most memory that all processes used together; looks at it now and then."""

    def __init__(self, shm: Path) -> None:
        self.peak_bytes, self._shm, self._at_s = 0, shm, 0.0

    def look(self) -> None:
        if (now_s := time.monotonic()) >= self._at_s:
            self.peak_bytes = max(self.peak_bytes, processes.memory_bytes(os.getpid(), self._shm))
            if self.peak_bytes > MEMORY_LIMIT * processes.total_bytes():
                raise CellFailed(f"needs more than {MEMORY_LIMIT:.0%} of this machine's memory")
            looked_s = time.monotonic() - now_s  # in which the processes looked at can map nothing
            self._at_s = time.monotonic() + max(MEMORY_EVERY_S, looked_s / MEMORY_SHARE)


def measure(cell: Cell, folder: Path, limit_s: float) -> dict[str, Any]:
    """Measure a cell. This process must do nothing else meanwhile.

    Args:
        cell: what to measure.
        folder: on the disk that is storage.
        limit_s: the cell fails after so long.

    Returns:
        the cell's fields, with what was measured.

    Raises:
        CellFailed: with what is known of the cause.
    """
    spent = processes.Spent()
    with started(cells.run, cell, folder) as running:
        sightings, memory = Sightings(_watched(running, [running.work])), _Memory(running.shm)

        def look() -> None:
            sightings.look()
            memory.look()

        found = list(running.told(limit_s, look))[-1]
        running.process.join(PATIENCE_S)
        killed = processes.reap(PATIENCE_S, running.spare)
    cpu_s = spent.cpu_s() - found.pop("cpu_before_s") - found.pop("restore_cpu_s")
    found["safe"] = [event for event in [*found["safe"], *sightings.safe] if event[0] in found["begun"]]
    return {
        **asdict(cell),
        "measured_steps": cell.measured,
        **_of_snapshots(found),
        "cpu_s": cpu_s,
        "peak_bytes": memory.peak_bytes,
        "written_bytes": spent.written_bytes(),
        "killed": len(killed),
    }


def measure_in_turns(training: Training, folder: Path, tell: Callable[[dict[str, Any]], None]) -> None:
    """Measure a training in turns. This process must do nothing else meanwhile.

    Args:
        training: what to measure.
        folder: on the disk that is storage.
        tell: is told each turn when it is over, and each way that failed, also where the training fails later.

    Raises:
        CellFailed: with what is known of the cause.
    """
    with started(turns.run, training, folder) as running:
        ours = [training.folder_of(way, running.work) for way in training.ways if way.startswith("ours")]
        sightings = Sightings(_watched(running, ours))

        def look() -> None:
            sightings.look()
            if processes.available_bytes() < (1 - MEMORY_LIMIT) / 4 * processes.total_bytes():
                raise CellFailed("its ways together need nearly all of this machine's memory: name fewer")

        for said in running.told(2 * training.seconds + START_S, look):
            if "turn" in said:
                sightings.look()
                turn = said["turn"]
                begun, safe = turn.pop("begun"), [*turn.pop("safe"), *sightings.safe]
                turn |= {"taken": len(begun), "safe_after_s": _safe_after_s(begun, safe)}
            tell(said)
        running.process.join(PATIENCE_S)


def _watched(running: Started, folders: list[Path]) -> list[tuple[str, Path]]:
    """Where snapshots of ours show themselves, of ways that save to these folders."""
    below = [((DURABLE, folder / "run"), (PEER, far_folder(running.shm, folder))) for folder in folders]
    return [(HOST, running.shm), *(place for both in below for place in both)]


def _of_snapshots(found: dict[str, Any]) -> dict[str, Any]:
    """What was noted of single snapshots, in few numbers."""
    begun, safe = found.pop("begun"), found.pop("safe")
    begin_s, end_s = found.pop("window")
    inside = {step: at for step, at in begun.items() if begin_s <= at < end_s}
    last_ones = found.pop("last_ones")
    return found | {
        "inside": len(inside),
        "after_begin": sum(at >= begin_s for at in begun.values()) + last_ones,
        "snapshots": len(begun) + last_ones,
        "safe_after_s": _safe_after_s(inside, safe),
    }


def _safe_after_s(begun: dict[int, float], safe: list[tuple[int, str, float]]) -> dict[str, list[float]]:
    return {
        tier: [at - begun[step] for step, reached, at in safe if reached == tier and step in begun] for tier in TIERS
    }


def _inside(
    run: Callable[..., None], what: Cell | Training, place: Path, shm: Path, command: int, answer: Connection
) -> None:
    """In the process that measures."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["LIGHTNING_SPOT_RUNTIME_DIR"] = str(shm / "nodes")  # short enough for sockets
    os.environ["LIGHTNING_SPOT_SHM_DIR"] = str(shm)
    log = os.open(place / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    work = place / "work"
    work.mkdir()
    try:
        run(what, work, command, answer.send)
        answer.send(None)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads of what has failed may never end


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return lines[-1].strip() if lines else ""
