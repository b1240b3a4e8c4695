"""The ``lightning-spot`` command, as a user calls it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lightning_spot import EverySteps, SpotCheckpoint, SpotCheckpointIO
from lightning_spot.cli import main, snapshots
from lightning_spot.cli.command import COMMANDS, command_parser
from lightning_spot.cli.snapshots import Found
from lightning_spot.client.stores import open_store
from lightning_spot.config import format_bytes
from lightning_spot.simulation import simulator
from lightning_spot.store.fences import Claim
from lightning_spot.store.local import LocalStore
from tests.conftest import Cli
from tests.integration.test_stores import put, sharded
from tests.support.oracle import claim_of
from tests.support.server import RunningServer, StartServer
from tests.support.snapshots import interrupted
from tests.support.trainer import At, Net, data, trainer


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that was interrupted: snapshots in memory and on disk."""
    return interrupted(tmp_path / "run-1")


def test_ls(run_dir: Path, cli: Cli) -> None:
    said = cli("ls", run_dir)
    assert "step-000000030-attempt-0001" in said
    rows = [line.split() for line in said.splitlines()[1:]]
    assert {(row[1], row[-2]) for row in rows} >= {("30", "host"), ("30", "storage"), ("25", "storage")}
    assert {row[-1] for row in rows} == {"replicated", "persisted"}


