"""A warm process that forks trainers: each trains at once, instead of importing torch first."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path


class Zygote:
    """A warm process that forks trainers."""

    def __init__(self, python: str, log: Path) -> None:
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                [python, "-m", "tests.crash_trainer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                cwd=Path(__file__).parents[1],
            )
        assert self.read() == "ready"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def spawn(self, dirpath: Path, oracle: Path, **more: object) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"dirpath": str(dirpath), "oracle": str(oracle), **more}) + "\n")
        self.process.stdin.flush()
        return int(self.read())
