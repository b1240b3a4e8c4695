"""Ranks on GPUs, which talk by NCCL: models in shards (FSDP2) and DDP in ranges."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.exact_sharded import undisturbed_and_stopped
from tests.support.gpus import NEEDS_GPU
from tests.support.program import Outcome, run
from tests.support.training import train

pytestmark = NEEDS_GPU

TWO = pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"))


@pytest.mark.parametrize("ranks", [1, TWO])
def test_a_model_in_shards_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path, ranks: int) -> None:
    run(sys.executable, undisturbed_and_stopped, tmp_path, ranks=ranks, accelerator="gpu")
    Outcome(tmp_path / "broken").check_end(Outcome(tmp_path / "whole"))


@pytest.mark.parametrize("ranks", [1, TWO])
def test_snapshots_of_ddp_hold_the_parameters_of_their_steps(tmp_path: Path, ranks: int) -> None:
    done = run(sys.executable, train, tmp_path, ranks=ranks, steps=8, accelerator="gpu")
    done.check_states()
    assert [account["aborted"] for account in done.accounts(ranks)] == [0] * ranks