def test_ls_on_a_narrow_terminal_cuts_no_name(run_dir: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied from there, into the next command."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    listed = cli("ls", run_dir)
    assert "\x1b[" in listed
    assert "…" not in listed
    assert all(manifest.name in listed for manifest in LocalStore(run_dir).survey().manifests)


def test_ls_of_a_path_where_no_run_ever_was(tmp_path: Path, cli: Cli) -> None:
    assert f"no run is, or ever was, at '{tmp_path / 'mistyped'}'" in cli("ls", tmp_path / "mistyped", code=2)
    claim = Claim(attempt=1, run_id="0" * 12, digest="t", location=f"file://{tmp_path / 'begun'}", started_unix_s=0.0)
    LocalStore(tmp_path / "begun").claim(claim)
    assert "no snapshots of" in cli("ls", tmp_path / "begun")


ANSWER = {"run", "snapshots", "unreadable", "not_asked"}
FACTS = {"name", "step", "epoch", "attempt", "created_unix_s", "complete", "exact", "bytes", "tier", "state"}


def test_json_has_the_shape_that_is_documented(run_dir: Path, cli: Cli) -> None:
    listed = json.loads(cli("ls", run_dir, "-o", "json"))
    assert listed.keys() == ANSWER
    assert [entry.keys() for entry in listed["snapshots"]] == [FACTS] * len(listed["snapshots"])
    assert listed["snapshots"][0]["step"] == 30
    assert {entry["tier"] for entry in listed["snapshots"]} == {"host", "storage"}
    checked = json.loads(cli("verify", run_dir, "-o", "json"))
    assert checked.keys() == ANSWER
    assert [entry["state"] for entry in checked["snapshots"]] == ["good"] * len(listed["snapshots"])
    assert checked["snapshots"][0].keys() == FACTS | {"reason"}
    shown = json.loads(cli("show", run_dir, "-o", "json"))
    assert shown.keys() == FACTS | {"run", "manifest"}
    page = (Path(__file__).parents[2] / "docs/reference/command-line.md").read_text()
    assert set(re.findall(r"`(\w+)`", page)) >= ANSWER | FACTS | {"reason", "manifest"}


def test_names_are_those_of_snapshots_that_commands_take(run_dir: Path, tmp_path: Path, cli: Cli) -> None:
    names = cli("ls", run_dir, "-o", "name").splitlines()
    assert names[0] == f"{run_dir}@30"
    assert len(names) == len(set(names))
    assert cli("show", names[-1], "-o", "name").splitlines() == names[-1:]
    for file in run_dir.glob("step-000000025-*/model.ckpt"):
        file.write_bytes(b"damage")
    shutil.copytree(run_dir, copied := tmp_path / "copied")  # of which no server has anything
    assert cli("verify", copied, "-o", "name", code=1).split() == [f"{copied}@30"]


def test_show(run_dir: Path, cli: Cli) -> None:
    said = cli("show", f"{run_dir}@25")
    for word in ("step-000000025-attempt-0001", "epoch", "xxh3-128", f"torch {torch.__version__}"):
        assert word in said
    assert "8.39 MB" not in said  # its one part is as long as the file


def test_cp(run_dir: Path, tmp_path: Path, cli: Cli) -> None:
    target = tmp_path / "mine.ckpt"

    def copied(*arguments: object) -> int:
        assert "every checksum holds" in cli("cp", *arguments)
        return int(torch.load(target, weights_only=True)["global_step"])

    assert copied(run_dir, target) == 30
    assert "--force" in cli("cp", run_dir, target, code=2)
    assert copied(f"{run_dir}@25", target, "--force") == 25
    assert copied(f"{run_dir}@latest", target, "--force") == 30
    assert "no directory" in cli("cp", run_dir, tmp_path / "none" / "x.ckpt", code=2)
    cli("ls", f"{run_dir}@25", code=2)


def test_a_run_in_a_bucket_whose_name_ends_like_a_step(
    s3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, target = f"{s3}/run", tmp_path / "mine.ckpt"
    for place, step in ((url, 5), (f"{url}@5", 9)):
        store = open_store(place)
        store.claim(claim_of(1))
        put(store, step)
    assert main(["cp", f"{url}@5/", str(target)]) == 0
    assert "step 9" in capsys.readouterr().out
    assert main(["cp", f"{url}@5", str(target), "--force"]) == 0
    assert "step 5" in capsys.readouterr().out


def test_what_is_good_nowhere_is_said_once_and_leaves_nothing(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its only copy was passed over, and then named once more, as the error."""
    shutil.copytree(run_dir, copied := tmp_path / "copied")  # of which no server has anything
    (data,) = copied.glob("step-000000025-*/model.ckpt")
    data.write_bytes(data.read_bytes()[:-1])
    (target := tmp_path / "pulled").mkdir()
    capsys.readouterr()
    assert main(["cp", f"{copied}@25", str(target)]) != 0
    said = capsys.readouterr()
    assert "skipped" not in said.err
    assert said.err.count("is cut short") == 1
    assert not list(target.iterdir())


def test_cp_names_the_last_good_snapshot_and_the_unreadable_ones(
    run_dir: Path, tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error said nothing of the good one; of a newest one with an unreadable manifest nothing was said at all."""
    shutil.copytree(run_dir, copied := tmp_path / "copied")  # of which no server has anything
    newest, older = LocalStore(copied).survey().manifests[:2]
    (copied / newest.data_path).write_bytes(b"damage")
    target = tmp_path / "mine.ckpt"
    said = " ".join(cli("cp", copied, target, code=1).split())
    assert said.endswith(f"lightning-spot cp {copied}@{older.name} DEST")
    assert not target.exists()
    (copied / newest.name / "manifest.json").write_text("garbage")
    assert main(["cp", str(copied), str(target)]) == 0
    said = capsys.readouterr()
    assert f"skipped: {newest.name} at storage" in said.err
    assert f"step {older.step}" in said.out


def test_a_sharded_snapshot_is_pulled_into_a_directory(tmp_path: Path, cli: Cli) -> None:
    manifest, image = sharded(5)
    store = LocalStore(tmp_path / "run")
    store.put(manifest, memoryview(image), attempt=1)
    assert "a directory, of a sharded model. --consolidate makes one plain file" in cli(
        "cp", tmp_path / "run", tmp_path
    )
    pulled = tmp_path / manifest.name
    assert {path.name: path.read_bytes() for path in pulled.iterdir()} == {
        path.name: path.read_bytes() for path in (store.root / manifest.name).iterdir()
    }
    assert "never replaced" in cli("cp", tmp_path / "run", tmp_path, "--force", code=2)
    assert "3, .metadata first" in cli("show", tmp_path / "run")
    assert main(["verify", str(tmp_path / "run")]) == 0
    with open(store.root / manifest.name / "__0_0.distcp", "ab") as file:
        file.write(b"more")
    assert main(["verify", str(tmp_path / "run")]) == 1
    (store.root / manifest.name / "__0_0.distcp").write_bytes(b"x" * manifest.files[1].nbytes)
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert main(["cp", str(tmp_path / "run"), str(tmp_path / "other")]) != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", manifest.name]


def test_verify(run_dir: Path, cli: Cli) -> None:
    assert "BAD" not in cli("verify", run_dir)
    newest = LocalStore(run_dir).survey().manifests[0]
    with open(run_dir / newest.data_path, "r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    checked = json.loads(cli("verify", run_dir, "-o", "json", code=1))["snapshots"]
    states = {entry["tier"]: entry["state"] for entry in checked if entry["name"] == newest.name}
    assert states == {"storage": "bad", "host": "good"}
    # cp takes the copy that is good
    assert main(["cp", str(run_dir), str(run_dir / "pulled.ckpt")]) == 0


def test_a_server_that_does_not_answer_is_told_by_the_exit_code(
    run_dir: Path, tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands ended with 0, as if it held nothing. A named snapshot is the whole answer; damage matters more."""
    newest, silent, copy = LocalStore(run_dir).survey().manifests[0], "spot://127.0.0.1:9", tmp_path / "copy.ckpt"
    for command, *more in (["ls"], ["show"], ["verify"], ["cp", copy]):
        said = cli(command, run_dir, *more, "--server", silent, code=3)
        assert f"not asked: no snapshot server answers at {silent}" in said
        assert said.count(silent) == 1
        assert newest.name in said or copy.exists()
    for command, *more in (["show"], ["cp", copy, "--force"]):
        cli(command, f"{run_dir}@25", *more, "--server", silent)
    assert main(["ls", str(run_dir), "--server", silent, "-o", "json"]) == 3
    answer = capsys.readouterr()
    assert silent in json.loads(answer.out)["not_asked"][0]  # programs get JSON alone
    assert silent in answer.err
    (run_dir / newest.data_path).write_bytes(b"")
    assert "not asked: " in cli("verify", run_dir, "--server", silent, code=1)


def test_a_server_that_goes_while_it_is_read_is_no_damage(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    ask = snapshots.ask

    def ask_and_end(run: str, servers: Sequence[str]) -> snapshots.Found:
        found = ask(run, servers)
        server.stop()
        return found

    monkeypatch.setattr(snapshots, "ask", ask_and_end)
    assert "BAD" not in cli("verify", f"{server.url}/run-1", code=3)


def test_doctor_uses_the_size_of_the_existing_snapshots(run_dir: Path, cli: Cli) -> None:
    """It was 1 GB for a run of any size."""
    newest = LocalStore(run_dir).survey().manifests[0]
    assert f"snapshots of {format_bytes(newest.nbytes)}: " in cli("doctor", run_dir)


def test_what_cannot_be_read_is_listed_with_its_reason(run_dir: Path, cli: Cli) -> None:
    folder = run_dir / LocalStore(run_dir).survey().manifests[-1].name
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    assert f"unreadable: {folder.name} at storage: a manifest has format 99" in cli("ls", run_dir)
    for command, code in (("ls", 0), ("verify", 1)):
        (unreadable,) = json.loads(cli(command, run_dir, "-o", "json", code=code))["unreadable"]
        assert unreadable["name"] == f"{folder.name} at storage"
    said = cli("show", run_dir)
    assert "run-1@" in said
    assert "lineage" in said


def test_a_folder_of_plain_checkpoints_is_said_to_be_one(tmp_path: Path, cli: Cli) -> None:
    one = SpotCheckpointIO(local_server=False)
    one.save_checkpoint({"state_dict": {}}, tmp_path / "saved" / "a.ckpt")
    one.teardown()
    assert "SpotCheckpointIO has saved plain checkpoint files there" in cli("ls", tmp_path / "saved", code=2)


@pytest.fixture
def server(start_server: StartServer, tmp_path: Path) -> RunningServer:
    """One that has the snapshots of a run that was interrupted."""
    server = start_server()
    interrupted(tmp_path / "run-1", servers=server.url)
    return server


def test_a_server(server: RunningServer, tmp_path: Path, cli: Cli) -> None:
    assert cli("ls", f"{server.url}/run-1").split()[-1] == "local"
    assert server.url in cli("ls", tmp_path / "run-1", "--server", server.url)
    assert main(["verify", f"{server.url}/run-1"]) == 0
    assert main(["cp", f"{server.url}/run-1", str(tmp_path)]) == 0
    assert (tmp_path / "step-000000030-attempt-0001.ckpt").exists()
    assert f"no run is, or ever was, at '{server.url}/mistyped'" in cli("ls", f"{server.url}/mistyped", code=2)


WRONG = [
    ([""], "'': it is empty; give a directory or URL"),
    (["run-\udce9"], "it is not UTF-8; give a directory whose name is"),
    (["s3a:/x"], "'s3a:/x': a URL has two slashes, s3a://x; for a directory write ./s3a:/x"),
    (["s3://"], "'s3://': it names no bucket, as s3://bucket/run-1 does"),
    (["smb://me:secret@host/run"], "'smb://…@host/run': a URL with a password ends in logs"),
    (["x", "--server", "10.0.0.5:1"], "--server '10.0.0.5:1' is no server URL"),
    (["x", "--server", "spot://h:99999"], "--server 'spot://h:99999' is no server URL"),
    (["x", "--server", "spot://h:9/run"], "--server 'spot://h:9/run' names more than a server: give spot://h:9 only"),
    (["x", "--server", "auto"], "--server 'auto' is no server URL"),
    *((["x", "--server", odd], f"--server {odd!r} is no server URL") for odd in ("", "spot://", "spot:///run")),
    (["spot://h:9/run", "--server", "x"], "--server 'x' is no server URL"),
]
"""Of each command that asks for a run; and what is wrong with it."""

SERVE = ["serve", "--listen", "127.0.0.1:0", "--memory-limit", "64MiB"]

TIMES = [["serve", "--drain-timeout"], ["drill", "--limit"], ["simulate", "--work"]]
"""Flags that take a time."""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["show", "NOWHERE"], "no run is, or ever was, at 'NOWHERE': give the directory or URL of one"),
        (["ls", "spot://127.0.0.1:9/run"], "no snapshot server answers"),
        (["ls", "NOWHERE", "--server", "spot://127.0.0.1:9"], "no tier that answers knows of a run at 'NOWHERE'"),
        (["ls", "spot://127.0.0.1:9"], "names no run"),
        (["ls", "runs/a/step-000000030-attempt-0001/"], "write runs/a@step-000000030-attempt-0001 (for ls, its run"),
        (["cp", "s3://b/run/step-000000030-attempt-0001/model.ckpt", "x"], "write s3://b/run@step"),
        (["ls", f"/{'n' * 300}/run"], "/.lightning_spot: File name too long"),
        (["ls", "ftp://127.0.0.1:9/run"], "ftp:// cannot keep snapshots"),
        (["ls", __file__], f"{__file__} is a file, and not the directory of a run"),
        (["report", "spot://127.0.0.1:9/run"], "is a snapshot server: give a directory or URL of a run"),
        (["doctor", "spot://127.0.0.1:9"], "spot://127.0.0.1:9 is a snapshot server: give a directory or URL"),
        (["doctor", "NOWHERE", *2 * ("--server", "spot://h:9")], "--server names spot://h:9 twice"),
        (["doctor", "NOWHERE", "--snapshot-size", "64"], "--snapshot-size 64: that is 64 bytes. Give a unit"),
        *(
            (["simulate", flag, "600"], f"{flag} 600: that is 600 bytes. Give a unit, such as 600MB or")
            for flag in ("--server-speed", "--storage-speed", "--snapshot-size")
        ),
        (["doctor", "NOWHERE", "--lifetime", "0"], "--lifetime=0.0"),
        *(
            (["serve", "--listen", odd], "--listen is not written like 127.0.0.1:7070: ")
            for odd in ("a..b:1", f"{64 * 'a'}:1", "h:" + 5000 * "1")
        ),
        (["serve", "--listen", "nowhere"], "127.0.0.1:7070: 'nowhere'"),
        (["serve", "--listen", "127.0.0.1:99999"], "--listen"),
        *((["serve", "--listen", f"{every}:7070"], "LIGHTNING_SPOT_TOKEN") for every in ("0.0.0.0", "[::]")),
        (["serve", "--memory-limit", "1.5"], "--memory-limit='1.5' is no size"),
        (["serve", "--memory-limit", "3"], "--memory-limit 3: that is 3 bytes. Give a unit, such as 3MB or 3GiB"),
        (["serve", "--memory-limit", "900TiB"], "--memory-limit 989560.46 GB: this machine"),
        (["serve", "--run-memory-limit", "x"], "--run-memory-limit='x' is no size"),
        (["serve", "--slots", "0"], "--slots=0"),
        ([*SERVE, "--storage", "/dev/null/x"], "cannot be made"),
        *(([*SERVE, f"--tls-{one}", "a"], f"--tls-{other}") for one, other in (("cert", "key"), ("key", "cert"))),
        ([*SERVE, "--client-ca", "a"], "--tls-cert"),
        ([*SERVE, "--tls-cert", "a", "--tls-key", "b"], "--tls-cert a"),
        (["serve", "--storage", "s3:/b"], "--storage 's3:/b': a URL has two slashes, s3://b"),
        (["serve", "--storage", "spot://h:7070"], "--storage spot://h:7070: a server stores runs in directories"),
        (["serve", "--allow-storage", " "], "--allow-storage ' ': it is empty"),
        (["serve", "--allow-storage", "nonsense://bucket"], "'nonsense://bucket': nonsense:// cannot keep snapshots"),
        (["drill", "--limit", "0", "--", "true"], "--limit=0"),
        (["drill", "--kills", "0", "--", "true"], "--kills=0"),
        (["drill", "--keep", "/dev/null", "--", "true"], "--keep /dev/null cannot be made"),
        (["simulate", "--price", "nan"], "--price=nan"),
        (["simulate", "--runs", "1000000000"], "--runs=1000000000 with --hosts=1: 10000000 machines at most"),
        (["simulate", "--hosts", "1000000000"], "--runs=1000 with --hosts=1000000000"),
        *((["simulate", flag, "0"], f"{flag}=0: it is a whole number, at least 1") for flag in ("--runs", "--hosts")),
        *((["simulate", flag, "0"], f"{flag}=0.0: it is a number, more") for flag in ("--lifetime", "--crash-every")),
        (["simulate", "--trace", "nothing.csv"], "nothing.csv cannot be used as a trace"),
        (["prune", "NOWHERE", "--keep", "0"], "--keep=0"),
        (["prune", "NOWHERE", "--keep", "1", "--newer-than", "2"], "--newer-than '2' has no unit"),
        (["run", "--max-errors", "few", "--", "true"], "--max-errors='few'"),
        *(([*flags, "5"], f"{flags[-1]} '5' has no unit") for flags in TIMES),
        *(
            ([command, *given, *more], complaint)
            for command, more in (("ls", []), ("show", []), ("verify", []), ("cp", ["copy"]))
            for given, complaint in WRONG
        ),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], complaint: str, tmp_path: Path, cli: Cli) -> None:
    nowhere = str(tmp_path / "nowhere")
    said = cli(*(item.replace("NOWHERE", nowhere) for item in arguments), code=2)
    assert complaint.replace("NOWHERE", nowhere) in said
    assert "Traceback" not in said
    assert not re.search(r"\b(dirpath|memory|run|replicas)=", said.replace("--", "")) or said.startswith("--")


@pytest.mark.parametrize(
    ("scheme", "package", "extra"),
    [("gs", "gcsfs", "gcs"), ("abfs", "adlfs", "azure"), ("az", "adlfs", "azure")],
)
def test_what_to_install_for_a_url_is_said(
    scheme: str, package: str, extra: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert f"{package} is not installed: pip install 'lightning_spot[{extra}]'" in cli(
        "ls", f"{scheme}://bucket/run", code=2
    )


def test_a_run_that_never_ends_has_no_price(
    capsys: pytest.CaptureFixture[str], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "MOST_FAILURES", 50)
    never = ["simulate", "--work", "1h", "--lifetime", "1s", "--runs", "2"]
    assert main(never) == 0
    assert "PRICE" not in capsys.readouterr().out
    said = cli(*never, "--price", "2")
    assert said.splitlines()[2].split()[-1] == "unknown"
    assert "nan" not in said


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).parent / "lightning-spot"
    done = subprocess.run([str(command), "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0.1.0"


def test_help_imports_no_command() -> None:
    """What it takes is imported before anything is printed."""
    code = "import sys; from lightning_spot.cli.command import command_parser; command_parser(()).format_help()"
    code += "; print(*(name for name in sys.modules if name.startswith('lightning_spot.') or '.' not in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert {name for name in imported if name.startswith("lightning_spot.")} <= {
        f"lightning_spot.{name}"
        for name in ("_version", "cli", "cli.command", "cli.output", "errors", "renamed", "untrusted")
    }
    assert not imported & {"aiohttp", "fsspec", "numpy", "torch", "lightning", "asyncio", "http"}


@pytest.mark.parametrize(("command", "which"), [("cp", ""), ("cp", "@latest"), ("verify", "")])
def test_snapshots_superseded_during_a_command_are_not_bad(
    command: str, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a snapshot at every step, those that were listed have left memory when they are to be opened."""
    path, target = tmp_path / "run-1", tmp_path / "pulled.ckpt"
    arguments, codes = [command, f"{path}{which}", *([str(target)] if command == "cp" else [])], list[int]()
    ask, asked, trained = snapshots.ask, threading.Event(), threading.Event()

    def ask_and_wait(run: str, servers: Sequence[str]) -> Found:
        found = ask(run, servers)
        asked.set()
        assert trained.wait(120)
        return found

    monkeypatch.setattr(snapshots, "ask", ask_and_wait)
    called = threading.Thread(target=lambda: codes.append(main(arguments)))
    begin = At(10, lambda: (called.start(), asked.wait(120)), "on_train_batch_start")
    end = At(18, lambda: (trained.set(), called.join(120)), "on_train_batch_start")
    spot = SpotCheckpoint(str(path), interval=EverySteps(1), on_full="wait", slots=2, min_upload_interval_s=1000.0)
    trainer(spot, begin, end, max_epochs=1).fit(Net(), data())
    said = capsys.readouterr()
    assert codes == [0], said.err
    if command == "cp":
        assert torch.load(target, weights_only=True)["global_step"] in (17, 18)
    else:
        assert re.search(r"^gone +step-0+\d+-attempt-0001 +host ", said.out, re.MULTILINE)
        assert "BAD" not in said.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_exit_codes_and_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, check=lambda end: end.code == 0):
        main([command, "--help"])
    text = capsys.readouterr().out
    _, examples, codes = re.split("^examples:|^exit codes:", text, flags=re.MULTILINE)
    assert {"0", "2"} <= set(re.findall(r"^  (\d+) ", codes, re.MULTILINE))
    lines = [shlex.split(line) for line in examples.strip().splitlines()]
    assert [line[:2] for line in lines] == [["lightning-spot", command]] * len(COMMANDS[command].examples)
    assert {command_parser().parse_args(arguments).command for _, *arguments in lines} == {command}


@pytest.mark.parametrize("command", [["simulate", "--work", "2h", "--snapshot-size", "1GB"], ["--help"]])
def test_a_terminal_without_utf8_ends_no_command(tmp_path: Path, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_spot", *command],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.isascii()
