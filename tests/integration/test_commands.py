"""Commands for whoever runs trainings and servers: ``status``."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.config import PROTOCOL_VERSION
from tests.conftest import Cli
from tests.support.server import Bench, RunningNode
from tests.support.snapshots import EachDurable
from tests.support.trainer import Net, Stop, StopAt, data, trainer

SILENT = "spot://127.0.0.1:9"


def train(path: Path, until: int = 31, **settings: Any) -> None:
    """Train with a snapshot every 5 steps, each stored, until the trainer is interrupted."""
    callback = SpotCheckpoint(str(path), interval=EverySteps(5), on_full="wait", min_upload_interval_s=0.0, **settings)
    with pytest.raises(Stop):
        trainer(callback, EachDurable(path, 5), StopAt(until)).fit(Net(), data())


# -- status -----------------------------------------------------------------------------------------------------------


def test_status_of_a_run_on_this_host_and_at_a_server(
    tmp_path: Path, start_node: Callable[..., RunningNode], cli: Cli
) -> None:
    node = start_node()
    train(tmp_path / "run-1", servers=node.url)
    answer = json.loads(cli("status", "--server", node.url, "-o", "json"))
    rows = {row["server"]: row for row in answer["runs"]}
    assert answer["not_asked"] == []
    assert rows.keys() == {"host", node.url}
    host, there = rows["host"], rows[node.url]
    assert (host["state"], host["attempt"], host["lag_steps"]) == ("stopped", 1, 0)
    assert (host["committed_step"], host["replicated_step"], host["persisted_step"]) == (30, 30, 30)
    assert host["slots"] > 0
    assert abs(host["persisted_unix_s"] - time.time()) < 60
    assert there["committed_step"] == 30
    for name in cli("status", "--server", node.url, "-o", "name").splitlines():
        assert "step-000000030" in cli("show", name)
    shown = cli("status", "--server", node.url).splitlines()
    assert len(shown) == 3
    assert shown[0].split()[:3] == ["RUN", "ATTEMPT", "STATE"]


def test_a_run_that_has_ended_is_complete(tmp_path: Path, start_node: Callable[..., RunningNode], cli: Cli) -> None:
    node = start_node("--storage", str(tmp_path / "stored"))
    spot = SpotCheckpoint(str(tmp_path / "run-1"), servers=node.url, interval=EverySteps(5))
    trainer(spot, max_epochs=1).fit(Net(), data())
    (row,) = [
        row
        for row in json.loads(cli("status", "--server", node.url, "-o", "json"))["runs"]
        if row["server"] == node.url
    ]
    assert row["state"] == "complete"


def test_a_stored_snapshot_counts_when_its_slot_is_used_again(bench: Bench) -> None:
    bench.open()
    bench.save(1)
    assert bench.flush() == []
    bench.tier().open.clear()
    for step in range(2, 7):
        bench.save(step, wait_s=5.0)
    assert 1 not in bench.committed()
    (run,) = bench.node.status()["runs"].values()
    assert {state: found["step"] for state, found in run["newest"].items()} == {
        "committed": 6,
        "replicated": 1,
        "persisted": 1,
    }


def test_a_server_that_does_not_answer_is_a_row(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    said = cli("status", "--server", SILENT, code=3)
    assert "no answer" in said
    assert f"not asked: no snapshot server answers at {SILENT}" in said
    monkeypatch.setenv("LIGHTNING_SPOT_SERVERS", SILENT)
    assert SILENT in json.loads(cli("status", "-o", "json", code=3).partition("not asked")[0])["not_asked"][0]
    monkeypatch.setenv("LIGHTNING_SPOT_SERVERS", "10.0.0.5")
    assert "LIGHTNING_SPOT_SERVERS" in cli("status", code=2)


def test_status_without_a_server(cli: Cli) -> None:
    assert json.loads(cli("status", "-o", "json")) == {"runs": [], "not_asked": []}
    assert "-w" in cli("status", "-w", code=2)


@pytest.fixture
def stranger() -> Iterator[Callable[[object], str]]:
    """A server of no version of ours: answers everything with the same JSON."""
    answers: list[object] = [None]

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers[-1]).encode()
            self.send_response(200)
            self.send_header("Spot-Protocol", str(PROTOCOL_VERSION))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def start(answer: object) -> str:
        answers.append(answer)
        return f"spot://127.0.0.1:{server.server_port}"

    yield start
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "runs",
    [[], {"x": []}, {"x": {}}, {"x": {"attempt": 1, "newest": {"committed": {"step": -1}}}}, {"x": {"newest": 3}}],
)
def test_what_no_server_of_ours_says_is_no_answer(stranger: Callable[[object], str], runs: object, cli: Cli) -> None:
    assert "no answer" in cli("status", "--server", stranger({"runs": runs}), code=3)


def test_a_hostile_name_does_nothing_to_a_terminal(stranger: Callable[[object], str], cli: Cli) -> None:
    run = {"attempt": 1, "newest": {"committed": {"step": 1, "unix_s": 1, "attempt": 1}}, "slots": 1, "asked_s": 1}
    url = stranger({"runs": {"\x1b[2J[bold]x\n": run}})
    for form in ("table", "json", "name"):
        said = cli("status", "--server", url, "-o", form)
        assert said.replace("\n", "").isprintable()
        assert len(cli("status", "--server", url, "-o", "name").splitlines()) == 1


def on_a_terminal(*arguments: str, until: bytes, columns: int = 200) -> tuple[bytes, int]:
    """Run a command on a terminal until it has shown something, and interrupt it; what it showed, and its exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        terminal_of = {"TERM": "xterm", "COLUMNS": str(columns)}
        os.execve(sys.executable, [sys.executable, "-m", "lightning_spot", *arguments], {**os.environ, **terminal_of})
    shown, deadline_s, asked = b"", time.monotonic() + 60, False
    while time.monotonic() < deadline_s:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # all of it was read
            break
        if until in shown and not asked:
            os.kill(pid, signal.SIGINT)
            asked = True
    os.close(terminal)
    return shown, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_status_that_is_watched(start_node: Callable[..., RunningNode]) -> None:
    node = start_node()
    shown, code = on_a_terminal("status", "-w", "--server", node.url, until=b"idle")
    assert code == 0
    assert b"Traceback" not in shown
    shown, code = on_a_terminal("status", "-w", "--server", SILENT, until=b"no answer")
    assert code == 3
    shown, code = on_a_terminal("status", "-w", "--server", SILENT, until=b"spot", columns=80)
    assert code == 3
    assert "…" not in shown.decode()
