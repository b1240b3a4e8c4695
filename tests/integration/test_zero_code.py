"""Snapshots without a change of the program: ``LIGHTNING_SPOT``, and Lightning's command line."""

from __future__ import annotations

import importlib
import importlib.metadata
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

ROOT = Path(__file__).parents[2]
GROUPS = ("lightning.pytorch.callbacks_factory", "pytorch_lightning.callbacks_factory")


def steps(folder: Path) -> list[int]:
    return [manifest.step for manifest in LocalStore(folder).survey().manifests] if folder.exists() else []


def test_nothing_is_added_or_imported_where_nothing_is_asked_for() -> None:
    code = "import sys; from lightning_spot import entry_point; assert entry_point.callbacks() == [];"
    code += "assert not {'torch', 'lightning', 'lightning_spot.callbacks'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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


def test_every_option_is_shown_with_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line("fit", "--help")
    shown = " ".join(capsys.readouterr().out.split())
    documented = SpotCheckpoint.__doc__ or ""
    assert "--spot.on_full {skip,wait}" in shown
    assert "in which the run is stored, such as" in shown
    assert shown.count("--spot.") >= documented.count("            ") // 8
    with pytest.raises(SystemExit):
        command_line("fit", "--spot.dirpath=s3://bucket/run-1", "--print_config")
    assert "min_upload_interval_s: null" in capsys.readouterr().out
