"""The drill tells an exact training from one that is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spot.cli import main
from lightning_spot.exact.compare import differences


def drill(tmp_path: Path, case: str, kills: int) -> tuple[int, dict[str, Any]]:
    training = [sys.executable, "-m", "tests.exact_cases", case, str(tmp_path), "--pace", "0.04"]
    command = [sys.executable, "-c", "import sys; from lightning_spot.cli import main; sys.exit(main())", "drill"]
    command += ["--json", "--kills", str(kills), "--limit", "120", "--keep", str(tmp_path / "kept"), "--", *training]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_an_exact_training(tmp_path: Path) -> None:
    code, report = drill(tmp_path, "plain", kills=3)
    assert report["differences"] == []
    assert code == 0
    assert report["kills"]


@pytest.mark.slow
def test_a_training_that_is_not(tmp_path: Path) -> None:
    code, report = drill(tmp_path, "clock", kills=1)
    assert code == 1
    assert report["differences"][0].startswith("state_dict.net.0.")


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ([], "give the command that trains"),
        (["--", sys.executable, "-c", "raise SystemExit(3)"], "ended with exit code 3"),
        (["--", sys.executable, "-c", "pass"], "took no snapshot"),
    ],
)
def test_what_cannot_be_drilled(training: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", *training]) == 2
    assert says in capsys.readouterr().err


def test_differences_are_told_entry_by_entry() -> None:
    left = {"a": torch.tensor([1.0, 2.0]), "b": [1, 2], "c": "/x/best-v1.ckpt", "d": float("nan"), "Timer": 1}
    assert list(differences(left, {**left, "c": "/y/best.ckpt", "Timer": 2})) == []
    changed = {**left, "a": torch.tensor([1.0, 2.5]), "b": [1, 3]}
    assert list(differences(left, changed)) == [
        "a: 50.0% of 2 values differ, by at most 0.5",
        "b[1]: 2 and 3",
    ]
    assert list(differences({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int64)})) != []
    assert list(differences({"a": -0.0 * torch.ones(1)}, {"a": torch.zeros(1)})) != []  # to the bit
    assert list(differences({"a": 1}, {"b": 1})) == ["a: only in the first", "b: only in the second"]
    assert list(differences({"a": [1]}, {"a": [1, 2]})) == ["a: 1 items and 2"]
