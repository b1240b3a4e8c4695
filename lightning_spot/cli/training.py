"""The user's training, as a drill runs it: in a process group of its own, also where a launcher starts its ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lightning_spot.config import DRILL_VARIABLE, NOTICE_FILE_VARIABLE
from lightning_spot.errors import SettingsError
from lightning_spot.protocol.process import descendants
from lightning_spot.protocol.record import find_record


class Training:
    """The command that trains, while it runs.

    Args:
        process: it leads its process group.
        folder: below which it keeps its run.

    Attributes:
        process: see above.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self._folder = folder

    def launched(self) -> list[int]:
        """Processes that a launcher such as torchrun has put into groups of their own, and not the run's node."""
        if self.process.poll() is not None:  # its number may be another process's by now
            return []
        nodes = [find_record(str(run)).process() for run in (self._folder / "runs").glob("*")]
        known = {node.pid for node in nodes if node is not None}
        return [pid for pid in descendants(self.process.pid) if pid not in known and not self._is_in_group(pid)]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to its process group; what ends them at once, to what was launched as well."""
        launched = self.launched() if number == signal.SIGKILL else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        for pid in launched:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _is_in_group(self, pid: int) -> bool:
        try:
            return os.getpgid(pid) == self.process.pid
        except ProcessLookupError:  # it has ended, and needs no signal
            return True


@contextlib.contextmanager
def training(command: list[str], folder: Path, notice: Path) -> Iterator[Training]:
    """Run a command until it is left: then all of it is ended, but its node.

    Args:
        command: that trains.
        folder: for its run, and its log.
        notice: a file that is a notice to it, once it is there.

    Raises:
        SettingsError: if it cannot be started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        DRILL_VARIABLE: str(folder),
        NOTICE_FILE_VARIABLE: str(notice),
        "LIGHTNING_SPOT_CLOUD": "none",
    }
    with open(folder / "log", "ab") as log:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        except OSError as error:
            raise SettingsError(f"{command[0]!r} cannot be started: {error.strerror}") from error
    found = Training(process, folder)
    try:
        yield found
    finally:
        found.send(signal.SIGKILL)  # its ranks, if it was killed itself
        process.wait()
