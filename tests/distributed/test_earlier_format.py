"""Runs that were left by the version before: they go on exactly from what lies in their directories."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

LEFT = Path(__file__).parents[1] / "data" / "format-4.tar.xz"


@pytest.mark.parametrize("kind", ["single", "ddp", "fsdp"])
def test_a_run_of_the_version_before_goes_on_exactly(kind: str, tmp_path: Path) -> None:
    with tarfile.open(LEFT) as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / kind
    undisturbed = json.loads((root / "end.json").read_text())
    (root / "end.json").unlink()
    command = [sys.executable, "-m", "tests.support.earlier_trainer", str(root), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "resumes at step 4" in done.stderr
    assert json.loads((root / "end.json").read_text()) == undisturbed
