"""What all benchmarks share: rounds, results, a large training state, a scratch area that is cleaned up."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch

GIB = 2**30
PARAMETERS = 150
PARAMETER_ELEMENTS = 560_000  # 150 parameters with Adam's two moments: 1.01 GB in 450 tensors and 150 counters


@dataclass(frozen=True)
class Result:
    """One line of the table: values of all rounds, judged by their median, or by nothing where there is no target."""

    name: str
    values: list[float]
    target: float | None
    at_most: bool = True
    unit: str = "x"

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        if self.target is None:
            return True
        return self.median <= self.target if self.at_most else self.median >= self.target

    def row(self) -> str:
        low, high = min(self.values), max(self.values)
        sign = "≤" if self.at_most else "≥"
        spread = f"{low:.2f}–{high:.2f}"
        verdict = "" if self.target is None else "yes" if self.met else "**no**"
        target = "none" if self.target is None else f"{sign} {self.target:g} {self.unit}"
        return f"| {self.name} | {self.median:.2f} {self.unit} | {spread} | {target} | {verdict} |"


def about() -> dict[str, Any]:
    """When and where something was measured, and of what."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "when": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or "unknown",
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "load_before": os.getloadavg()[0],
    }


def bare_trainer(steps: int, callbacks: Sequence[pl.Callback], **settings: Any) -> pl.Trainer:
    """A trainer, on the CPU unless told otherwise, that does nothing beside training but what its callbacks do."""
    return pl.Trainer(
        max_steps=steps,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"accelerator": "cpu", "enable_checkpointing": False, **settings},
    )


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def training_state(elements: int = PARAMETER_ELEMENTS, only: str = "") -> dict[str, torch.Tensor]:
    """Weights and Adam's moments, 1.01 GB by default; or those of them whose names begin with ``only``."""
    names = [f"{kind}.{index}" for index in range(PARAMETERS) for kind in ("weight", "exp_avg", "exp_avg_sq")]
    return {name: torch.full((elements,), float(index)) for index, name in enumerate(names) if name.startswith(only)}


class WarmCopy:
    """One copy of a state into memory whose pages exist: the least that any snapshot costs."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.source = list(state.values())
        self.target = [torch.ones_like(tensor) for tensor in self.source]
        self()

    def __call__(self) -> None:
        for target, source in zip(self.target, self.source, strict=True):
            target.copy_(source)


@contextlib.contextmanager
def memory_node(folder: Path) -> Iterator[int]:
    """A snapshot server in a process of its own, of 4 GiB; the port it listens on."""
    command = [
        sys.executable,
        "-m",
        "lightning_spot",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--memory-limit",
        "4GiB",
    ]
    with open(folder / "node.log", "wb") as log:
        node = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + 60
        while "listening on " not in (text := (folder / "node.log").read_text()):
            if node.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(text)
            time.sleep(0.05)
        yield int(text.split("listening on ")[1].split(",")[0].rpartition(":")[2])
    finally:
        node.kill()
        node.wait()


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory on disk, with a runtime directory of its own for servers, which are ended afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="ls-bench-"))
    shm = Path(tempfile.mkdtemp(prefix="ls-bench-", dir="/dev/shm"))
    changed = {"LIGHTNING_SPOT_RUNTIME_DIR": str(folder / "run"), "LIGHTNING_SPOT_SHM_DIR": str(shm)}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield folder
    finally:
        _end_nodes(folder / "run")
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)


def _end_nodes(runtime_dir: Path) -> None:
    from lightning_spot.client.server_client import ServerClient
    from lightning_spot.protocol.wire import Address

    for http in runtime_dir.glob("*.http"):
        with contextlib.suppress(Exception):
            os.kill(int(ServerClient(Address(socket_path=str(http))).call("GET", "/v1/status")["pid"]), signal.SIGKILL)
