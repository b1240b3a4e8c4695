"""Helpers of the crash tests: what a whole snapshot looks like, processes to kill, and a tracer that strikes at a call.

Run as a program it is a small server without torch. For each line it forks a child that runs a scenario with the real
stores and servers, and strikes it at its N-th call that changes files or directories.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import functools
import io
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from lightning_spot.cli import main
from lightning_spot.errors import SpotError
from lightning_spot.server.runs import RunInfo
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.snapshot.files import FileSpan
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.store.fences import Claim, digest_of
from lightning_spot.store.local import LocalStore
from lightning_spot.store.retention import Keep, retain
from tests.support import shard_scenarios

HOME = Path(__file__).resolve().parents[2]
ANSWER_S = 90.0

# -- what a whole snapshot of crash_trainer.Watched looks like --------------------------------------------------------

LEARNING_RATE, BETAS, EPS, MOMENTUM = 1.0, (0.9, 0.999), 1e-8, 0.1
_CLOSE = 2e-5  # one step more or less changes every value by at least 1/step of it


class Moments:
    """One element under Adam, computed in plain Python."""

    def __init__(self) -> None:
        self.value = self.exp_avg = self.exp_avg_sq = 0.0

    def step(self, number: int, gradient: float) -> None:
        self.exp_avg = BETAS[0] * self.exp_avg + (1 - BETAS[0]) * gradient
        self.exp_avg_sq = BETAS[1] * self.exp_avg_sq + (1 - BETAS[1]) * gradient**2
        mean, square = self.exp_avg / (1 - BETAS[0] ** number), self.exp_avg_sq / (1 - BETAS[1] ** number)
        self.value -= LEARNING_RATE * mean / (square**0.5 + EPS)


@functools.cache
def expected(step: int) -> tuple[Moments, float]:
    """The weights' element and the running mean after ``step`` steps, the gradient of step t being -t, its input t."""
    weight, running_mean = Moments(), 0.0
    for number in range(1, step + 1):
        weight.step(number, -float(number))
        running_mean = (1 - MOMENTUM) * running_mean + MOMENTUM * number
    return weight, running_mean


def mixed(state: dict[str, Any], step: int) -> list[str]:
    """Names of the tensors of a ``state_dict`` that are not those of ``step``."""
    weight, running_mean = expected(step)
    values = {
        "count": weight.value,
        "seen": step,
        "ballast": step,
        "norm.running_mean": running_mean,
        "norm.num_batches_tracked": step,
    }
    return [name for name, value in values.items() if not _all_are(state[name], value)]


def _all_are(tensor: Any, value: float) -> bool:
    if tensor.numel() == 0:
        return True
    ends = (float(tensor.min()), float(tensor.max()))
    return all(abs(end - value) <= _CLOSE * max(1e-30, abs(value)) for end in ends)


def check_checkpoint(file: IO[bytes], step: int) -> None:
    """Fail unless ``file`` is the whole checkpoint of ``step``, and of no other."""
    import torch

    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if "/data/" not in record.filename:  # tensors' bytes have no CRC
                archive.read(record)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    assert checkpoint["global_step"] == step
    assert not (torn := mixed(checkpoint["state_dict"], step)), f"{torn} are not of step {step}"
    states = checkpoint["optimizer_states"][0]["state"]
    assert {float(state["step"]) for state in states.values()} <= ({float(step)} if step else set())
    if step:
        weight, _ = expected(step)
        assert _all_are(states[0]["exp_avg"], weight.exp_avg)
        assert _all_are(states[0]["exp_avg_sq"], weight.exp_avg_sq)


def lines(oracle: Path, word: str) -> list[list[str]]:
    """What a trainer has noted under a word."""
    text = oracle.read_text() if oracle.exists() else ""
    return [line.split()[1:] for line in text.split("\n")[:-1] if line.startswith(word + " ")]


# -- processes that answer one line for each line ---------------------------------------------------------------------


