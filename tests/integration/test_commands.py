"""Commands for whoever runs trainings: ``status``, ``stop``, ``diff``, ``report --html`` and ``completion``."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import lightning.pytorch as pl
import pytest
import torch

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.cli import main
from lightning_spot.cli.diff import compare_states
from lightning_spot.client.starting import start
from lightning_spot.config import PROTOCOL_VERSION
from lightning_spot.goodput.ledger import AttemptRecord, account_after
from lightning_spot.goodput.records import write_record
from lightning_spot.protocol.record import ServerRecord, find_record
from lightning_spot.server.runs import RunInfo
from lightning_spot.store.local import LocalStore
from tests.conftest import Cli
from tests.support.answering import Answering
from tests.support.server import MIB, RUN, RUN_ID, Bench, RunningServer, image_of, manifest_of
from tests.support.snapshots import interrupted
from tests.support.trainer import Net, data, trainer
from tests.support.waiting import until

SILENT = "spot://127.0.0.1:9"
STATES = ("committed", "replicated", "persisted")


# -- status -----------------------------------------------------------------------------------------------------------


def test_status_of_a_run_on_this_host_and_at_a_server(
    tmp_path: Path, start_server: Callable[..., RunningServer], cli: Cli
) -> None:
    server = start_server()
    interrupted(tmp_path / "run-1", servers=server.url)
    answer = json.loads(cli("status", "--server", server.url, "-o", "json"))
    rows = {row["server"]: row for row in answer["runs"]}
    assert answer["not_asked"] == []
    assert rows.keys() == {"host", server.url}
    host, there = rows["host"], rows[server.url]
    assert (host["state"], host["attempt"], host["lag_steps"]) == ("stopped", 1, 0)
    assert (host["committed_step"], host["replicated_step"], host["persisted_step"]) == (30, 30, 30)
    assert host["slots"] > 0
    assert abs(host["persisted_unix_s"] - time.time()) < 60
    assert there["committed_step"] == 30
    for name in cli("status", "--server", server.url, "-o", "name").splitlines():
        assert "step-000000030" in cli("show", name)
    shown = cli("status", "--server", server.url).splitlines()
    assert len(shown) == 3
    assert shown[0].split()[:3] == ["RUN", "ATTEMPT", "STATE"]


def newest(bench: Bench) -> dict[str, int]:
    """Step of the newest snapshot in each state, as the server says of its run."""
    (run,) = bench.server.status()["runs"].values()
    return {state: found["step"] for state, found in run["newest"].items()}


def test_a_stored_snapshot_counts_when_its_slot_is_used_again(bench: Bench) -> None:
    bench.open()
    bench.save(1)
    assert bench.flush() == []
    bench.tier().open.clear()
    for step in range(2, 7):
        bench.save(step, wait_s=60)
    assert 1 not in bench.committed()
    assert newest(bench) == {**dict.fromkeys(STATES, 1), "committed": 6}


def test_a_removed_snapshot_counts_no_more(bench: Bench) -> None:
    bench.open()
    for step in (1, 2):
        removed = bench.save(step, wait_s=60)
        assert bench.flush() == []
    bench.server.remove(RUN, removed.name)
    assert newest(bench) == dict.fromkeys(STATES, 1)


def test_what_is_stored_is_known_to_the_next_server(make_bench: Callable[..., Bench], runtime_dir: Path) -> None:
    killed = make_bench(area=runtime_dir / "area")
    killed.open()
    killed.save(1)
    assert killed.flush() == []
    killed.die()
    assert newest(make_bench(area=runtime_dir / "area")) == dict.fromkeys(STATES, 1)


def test_a_run_is_stopped_once_its_trainer_has_gone(bench: Bench) -> None:
    """Its server on this host sees the connection close; another one waits until nobody asks for the run."""
    bench.server.registry.begin_session("trainer")
    bench.open(session="trainer")
    assert [run["state"] for run in bench.server.status()["runs"].values()] == ["training"]
    bench.server.end_session("trainer")
    assert [run["state"] for run in bench.server.status()["runs"].values()] == ["stopped"]
    assert [run["state"] for run in bench.server.listed()] == ["stopped"]


def test_after_a_rewind_nothing_lags(stranger: Callable[[object], str], cli: Cli) -> None:
    newest = {"committed": {"step": 10, "unix_s": 2}, "persisted": {"step": 30, "unix_s": 1}}
    url = stranger({"runs": {"x": {"attempt": 2, "newest": newest, "slots": 1, "state": "training"}}})
    (row,) = json.loads(cli("status", "--server", url, "-o", "json"))["runs"]
    assert row["lag_steps"] == 0


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


class Stranger(Answering):
    """A server of no version of ours: answers everything with the same JSON."""

    what: object = None

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = json.dumps(self.what).encode()
        request.send_response(200)
        request.send_header("Spot-Protocol", str(PROTOCOL_VERSION))
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def start(self, what: object) -> str:
        self.what = what
        return self.url.replace("http:", "spot:")


@pytest.fixture
def stranger() -> Iterator[Callable[[object], str]]:
    with closing(Stranger()) as running:
        yield running.start


@pytest.mark.parametrize(
    "runs",
    [[], {"x": []}, {"x": {}}, {"x": {"attempt": 1, "newest": {"committed": {"step": -1}}}}, {"x": {"newest": 3}}],
)
def test_what_no_server_of_ours_says_is_no_answer(stranger: Callable[[object], str], runs: object, cli: Cli) -> None:
    assert "no answer" in cli("status", "--server", stranger({"runs": runs}), code=3)


def test_a_hostile_name_does_nothing_to_a_terminal(stranger: Callable[[object], str], cli: Cli) -> None:
    run = {"attempt": 1, "newest": {"committed": {"step": 1, "unix_s": 1}}, "slots": 1, "state": "\x1b[2Jstopped"}
    url = stranger({"runs": {"\x1b[2J[bold]x\n": run}})
    for form in ("table", "json", "name"):
        said = cli("status", "--server", url, "-o", form)
        assert said.replace("\n", "").isprintable()
        assert len(cli("status", "--server", url, "-o", "name").splitlines()) == 1


def on_a_terminal(*arguments: str, until: bytes, columns: int = 200) -> tuple[bytes, int]:
    """Run a command on a terminal until it has shown something, and interrupt it; what it showed, and its exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what runs in the background of a shell ignores it
        terminal_of = {"TERM": "xterm", "COLUMNS": str(columns)}
        os.execve(sys.executable, [sys.executable, "-m", "lightning_spot", *arguments], {**os.environ, **terminal_of})
    shown, deadline_s, ask_again_s = b"", time.monotonic() + 60, 0.0
    while time.monotonic() < deadline_s:
        if until in shown and time.monotonic() > ask_again_s:
            os.kill(pid, signal.SIGINT)
            ask_again_s = time.monotonic() + 10
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # all of it was read
            break
    os.close(terminal)
    return shown, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_status_that_is_watched(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    shown, code = on_a_terminal("status", "-w", "--server", server.url, until=b"idle")
    assert code == 0
    assert b"Traceback" not in shown
    shown, code = on_a_terminal("status", "-w", "--server", SILENT, until=b"no answer")
    assert code == 3
    shown, code = on_a_terminal("status", "-w", "--server", SILENT, until=b"spot", columns=80)
    assert code == 3
    assert "…" not in shown.decode()


# -- stop -------------------------------------------------------------------------------------------------------------


def left_on_this_host(record: ServerRecord) -> list[Path]:
    """Files of a local server."""
    memory = Path(os.environ["LIGHTNING_SPOT_SHM_DIR"])
    return [*record.folder.glob(f"{record.key}.[!a]*"), *record.folder.glob("*.alive"), *memory.glob("*")]


def stopped(answer: str) -> list[dict[str, Any]]:
    """What ``stop -o json`` says of each server."""
    found: list[dict[str, Any]] = json.loads(answer[: answer.rindex("}") + 1])["servers"]
    return found


def test_stop_ends_a_local_server_and_leaves_nothing(tmp_path: Path, cli: Cli) -> None:
    interrupted(run := tmp_path / "run-1")
    record = find_record(str(run))
    process = record.process()
    assert process is not None
    (found,) = stopped(cli("stop", run, "-o", "json"))
    assert (found["result"], found["kept"]) == ("stopped", [])
    assert found["runs"][0].startswith("run-1@")
    assert not process.alive
    assert left_on_this_host(record) == []
    assert "nor anything of one" in cli("stop", run, code=2)
    assert stopped(cli("stop", "--all", "-o", "json")) == []
    callback = SpotCheckpoint(str(run), interval=EverySteps(5))
    trainer(callback).fit(Net(), data())
    assert callback.resumed_from is not None
    assert (callback.resumed_from.step, callback.resumed_from.tier) == (30, "storage")


class Stopping(pl.Callback):
    """Runs a command in mid-training."""

    def __init__(self, *command: str) -> None:
        self.command, self.code = command, -1

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 12:
            self.code = main([*self.command])


@pytest.mark.parametrize("more", [[], ["--discard"]])
def test_stop_spares_a_server_with_a_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    run = tmp_path / "run-1"
    during = Stopping("stop", "--all", "-o", "json", *more)
    trainer(SpotCheckpoint(str(run), interval=EverySteps(5), on_full="wait"), during, max_epochs=1).fit(Net(), data())
    assert during.code == 1
    said = capsys.readouterr().out
    (found,) = stopped(said[said.index("{\n") :])
    assert found["result"] == "in use"
    assert str(os.getpid()) in found["reason"]
    assert LocalStore(run).survey().manifests[0].complete


def test_stop_drops_nothing_of_a_server_that_does_not_answer(tmp_path: Path, cli: Cli) -> None:
    """A trainer may be connected to it."""
    interrupted(run := tmp_path / "run-1")
    process = find_record(str(run)).process()
    assert process is not None
    process.send(signal.SIGSTOP)
    try:
        (found,) = stopped(cli("stop", run, "--discard", "-o", "json", code=1))
        assert found["result"] == "running"
        assert process.alive
    finally:
        process.send(signal.SIGCONT)


def test_what_a_server_that_hangs_holds_is_not_discarded(start_server: Callable[..., RunningServer], cli: Cli) -> None:
    """It was said to be, although nothing was."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    server = start_server(listen=listen)
    server.process.send_signal(signal.SIGSTOP)
    try:
        (found,) = stopped(cli("stop", "--server", server.url, "--discard", "-o", "json", code=1))
        assert found["result"] == "running"
    finally:
        server.process.send_signal(signal.SIGCONT)
    until(lambda: main(["status", "--server", server.url]) == 0, "it to answer again")
    assert stopped(cli("stop", "--server", server.url, "--discard", "-o", "json"))[0]["result"] == "discarded"
    cli("stop", "--server", server.url, "--discard", code=2)  # nothing is left to discard


def left_by_a_killed_server(run: Path, durable: str) -> ServerRecord:
    """Commit a snapshot at a local server that has no time to store it, and kill that."""
    host = start(str(run), "run", slots=2, memory_bytes=64 * MIB, server_idle_timeout_s=60.0)
    info = RunInfo(name="run", id=RUN_ID, location=f"file://{run}", attempt=1, token="t", durable_url=durable)
    LocalStore(run).claim(info.claim())
    record = find_record(str(run))
    process = record.process()
    assert process is not None
    host.open_run(replace(info, min_upload_interval_s=3600.0))
    for step in (1, 2):  # the second is put off
        lease = host.lease(1000, 30.0)
        with memoryview(lease.map) as slot:
            slot[:1000] = image_of(step, 1000)
        host.seal(lease, manifest_of(step))
        if step == 1 and durable == str(run):
            until(lambda: not host.owes(), "it to be stored")
    assert process.kill(10.0)
    host.disconnect()
    return record


def test_stop_stores_what_a_killed_server_left(tmp_path: Path, cli: Cli) -> None:
    record = left_by_a_killed_server(run := tmp_path / "run", str(run))
    assert record.left_slots()
    assert LocalStore(run).survey().manifests[0].step == 1
    (found,) = stopped(cli("stop", "--all", "-o", "json"))
    assert (found["result"], found["runs"]) == ("stopped", [f"run@{RUN_ID}"])
    assert LocalStore(run).survey().manifests[0].step == 2
    assert left_on_this_host(record) == []


def test_stop_keeps_what_is_stored_nowhere(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "file").touch()
    record = left_by_a_killed_server(run := tmp_path / "run", str(tmp_path / "file" / "run"))

    def is_draining() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking, suppress(OSError):
            asking.connect(str(record.http))
            asking.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
            return b"shutting down" in b"".join(iter(partial(asking.recv, 4096), b""))
        return False

    def end_the_waiting() -> None:
        """It would go on for five minutes."""
        until(is_draining, "SIGTERM")
        process = record.process()
        assert process is not None

        def has_ended() -> bool:
            process.send(signal.SIGTERM)
            return not process.alive

        until(has_ended, "it to end")

    impatient = threading.Thread(target=end_the_waiting)
    impatient.start()
    (found,) = stopped(cli("stop", run, "-o", "json", code=1))
    impatient.join()
    assert (found["result"], found["kept"][-1]) == ("kept", "run@2")
    assert found["kept_bytes"] >= 1000
    assert str(record.log) in found["reason"]
    assert record.left_slots()
    assert not record.running()
    (found,) = stopped(cli("stop", run, "--discard", "-o", "json"))
    assert found["result"] == "discarded"
    assert left_on_this_host(record) == []


def test_stop_leaves_the_servers_of_another_runtime_directory(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their slots lie in the same tmpfs: another server was started for them."""
    interrupted(run := tmp_path / "run-1")
    record = find_record(str(run))
    (slots,) = Path(os.environ["LIGHTNING_SPOT_SHM_DIR"]).iterdir()
    with monkeypatch.context() as patch, tempfile.TemporaryDirectory(prefix="spot-") as another:
        patch.setenv("LIGHTNING_SPOT_RUNTIME_DIR", another)
        assert stopped(cli("stop", "--all", "-o", "json")) == []
        assert os.listdir(another) == []
    assert record.running()
    assert slots.exists()


def test_stop_ends_a_snapshot_server(start_server: Callable[..., RunningServer], cli: Cli) -> None:
    server = start_server()
    assert stopped(cli("stop", "--server", server.url, "-o", "json"))[0]["result"] == "stopped"
    assert server.process.wait(120) == 0
    assert f"no snapshot server of this user answers at {server.url}" in cli("stop", "--server", server.url, code=2)
    assert "loopback" in cli("stop", "--server", "spot://10.0.0.5:7070", code=2)
    assert "one of RUN" in cli("stop", code=2)
    assert "one of RUN" in cli("stop", "--all", "run", code=2)


def test_stop_never_ends_a_process_that_does_not_listen_there(stranger: Callable[[object], str], cli: Cli) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        url = stranger({"pid": bystander.pid, "runs": {}})
        for more in ([], ["--discard"]):
            main(["stop", "--server", url, *more])
            assert bystander.poll() is None
        bystander.kill()


# -- diff -------------------------------------------------------------------------------------------------------------


def differences(answer: str) -> dict[str, str]:
    return {each["entry"]: each["text"] for each in json.loads(answer)["differences"]}


def test_diff_of_two_snapshots_and_a_file(tmp_path: Path, cli: Cli) -> None:
    interrupted(run := tmp_path / "run-1")
    assert main(["cp", f"{run}@30", str(tmp_path / "last.ckpt")]) == 0
    found = differences(cli("diff", f"{run}@25", run, "-o", "json", code=1))
    assert found["global_step"] == "25 and 30"
    assert "of 512 values differ" in found["state_dict.net.0.weight"]
    stored = next(run.glob("step-000000030-*"))
    assert json.loads(cli("diff", stored, f"{run}@latest", "-o", "json"))["equal"]
    assert "no run is" in cli("diff", tmp_path / "last.ckpt", tmp_path / "none", code=2)


def test_diff_of_shapes_dtypes_and_names(tmp_path: Path, cli: Cli) -> None:
    torch.save({"a": torch.zeros(2), "b": torch.zeros(2), "c": 1}, first := tmp_path / "a.ckpt")
    torch.save({"a": torch.zeros(3), "b": torch.zeros(2).half(), "\x1b[31md": 1}, second := tmp_path / "b.ckpt")
    verdict = compare_states(first, second)
    found = dict(verdict.different)
    assert found["a"] == "torch.float32 (2,) and torch.float32 (3,)"
    assert found["b"] == "torch.float32 (2,) and torch.float16 (2,)"
    assert found["c"] == "only in the first"
    assert cli("diff", first, second, code=1).replace("\n", "").isprintable()
    (tmp_path / "no.ckpt").write_text("no checkpoint")
    assert "cannot be compared" in cli("diff", first, tmp_path / "no.ckpt", code=2)


# -- report --html, --plot --------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The elements of a page, and the text of its cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements, self.cells = list[tuple[str, dict[str, str | None]]](), list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "td":
            self.cells.append(data)


def test_the_report_as_one_page(tmp_path: Path, cli: Cli) -> None:
    run, file = tmp_path / "<script>alert(1)<" / "script>&\x1b[2Jrun", tmp_path / "report.html"
    record = None
    for number, (begun_s, end) in enumerate(((0.0, "killed"), (200.0, "complete")), 1):
        record = AttemptRecord(
            attempt=number,
            begun_unix_s=1e9 + begun_s,
            trained_unix_s=1e9 + begun_s + 10.0,
            from_step=80 * (number - 1),
            step=100 * number,
            unix_s=1e9 + begun_s + 110.0,
            end=end,
            earlier=account_after(record),
        )
    write_record(str(run), record)
    told = cli("report", run, "--html", file, "--plot", tmp_path / "report.svg")
    page = Page(file.read_text())
    names = [name for name, _ in page.elements]
    assert {"script", "link", "img", "iframe", "a"} & set(names) == set()
    assert not [each for _, each in page.elements if {"src", "href", "xlink:href", "onload"} & each.keys()]
    assert {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"} in [
        each for _, each in page.elements
    ]
    assert "\x1b" not in file.read_text()
    assert {"0 to 100", "80 to 200", "killed", "complete"} <= set(page.cells)
    drawing = (tmp_path / "report.svg").read_text()
    assert drawing in file.read_text()
    bars = ElementTree.fromstring(drawing).findall("{http://www.w3.org/2000/svg}rect")[6:]
    assert sum(float(bar.attrib["width"]) for bar in bars) == pytest.approx(940, abs=1)
    assert "goodput" in told
    assert "cannot be written" in cli("report", run, "--html", tmp_path / "none" / "x.html", code=2)
    assert "the drawing is SVG" in cli("report", run, "--plot", tmp_path / "report.png", code=2)


# -- completion -------------------------------------------------------------------------------------------------------

SHELLS = [shell for shell in ("bash", "zsh") if shutil.which(shell)]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["st"], {"status", "stop"}),
        (["ls", "--s"], {"--server"}),
        (["ls", "-o", ""], {"table", "json", "name"}),
        (["report", "-o", "n"], set()),
        (["prune", "--mode", "mi"], {"min"}),
        (["completion", ""], {"bash", "zsh"}),
        (["ls", ""], set()),  # files, by the shell itself
        (["ls", "--server", "-"], set()),
    ],
)
def test_completion(shell: str, words: list[str], offered: set[str], tmp_path: Path, cli: Cli) -> None:
    script = tmp_path / "script"
    script.write_text(cli("completion", shell))
    setup = "setopt ksharrays shwordsplit; " if shell == "zsh" else ""
    given = " ".join(shlex.quote(word) for word in ["lightning-spot", *words])
    code = f"{setup}source {script}; COMP_WORDS=({given}); COMP_CWORD={len(words)}; _lightning_spot"
    options = ["-f"] if shell == "zsh" else ["--norc", "--noprofile"]
    done = subprocess.run(
        [shell, *options, "-c", f'{code}; printf "%s\\n" "${{COMPREPLY[@]}}"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert set(done.stdout.split()) == offered


@pytest.mark.parametrize("arguments", [["completion", "bash"], ["simulate", "--work", "1h", "--runs", "20"]])
def test_an_answer_that_is_read_no_further_is_no_error(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "lightning_spot", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        writer.stdout.close()
        assert writer.stderr.read() == b""
    assert writer.returncode == 128 + signal.SIGPIPE


def test_an_answer_that_cannot_be_written_is_one_line() -> None:
    command = [sys.executable, "-m", "lightning_spot", "completion", "bash"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "No space left" in line


def test_completion_registers_itself(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(cli("completion", "bash"))
    code = f"source {tmp_path / 'script'}; complete -p lightning-spot"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert "_lightning_spot" in done.stdout
