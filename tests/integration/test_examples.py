"""The ways in, as the documentation shows them: a callback, LightningCLI, resume; and without a change of a program."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

from lightning_spot import EverySteps, SettingsError, SpotCheckpoint, SpotCLI, entry_point
from lightning_spot.store.local import LocalStore
from tests.support.said import informed
from tests.support.trainer import Net, data, trainer

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "callbacks").glob("*.yaml"))
SMALL = [
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=8",
    "--trainer.limit_val_batches=1",
    "--trainer.val_check_interval=8",
    "--trainer.enable_progress_bar=false",
    "--trainer.logger=false",
    "--trainer.accelerator=cpu",
    "--model.width=32",
    "--model.layers=1",
    "--data.max_bytes=100000",
]


def run(python: str, tmp_path: Path, *arguments: str) -> str:
    done = subprocess.run(
        [python, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("example", "needs", "small"),
    [
        ("digits.py", "torch", ["--every-steps=10"]),
        ("tabular.py", "sklearn", []),
        ("graphs.py", "torch_geometric", ["--graphs=60"]),
        ("hugging_face.py", "transformers", ["--max-bytes=20000"]),
    ],
)
def test_callback_then_resume(warm_python: str, tmp_path: Path, example: str, needs: str, small: list[str]) -> None:
    pytest.importorskip(needs)
    command = [str(ROOT / "examples" / example), f"--dirpath={tmp_path / 'run'}", *small]
    run(warm_python, tmp_path, *command, "--epochs=1")
    steps = LocalStore(tmp_path / "run").survey().manifests[0].step
    said = run(warm_python, tmp_path, *command, "--epochs=2")
    assert f"resumes at step {steps}" in said
    newest = LocalStore(tmp_path / "run").survey().manifests[0]
    assert newest.complete
    assert newest.step == 2 * steps


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_ready_made_configs(warm_python: str, tmp_path: Path, config: Path) -> None:
    script = str(ROOT / "examples" / "stdlib_gpt.py")
    needs_a_cloud = "s3://" in config.read_text() or "spot://" in config.read_text()
    if needs_a_cloud:
        said = run(warm_python, tmp_path, script, "fit", *SMALL, "--config", str(config), "--print_config")
        assert "lightning_spot" in said
        return
    run(warm_python, tmp_path, script, "fit", *SMALL, "--config", str(config))
    assert list((tmp_path / "checkpoints").rglob("*.ckpt"))


# -- without a change of the program -----------------------------------------------------------------------------------


GROUPS = ("lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory")


def steps(folder: Path) -> list[int]:
    return [manifest.step for manifest in LocalStore(folder).survey().manifests] if folder.exists() else []


def test_nothing_is_added_or_imported_where_nothing_is_asked_for() -> None:
    code = "import sys; from lightning_spot import entry_point; assert entry_point.callbacks() == [];"
    code += "assert not {'torch', 'lightning', 'lightning_spot.callbacks'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("group", GROUPS)
def test_lightning_finds_it(group: str) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][group]
    module, _, name = declared["lightning_spot"].partition(":")
    assert getattr(importlib.import_module(module), name) is entry_point.callbacks
    installed = [found for found in importlib.metadata.entry_points(group=group) if found.name == "lightning_spot"]
    assert all(found.load() is entry_point.callbacks for found in installed)


def test_a_training_that_knows_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT", str(tmp_path / "run-1"))
    found = []
    for _ in range(2):
        training = trainer()
        if not any(isinstance(each, SpotCheckpoint) for each in training.callbacks):  # the package is not installed
            training.callbacks += entry_point.callbacks()
        training.fit(Net(), data())
        found += [each for each in training.callbacks if isinstance(each, SpotCheckpoint)]
    assert steps(tmp_path / "run-1")
    assert steps(tmp_path / "run-1" / "fit-2")
    assert [spot.attempt for spot in found] == [1, 1]


def test_the_programs_own_callback_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT", str(tmp_path / "asked"))
    own, [asked] = SpotCheckpoint(str(tmp_path / "own"), interval=EverySteps(1)), entry_point.callbacks()
    with caplog.at_level("INFO", "lightning_spot"):
        training = trainer(own)
        training.callbacks.append(asked)
        training.fit(Net(), data())
    assert steps(tmp_path / "own")
    assert not (tmp_path / "asked").exists()
    assert asked not in training.callbacks
    assert str(informed(caplog)["own-callback"]["about"]).endswith("asked")


@pytest.mark.parametrize(("servers", "number"), [("spot://a:7070", 1), (" spot://a:7070, spot://b:7070,", 2)])
def test_servers_are_named_beside_it(monkeypatch: pytest.MonkeyPatch, servers: str, number: int) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT", "s3://bucket/run-1")
    monkeypatch.setenv("LIGHTNING_SPOT_SERVERS", servers)
    [spot] = entry_point.callbacks()
    assert len(spot.location.servers) == number


def test_what_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT", "memory://run-1")
    with pytest.raises(SettingsError):
        entry_point.callbacks()


def command_line(*arguments: str) -> pl.Trainer:
    fixed = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "limit_train_batches": 3}
    defaults = {**fixed, "max_epochs": 1, "enable_checkpointing": False, "enable_model_summary": False}
    cli = SpotCLI(
        BoringModel, BoringDataModule, args=list(arguments), trainer_defaults=defaults, save_config_callback=None
    )
    return cli.trainer


@pytest.mark.parametrize("way", ["flags", "file", "variable"])
def test_lightnings_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    run = tmp_path / "run-1"
    (tmp_path / "spot.yaml").write_text(f"spot:\n  dirpath: {run}\n  keep: 3\n")
    flags = {
        "flags": ["--spot.dirpath", str(run), "--spot.keep=3"],
        "file": ["--config", str(tmp_path / "spot.yaml")],
        "variable": ["--spot.keep=3"],
    }
    if way == "variable":
        monkeypatch.setenv("LIGHTNING_SPOT", str(run))
    training = command_line("fit", *flags[way])
    [spot] = [each for each in training.callbacks if isinstance(each, SpotCheckpoint)]
    assert spot.location.url.endswith("run-1")
    assert steps(run) == [3]
