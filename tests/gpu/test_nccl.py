"""Ranks on GPUs, which talk by NCCL: models in shards (FSDP2) and DDP in shares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_spot.exact.compare import differences
from tests.distributed.test_sharded_fit import final
from tests.distributed.test_together import accounts, check_states
from tests.support.gpus import NEEDS_GPU

pytestmark = NEEDS_GPU
TWO = pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"))


def train(module: str, root: Path, *arguments: object) -> None:
    """Train on GPUs in processes of their own; fails with what they said."""
    command = [sys.executable, "-m", f"tests.support.{module}", str(root), "--accelerator", "gpu", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [1, TWO])
def test_a_model_in_shards_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path, ranks: int) -> None:
    train("exact_sharded", tmp_path, "--in-one", "--ranks", ranks)
    assert list(differences(final(tmp_path / "whole"), final(tmp_path / "broken"))) == []


@pytest.mark.parametrize("ranks", [1, TWO])
def test_snapshots_of_ddp_hold_the_parameters_of_their_steps(tmp_path: Path, ranks: int) -> None:
    train("together_trainer", tmp_path, "--ranks", ranks, "--steps", 8)
    check_states(tmp_path)
    assert [account["aborted"] for account in accounts(tmp_path, ranks)] == [0] * ranks
