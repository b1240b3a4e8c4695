"""Parameters that each rank has for itself come back to it, or are named where they are too large for that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_spot.exact import own_parameters
from lightning_spot.exact.own_parameters import (
    OwnParameters,
    capture_values,
    what_is_the_first_ranks,
    what_other_ranks_kept,
)
from tests.distributed.test_sharded_fit import log, two_ranks
from tests.support.exact_own import OnShards

SAME = "weight there differ: []\n"
NAMED = "each rank trains parameters of its own, and those above 16 MiB are in snapshots as rank 0 has them"


@pytest.mark.parametrize("strategy", ["ddp", "manual", "fsdp2", "kernels"])
def test_each_rank_goes_on_with_its_own(strategy: str, tmp_path: Path, warm_python: str) -> None:
    two_ranks([warm_python, "-m", "tests.support.exact_own", str(tmp_path), strategy], tmp_path)
    said = log(tmp_path)
    assert said.count("it was stopped\n") == said.count(SAME) == 2, said[-3000:]
    assert NAMED not in said
    assert said.count("norm.running_mean, norm.running_var") == 2 * (strategy == "manual")


def test_optimizer_state_of_one_rank_is_named_if_it_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not kept if it is too large, or if the number of ranks has changed."""
    module = torch.nn.Linear(2, 1)
    optimizer = OnShards(module.parameters())
    for parameter in module.parameters():
        optimizer.state[parameter] = {"momentum": torch.ones_like(parameter), "step": 3, "norm": 1.0}
    trainer: Any = SimpleNamespace(
        lightning_module=module, optimizers=[optimizer], world_size=2, strategy=object.__new__(ModelParallelStrategy)
    )
    saved = capture_values(trainer)
    assert saved["optimizers"][0]["bias"] == {"momentum": torch.ones(1), "norm": 1.0}
    optimizer.state[module.bias].update(late=None, ring=[2.0, torch.ones(1)], more={"none": None})
    grown = capture_values(trainer)["optimizers"][0]["bias"]  # what is there by now, of whatever kind
    assert grown == {
        "momentum": torch.ones(1),
        "norm": 1.0,
        "late": None,
        "ring": [2.0, torch.ones(1)],
        "more": {"none": None},
    }
    assert saved["groups"] == [[{"lr": 0.05, "seen": 0.0}]]
    (said,) = what_other_ranks_kept([saved, {**saved, "groups": [[{"lr": 0.05, "seen": 1.0}]]}])
    assert "(weight, bias, seen) goes on as rank 0 had it" in said
    assert not list(what_other_ranks_kept([{"groups": saved["groups"]}] * 2))
    monkeypatch.setattr(own_parameters, "MOST_BYTES", 2**20)
    optimizer.state[module.weight]["more"] = torch.zeros(2**19)
    saved = capture_values(trainer)
    assert "optimizers" not in saved
    assert next(what_is_the_first_ranks({}, saved)).count("weight (momentum, norm, more)") == 1
    trainer.optimizers = [torch.optim.AdamW(module.parameters())]  # torch's keep the same on all ranks
    assert capture_values(trainer) == {}


def test_what_is_too_large_is_named_before_training_goes_on(tmp_path: Path, warm_python: str) -> None:
    rows = 2**24 // (3 * 8 * 4) + 1  # a weight and two moments
    two_ranks([warm_python, "-m", "tests.support.exact_own", str(tmp_path), "ddp", "--rows", str(rows)], tmp_path)
    said = log(tmp_path)
    assert said.count("it was stopped\n") == 2, said[-3000:]
    assert SAME not in said  # what rank 0 trains depends on what the other one has
    assert f"{NAMED}: all ranks go on with its own.weight." in said


def test_what_an_optimizer_keeps_on_a_device_comes_back_there() -> None:
    """A fused one has its counts of steps beside the parameters, and fails with one on the host."""
    module = torch.nn.Linear(2, 1, bias=False, device="meta")
    optimizer = torch.optim.Adam(module.parameters())
    optimizer.state[module.weight] = {"step": torch.zeros((), device="meta"), "on host": torch.zeros(())}
    trainer: Any = SimpleNamespace(lightning_module=module, optimizers=[optimizer])
    values = {"step": torch.ones(()), "on host": torch.ones(()), "exp_avg": torch.ones(1, 2), "new": torch.ones(())}
    OwnParameters().restore(trainer, {"optimizers": [{"weight": values}]})
    where = {key: value.device.type for key, value in optimizer.state[module.weight].items()}
    assert where == {"step": "meta", "on host": "cpu", "exp_avg": "meta", "new": "cpu"}
