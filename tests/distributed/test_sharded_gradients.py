"""Gradients in mid-accumulation that ranks have not added up, or that are not sharded as their parameters are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.errors import NotSerializableError
from lightning_spot.state.elastic import OtherRanks
from lightning_spot.state.randomness import capture_random
from lightning_spot.state.sharded_gradients import gradient_like, placements_apart, plain_placements
from tests.support.exact_cases import loader
from tests.support.program import Outcome, launch
from tests.support.ranks import as_rank
from tests.support.trainer import Stop, StopIn
from tests.support.trainer import trainer as quiet
from tests.support.waiting import new_process

WINDOW = 3


class Middle(nn.Module):
    """A norm that some steps have no use for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, hidden: torch.Tensor, skips: bool) -> torch.Tensor:
        return hidden if skips else self.norm(hidden)


class TwoSteps(pl.LightningModule):
    """The first optimizer steps with each batch, so that snapshots are taken; the second one at the end of a window."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.first, self.middle, self.last = nn.Linear(8, 16), Middle(), nn.Linear(16, 1)

    def add_up(self, adds: bool) -> None:
        """Have ranks add gradients of the norm up, or wait: called as a window begins, and for its last batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        ends = batch_idx % WINDOW == WINDOW - 1
        if batch_idx % WINDOW in (0, WINDOW - 1):
            self.add_up(ends)
        hidden = self.middle(self.first(batch[0]), self.skips and batch_idx % WINDOW > 0)
        hidden = hidden.full_tensor() if isinstance(hidden, DTensor) else hidden
        self.manual_backward(nn.functional.mse_loss(self.last(hidden.relu()).float(), batch[1]))
        first.step()
        first.zero_grad()
        if ends:
            second.step()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        every = [*self.first.parameters(), *self.last.parameters()]
        return torch.optim.AdamW(every, 0.01, foreach=False), torch.optim.AdamW(self.middle.parameters(), 0.05)


class Fsdp(TwoSteps):
    policy = MixedPrecisionPolicy()
    has_copies = False

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh if self.has_copies else self.device_mesh["data_parallel"]  # type: ignore[index]
        for layer in (self.first, self.middle.norm, self.middle, self.last):
            if not hasattr(layer, "set_requires_gradient_sync"):
                fully_shard(layer, mesh=mesh, mp_policy=self.policy)

    def add_up(self, adds: bool) -> None:
        self.middle.norm.set_requires_gradient_sync(adds)  # type: ignore[operator] # FSDP2's


class InFloat32(Fsdp):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Skips(Fsdp):
    """The norm is used in the first batch of a window only, which is not the first one after the resume."""

    skips = True


class Copies(Fsdp):
    """Both ranks have the same shards: sums over the ranks that have different ones wait, not whole gradients."""

    has_copies = True

    def add_up(self, adds: bool) -> None:
        self.middle.norm.set_requires_all_reduce(adds)  # type: ignore[operator] # FSDP2's


class SumsOverRanks(TwoSteps):
    """All ranks of tensor parallelism have the norm, and each has the gradient of some rows."""

    def configure_model(self) -> None:
        if not isinstance(self.middle.norm.weight, DTensor):
            plan = {"first": ColwiseParallel(output_layouts=Shard(0)), "middle.norm": SequenceParallel(sequence_dim=0)}
            parallelize_module(self, self.device_mesh["tensor_parallel"], plan)  # type: ignore[index,arg-type]


