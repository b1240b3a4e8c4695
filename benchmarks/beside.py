"""A program of ours that listens, in a process of its own, so that what is measured does not wait for it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound="Beside")


class Beside:
    """Such a program, until the block ends. It prints the port that it listens on.

    Args:
        module: that is run.
        *arguments: of it.
    """

    def __init__(self, module: str, *arguments: object) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def __enter__(self: Kind) -> Kind:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait()
