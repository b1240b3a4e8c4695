"""The re-implementations in ``benchmarks/baselines``: what each has saved is what it says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.baselines.asymcheck import cut_by_share
from benchmarks.baselines.baseline import Baseline
from benchmarks.peers.ways import BASELINES

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


def differences(one: Any, other: Any) -> list[str]:
    (mine, spec), (others, other_spec) = tree_flatten_with_path(one), tree_flatten_with_path(other)
    assert spec == other_spec
    return [
        keystr(path)
        for (path, a), (_, b) in zip(mine, others, strict=True)
        if not (torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b)
    ]


@pytest.mark.parametrize("name", [name for name, kind in BASELINES.items() if kind.exact])
def test_a_baseline_restores_the_state_of_its_step_bit_for_bit(name: str, tmp_path: Path) -> None:
    saving = BASELINES[name](tmp_path, 3)
    oracle = train(saving)
    step, checkpoint = saving.restore()
    saving.close()
    assert step == 12
    wrong = differences(checkpoint, oracle.of_step[12])
    assert [path for path in wrong if saving.exact_buffers or not any(name in path for name in BUFFERS)] == []
    assert sorted(saving.begun) == [3, 6, 9, 12]
    assert {step for step, _, _ in saving.safe} >= {12}
    assert all(at >= saving.begun[step] for step, _, at in saving.safe)


@pytest.mark.parametrize("name", ["oteacheck", "asymcheck"])
def test_partitions_are_released_before_the_next_optimizer_waits(name: str, tmp_path: Path) -> None:
    saving = BASELINES[name](tmp_path, 1)
    released: list[int] = []
    wait = saving.wait

    def looked_at() -> None:
        released.append(sum(map(bool, saving.partitions.values())))  # what is left when the optimizer comes
        wait()

    saving.wait = looked_at  # type: ignore[method-assign]
    train(saving)
    last = released[12:14]  # after AsymCheck's warm-up
    assert all(left <= 1 for left in last), released  # those without a gradient


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


@pytest.mark.parametrize("shares", [[1.0], [0.0, 0.0], [3.0, 0.0, 1.0, 2.0], [0.1] * 50])
def test_each_element_is_in_one_partition(shares: list[float]) -> None:
    sources = [torch.randn(1), torch.randn(100), torch.randn(10, 3).T, torch.randn(7).double(), torch.randn(0)]
    pairs = [(torch.zeros_like(source), source) for source in sources]
    partitions = cut_by_share(pairs, shares)
    assert sum(source.numel() for part in partitions.values() for _, source in part) == 138
    for part in partitions.values():
        for target, source in part:
            target.copy_(source)
    assert all(torch.equal(target, source) for target, source in pairs)
    if len(shares) == 4:
        sizes = [sum(source.nbytes for _, source in part) for part in partitions.values()]
        assert sizes[0] > sizes[3] > sizes[2]
