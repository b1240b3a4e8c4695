"""``python -m benchmarks peers``: its plan, its tables, and (in the long form) the command itself."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.blocking import Idle
from benchmarks.peers import command, turns
from benchmarks.peers import compare as comparing
from benchmarks.peers.cell import Cell
from benchmarks.peers.plan import Found
from benchmarks.peers.turns import Training


def test_a_failing_training_or_cell_is_named_and_others_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no room")

    def one(cell: Cell, folder: Path, limit_s: float) -> dict[str, Any]:
        return fail() if cell.way == "dash" else {"way": cell.way}  # type: ignore[return-value]

    monkeypatch.setattr(comparing, "measure_in_turns", fail)
    monkeypatch.setattr(comparing, "measure", one)
    monkeypatch.setattr(comparing.processes, "adopt_orphans", lambda: None)
    arguments = ["--models", "plain", "--intervals", "1,10", "--ways", "none,dash,gemini", "--scale", "tiny"]
    comparing.compare(command.parser().parse_args(arguments), tmp_path / "found.json")
    found = Found(**json.loads((tmp_path / "found.json").read_text()))
    failed = sorted((missed["interval"], missed["way"], missed["error"]) for missed in found.failed)
    assert failed == [(n, way, "OSError('no room')") for n, way in ((1, "all of it"), (1, "dash"), (10, "all of it"))]
    assert sorted(cell["way"] for cell in found.cells) == ["gemini", "none"]
    assert not found.missing


def test_of_an_optimizer_that_does_nothing_all_counts_as_written() -> None:
    """Else ours would copy nothing again, and be measured without its copies."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = Idle([parameter])
    optimizer.step()
    owned = [parameter, *optimizer.state[parameter].values()]
    before = [tensor._version for tensor in owned]
    optimizer.step()
    assert all(tensor._version > version for tensor, version in zip(owned, before, strict=True))


@pytest.fixture
def turns_here(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Turns run in this process, and change nothing in it for good: neither where threads run, nor what is logged."""
    monkeypatch.setattr(turns, "bind_team", lambda: [])
    caplog.set_level(logging.ERROR, "lightning.pytorch")


@pytest.mark.usefixtures("turns_here")
def test_methods_of_others_take_turns_and_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = ("ModelCheckpoint", "AsyncCheckpointIO", "oteacheck", "DCP thread")
    modules: list[torch.nn.Module] = []
    build = turns.build

    def kept(*arguments: Any) -> Any:
        module, data = build(*arguments)
        modules.append(module)
        return module, data

    monkeypatch.setattr(turns, "build", kept)
    told: list[dict[str, Any]] = []

    def tell(said: dict[str, Any]) -> None:
        assert "failed" not in said, said
        assert not any(weight._post_accumulate_grad_hooks for weight in modules[0].parameters())
        told.extend([said["turn"]] if "turn" in said else [])

    training = Training(model="plain", interval=2, ways=ways, scale="tiny", device="cpu", rounds=1, warm_up=4)
    turns.run(training, tmp_path, os.getpid(), tell)
    for one in told:
        durable = {step for step, tier, _ in one["safe"] if tier == "durable"}
        assert (set(one["begun"]) if one["way"] != "none" else set()) >= durable
        assert len(one["begun"]) == (0 if one["way"] == "none" else one["steps"] // 2), one
        if one["way"] in ("ModelCheckpoint", "AsyncCheckpointIO", "DCP thread"):
            assert durable == set(one["begun"]), one
        assert (one["blocked_s"] > 0) == (one["way"] != "none")
    assert {one["way"] for one in told if one["round"] == 0} == {"none", *ways}


@pytest.mark.soak
def test_the_command_measures_every_way_and_says_what_it_did_not(tmp_path: Path) -> None:
    disk = tempfile.TemporaryDirectory(prefix="ls-test-", dir="/var/tmp")  # what is written to memory is not counted
    run = [sys.executable, "-m", "benchmarks", "peers", "--quick", "--out", str(tmp_path), "--folder", disk.name]
    root = Path(__file__).parents[2]
    done = subprocess.run(run, cwd=root, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "peers.json").read_text())
    assert {cell["way"] for cell in found["cells"]} == {
        "none",
        "ours",
        "ModelCheckpoint",
        "AsyncCheckpointIO",
        "dash",
        "oteacheck",
    }
    assert {entry["way"] for entry in found["turns"]} == {cell["way"] for cell in found["cells"]}
    assert all(entry["taken"] == 1 for entry in found["turns"] if entry["way"] != "none" and entry["round"] == 0)
    for one in found["cells"]:
        if one["way"] != "none":
            assert one["equal"] is True, one
            # Ours passes over a step while its slots are being made, or are all busy, and takes the next one.
            assert one["way"] == "ours" or one["inside"] == 2, one
            assert one["way"] == "ours" or one["safe_after_s"]["durable"], one
            assert one["snapshots"] >= 1, one
            assert one["restore_s"] > 0
            assert one["written_bytes"] > 0
        assert not one["killed"], one
        assert one["cpu_s"] > 0
        assert one["peak_bytes"] > 2**20
    assert list(Path(disk.name).iterdir()) == []
    done = subprocess.run([*run, "--budget", "0"], cwd=root, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "Not measured within the budget:\n\n- plain, every 10: all of it\n" in done.stdout
    assert "- plain, every 10: AsyncCheckpointIO, ModelCheckpoint, dash, none, oteacheck, ours\n" in done.stdout
    disk.cleanup()
