"""``lightning-spot run``: starts a training again after a crash or a kill, where nothing else on the machine does."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Iterator

from lightning_spot.cli.arguments import add_program, program_of, takes_number, takes_time
from lightning_spot.cli.output import error_console
from lightning_spot.config import RESTARTER_VARIABLE
from lightning_spot.errors import SettingsError
from lightning_spot.retry import growing

MAX_RESTARTS = 100
MAX_ERRORS = 3
PAUSE_S = 1.0

_LONGEST_PAUSE_S = 300.0
_SOUND_S = 60.0
"""A program that ran for so long has begun well: the next pause is the shortest again."""
_ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
"""Signals after which it is not started again."""
_PASSED_ON = {*_ENDS, signal.SIGUSR1, signal.SIGUSR2}
_PREEMPTED = {128 + signal.SIGTERM, 128 + signal.SIGKILL}
"""Exit codes that are no errors of the program: it had a notice, or was killed."""


class Supervisor:
    """Starts a program, and again when it ends with an error.

    Signals are waited for, never handled: the program gets them, but those that the terminal has sent it already.

    Args:
        command: the program and its arguments.
        max_restarts: how often it is started again, whatever it ended with.
        max_errors: how often in a row it may end with an error.
        pause_s: seconds before it is started again; they double while it ends within a minute.
    """

    def __init__(self, command: list[str], *, max_restarts: int, max_errors: int, pause_s: float) -> None:
        self._command = command
        self._max_restarts, self._max_errors, self._pause_s = max_restarts, max_errors, pause_s
        self._ended_by = 0  # the first signal after which the program is not started again

    def run(self) -> int:
        """Run the program to its end; returns the exit code of the last start.

        Raises:
            SettingsError: if it cannot be started.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
        try:
            return self._run(before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _run(self, mask: set[int | signal.Signals]) -> int:
        errors, pauses = 0, self._pauses()
        for restart in range(self._max_restarts + 1):
            begun_s = time.monotonic()
            code = self._start(mask)
            if code == 0 or self._ended_by:
                return code and 128 + self._ended_by  # torchrun, for one, ends with 1 then
            errors = 0 if code in _PREEMPTED else errors + 1
            if errors >= self._max_errors > 0:
                _say(f"failed {errors} times in a row, the last time with exit code {code}. Giving up")
                return code
            if restart == self._max_restarts:
                _say(f"exit code {code} after {restart} restarts (--max-restarts). Giving up")
                return code
            if time.monotonic() - begun_s >= _SOUND_S:
                pauses = self._pauses()
            pause_s = next(pauses)
            _say(f"exit code {code}. Starting again in {pause_s:g} s (restart {restart + 1} of {self._max_restarts})")
            if number := self._ended_within(pause_s):
                return 128 + number
        raise AssertionError("unreachable")

    def _pauses(self) -> Iterator[float]:
        return growing(self._pause_s, max(self._pause_s, _LONGEST_PAUSE_S))

    def _start(self, mask: set[int | signal.Signals]) -> int:
        """Start the program and pass signals on until it ends; returns its exit code."""
        environment = {**os.environ, RESTARTER_VARIABLE: str(os.getpid())}
        try:
            process = subprocess.Popen(
                self._command, env=environment, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            )
        except OSError as error:
            raise SettingsError(f"{self._command[0]!r} cannot be started: {error.strerror}") from error
        while process.poll() is None:
            info = signal.sigwaitinfo({*_PASSED_ON, signal.SIGCHLD})
            if info.si_signo == signal.SIGCHLD:
                continue
            if info.si_signo in _ENDS:
                self._ended_by = self._ended_by or info.si_signo
            # The terminal sends a Ctrl-C to its whole group, and a program that leaves a doomed machine knows it.
            if info.si_code <= 0 and info.si_pid != process.pid:
                process.send_signal(info.si_signo)
        code = process.returncode
        return 128 - code if code < 0 else code

    def _ended_within(self, pause_s: float) -> int:
        """Wait; the signal that ended it, or 0."""
        deadline_s = time.monotonic() + pause_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            info = signal.sigtimedwait(_PASSED_ON, left_s)
            if info is not None and info.si_signo in _ENDS:
                return info.si_signo
        return 0


def _say(text: str) -> None:
    error_console().print(f"lightning-spot run: {text}")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those of the command."""
    parser.add_argument(
        "--max-restarts",
        default=MAX_RESTARTS,
        help="how often the program is started again (default %(default)s)",
        **takes_number(),
    )
    parser.add_argument(
        "--max-errors",
        default=MAX_ERRORS,
        help="how often in a row it may end with an error; notices (143) and kills (137) are none, 0 is no limit"
        " (default %(default)s)",
        **takes_number(),
    )
    parser.add_argument(
        "--pause",
        default=PAUSE_S,
        help="before the next start; it doubles while the program ends within a minute (default 1s)",
        **takes_time(),
    )
    add_program(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    command = program_of(arguments)
    return Supervisor(
        command, max_restarts=arguments.max_restarts, max_errors=arguments.max_errors, pause_s=arguments.pause
    ).run()
