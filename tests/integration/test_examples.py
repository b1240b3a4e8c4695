"""The ways in, as the documentation shows them: a callback, LightningCLI, resume; and without a change of a program."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lightning_spot.store.local import LocalStore

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


def test_callback_then_resume(warm_python: str, tmp_path: Path) -> None:
    script, path = str(ROOT / "examples" / "digits.py"), tmp_path / "digits"
    run(warm_python, tmp_path, script, f"--dirpath={path}", "--epochs=1", "--every-steps=10")
    said = run(warm_python, tmp_path, script, f"--dirpath={path}", "--epochs=2", "--every-steps=10")
    assert "resumes at step 45" in said
    assert LocalStore(path).survey().manifests[0].step == 90


@pytest.mark.parametrize(
    ("example", "needs", "small"),
    [
        pytest.param("tabular.py", "sklearn", []),
        pytest.param("graphs.py", "torch_geometric", ["--graphs=60"]),
        pytest.param("hugging_face.py", "transformers", ["--max-bytes=20000"]),
    ],
)
def test_third_party_models(warm_python: str, tmp_path: Path, example: str, needs: str, small: list[str]) -> None:
    pytest.importorskip(needs)
    command = [str(ROOT / "examples" / example), f"--dirpath={tmp_path / 'run'}", *small]
    run(warm_python, tmp_path, *command, "--epochs=1")
    steps = LocalStore(tmp_path / "run").survey().manifests[0].step
    said = run(warm_python, tmp_path, *command, "--epochs=2")
    assert f"resumes at step {steps}" in said
    newest = LocalStore(tmp_path / "run").survey().manifests[0]
    assert newest.complete
    assert newest.step == 2 * steps


def test_cli_flags(warm_python: str, tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "stdlib_gpt.py")
    flags = ["--trainer.callbacks+=lightning_spot.SpotCheckpoint", "--trainer.callbacks.dirpath=checkpoints/gpt"]
    run(warm_python, tmp_path, script, "fit", *SMALL, *flags)
    assert LocalStore(tmp_path / "checkpoints" / "gpt").survey().manifests[0].complete


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
