"""Training as a user does it: snapshots that are exactly the state of their step, resume, and what goes wrong."""

from __future__ import annotations

import logging
import random
import re
import subprocess
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_spot import AutoResume, EverySteps, RemoteSnapshot, SpotCheckpoint
from lightning_spot.capture import attempt
from lightning_spot.capture.copier import Copier
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.cli import main
from lightning_spot.client import starting
from lightning_spot.client.stores import open_store
from lightning_spot.errors import (
    NotSerializableError,
    RunBusyError,
    SettingsError,
)
from lightning_spot.goodput.records import read_records
from lightning_spot.session import snapshotter
from lightning_spot.store.local import LocalStore
from tests.support.filled import check_archive
from tests.support.oracle import claim_of
from tests.support.said import informed, said
from tests.support.server import StartServer
from tests.support.snapshots import EachDurable, check_all, load, manifests, spot
from tests.support.trainer import At, Net, Probe, Stop, StopAt, Unsteady, trainer
from tests.support.trainer import data as trained_data
from tests.support.waiting import new_process, until

pytestmark = pytest.mark.guarantee("G6")


data = partial(trained_data, 10)
"""Epochs of 10 steps; two of them, if a test does not say otherwise."""


@pytest.mark.parametrize(("lap_s", "asked_before"), [(0.0, True), (2.0, False)])
def test_the_slot_of_a_snapshot_is_leased_a_step_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lap_s: float, asked_before: bool
) -> None:
    """Where steps are so long that it would be given back meanwhile, it is not."""
    probe, callback, comes = Probe(), spot(tmp_path, local_server=False), []
    real = SnapshotWriter.next_comes

    def next_comes(writer: SnapshotWriter) -> None:
        comes.append(callback.snapshots.snapshotter._trainer.global_step)
        real(writer)

    def clock() -> float:
        return time.monotonic() + lap_s * len(probe.states)

    monkeypatch.setattr(SnapshotWriter, "next_comes", next_comes)
    monkeypatch.setattr(snapshotter, "time", SimpleNamespace(monotonic=clock))
    trainer(callback, probe, EachDurable(tmp_path / "run-1", 3)).fit(Net(), data())
    assert [manifest.step for manifest in check_all(tmp_path, probe)] == [20, *range(18, 0, -3)]
    assert comes == ([2, 5, 8, 11, 14, 17, 20] if asked_before else [])


def test_a_tensor_that_moves_is_never_committed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No copying in the background: what is not copied at once is copied just before the optimizer step,
    # when forward has changed the bias already.
    monkeypatch.setattr(attempt, "Copier", partial(Copier, threads=0))
    probe, callback = Probe(), spot(tmp_path)
    trainer(callback, probe, max_epochs=3).fit(Unsteady(), data())
    assert callback.num_dropped == 1
    found = check_all(tmp_path, probe)
    assert len(said(caplog, "snapshot-torn")) == 1  # then it is known and copied at once
    assert 3 not in {manifest.step for manifest in found}
    assert found[0].complete