class UnusedByDdp(TwoSteps):
    """DDP averages the norm's gradient in the batch behind the one that uses it, since that was not to."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        ddp: Any = self.trainer.model
        hidden = self.first(batch[0])
        self.manual_backward(nn.functional.mse_loss(self.last(hidden.relu()), batch[1]))
        first.step()
        first.zero_grad()
        if batch_idx % WINDOW == 0:
            with ddp.no_sync():
                self.manual_backward(self.middle(hidden.detach(), False).sin().mean())
        if batch_idx % WINDOW == WINDOW - 1:
            second.step()
            second.zero_grad()


def whole_and_stopped(root: Path, kind: type[TwoSteps], make_strategy: Callable[[], Any]) -> None:
    """Train to the end in ``whole``; in ``broken``, stop in mid-accumulation and go on."""

    def fit(name: str, *callbacks: pl.Callback, seed: int = 11) -> None:
        new_process()
        pl.seed_everything(seed, verbose=False)
        spot = SpotCheckpoint(
            str(root / name / "run"), interval=EverySteps(1), on_full="wait", keep=100, run_name="run"
        )
        limits: dict[str, Any] = {"limit_train_batches": 6, "max_epochs": 1, "devices": 2}
        quiet(*callbacks, spot, strategy=make_strategy(), **limits).fit(kind(), loader(noise=False))

    fit("whole")
    with pytest.raises(Stop):
        fit("broken", StopIn("on_train_batch_start", 5))
    fit("broken", seed=99)


def stop_between_sums(root: Path) -> None:
    whole_and_stopped(root, SumsOverRanks, lambda: ModelParallelStrategy(1, 2))


def stop_between_syncs(root: Path, kind: str) -> None:
    whole_and_stopped(root, KINDS[kind], lambda: ModelParallelStrategy(2, 1))


KINDS = {kind.__name__: kind for kind in (Fsdp, InFloat32, Skips, Copies)}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_fsdp_has_not_added_up_come_back(tmp_path: Path, warm_python: str, kind: str) -> None:
    """They lie beside the parameters: the window went on without them, and without a word."""
    assert launch(warm_python, stop_between_syncs, tmp_path, kind=kind).resumed == [5]
    Outcome(tmp_path / "broken").check_end(Outcome(tmp_path / "whole"))


def stop_before_ddp_averages(root: Path) -> None:
    unused = {"find_unused_parameters": True}
    whole_and_stopped(root, UnusedByDdp, lambda: DDPStrategy(process_group_backend="gloo", **unused))


def test_gradients_that_ddp_has_not_averaged_yet_are(tmp_path: Path, warm_python: str) -> None:
    """It averages what a window has used, and one that is made again has seen none of it: ranks drifted apart."""
    assert launch(warm_python, stop_before_ddp_averages, tmp_path).resumed == [5]
    Outcome(tmp_path / "broken").check_end(Outcome(tmp_path / "whole"))


def test_gradients_that_are_sums_over_ranks_come_back(tmp_path: Path, warm_python: str) -> None:
    """Each rank's part of the sum was taken for all of it."""
    assert launch(warm_python, stop_between_sums, tmp_path).resumed == [5]
    Outcome(tmp_path / "broken").check_end(Outcome(tmp_path / "whole"))


class Keeps(Fsdp):
    """Has a copy of some weights in the checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"average": self.first.weight.detach().clone()}


def stop_with_shards(root: Path) -> None:
    whole_and_stopped(root, Keeps, lambda: ModelParallelStrategy(2, 1))


def test_tensors_in_shards_that_hooks_save_are_named(tmp_path: Path, warm_python: str) -> None:
    """Each rank was given rank 0's part of them, without a word."""
    done = launch(warm_python, stop_with_shards, tmp_path)
    assert "not exact" in done.log
    assert "mine.average" in done.log


def test_placements_of_gradients_are_told_and_put_back() -> None:
    with as_rank(0, (2,)) as mesh:

        def made(*placements: Any) -> DTensor:
            return DTensor.from_local(torch.rand(4, 2), mesh, placements, run_check=False)

        parameters = {"all": made(Replicate()), "rows": made(Shard(0)), "plain": torch.rand(4, 2)}
        gradients = {"all": made(Partial("avg")), "rows": made(Shard(0)), "plain": torch.rand(4, 2)}
        found = dict(placements_apart((name, each, gradients[name]) for name, each in parameters.items()))
        assert found == {"all": [["partial", "avg"]]}
        for name, gradient in gradients.items():
            again = gradient_like(parameters[name], getattr(gradient, "_local_tensor", gradient), found.get(name))
            assert getattr(again, "placements", None) == getattr(gradient, "placements", None)
        with pytest.raises(NotSerializableError, match="mid-accumulation"):
            plain_placements(made(_Odd("sum")))


class _Odd(Partial):
    """As torch has for what is masked."""


def test_other_ranks_are_told_that_gradients_are_not_theirs() -> None:
    state = {"random": capture_random(), "metrics": {}, "buffers": {}, "gradients": {}}
    kept = {"w": {"local": torch.ones(1), "placements": None}}
    unsynced = {**state, "unsynced_gradients": {"gradients": kept, "waits": ["norm"]}}
    trainer: Any = SimpleNamespace(strategy=ModelParallelStrategy(), lightning_module=nn.Linear(1, 1))
    others = OtherRanks([unsynced] * 2, 0, 3)
    assert others.values(trainer)["unsynced_gradients"] == {"gradients": {}, "sums": {}, "waits": ["norm"]}
    assert ["in shards" in reason for reason in others.reasons] == [True]
