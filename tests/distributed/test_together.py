"""Ranks of one training (DDP on gloo) that write its snapshots together, in processes of their own."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.exact.compare import differences
from lightning_spot.image.files import MODEL_FILE
from lightning_spot.image.manifest import Manifest
from lightning_spot.tiers.local import LocalStore
from tests.support.snapshots import read
from tests.support.trainer import digest
from tests.support.waiting import until

Train = Callable[..., int]


@pytest.fixture
def train(warm_python: str) -> Train:
    """Train on some ranks; the exit code."""

    return functools.partial(run_trainer, warm_python, "tests.support.together_trainer")


def run_trainer(python: str, module: str, root: Path, *arguments: object) -> int:
    """Run a module that trains below ``root``, to the end of its first rank; the exit code of that."""
    root.mkdir(exist_ok=True)
    with open(root / "log", "a") as log:
        command = [python, "-m", module, str(root), *map(str, arguments)]
        return subprocess.run(command, stdout=log, stderr=log, timeout=600, check=False).returncode


def manifests(root: Path) -> list[Manifest]:
    return LocalStore(root / "run").survey().manifests


def load(root: Path, manifest: Manifest) -> dict[str, Any]:
    return read(root / "run", manifest)


def accounts(root: Path, ranks: int) -> list[dict[str, Any]]:
    """What the ranks have left; the first one does not wait for the others."""
    files = [root / f"rank-{rank}.json" for rank in range(ranks)]
    until(lambda: all(file.exists() and file.read_text().endswith("}") for file in files), f"{files}")
    return [json.loads(file.read_text()) for file in files]


def check_states(root: Path) -> None:
    """Every snapshot holds the parameters of its step."""
    steps = dict(line.split() for line in (root / "steps").read_text().splitlines())
    found = manifests(root)
    assert found
    for manifest in found:
        assert digest(load(root, manifest)["state_dict"]) == steps[str(manifest.step)], manifest.name


def check_ends(root: Path) -> None:
    """The run has ended as its twin."""
    ends = [load(each, manifests(each)[0]) for each in (root / "twin", root / "run")]
    assert differences(*ends) == []


def check_run(root: Path) -> None:
    """Every snapshot of the run holds the parameters of its step, and it has ended as its twin."""
    check_states(root / "run")
    check_ends(root)


def test_two_ranks_write_the_snapshots_of_a_training_together(train: Train, tmp_path: Path) -> None:
    """Of so few bytes the second one writes no range: only what it alone knows."""
    root = tmp_path / "run"
    assert train(root, "--steps", 8) == 0
    check_states(root)
    first, second = accounts(root, 2)
    assert first["aborted"] == 0
    nbytes = manifests(root)[0].nbytes
    assert first["copied"] > 4 * nbytes > second["copied"] > 0


def test_a_snapshot_that_two_ranks_wrote_is_resumed_exactly(train: Train, tmp_path: Path) -> None:
    assert train(tmp_path / "twin") == 0
    check_states(tmp_path / "twin")
    assert train(tmp_path / "run", "--kill", 1, 7) != 0
    newest = manifests(tmp_path / "run")
    assert train(tmp_path / "run") == 0
    again = manifests(tmp_path / "run")
    assert max(manifest.attempt for manifest in again) == 2
    assert all(manifest in again for manifest in newest)
    check_run(tmp_path)


def test_a_file_that_the_user_names_is_gone_on_from_exactly(train: Train, tmp_path: Path) -> None:
    """What only another rank knew lies beside it."""
    assert train(tmp_path / "twin", "--steps", 8) == 0
    named = next(each for each in manifests(tmp_path / "twin") if each.step == 4)
    path = tmp_path / "twin" / "run" / named.name / MODEL_FILE
    assert train(tmp_path / "run", "--steps", 8, "--ckpt", path) == 0
    check_ends(tmp_path)
    alone = tmp_path / "alone.ckpt"
    alone.write_bytes(path.read_bytes())
    assert train(tmp_path / "run-2", "--steps", 8, "--ckpt", alone) != 0
    assert "is not in the whole directory of a snapshot" in (tmp_path / "run-2" / "log").read_text()


@pytest.mark.soak
@pytest.mark.parametrize("who", [0, 1, 3])
def test_one_of_four_ranks_is_killed_within_its_range(train: Train, tmp_path: Path, who: int) -> None:
    options = ("--ranks", 4, "--steps", 5, "--width", 4096)  # beside which what only a rank knows is little
    assert train(tmp_path / "twin", *options) == 0
    told = accounts(tmp_path / "twin", 4)
    assert told[0]["aborted"] == 0
    nbytes = manifests(tmp_path / "twin")[0].nbytes
    for each in told[1:]:
        assert 0.9 / 4 <= each["copied"] / nbytes / 5 <= 1.1 / 4
    assert train(tmp_path / "run", *options, "--kill", who, 4) != 0
    check_states(tmp_path / "run")
    assert train(tmp_path / "run", *options) == 0
    check_run(tmp_path)


@pytest.mark.soak
def test_an_urgent_snapshot_is_written_together(train: Train, tmp_path: Path) -> None:
    steps = ("--steps", 60)  # training ends in less time than ranks take to agree where to stop, otherwise
    assert train(tmp_path / "twin", *steps) == 0
    assert train(tmp_path / "run", *steps, "--every", 5, "--notice", 1, 7) == 143
    stopped = manifests(tmp_path / "run")[0]
    assert stopped.step > 7
    check_states(tmp_path / "run")
    assert train(tmp_path / "run", *steps) == 0
    check_ends(tmp_path)


def test_without_a_local_server_each_rank_has_a_ring(train: Train, tmp_path: Path) -> None:
    assert train(tmp_path / "twin", "--memory", "none") == 0
    assert accounts(tmp_path / "twin", 2)[0]["aborted"] == 0
    check_states(tmp_path / "twin")
    assert train(tmp_path / "run", "--memory", "none", "--kill", 1, 7) != 0
    assert train(tmp_path / "run", "--memory", "none") == 0
    check_run(tmp_path)


@pytest.mark.soak
def test_ranks_that_differ_are_named_and_rank_0_writes_alone(train: Train, tmp_path: Path) -> None:
    wide = ("--width", 4096, "--steps", 6)
    assert train(tmp_path / "run", "--unlike", *wide) == 0
    log = (tmp_path / "run" / "log").read_text()
    assert "rank 0 writes the model alone" in log
    assert max(manifest.step for manifest in manifests(tmp_path / "run")) == 6
    check_states(tmp_path / "run")
    assert train(tmp_path / "strict", "--unlike", "--strict", *wide) != 0
    assert "ranks cannot write snapshots together" in (tmp_path / "strict" / "log").read_text()
