"""The warm Python of the tests is a Python: files, arguments, codes and signals go through it, and kills kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_spot.protocol.process import ProcessId
from tests.support import folders
from tests.support.server import RunningNode
from tests.support.waiting import lives, until

StartNode = Callable[..., RunningNode]


def test_signals_and_kills_go_through(warm_python: str) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen([warm_python, "-c", code], stdout=subprocess.PIPE, text=True)
        pid = int(process.stdout.readline())
        assert pid != process.pid
        assert lives(pid)
        process.send_signal(number)
        assert process.wait() == -number
        if number == signal.SIGKILL:  # the next one is made after its death
            subprocess.run([warm_python, "-c", "pass"], check=True)
            assert not lives(pid)
        until(lambda pid=pid: not lives(pid), "the fork to end")
        process.stdout.close()


def test_nodes_are_forked_from_one_that_never_saw_torch(start_node: StartNode) -> None:
    node = start_node()
    mapped = Path(f"/proc/{node.process.pid}/maps").read_text()
    assert "xxhash" in mapped  # it is the fork that is looked at
    assert "libtorch" not in mapped


def test_what_a_killed_test_run_left_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = [(tmp_path, folders.RUNTIME), (tmp_path / "shm", folders.SLOTS)]
    monkeypatch.setattr(folders, "homes", lambda: homes)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    here = ProcessId.of(os.getpid())
    ended = replace(here, started=here.started - 1)  # of a process that had this number before
    abroad = replace(ended, namespace="pid:[1]")
    stays = [tmp_path / f"{folders.RUNTIME}{name}" for name in (folders.own_name(abroad), folders.own_name(here), "x")]
    goes = [home / f"{prefix}{folders.own_name(ended)}" for home, prefix in homes]
    warm_left, warm_begins = (tmp_path / f"{folders.WARM}{name}" for name in ("left", "begins"))
    for folder in (*stays, *goes, warm_left, warm_begins):
        folder.mkdir(parents=True)
    os.utime(warm_left, (0, 0))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as stopped:
        node = until(lambda: ProcessId.of(stopped.pid), "it to run")
        os.kill(stopped.pid, signal.SIGSTOP)
        (goes[0] / "run.alive").write_text(node.to_json())
        folders.clear_up()
        assert stopped.wait(30) == -signal.SIGKILL
    assert [folder.exists() for folder in (*stays, warm_begins)] == [True] * 4
    assert [folder.exists() for folder in (*goes, warm_left)] == [False] * 3


def test_nothing_that_was_forked_outlives_who_asked_for_it(tmp_path: Path) -> None:
    """Not even what was stopped: a test run that is killed leaves no process behind."""
    code = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from tests.support import warm\n"
        "folder = Path(sys.argv[1])\n"
        "held = warm.hold(warm.start(folder))\n"
        "request = ['-m', 'lightning_spot.http.program', '--listen', '127.0.0.1:0', '--memory', '1MiB']\n"
        "with open(folder / 'node.log', 'wb') as log:\n"
        "    fork = warm.Fork(str(folder / 'python'), request, stdout=log, environment=os.environ)\n"
        "os.kill(fork.pid, signal.SIGSTOP)\n"
        "print(fork.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    folder = Path(tempfile.mkdtemp(prefix=folders.WARM))
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as session:
        pid = int(session.stdout.readline())
        assert lives(pid)
        session.kill()
    until(lambda: not lives(pid), "the node to end")
    until(lambda: not folder.exists(), "its server to tidy up")
