"""The ``lightning-spot`` command, as a user calls it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch

from lightning_spot import EverySteps, SpotCheckpoint, SpotCheckpointIO
from lightning_spot.cli import listing, main, transfer
from lightning_spot.cli.tiers import Entry, Found, ask
from lightning_spot.config import format_bytes
from lightning_spot.image.manifest import PortionOf, portion_name
from lightning_spot.tiers.fences import Claim
from lightning_spot.tiers.local import LocalStore
from tests.conftest import RunningNode
from tests.models import EachDurable, Net, data, trainer
from tests.test_fit import Stop, StopAt
from tests.test_stores import sharded


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that was interrupted: snapshots in memory and on disk."""
    path = tmp_path / "run-1"
    callback = SpotCheckpoint(str(path), interval=EverySteps(5), on_full="wait", min_upload_interval_s=0.0)
    with pytest.raises(Stop):
        trainer(callback, EachDurable(path, 5), StopAt(31)).fit(Net(), data())
    return path


Said = Callable[[], str]


def test_ls(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["ls", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert "step-000000030-attempt-0001" in said
    rows = [line.split() for line in said.splitlines()[1:]]
    assert {(row[1], row[-2]) for row in rows} >= {("30", "host"), ("30", "storage"), ("25", "storage")}
    assert {row[-1] for row in rows} == {"replicated", "persisted"}


def test_ls_on_a_narrow_terminal_cuts_no_name(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copied from there, into the next command."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["ls", str(run_dir)]) == 0
    listed = capsys.readouterr().out
    assert "\x1b[" in listed
    assert "…" not in listed
    assert all(manifest.name in listed for manifest in LocalStore(run_dir).survey().manifests)


def test_ls_of_portions(run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are whole in a pipe; a portion whose host does not know when it was taken is not 20,000 days old."""
    named = argparse.Namespace(run=str(run_dir), server=[], run_name=None, json=False)
    entry = ask(named).entries[0]
    name = portion_name("step-000000106-attempt-0003-complete", 1)
    of = PortionOf(1, 2, "0" * 32)
    portion = replace(entry.manifest, name=name, portion=of, epoch=0, created_unix_s=0.0)
    source = SimpleNamespace(tier="spot://memory-node-1.example.com:7070")
    monkeypatch.setattr(listing, "ask", lambda _: Found([Entry(portion, cast(Any, source), "portion 2 of 2")]))
    capsys.readouterr()
    assert listing.ls(named) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    size = format_bytes(portion.nbytes).split()
    assert row == [name, str(portion.step), "-", "1", *size, "-", source.tier, "portion", "2", "of", "2"]


def test_ls_of_a_path_where_no_run_ever_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(tmp_path / "mistyped")]) == 2
    assert f"no run is, or ever was, at '{tmp_path / 'mistyped'}'" in " ".join(capsys.readouterr().err.split())
    claim = Claim(attempt=1, run_id="0" * 12, digest="t", location=f"file://{tmp_path / 'begun'}", started_unix_s=0.0)
    LocalStore(tmp_path / "begun").claim(claim)
    assert main(["ls", str(tmp_path / "begun")]) == 0
    assert "no snapshots of" in capsys.readouterr().out


def test_ls_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["ls", str(run_dir), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed[0]["step"] == 30
    assert {entry["tier"] for entry in listed} == {"host", "storage"}


def test_show(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["show", f"{run_dir}@25"]) == 0
    said = capsys.readouterr().out
    for word in ("step-000000025-attempt-0001", "epoch", "xxh3-128", f"torch {torch.__version__}"):
        assert word in said
    assert "8.39 MB" not in said  # its one part is as long as the file


def test_cp(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    target = tmp_path / "mine.ckpt"
    assert main(["cp", str(run_dir), str(target)]) == 0
    assert "every checksum holds" in capsys.readouterr().out
    assert torch.load(target, weights_only=True)["global_step"] == 30
    assert main(["cp", str(run_dir), str(target)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["cp", f"{run_dir}@25", str(target), "--force"]) == 0
    assert torch.load(target, weights_only=True)["global_step"] == 25
    assert main(["cp", str(run_dir), str(tmp_path / "none" / "x.ckpt")]) == 2
    assert "no directory" in capsys.readouterr().err
    assert main(["cp", f"{run_dir}@latest", str(tmp_path / "latest.ckpt")]) == 0
    assert main(["ls", f"{run_dir}@25"]) == 2


def test_what_is_good_nowhere_is_said_once_and_leaves_nothing(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its only copy was passed over, and then named once more, as the error."""
    shutil.copytree(run_dir, copied := tmp_path / "copied")  # of which no node has anything
    (data,) = copied.glob("step-000000025-*/model.ckpt")
    data.write_bytes(data.read_bytes()[:-1])
    (target := tmp_path / "pulled").mkdir()
    capsys.readouterr()
    assert main(["cp", f"{copied}@25", str(target)]) != 0
    said = capsys.readouterr()
    assert "is passed over" not in said.out
    assert said.err.count("is cut short") == 1
    assert not list(target.iterdir())


def test_pull_names_the_snapshot_before_a_damaged_one_and_says_what_it_could_not_read(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error said nothing of the good one; of a newest one with an unreadable manifest nothing was said at all."""
    shutil.copytree(run_dir, copied := tmp_path / "copied")  # of which no node has anything
    newest, older = LocalStore(copied).survey().manifests[:2]
    (copied / newest.data_path).write_bytes(b"damage")
    target = tmp_path / "mine.ckpt"
    capsys.readouterr()
    assert main(["cp", str(copied), str(target)]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith(f"lightning-spot cp {copied}@{older.name} DEST")
    assert not target.exists()
    (copied / newest.name / "manifest.json").write_text("garbage")
    assert main(["cp", str(copied), str(target)]) == 0
    said = capsys.readouterr().out
    assert f"passed over: {newest.name} at storage" in said
    assert f"step {older.step}" in said


def test_a_sharded_snapshot_is_pulled_into_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, image = sharded(5)
    store = LocalStore(tmp_path / "run")
    store.put(manifest, memoryview(image), attempt=1)
    assert main(["cp", str(tmp_path / "run"), str(tmp_path)]) == 0
    assert "a directory, of a sharded model. --consolidate makes one plain file" in capsys.readouterr().out
    pulled = tmp_path / manifest.name
    assert {path.name: path.read_bytes() for path in pulled.iterdir()} == {
        path.name: path.read_bytes() for path in (store.root / manifest.name).iterdir()
    }
    assert main(["cp", str(tmp_path / "run"), str(tmp_path), "--force"]) == 2
    assert "never replaced" in " ".join(capsys.readouterr().err.split())
    assert main(["show", str(tmp_path / "run")]) == 0
    assert "3, .metadata first" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "run")]) == 0
    (store.root / manifest.name / "__0_0.distcp").write_bytes(b"x" * manifest.files[1].nbytes)
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert main(["cp", str(tmp_path / "run"), str(tmp_path / "other")]) != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", manifest.name]


def test_verify(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["verify", str(run_dir)]) == 0
    assert "BAD" not in capsys.readouterr().out
    newest = LocalStore(run_dir).survey().manifests[0]
    with open(run_dir / newest.data_path, "r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    assert main(["verify", str(run_dir)]) == 1
    said = capsys.readouterr().out
    assert f"BAD  {newest.name} at storage" in said
    assert f"good {newest.name} at host" in said
    # pull takes the copy that is good
    assert main(["cp", str(run_dir), str(run_dir / "pulled.ckpt")]) == 0


def test_doctor_reckons_with_the_size_of_the_snapshots_that_are_there(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was 1 GB for a run of any size."""
    newest = LocalStore(run_dir).survey().manifests[0]
    capsys.readouterr()
    assert main(["doctor", str(run_dir), "--sample", "1MB"]) == 0
    assert f"snapshots of {format_bytes(newest.nbytes)}: " in capsys.readouterr().out


def test_what_cannot_be_read_is_listed_with_its_reason(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_dir / LocalStore(run_dir).survey().manifests[-1].name
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    capsys.readouterr()
    assert main(["ls", str(run_dir)]) == 0
    assert f"unreadable: {folder.name} at storage: a manifest has format 99" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["ls", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[-1]["state"] == "unreadable"
    assert main(["verify", str(run_dir)]) == 1
    assert f"BAD  {folder.name} at storage" in capsys.readouterr().out
    assert main(["show", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert "run-1@" in said
    assert "lineage" in said


def test_a_folder_of_plain_checkpoints_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = SpotCheckpointIO(local_server=False)
    one.save_checkpoint({"state_dict": {}}, tmp_path / "saved" / "a.ckpt")
    one.teardown()
    assert main(["ls", str(tmp_path / "saved")]) == 2
    assert "SpotCheckpointIO has saved plain checkpoint files there" in " ".join(capsys.readouterr().err.split())


def test_two_runs_of_one_name_at_a_node(
    start_node: Callable[..., RunningNode], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = start_node()
    for team in "ab":
        settings = {"servers": node.url, "interval": EverySteps(5), "on_full": "wait", "notices": None}
        callback = SpotCheckpoint(str(tmp_path / team / "run-1"), **settings)
        with pytest.raises(Stop):
            trainer(callback, StopAt(11)).fit(Net(), data())
    capsys.readouterr()
    assert main(["ls", f"{node.url}/run-1"]) == 2
    listed = capsys.readouterr().err
    names = sorted({word.strip(",;.") for word in listed.split() if word.startswith("run-1@")})
    assert len(names) == 2
    for name in names:
        assert main(["ls", f"{node.url}/{name}"]) == 0
        assert "step-000000010" in capsys.readouterr().out


def test_a_node(start_node: Callable[..., RunningNode], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = start_node()
    callback = SpotCheckpoint(str(tmp_path / "run-1"), servers=node.url, interval=EverySteps(5), on_full="wait")
    with pytest.raises(Stop):
        trainer(callback, StopAt(31)).fit(Net(), data())
    capsys.readouterr()
    assert main(["ls", f"{node.url}/run-1"]) == 0
    assert capsys.readouterr().out.split()[-1] == "local"
    assert main(["ls", str(tmp_path / "run-1"), "--server", node.url]) == 0
    assert node.url in capsys.readouterr().out
    assert main(["verify", f"{node.url}/run-1"]) == 0
    assert main(["cp", f"{node.url}/run-1", str(tmp_path)]) == 0
    assert (tmp_path / "step-000000030-attempt-0001.ckpt").exists()
    capsys.readouterr()
    assert main(["ls", f"{node.url}/mistyped"]) == 2
    assert f"no run is, or ever was, at '{node.url}/mistyped'" in " ".join(capsys.readouterr().err.split())


WRONG = [
    ([""], "'': it is empty; give a directory or URL"),
    (["s3a:/x"], "'s3a:/x': a URL has two slashes, s3a://x; for a directory write ./s3a:/x"),
    (["s3://"], "'s3://': it names no bucket, as s3://bucket/run-1 does"),
    (["smb://me:secret@host/run"], "'smb://…@host/run': a URL with a password ends in logs"),
    (["10.0.0.5:7070/run"], "'10.0.0.5:7070/run': for a snapshot server write spot://10.0.0.5:7070/run"),
    (["x", "--server", "10.0.0.5:1"], "--server '10.0.0.5:1' is no server URL"),
    (["x", "--server", "spot://h:99999"], "--server 'spot://h:99999' is no server URL"),
    (["x", "--server", "spot://h:9/run"], "--server 'spot://h:9/run' names more than a node: give spot://h:9 only"),
    (["x", "--server", "auto"], "--server 'auto' is no server URL"),
    (["x", "--server", ""], "--server '' is no server URL"),
    (["spot://h:9/run", "--server", "x"], "--server 'x' is no server URL"),
    (["x", "--run-name", "a/b"], "--run-name: run name 'a/b' is not usable"),
    (["x", "--run-name", ""], "--run-name: run name '' is not usable"),
]
"""Of each command that asks for a run; and what is wrong with it."""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["show", "NOWHERE"], "no run is, or ever was, at 'NOWHERE': give the directory or URL of one"),
        (["ls", "spot://127.0.0.1:9/run"], "no snapshot server answers"),
        (
            ["ls", "NOWHERE", "--server", "spot://127.0.0.1:9"],
            "no tier that answers knows of a run at 'NOWHERE'",
        ),
        (["ls", "spot://127.0.0.1:9"], "names no run"),
        (["ls", "spot://127.0.0.1:port/run"], "no server URL"),
        (["ls", "nonsense://bucket/run"], "Give a directory"),
        (["ls", "x", "--server", "10.0.0.5"], "no server URL"),
        (["cp", "NOWHERE@3", "x"], "no run is, or ever was, at"),
        (
            ["ls", "runs/a/step-000000030-attempt-0001/"],
            "write runs/a@step-000000030-attempt-0001 (for ls, its run runs/a",
        ),
        (["cp", "s3://b/run/step-000000030-attempt-0001/model.ckpt", "x"], "write s3://b/run@step"),
        (["show", "spot://127.0.0.1:9/run/step-000000030-attempt-0001"], "write spot://127.0.0.1:9/run@step"),
        (["verify", "NOWHERE"], "no run is, or ever was, at"),
        (["ls", "ftp://127.0.0.1:9/run"], "ftp:// cannot keep snapshots: it uses one connection"),
        (["serve", "--slots", "0"], "--slots 0"),
        (["serve", "--memory-limit", "1.5"], "--memory-limit='1.5' is no size"),
        (["serve", "--run-memory-limit", "x"], "--run-memory-limit='x' is no size"),
        (["serve", "--storage", ""], "--storage '': it is empty"),
        (["serve", "--allow-storage", " "], "--allow-storage ' ': it is empty"),
        (["serve", "--allow-storage", "nonsense://bucket"], "'nonsense://bucket' cannot be used as a tier"),
        (["serve", "--storage", "spot://h:7070"], "--storage spot://h:7070: a server brings runs to directories"),
        (
            ["serve", "--allow-storage", "spot://h:7070"],
            "--allow-storage spot://h:7070: a server brings runs to directories",
        ),
        (["drill", "--limit", "0", "--", "true"], "--limit=0"),
        (["drill", "--keep", "/dev/null", "--", "true"], "/dev/null is no empty directory"),
        (["simulate", "--price", "nan"], "--price=nan"),
        (["simulate", "--seed", "-1"], "--seed=-1"),
        (["simulate", "--work", "0s"], "--work=0.0"),
        (["simulate", "--crash-every", "0"], "--crash-every=0.0"),
        (["simulate", "--runs", "0"], "--runs=0"),
        (["simulate", "--runs", "1000000000"], "--runs=1000000000: at most 1000000"),
        (["doctor", "NOWHERE", "--sample", "1000TB"], "--sample 1000TB: at most half"),
        (["doctor", "NOWHERE", "--snapshot-size", "x"], "--snapshot-size='x'"),
        (["doctor", "NOWHERE", "--sample", "64"], "--sample 64: that is 64 bytes. Give a unit"),
        (["doctor", "NOWHERE", "--lifetime", "0"], "--lifetime=0.0"),
        (["doctor", "NOWHERE", "--replicas", "0"], "--replicas=0"),
        (["doctor", "NOWHERE", "--replicas", "2"], "--replicas=2: each replica is at a server of its own"),
        (["doctor", "spot://127.0.0.1:9"], "spot://127.0.0.1:9 is a snapshot server: give a directory or URL"),
        (["doctor", "NOWHERE", *2 * ("--server", "spot://h:9")], "--server names spot://h:9 twice"),
        *(
            (([command, *given, *more]), complaint)
            for command, more in (("ls", []), ("show", []), ("verify", []), ("cp", ["copy"]))
            for given, complaint in WRONG
        ),
        (["report", "s3a:/x"], "'s3a:/x': a URL has two slashes, s3a://x"),
        (["report", ""], "'': it is empty; give a directory or URL"),
        (["serve", "--storage", "s3:/b"], "--storage 's3:/b': a URL has two slashes, s3://b"),
        (["simulate", "--hosts", "0"], "--hosts=0"),
        (["simulate", "--hosts", "2", "--correlated", "3"], "--correlated=3: of --hosts=2, 1 to all go at a time"),
        (["drill", "--keep", "/proc/none", "--", "true"], "--keep /proc/none cannot be made"),
        (["report", "spot://127.0.0.1:9/run"], "keeps no records of attempts: give the run's"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert main([item.replace("NOWHERE", nowhere) for item in arguments]) == 2
    said = capsys.readouterr().err
    assert complaint.replace("NOWHERE", nowhere) in said
    assert "Traceback" not in said
    assert not re.search(r"\b(dirpath|memory|run|replicas)=", said.replace("--", "")) or said.startswith("--")


@pytest.mark.parametrize("time", ["nan", "5", "5 apples"])
@pytest.mark.parametrize("flags", [["serve", "--drain-timeout"], ["drill", "--limit"], ["simulate", "--work"]])
def test_times_have_a_unit(flags: list[str], time: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*flags, time])
    assert f"{flags[-1]}: '{time}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scheme", "package", "extra"),
    [("gs", "gcsfs", "gcs"), ("abfs", "adlfs", "azure"), ("az", "adlfs", "azure")],
)
def test_what_to_install_for_a_url_is_said(
    scheme: str, package: str, extra: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["ls", f"{scheme}://bucket/run"]) == 2
    assert f"{package} is not installed: pip install 'lightning_spot[{extra}]'" in capsys.readouterr().err


def test_a_node_that_does_not_answer_is_named_once(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["ls", str(run_dir), "--server", "spot://127.0.0.1:9"]) == 0
    assert capsys.readouterr().out.count("spot://127.0.0.1:9") == 1


def test_a_run_that_never_ends_has_no_price(capsys: pytest.CaptureFixture[str]) -> None:
    never = ["simulate", "--work", "1h", "--lifetime", "1s", "--runs", "2", "--policy", "YoungDaly"]
    assert main(never) == 0
    assert "PRICE" not in capsys.readouterr().out
    assert main([*never, "--price", "2"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[2].split()[-1] == "unknown"
    assert "nan" not in said


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).parent / "lightning-spot"
    done = subprocess.run([str(command), "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0.1.0"


@pytest.mark.parametrize("module", ["lightning_spot.cli", "lightning_spot.service.program", "lightning_spot"])
def test_light_imports(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'lightning', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


class Superseded(pl.Callback):
    """Runs a command in mid-training, and trains on for some steps once it has asked what there is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *command: str) -> None:
        self.code, self.asked, self.trained = -1, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.call, args=(list(command),))
        monkeypatch.setattr(transfer, "ask", self.ask)

    def call(self, command: list[str]) -> None:
        self.code = main(command)

    def ask(self, arguments: argparse.Namespace) -> Found:
        found = ask(arguments)
        self.asked.set()
        assert self.trained.wait(60)
        return found

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 10:
            self.thread.start()
            assert self.asked.wait(60)
        if trainer.global_step == 18:
            self.trained.set()
            self.thread.join(60)


@pytest.mark.parametrize("command", ["cp", "verify"])
def test_snapshots_that_are_superseded_while_a_command_looks_are_not_bad(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a snapshot at every step, those that were listed have left memory when they are to be opened."""
    path, target = tmp_path / "run-1", tmp_path / "pulled.ckpt"
    during = Superseded(monkeypatch, command, str(path), *([str(target)] if command == "cp" else []))
    spot = SpotCheckpoint(str(path), interval=EverySteps(1), on_full="wait", slots=2, min_upload_interval_s=1000.0)
    trainer(spot, during, max_epochs=1).fit(Net(), data())
    said = capsys.readouterr()
    assert during.code == 0, said.err
    if command == "cp":
        assert torch.load(target, weights_only=True)["global_step"] in (17, 18)
    else:
        assert re.search(r"^gone step-0+\d+-attempt-0001 at host: ", said.out, re.MULTILINE)
        assert "BAD" not in said.out


@pytest.mark.parametrize("command", [["simulate", "--work", "2h", "--snapshot-size", "1GB"], ["--help"]])
def test_a_terminal_without_utf8_ends_no_command(tmp_path: Path, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_spot", *command],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.isascii()
