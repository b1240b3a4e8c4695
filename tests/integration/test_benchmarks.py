"""The benchmarks: what re-implementations save, how ways take turns, what is compared, one server with many clients."""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import scale
from benchmarks.baselines.baseline import Baseline
from benchmarks.blocking import Idle
from benchmarks.peers import turns
from benchmarks.peers.turns import Training
from benchmarks.peers.ways import BASELINES
from lightning_spot.client.part_streams import CONNECTIONS
from lightning_spot.state.compare import differences

STEPS = 14  # AsymCheck measures ten


class Net(pl.LightningModule):
    """Buffers that forward changes, tied weights, a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = torch.nn.Linear(8, 160), torch.nn.BatchNorm1d(160), torch.nn.Linear(160, 8)
        self.tied, self.unused = self.first, torch.nn.Linear(3, 3)
        self.wide = torch.nn.Parameter(torch.randn(20_000))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.second(self.norm(self.first(batch[0]))).square().mean() + self.wide.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Oracle(pl.Callback):
    """Copies of the checkpoint of each step."""

    def __init__(self) -> None:
        self.of_step: dict[int, dict[str, Any]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.of_step[trainer.global_step] = copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint(False))


def train(saving: Baseline, steps: int = STEPS, start: dict[str, Any] | None = None) -> Oracle:
    torch.manual_seed(1)
    oracle = Oracle()
    trainer = pl.Trainer(
        max_steps=steps,
        callbacks=[oracle, saving],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(400, 8)), 4))
    return oracle


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    mine, others = one["state_dict"], other["state_dict"]
    return sum(float((mine[name].float() - others[name].float()).square().sum()) for name in others)


BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.mark.parametrize("name", [name for name, kind in BASELINES.items() if kind.exact])
def test_a_baseline_restores_the_state_of_its_step_bit_for_bit(name: str, tmp_path: Path) -> None:
    saving = BASELINES[name](tmp_path, 3)
    oracle = train(saving)
    step, checkpoint = saving.restore()
    saving.close()
    assert step == 12
    wrong = differences(checkpoint, oracle.of_step[12])
    assert [text for text in wrong if saving.exact_buffers or not any(name in text for name in BUFFERS)] == []
    assert sorted(saving.begun) == [3, 6, 9, 12]
    assert {step for step, _, _ in saving.safe} >= {12}
    assert all(at >= saving.begun[step] for step, _, at in saving.safe)


def test_top_k_is_not_exact_and_is_nearer_than_its_base(tmp_path: Path) -> None:
    saving = BASELINES["asymcheck-topk"](tmp_path, 1)
    oracle = train(saving)
    step, checkpoint = saving.restore()
    base = int(next(tmp_path.glob("base-*")).stem.removeprefix("base-"))
    assert not saving.exact
    assert (base, step) == (1, 14)
    left = distance(checkpoint, oracle.of_step[14])
    assert 0 < left < 0.9 * distance(oracle.of_step[base], oracle.of_step[14])
    assert checkpoint["global_step"] == 14


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
    ways, build = ("ModelCheckpoint", "AsyncCheckpointIO", "oteacheck", "DCP thread"), turns.build
    modules: list[torch.nn.Module] = []
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(turns, "build", lambda *given: modules.append((built := build(*given))[0]) or built)

    def tell(said: dict[str, Any]) -> None:
        assert "failed" not in said, said
        assert not any(weight._post_accumulate_grad_hooks for weight in modules[0].parameters())
        told.extend([said["turn"]] if "turn" in said else [])

    training = Training(model="plain", interval=2, ways=ways, scale="tiny", device="cpu", rounds=1, warm_up=4)
    turns.run(training, tmp_path, os.getpid(), tell)
    assert {one["way"] for one in told if one["round"] == 0} == {"none", *ways}
    for one in told:
        assert len(one["begun"]) == (0 if one["way"] == "none" else one["steps"] // 2), one
        assert {step for step, tier, _ in one["safe"] if tier == "durable"} <= set(one["begun"]), one


@pytest.mark.soak
def test_the_command_measures_every_way_and_says_what_it_did_not(tmp_path: Path) -> None:
    disk = tempfile.TemporaryDirectory(prefix="ls-test-", dir="/var/tmp")  # what is written to memory is not counted
    run = [sys.executable, "-m", "benchmarks", "peers", "--quick", "--out", str(tmp_path), "--folder", disk.name]
    root = Path(__file__).parents[2]
    done = subprocess.run(run, cwd=root, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "peers.json").read_text())
    ways = {"none", "ours", "ModelCheckpoint", "AsyncCheckpointIO", "dash", "oteacheck"}
    assert {cell["way"] for cell in found["cells"]} == {entry["way"] for entry in found["turns"]} == ways
    for one in found["cells"]:
        assert not one["killed"], one
        assert one["way"] == "none" or (one["equal"] is True and one["snapshots"] >= 1 and one["written_bytes"]), one
    assert list(Path(disk.name).iterdir()) == []
    done = subprocess.run([*run, "--budget", "0"], cwd=root, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "Not measured within the budget:\n\n- plain, every 10: all of it\n" in done.stdout
    assert "- plain, every 10: AsyncCheckpointIO, ModelCheckpoint, dash, none, oteacheck, ours\n" in done.stdout
    disk.cleanup()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_64_clients_are_served_alike_and_within_bounds(tmp_path: Path) -> None:
    memory_bytes = scale.CLIENTS * scale.SLOTS * scale.NBYTES * 2
    with scale.node(tmp_path, memory_bytes) as (url, process):
        load = scale.measure(url, process, clients=scale.CLIENTS, seconds=20.0)
        assert load.errors == []
        assert load.fairness >= 0.9
        assert min(load.commits) >= 1
        assert load.p99_s <= 3 * load.clients * scale.NBYTES / load.bytes_per_s
        assert load.own_bytes < 256 * 2**20
        assert load.threads < scale.CLIENTS * (CONNECTIONS + 1) + 64  # streams, and a request that waits
        assert process.memory_info().shared <= memory_bytes + 64 * 2**20
