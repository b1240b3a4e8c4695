"""``lightning-spot run``: starts a training again after a crash or a kill, where nothing else on the machine does."""

from __future__ import annotations

import argparse
import itertools
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

_LONGEST_PAUSE_S = 300.0
_SOUND_S = 60.0
"""A program that ran for so long has begun well: the next pause is the shortest again."""
_ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
"""Signals after which it is not started again."""
_PASSED_ON = {*_ENDS, signal.SIGUSR1, signal.SIGUSR2}
_PREEMPTED = {128 + signal.SIGTERM, 128 + signal.SIGKILL}
"""Exit codes that are no errors of the program: it had a notice, or was killed."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``run``."""
    restarts = "how often the program is started again (default %(default)s)"
    parser.add_argument("--max-restarts", default=100, help=restarts, **takes_number())
    errors = (
        "how often in a row it may end with an error; notices (143) and kills (137) are none, 0 is no limit"
        " (default %(default)s)"
    )
    parser.add_argument("--max-errors", default=3, help=errors, **takes_number())
    pause = "before the next start; it doubles while the program ends within a minute (default 1s)"
    parser.add_argument("--pause", default=1.0, help=pause, **takes_time())
    add_program(parser)


def run(arguments: argparse.Namespace) -> int:
    """Start a program, and again when it ends with an error; returns the exit code of its last start.

    Signals are waited for, never handled: the program gets them, but those that the terminal has sent it already.

    Raises:
        SettingsError: if it cannot be started.
    """
    command = program_of(arguments)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    try:
        errors, pauses = 0, _pauses(arguments.pause)
        for restart in itertools.count():
            begun_s = time.monotonic()
            code, ended_by = _started(command, before)
            if code == 0 or ended_by:
                return code and 128 + ended_by  # torchrun, for one, ends with 1 then
            errors = 0 if code in _PREEMPTED else errors + 1
            if errors >= arguments.max_errors > 0:
                _say(f"failed {errors} times in a row, the last time with exit code {code}. Giving up")
                return code
            if restart == arguments.max_restarts:
                _say(f"exit code {code} after {restart} restarts (--max-restarts). Giving up")
                return code
            if time.monotonic() - begun_s >= _SOUND_S:
                pauses = _pauses(arguments.pause)
            pause_s, number = next(pauses), f"restart {restart + 1} of {arguments.max_restarts}"
            _say(f"exit code {code}. Starting again in {pause_s:g} s ({number})")
            if ended_by := _ended_within(pause_s):
                return 128 + ended_by
        raise AssertionError("unreachable")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pauses(first_s: float) -> Iterator[float]:
    """Before it is started again; they double while it ends within a minute."""
    return growing(first_s, max(first_s, _LONGEST_PAUSE_S))


def _started(command: list[str], mask: set[int | signal.Signals]) -> tuple[int, int]:
    """Start the program and pass signals on until it ends; its exit code, and the first signal that ended it, or 0."""
    environment, ended_by = {**os.environ, RESTARTER_VARIABLE: str(os.getpid())}, 0
    try:
        process = subprocess.Popen(
            command, env=environment, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        )
    except OSError as error:
        raise SettingsError(f"{command[0]!r} cannot be started: {error.strerror}") from error
    while process.poll() is None:
        info = signal.sigwaitinfo({*_PASSED_ON, signal.SIGCHLD})
        if info.si_signo == signal.SIGCHLD:
            continue
        if info.si_signo in _ENDS:
            ended_by = ended_by or info.si_signo
        # The terminal sends a Ctrl-C to its whole group, and a program that leaves a doomed machine knows it.
        if info.si_code <= 0 and info.si_pid != process.pid:
            process.send_signal(info.si_signo)
    code = process.returncode
    return 128 - code if code < 0 else code, ended_by


def _ended_within(pause_s: float) -> int:
    """Wait; the signal that ended it, or 0."""
    deadline_s = time.monotonic() + pause_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        info = signal.sigtimedwait(_PASSED_ON, left_s)
        if info is not None and info.si_signo in _ENDS:
            return info.si_signo
    return 0


def _say(text: str) -> None:
    error_console().print(f"lightning-spot run: {text}")
