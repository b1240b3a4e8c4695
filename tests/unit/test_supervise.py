"""``lightning-spot run``: what starts a training again, what does not, and which signals it gets."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waiting import until

COMMAND = [sys.executable, "-m", "lightning_spot", "run"]
BOUND_S = 60.0


def ends_with(tmp_path: Path, codes: list[str]) -> Path:
    """A program that ends with each of the codes in turn (``kill``: by SIGKILL), and counts its starts."""
    script = tmp_path / "train"
    cases = "\n".join(f"  {n}) {'kill -9 $$' if code == 'kill' else f'exit {code}'} ;;" for n, code in enumerate(codes))
    count = f"n=$(cat {tmp_path}/n 2>/dev/null || echo 0)\necho $((n+1)) >{tmp_path}/n"
    script.write_text(f"#!/bin/bash\n{count}\ncase $n in\n{cases}\n  *) exit 99 ;;\nesac\n")
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    ("codes", "flags", "code", "starts"),
    [
        (["0"], [], 0, 1),
        (["143", "kill", "0"], [], 0, 3),
        (["1", "1", "0"], [], 0, 3),
        (["1", "1", "7"], [], 7, 3),
        (["1", "1", "143", "1", "1", "0"], [], 0, 6),
        (["1", "1", "1", "1", "0"], ["--max-errors", "0"], 0, 5),
        (["143", "143", "kill"], ["--max-restarts", "2"], 137, 3),
        (["5"], ["--max-restarts", "0"], 5, 1),
    ],
)
def test_starts_again(tmp_path: Path, codes: list[str], flags: list[str], code: int, starts: int) -> None:
    command = [*COMMAND, "--pause", "0", *flags, "--", str(ends_with(tmp_path, codes))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "n").read_text().strip() == str(starts)


@pytest.mark.parametrize("arguments", [[], ["--", "/no/such/program"], ["--max-restarts", "-1", "--", "true"]])
def test_wrong_usage(arguments: list[str]) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@contextmanager
def running(tmp_path: Path, body: str, *flags: str, **how: object) -> Iterator[subprocess.Popen[bytes]]:
    """A program under the command; it has begun, and runs ``body``."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "def note(word): os.write(os.open(here / 'noted', os.O_APPEND | os.O_CREAT | os.O_WRONLY), word + b' ')\n"
        f"{body}\n(here / 'up').touch()\ntime.sleep({BOUND_S})\n"
    )
    process = subprocess.Popen([*COMMAND, *flags, "--", sys.executable, str(script)], **how)  # type: ignore[call-overload]
    try:
        until((tmp_path / "up").exists, "the program to run")
        yield process
    finally:
        process.terminate()  # which is passed on
        process.wait(BOUND_S)


NOTES = "for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(n, lambda n, _: note(b'%d' % n))"


def noted(tmp_path: Path) -> list[int]:
    file = tmp_path / "noted"
    return [int(word) for word in file.read_text().split()] if file.exists() else []


def test_signals_are_passed_on_and_end_it(tmp_path: Path) -> None:
    body = f"{NOTES}\nsignal.signal(signal.SIGTERM, lambda *_: (note(b'15'), sys.exit(1)))"
    with running(tmp_path, body) as process:
        process.send_signal(signal.SIGUSR1)
        until(lambda: noted(tmp_path) == [signal.SIGUSR1], "the first signal")
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == 143
    assert noted(tmp_path) == [signal.SIGUSR1, signal.SIGTERM]


def test_a_program_that_was_told_but_is_done_is_done(tmp_path: Path) -> None:
    with running(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == 0


def test_the_program_itself_says_that_the_machine_goes(tmp_path: Path) -> None:
    body = f"{NOTES}\nos.kill(int(os.environ['LIGHTNING_SPOT_RESTARTER_PID']), signal.SIGTERM)\nsys.exit(143)"
    (tmp_path / "up").touch()
    with running(tmp_path, body, "--pause", "0") as process:
        assert process.wait(BOUND_S) == 143
    assert noted(tmp_path) == []


def test_one_of_its_processes_says_so_and_it_is_told(tmp_path: Path) -> None:
    """Ranks say so; torchrun would start them again."""
    (tmp_path / "up").touch()
    said = "os.fork() or (os.kill(int(os.environ['LIGHTNING_SPOT_RESTARTER_PID']), signal.SIGTERM), os._exit(0))"
    with running(
        tmp_path, f"{NOTES}\n{said}\nwhile not (here / 'noted').exists(): time.sleep(0.01)\nsys.exit(1)"
    ) as it:
        assert it.wait(BOUND_S) == 143
    assert noted(tmp_path) == [signal.SIGTERM]


def test_a_ctrl_c_on_the_terminal_comes_once(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    body = f"{NOTES}\n(here / 'up').touch()\ntime.sleep(1)\ntime.sleep(1)\nsys.exit(130)"
    begun = {"start_new_session": True, "preexec_fn": lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)}
    with running(tmp_path, body, stdin=theirs, **begun) as process:
        os.write(ours, b"\x03")
        assert process.wait(BOUND_S) == 130
    assert noted(tmp_path) == [signal.SIGINT]
    for end in (ours, theirs):
        os.close(end)


def test_a_signal_ends_the_pause(tmp_path: Path) -> None:
    command = [*COMMAND, "--pause", "1h", "--", "bash", "-c", f"touch {tmp_path}/ran; exit 1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert "Starting again" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(BOUND_S) == 143
    process.stderr.close()


def test_its_process_has_one_thread() -> None:
    """Another one might take the signals that are waited for."""
    code = "import os, lightning_spot.cli.command; assert len(os.listdir('/proc/self/task')) == 1"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=BOUND_S)