def test_plain_torch_and_lightning_read_it(tmp_path: Path, warm_python: str) -> None:
    trainer(spot(tmp_path)).fit(Net(), data())
    path = tmp_path / "run-1" / manifests(tmp_path)[0].data_path
    code = (
        "import sys\n"
        "for name in list(sys.modules):\n"
        "    if name.partition('.')[0] in ('lightning_spot', 'tests'):\n"
        "        del sys.modules[name]\n"
        "sys.modules['lightning_spot'] = None\n"  # as if it were not installed
        "import torch, lightning.pytorch as pl\n"
        "from lightning.fabric.utilities import registry\n"
        "real = registry.entry_points\n"
        "registry.entry_points = lambda **how: [each for each in real(**how) if each.name != 'lightning_spot']\n"
        "from tests.support.trainer import Net, data, trainer\n"
        f"path = {str(path)!r}\n"
        "assert torch.load(path, weights_only=True)['global_step'] == 20\n"
        "Net.load_from_checkpoint(path)\n"
        "t = trainer(max_epochs=3, enable_checkpointing=False); t.fit(Net(), data(10), ckpt_path=path)\n"
        "assert t.global_step == 30, t.global_step\n"
    )
    done = subprocess.run([warm_python, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check_archive(path)


# -- resume -----------------------------------------------------------------------------------------------------------


def stopped(root: Path, at: int = 16, *callbacks: pl.Callback, **more: Any) -> SpotCheckpoint:
    callback = spot(root, **more)
    with pytest.raises(Stop):
        trainer(callback, StopAt(at), *callbacks).fit(Net(), data())
    return callback


def test_the_same_line_carries_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = stopped(tmp_path)
    assert first.last_committed_step == 15
    interrupted = informed(caplog)["run-interrupted"]
    caplog.clear()
    probe, callback = Probe(), spot(tmp_path)
    again = trainer(callback, probe)
    again.fit(Net(), data())
    assert (callback.resumed_from.step, callback.resumed_from.tier, callback.attempt) == (15, "host", 2)
    assert min(probe.states) == 15
    assert again.global_step == 20
    lines = informed(caplog)
    assert [*lines] == ["resumed", "first-snapshot", "run-complete", "run-summary"]
    facts = [lines["run-summary"][name] for name in ("attempts", "step", "lost_steps", "taken")]
    assert facts == ["2 attempts", 20, interrupted["step"] - 15, 2]


def test_a_healthy_run_logs_four_messages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = spot(tmp_path)
    trainer(first).fit(Net(), data())
    lines = informed(caplog)
    assert [*lines] == ["started", "first-snapshot", "run-complete", "run-summary"]
    assert not [record for record in caplog.records if record.levelno > logging.INFO and hasattr(record, "spot_key")]
    facts = lines["first-snapshot"]
    assert (facts["step"], facts["about"]) == (3, first.location.url)
    summary = lines["run-summary"]
    assert [summary[name] for name in ("step", "lost_steps", "taken", "skipped", "dropped")] == [20, 0, 7, 0, 0]
    assert summary["uploaded_bytes"] > 0
    assert 0 < summary["goodput"] <= 1


def test_ckpt_path_from_a_server(tmp_path: Path, start_server: StartServer) -> None:
    server = start_server("--storage", str(tmp_path / "server"))
    stopped(tmp_path, servers=server.url)
    probe = Probe()
    trainer(probe, enable_checkpointing=False).fit(Net(), data(), ckpt_path=f"{server.url}/run-1/last.ckpt")
    assert min(probe.states) == 15
    (below,) = (tmp_path / "server").glob("run-1@*")
    assert LocalStore(below).survey().manifests


class WithBank(Net):
    """As losses that remember earlier batches (lightly's memory bank): in a buffer that no ``state_dict`` has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(1), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.bank += loss.detach()
        self.log("loss", loss)
        return loss


def test_a_finished_run_is_as_after_training(tmp_path: Path) -> None:
    """Buffers that no ``state_dict`` has, what was logged last, and the numbers that are drawn next."""
    banks, logged, drawn = [], [], []
    for seed in (1, 2):
        new_process()
        pl.seed_everything(seed, verbose=False)
        model, trains = WithBank(), trainer(spot(tmp_path))
        trains.fit(model, data())
        banks.append(float(model.bank))
        metrics = {name: float(value) for name, value in trains.callback_metrics.items()}
        logged.append({name: value for name, value in metrics.items() if not name.startswith("spot/")})
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert banks[0] == banks[1] > 0
    assert logged[0] == logged[1] != {}
    assert drawn[0] == drawn[1]


def test_a_finished_run_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    trainer(spot(tmp_path)).fit(Net(), data())
    before = manifests(tmp_path)
    new_process()
    model, callback = Net(), spot(tmp_path)
    trainer(callback).fit(model, data())
    facts = informed(caplog)["nothing-to-train"]
    assert (facts["epoch"], facts["step"]) == (2, 20)
    assert manifests(tmp_path) == before
    assert [record.end for record in read_records(str(tmp_path / "run-1"))] == ["complete", "complete"]
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run-1")]) == 0
    trained, found_it_complete = re.findall(r"^ *[12] .*complete *$", capsys.readouterr().out, re.MULTILINE)
    assert "0 to 20" in trained
    assert " none " in found_it_complete
    assert torch.equal(
        model.net[0].weight, load(tmp_path, before[0])["state_dict"]["net.0.weight"]
    )  # weights are there
    until(lambda: not starting.find_record(str(tmp_path / "run-1")).running(), "the server to end: nobody needs it")
    new_process()
    longer = trainer(spot(tmp_path), max_epochs=4)
    longer.fit(Net(), data())
    assert longer.global_step == 40
    new_process()
    caplog.clear()
    with pytest.raises(SettingsError, match="max_epochs=2"):
        trainer(spot(tmp_path)).fit(Net(), data())
    assert informed(caplog)["run-interrupted"]["way_on"] == ""  # it would meet the same error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SettingsError])
def test_what_is_safe_is_said_after_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    caplog.set_level(logging.INFO)

    with pytest.raises((error, SystemExit)):
        trainer(spot(tmp_path, local_server=False), StopAt(7, error)).fit(Net(), data())
    facts = informed(caplog)["run-interrupted"]
    assert (facts["error"], facts["step"]) == (error.__name__, 7)
    assert "step 6 is durable" in facts["safe"]
    assert bool(facts["way_on"]) is (error is KeyboardInterrupt)  # it might meet ours again
    assert manifests(tmp_path)[0].step == 6


@pytest.mark.parametrize("local_server", [True, False])
def test_s3(s3: str, local_server: bool) -> None:
    def callback() -> SpotCheckpoint:
        return SpotCheckpoint(
            f"{s3}/run-1", interval=EverySteps(5), local_server=local_server, on_full="wait", min_upload_interval_s=0.0
        )

    with pytest.raises(Stop):
        trainer(callback(), StopAt(16), EachDurable(f"{s3}/run-1", 5)).fit(Net(), data())
    assert [manifest.step for manifest in open_store(f"{s3}/run-1").survey().manifests] == [15, 10]
    again = callback()
    trainer(again).fit(Net(), data())
    assert again.resumed_from.step == 15


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"dirpath": "x", "servers": "10.0.0.5:7070"}, r"10\.0\.0\.5:7070"),
        ({"dirpath": "x", "servers": "spot://h:1/run"}, "spot://h:1/run"),
        ({"dirpath": "x", "run_name": "a/b"}, "'a/b'"),
        ({"dirpath": "spot://h:1/run"}, "servers='spot://h:1'$"),
        ({"dirpath": "s3:///run"}, "s3:///run.*s3://bucket/run-1"),
        ({"dirpath": "$HOME/run"}, r"dirpath='\$HOME/run': \$HOME .*'/.*/run'$"),
        ({"dirpath": "s3://bucket/${UNSET_HERE}/run"}, "dirpath=.*: .*UNSET_HERE}? "),
        ({"dirpath": "az://$web/$UNSET_HERE/run"}, r": \$UNSET_HERE "),
        ({"dirpath": "s3://$web/run"}, r": \$web "),
        ({"dirpath": "az://box/[x]/run"}, r"\[x\]"),
        ({"dirpath": "az://box/back\\slash"}, "box/back"),
        ({"dirpath": "x", "servers": "spot://h:1", "local_server": False}, "local_server=False with servers="),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], complaint: str) -> None:
    """``test_bad_input`` tries values of other kinds, ``test_file_systems`` URLs that cannot be used."""
    with pytest.raises(SettingsError, match=complaint):
        SpotCheckpoint(**arguments)


def test_unwritable_dirpath(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(SettingsError, match=re.escape(str(blocker))):
        trainer(SpotCheckpoint(str(blocker / "run-1"))).fit(Net(), data())


def test_two_callbacks_do_not_take_each_others_place(tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        trainer(spot(tmp_path), spot(tmp_path)).fit(Net(), data())


@pytest.mark.parametrize("kind", [SpotCheckpoint, AutoResume])
def test_a_class_in_the_place_of_a_callback_is_named(kind: Any) -> None:
    """A method of it was said to lack an argument."""
    run = trainer(kind)
    with pytest.raises(SettingsError, match=rf"callbacks= .*\b{kind.__name__}\b"):
        run.fit(Net(), data())


def test_a_trainer_has_one_run(tmp_path: Path) -> None:
    """It went on from the last one, also where only another one had snapshots: that training began anew."""
    resumes = AutoResume(str(tmp_path / "other"), local_server=False)
    with pytest.raises(SettingsError, match=r"/one.*/other.*dirpath"):
        trainer(AutoResume(str(tmp_path / "one"), local_server=False), resumes).fit(Net(), data())
    with pytest.raises(SettingsError, match=r"/other.*/run-1"):
        trainer(resumes, spot(tmp_path, resume=False)).fit(Net(), data())
    with pytest.raises(SettingsError, match=r"/other.*servers.*run_name"):
        trainer(resumes, AutoResume(str(tmp_path / "other"), run_name="third")).fit(Net(), data())
    assert not manifests(tmp_path)


@pytest.mark.parametrize("resumes_first", [True, False])
def test_whoever_writes_says_whether_there_is_a_local_server(tmp_path: Path, resumes_first: bool) -> None:
    """``AutoResume(dirpath)`` beside a writer without one was refused as another run."""
    path = str(tmp_path / "run-1")
    for step in (4, 8):
        resumes = AutoResume(path)
        writes = RemoteSnapshot(path, local_server=False, interval=EverySteps(2), on_full="wait")
        callbacks = [resumes, writes] if resumes_first else [writes, resumes]
        with pytest.raises(Stop):
            trainer(*callbacks, StopAt(step)).fit(Net(), data())
        assert not starting.find_record(path).running()
    assert resumes.resumed_from is not None
    assert resumes.resumed_from.tier == "storage"


def test_lightnings_own_checkpoints_stay_as_they_are(tmp_path: Path) -> None:
    run = trainer(spot(tmp_path), enable_checkpointing=True, default_root_dir=tmp_path)
    run.fit(Net(), data(), trained_data(3))
    assert type(run.checkpoint_callback) is ModelCheckpoint
    assert Path(run.checkpoint_callback.best_model_path).exists()
    assert run.test(Net(), trained_data(3), ckpt_path="best", verbose=False) == [{}]
    assert manifests(tmp_path)


@pytest.mark.parametrize("ours_first", [True, False])
def test_our_hooks_come_last(tmp_path: Path, ours_first: bool) -> None:
    class Swap(pl.Callback):
        """Exchanges the weights at the end, as averaging callbacks do."""

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            with torch.no_grad():
                pl_module.net[0].bias.fill_(7.0)

    class Swapping(Net):
        """Does so itself."""

        def on_train_end(self) -> None:
            with torch.no_grad():
                self.net[0].weight.fill_(5.0)

    own = ModelCheckpoint(str(tmp_path / "mine"), save_last=True)
    callbacks = [spot(tmp_path, local_server=False), Swap(), own]
    run = trainer(*(callbacks if ours_first else reversed(callbacks)))
    run.fit(Swapping(), data())
    assert isinstance(run.callbacks[-1], SpotCheckpoint)
    assert run.checkpoint_callback is own
    last = manifests(tmp_path)[0]
    assert last.complete
    assert torch.all(load(tmp_path, last)["state_dict"]["net.0.bias"] == 7.0)
    assert torch.all(load(tmp_path, last)["state_dict"]["net.0.weight"] == 5.0)
    assert "on_train_end" not in vars(run.strategy)


def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    trainer(spot(tmp_path), fast_dev_run=True).fit(Net(), data(), trained_data(3))
    assert not (tmp_path / "run-1").exists()


def test_state_that_cannot_be_pickled_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.global_step > 10:
                checkpoint["lambda"] = lambda: None

    run = trainer(spot(tmp_path))
    run.fit(Odd(), data())
    assert run.global_step == 20
    assert caplog.text.count("cannot be serialised") == 1
    assert manifests(tmp_path)[0].step == 9
    with pytest.raises(NotSerializableError):
        trainer(spot(tmp_path, on_error="raise", resume=False)).fit(Odd(), data())


def test_two_runs_with_one_name(tmp_path: Path, warm_python: str) -> None:
    path = str(tmp_path / "run-1")
    code = (
        "import os, sys; from lightning_spot.client import starting; from lightning_spot.server.runs import RunInfo\n"
        f"host = starting.start({path!r}, 'run-1', slots=2, memory_bytes=2**26, server_idle_timeout_s=60)\n"
        f"host.open_run(RunInfo(name='run-1', id='0123456789ab', location='file://{path}', attempt=1, token='t',"
        " pid=os.getpid()))\n"
        "print(os.getpid(), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([warm_python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        pid = int(other.stdout.readline())
        for _ in range(2):  # the first one that was refused, and left, took the run from the one that lives
            with pytest.raises(RunBusyError, match=f"pid {pid}"):
                trainer(spot(tmp_path)).fit(Net(), data())
            new_process()
        other.kill()
    assert LocalStore(path).claimed() == 0  # the one that lives is not fenced by the one that is refused


def test_a_zombie_is_fenced_and_trains_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def overtaken() -> None:
        until(lambda: manifests(tmp_path), "a first one to be durable")
        LocalStore(tmp_path / "run-1").claim(claim_of(2))

    run = trainer(spot(tmp_path, upload_timeout_s=5.0), At(10, overtaken))
    with caplog.at_level("WARNING"):
        run.fit(Net(), data())
    assert run.global_step == 20
    assert max(manifest.step for manifest in manifests(tmp_path)) <= 11
    assert said(caplog, "attempt-refused")
    assert said(caplog, "last-not-written"), "it would end as if it were there"