class Server:
    """A process to talk to by lines, every answer awaited for a bounded time."""

    def __init__(self, module: str, log: Path, python: str = sys.executable) -> None:
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                [python, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                bufsize=0,
                cwd=HOME,
            )
        self.log = log
        self._buffer = b""
        assert self.read() == "ready"

    def say(self, request: dict[str, Any]) -> None:
        self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def spawn(self, **request: Any) -> int:
        """Have ``crash_trainer`` fork a trainer; its process id."""
        self.say({key: str(value) if isinstance(value, Path) else value for key, value in request.items()})
        return int(self.read())

    def read(self, deadline_s: float = ANSWER_S) -> str:
        end = time.monotonic() + deadline_s
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, left))
            data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not data:
                tail = self.log.read_text(errors="replace")[-3000:]
                raise AssertionError(f"no answer ({'ended' if ready else 'too late'}); its log ends:\n{tail}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


# -- scenarios: the real code, told about step by step ----------------------------------------------------------------

Tell = Callable[..., None]
SMALL, LARGE = 3000, 3 * 2**20
_SESSION = "trainer"
SIZES = (SMALL, 9000, LARGE, SMALL, SMALL)
STEPS = len(SIZES)
FILES = (FileSpan(".metadata", 0, 100), FileSpan("__0_0.distcp", 4096, 9000 - 4096))
"""Of the second step, a snapshot of several files."""


@functools.cache
def image_of(step: int) -> bytes:
    """A small file with content that no other step has."""
    image = bytes([step]) * (SIZES[step - 1] if step <= STEPS else SMALL)
    return image if step != 2 else image[: FILES[0].stop].ljust(FILES[1].offset, b"\0") + image[FILES[1].offset :]


def manifest_of(step: int, attempt: int = 1) -> Manifest:
    nbytes = len(image_of(step))
    part_bytes = 1024 if nbytes < LARGE else LARGE // 8  # several parts, but not thousands
    name = snapshot_name(step, attempt)
    files = FILES if step == 2 else ()
    return Manifest(run="run", name=name, step=step, attempt=attempt, nbytes=nbytes, part_bytes=part_bytes, files=files)


def claim_of(attempt: int, *, token: str = "", **more: Any) -> Claim:
    """A claim as a trainer of the tests makes it; no two have the same token, unless it is given."""
    made = Claim(
        attempt=attempt,
        run_id="",
        digest=digest_of(token or uuid.uuid4().hex),
        location="file:///run",
        started_unix_s=1.0,
    )
    return replace(made, **more)


def file_of(step: int) -> Manifest:
    """A checkpoint at a place the user named, overwritten again and again."""
    return Manifest(run="run", name="last.ckpt", step=step, attempt=1, nbytes=0, file="")


def _worked(tell: Tell, action: Callable[..., Any], *arguments: Any, **more: Any) -> bool:
    """Do it; a failing tier is told, anything that is no error of the package's ends the scenario."""
    try:
        action(*arguments, **more)
    except SpotError as error:
        tell("refused", type(error).__name__)
        return False
    return True


def use_store(root: Path, tell: Tell) -> None:
    """Claim, put, put again (as the heir of a killed server does), keep one."""
    store = LocalStore(root / "durable")
    writer = 0
    for step in range(1, STEPS + 1):
        if step in (1, 4) and _worked(tell, store.claim, claim_of(writer + 1)):
            writer += 1
            tell("claimed", writer)
        image = memoryview(image_of(step))
        manifest = manifest_of(step).sealed(image)
        for _ in range(2):
            if _worked(tell, store.put, manifest, image, attempt=max(1, writer)):
                tell("durable", step)
        _worked(tell, retain, store, Keep(newest=1), manifest)


def use_file(root: Path, tell: Tell) -> None:
    """Overwrite one file."""
    store = LocalStore(root / "durable")
    for step in range(1, STEPS + 1):
        image = memoryview(image_of(step))
        if _worked(tell, store.put, file_of(step).sealed(image), image, attempt=1):
            tell("file", step)


def use_history(root: Path, tell: Tell) -> None:
    """Go back twice, take another snapshot, prune, and remove the run, by commands."""
    store, run = LocalStore(root / "durable"), str(root / "durable")
    store.claim(claim_of(1))
    for step in (1, 2, 3):
        image = memoryview(image_of(step))
        store.put(manifest_of(step).sealed(image), image, attempt=1)
        tell("durable", step)
    for step in (1, 2):
        _command(tell, "rewind", f"{run}@{step}")
        tell("rewound", step)
    store.claim(claim_of(2))
    image = memoryview(image_of(4))
    manifest = manifest_of(4, 2).sealed(image)
    store.put(manifest, image, attempt=2)
    tell("again", 4)
    retain(store, Keep(newest=2), manifest)
    tell("retained", 2)
    _command(tell, "prune", run, "--keep=1")
    tell("pruned", 1)
    _command(tell, "rm", run, "--all")
    tell("gone", 1)


def _command(tell: Tell, *arguments: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):  # what is told goes there
        code = main(list(arguments))
    if code:
        tell("error", " ".join(arguments))


def run_info(root: Path, *, attempt: int = 1, keep: int = 2, session: str = "") -> RunInfo:
    """A run without an identity that is kept in ``root/durable``."""
    url = str(root / "durable")
    run = RunInfo(name="run", id="", location=url, attempt=attempt, token=f"token-{attempt}")
    return replace(run, keep=Keep(newest=keep), durable_url=url, session=session)


def use_server(root: Path, tell: Tell) -> None:
    """Seal into a ring in tmpfs, which has to let snapshots go and grow a slot, and flush."""
    try:
        server = SnapshotServer(slots=2, memory_bytes=2**26, open_store=LocalStore, allow=None, area=root / "area")
    except OSError:
        tell("refused", "server")  # the program ends then, and says why
        return
    server.registry.begin_session(_SESSION)
    attempt = server.open_run(run_info(root, attempt=server.claimed("run") + 1, keep=1, session=_SESSION)).attempt
    for step in range(1, STEPS + 1):
        if _worked(tell, _seal, server, attempt, step):
            tell("committed", step)
            if step in (2, STEPS):
                left = server.flush("run", 10.0)
                assert not left, f"never clean again: {left}"
                tell("durable", step)
    server.close(keep_unsafe=True)


def _seal(server: SnapshotServer, attempt: int, step: int) -> None:
    image = image_of(step)
    upload = server.uploads.lease("run", attempt, len(image), wait_s=60)
    with upload.slot.view(len(image)) as view:
        view[:] = image
    try:
        server.uploads.seal(upload.id, manifest_of(step))
    except BaseException:
        server.uploads.abort(upload.id)  # as the trainer does
        raise


SCENARIOS = {
    "store": use_store,
    "file": use_file,
    "server": use_server,
    "history": use_history,
    **shard_scenarios.SCENARIOS,
}


# -- the tracer -------------------------------------------------------------------------------------------------------

CHANGES = ("fsync", "replace", "rename", "unlink", "remove", "mkdir", "rmdir", "open", "posix_fallocate")
TAKES_ROOM = ("fsync", "replace", "mkdir", "open", "posix_fallocate")


class Tracer:
    """Counts calls that change files and strikes at the N-th: with SIGKILL, or with a full disk.

    A file write that is struck has written its first half.

    Args:
        number: which call, from 1.
        span: how many calls in a row find the disk full; 0 kills.
        tell: called with ``"struck"`` and the call's name when a full disk strikes.
    """

    def __init__(self, number: int, span: int, tell: Tell) -> None:
        self._number, self._span, self._tell = number, span, tell
        self._calls = 0
        self._lock = threading.Lock()

    def install(self) -> None:
        for name in TAKES_ROOM if self._span else CHANGES:
            if hasattr(os, name):
                setattr(os, name, self._watched(name, getattr(os, name)))
        real_open = io.open

        def opened(file: Any, mode: str = "r", *arguments: Any, **more: Any) -> Any:
            if not set(mode) & set("wax+"):
                return real_open(file, mode, *arguments, **more)
            if self.hit():
                self.strike("open")
            return TracedFile(real_open(file, mode, *arguments, **more), self)

        builtins.open = io.open = opened  # type: ignore[assignment] # in a child made for this

    def hit(self) -> bool:
        with self._lock:
            self._calls += 1
            return self._number <= self._calls < self._number + max(1, self._span)

    def strike(self, name: str) -> None:
        if not self._span:
            os.kill(os.getpid(), signal.SIGKILL)
        self._tell("struck", name)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if self.hit():
                self.strike(name)
            return real(*arguments, **more)

        return call


class TracedFile:
    """A file opened for writing."""

    def __init__(self, file: Any, tracer: Tracer) -> None:
        self._file, self._tracer = file, tracer

    def write(self, data: Any) -> int:
        if self._tracer.hit():
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            self._tracer.strike("write")
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> TracedFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()


def in_child(request: dict[str, Any]) -> dict[str, Any]:
    """Run a scenario in a forked process; say how it ended and what it told."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        signal.alarm(60)  # whatever happens, it ends

        def tell(*words: Any) -> None:
            os.write(writer, (" ".join(map(str, words)) + "\n").encode())

        code = 1
        try:
            Tracer(request["number"], request["span"], tell).install()
            SCENARIOS[request["scenario"]](Path(request["root"]), tell)
            code = 0
        except BaseException as error:
            tell("error", type(error).__name__, error)
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = [line.split(" ", 1) for line in pipe.read().decode(errors="replace").splitlines()]
    return {"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "told": told}


def serve() -> None:
    """Answer requests until there are no more."""
    for step in range(1, STEPS + 1):
        image_of(step)  # once, for all children
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(in_child(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()
