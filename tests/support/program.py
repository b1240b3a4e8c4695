"""Trainings as programs: ``python -m tests.support.program MODULE:FUNCTION ARGUMENTS`` calls a function of the tests.

The arguments are a JSON object. :func:`start` and :func:`run` are how a test does that; ranks that Lightning starts are
the same command once more. What a training leaves is an :class:`Outcome`.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.local import LocalStore
from tests.support.waiting import kept_port, until

LONGEST_S = 600.0


def command(python: str, function: Callable[..., Any], root: Path, **arguments: Any) -> list[str]:
    """What calls a function with such arguments."""
    name = f"{function.__module__}:{function.__name__}"
    text = json.dumps({"root": root, **arguments}, default=str)
    return [python, "-m", "tests.support.program", name, text]


def start(python: str, function: Callable[..., Any], root: Path, **arguments: Any) -> subprocess.Popen[bytes]:
    """Start a training below ``root``; what it says is added to ``root/log``."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "log", "ab") as log:
        return subprocess.Popen(command(python, function, root, **arguments), stdout=log, stderr=log)


def run(python: str, function: Callable[..., Any], root: Path, *, code: int | None = 0, **arguments: Any) -> Outcome:
    """Train to the end of the first rank, which has to exit with a code; ``None``: with any but 0."""
    found = start(python, function, root, **arguments).wait(LONGEST_S)
    outcome = Outcome(root)
    assert found == code if code is not None else found != 0, f"exit code {found}\n{outcome.log[-5000:]}"
    return outcome


def launch(python: str, function: Callable[..., Any], root: Path, **arguments: Any) -> Outcome:
    """Train on two ranks that are started as by a launcher: each of several trainings of a process has them."""
    with kept_port() as port, pytest.MonkeyPatch.context() as patch:
        for name, value in {"WORLD_SIZE": 2, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            patch.setenv(name, str(value))
        ranks = []
        for rank in range(2):
            patch.setenv("LOCAL_RANK", str(rank))
            ranks.append(start(python, function, root, **arguments))
        try:
            assert [rank.wait(LONGEST_S) for rank in ranks] == [0, 0], Outcome(root).log[-5000:]
        finally:
            for process in ranks:
                process.kill()
    return Outcome(root)


@dataclass(frozen=True)
class Outcome:
    """What trainings below a directory have left, by now."""

    root: Path

    @property
    def log(self) -> str:
        """Of all attempts, and of all machines."""
        return "".join(log.read_text(errors="replace") for log in sorted(self.root.glob("log*")) if log.is_file())

    @property
    def resumed(self) -> list[int]:
        """The steps from which attempts have gone on."""
        return [int(step) for step in re.findall(r"resumes at step (\d+)", self.log)]

    @property
    def steps(self) -> dict[int, str]:
        """Checksums of the parameters of each step, see ``training``; those of the last attempt that had it."""
        path = self.root / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return {int(step): digest for step, digest in map(str.split, lines)}

    @property
    def snapshots(self) -> list[Manifest]:
        """That are durable, the newest first."""
        return LocalStore(self.root / "run").survey().manifests

    def content(self, manifest: Manifest) -> dict[str, Any]:
        """All that is in a snapshot."""
        from tests.support.snapshots import content  # torch

        return content(self.root / "run", manifest)

    def final(self) -> dict[str, Any]:
        """All that is in the last one, of a run that has come to its end."""
        newest = self.snapshots[0]
        assert newest.complete, self.log[-5000:]
        return self.content(newest)

    def accounts(self, ranks: int) -> list[dict[str, Any]]:
        """What each rank has left, see ``training``; the first one does not wait for the others."""
        files = [self.root / f"rank-{rank}.json" for rank in range(ranks)]
        until(lambda: all(file.exists() and file.read_text().endswith("}") for file in files), f"{files}")
        return [json.loads(file.read_text()) for file in files]

    def check_states(self) -> None:
        """Every snapshot holds the parameters of its step."""
        from tests.support.trainer import digest

        steps, found = self.steps, self.snapshots
        assert found, self.log[-5000:]
        for manifest in found:
            assert digest(self.content(manifest)["state_dict"]) == steps[manifest.step], manifest.name

    def check_end(self, twin: Outcome) -> None:
        """It has ended as its twin did, which nothing has disturbed."""
        from lightning_spot.state.compare import differences

        assert list(differences(twin.final(), self.final())) == []


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    arguments = json.loads(sys.argv[2])
    getattr(importlib.import_module(module), name)(**{**arguments, "root": Path(arguments["root"])})


if __name__ == "__main__":
    main()
