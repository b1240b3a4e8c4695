"""The warm Python of the tests is a Python: files, arguments, codes and signals go through it, and kills kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import until
from tests.test_sessions import _alive


@pytest.mark.parametrize("way", ["-c", "-m", "script"])
def test_what_it_is_given_goes_through(warm_python: str, tmp_path: Path, way: str) -> None:
    code = (
        "import os, sys\n"
        "assert __name__ == '__main__'\n"
        "import __main__\n"
        "assert 'lightning.pytorch' in sys.modules\n"
        "print(sys.argv[1:], sys.stdin.read(), os.environ['GIVEN'], os.getcwd(), flush=True)\n"
        "sys.exit('because')\n"
    )
    (tmp_path / "program.py").write_text(code)
    call = {"-c": ["-c", code], "-m": ["-m", "program"], "script": ["program.py"]}[way]
    done = subprocess.run(
        [warm_python, *call, "one", "two"],
        input="typed",
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "GIVEN": "this"},
    )
    assert done.stdout == f"['one', 'two'] typed this {tmp_path}\n", done.stderr
    assert done.stderr == "because\n"
    assert done.returncode == 1


def test_signals_and_kills_go_through(warm_python: str) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen([warm_python, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert pid != process.pid
        assert _alive(pid)
        process.send_signal(number)
        assert process.wait() == -number
        if number == signal.SIGKILL:  # the next one is made after its death
            subprocess.run([warm_python, "-c", "pass"], check=True)
            assert not _alive(pid)
        until(lambda pid=pid: not _alive(pid), "the fork to end")
        process.stdout.close()


def test_a_killed_fork_looks_killed(warm_python: str) -> None:
    assert subprocess.run([warm_python, "-c", "import os; os.kill(os.getpid(), 9)"], check=False).returncode == -9
    assert subprocess.run([warm_python, "-c", "raise SystemExit(143)"], check=False).returncode == 143


def test_forks_draw_other_numbers(warm_python: str) -> None:
    code = "import random, torch, numpy; print(random.random(), torch.rand(1), numpy.random.rand())"
    outputs = {subprocess.run([warm_python, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    assert len(outputs) == 2


def test_nodes_are_not_warm(warm_python: str) -> None:
    done = subprocess.run(
        [warm_python, "-m", "lightning_spot.service.program", "--help"], capture_output=True, text=True, check=True
    )
    assert "usage" in done.stdout
    assert (
        subprocess.run([warm_python, "-V"], capture_output=True, text=True, check=True).stdout.split()[1]
        == (sys.version.split()[0])
    )
