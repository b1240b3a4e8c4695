"""Trainings on a GPU: ways to step and to be compiled, kills, a lost device; and the host never waits for it."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.capture import copier, schedule
from tests.support.exact_sharded import undisturbed_and_stopped
from tests.support.gpus import NEEDS_GPU, ON_GPU
from tests.support.program import Outcome, run
from tests.support.snapshots import EachDurable, check_all, load, manifests, spot
from tests.support.trainer import Net, Probe, TwoOptimizers, data, trainer
from tests.support.training import train as train_ranks
from tests.support.waiting import new_process, until

pytestmark = NEEDS_GPU
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="Triton needs a C compiler"
)


class Steps(Net):
    """A network of some width, and an optimizer with ``settings``; on a GPU its state is all there."""

    def __init__(self, width: int = 32, **settings: Any) -> None:
        super().__init__(width)
        self.settings = settings

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, **self.settings)


@pytest.fixture
def small_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small state is spread over an iteration as a large one is."""
    monkeypatch.setattr(schedule, "LEAST_BYTES", 64)
    monkeypatch.setattr(copier, "HELD_S", 0.05)  # some of these trainings stand until a snapshot is durable


@pytest.mark.usefixtures("small_partitions")
@pytest.mark.parametrize("copy_mode", ["asymmetric", "backward", "auto"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_every_mode_on_a_gpu(tmp_path: Path, copy_mode: str, compiled: bool) -> None:
    probe, model = Probe(), Net()
    callback = spot(tmp_path, interval=EverySteps(1), copy_mode=copy_mode, device_buffer="1KiB")
    trainer(callback, probe, max_epochs=3, **ON_GPU).fit(torch.compile(model) if compiled else model, data())
    check_all(tmp_path, probe)


@pytest.mark.parametrize("module", [Net, TwoOptimizers])
@pytest.mark.parametrize("local_server", [True, False])
def test_training_on_a_gpu(tmp_path: Path, module: type[Net], local_server: bool) -> None:
    probe = Probe()
    trainer(spot(tmp_path, local_server=local_server), probe, max_epochs=3, **ON_GPU).fit(module(), data(), data(3))
    check_all(tmp_path, probe)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precision(tmp_path: Path, precision: Any) -> None:
    """With a scaler of gradients and without one."""
    trainer(spot(tmp_path), precision=precision, max_epochs=3, **ON_GPU).fit(Net(), data())
    new_process()
    callback = spot(tmp_path)
    again = trainer(callback, precision=precision, max_epochs=4, **ON_GPU)
    again.fit(Net(), data())
    assert callback.resumed_from is not None
    assert again.global_step == 80


@pytest.mark.usefixtures("small_partitions")
@pytest.mark.parametrize("way", ["fused", "foreach", "capturable"])
def test_ways_to_step(tmp_path: Path, way: str) -> None:
    probe, callback = Probe(), spot(tmp_path, interval=EverySteps(1), device_buffer="1KiB")
    trainer(callback, probe, EachDurable(tmp_path / "run-1", 5), **ON_GPU).fit(Steps(**{way: True}), data())
    assert len(check_all(tmp_path, probe)) >= 8
    snapshots = callback.snapshots.snapshotter
    assert snapshots.writing.dropped == 0


@pytest.mark.usefixtures("small_partitions")
@pytest.mark.parametrize(
    "how",
    [pytest.param({"mode": "reduce-overhead"}, marks=needs_compiler, id="reduce-overhead"), {"backend": "cudagraphs"}],
)
def test_steps_that_are_replayed_from_graphs(tmp_path: Path, how: dict[str, str]) -> None:
    probe, callback = Probe(), spot(tmp_path, interval=EverySteps(1), device_buffer="1KiB")
    model: Any = torch.compile(Steps(fused=True), **how)
    trainer(callback, probe, EachDurable(tmp_path / "run-1", 5), max_epochs=3, **ON_GPU).fit(model, data())
    assert len(check_all(tmp_path, probe)) >= 12


class Passing(pl.Callback):
    """Saves a tensor of another stream that nobody else holds, and whose memory is used again at once."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        with torch.cuda.stream(self.stream):
            checkpoint["passing"] = torch.full((1 << 24,), float(trainer.global_step), device="cuda")
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda._sleep(10**8)  # type: ignore[no-untyped-call] # what is copied comes after it

    def on_train_batch_start(self, *_: Any) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(4):
                torch.full((1 << 24,), -1.0, device="cuda")


def test_memory_that_is_used_again_at_once(tmp_path: Path) -> None:
    callback = spot(tmp_path, keep=3)
    trainer(callback, Passing(), max_steps=12, **ON_GPU).fit(Net(), data())
    found = manifests(tmp_path)
    assert found
    for manifest in found:
        passing = load(tmp_path, manifest)["passing"]
        assert torch.equal(passing, torch.full_like(passing, float(manifest.step)))


def test_no_more_memory_of_the_device_than_the_buffer(tmp_path: Path) -> None:
    def most(*callbacks: pl.Callback) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer(*callbacks, max_steps=20, **ON_GPU).fit(Steps(1 << 20, fused=True), data())
        return torch.cuda.max_memory_allocated() - before

    most()  # what libraries keep is there from now on
    alone = most()
    for megabytes in (0, 8):
        callback = spot(tmp_path / str(megabytes), keep=2, device_buffer=f"{megabytes}MiB" if megabytes else None)
        assert most(callback) <= alone + (megabytes << 20) + (1 << 20)  # losses that are read, a few bytes at a time


class Strict(pl.Callback):
    """From its third step on, whatever has the host wait for the device is an error, on all threads."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def lenient_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("small_partitions", "lenient_again")
@pytest.mark.parametrize("spots", [False, True], ids=["lightning-alone", "with-snapshots"])
def test_the_host_never_waits_for_the_device(tmp_path: Path, spots: bool) -> None:
    """Without snapshots it shows that nothing of Lightning's does."""
    callbacks: list[pl.Callback] = [Strict()]
    if spots:
        callbacks.insert(0, spot(tmp_path, interval=EverySteps(2), on_full="skip", device_buffer="1KiB"))
    run = trainer(*callbacks, max_epochs=4, **ON_GPU)
    run.fit(Steps(fused=True), data())
    assert run.global_step == 80
    if spots:
        assert manifests(tmp_path)


class Exact(Net):
    """Dropout, fused AdamW, and a width at which the kernels of a GPU add up in some order."""

    def __init__(self) -> None:
        super().__init__(width=256)
        self.net.insert(3, nn.Dropout(0.3))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class EndAt(pl.Callback):
    """Ends the training in the batch after a step, once a snapshot of this attempt is committed."""

    def __init__(self, spot: SpotCheckpoint, kill: int, fault: int) -> None:
        self.spot, self.kill, self.fault = spot, kill, fault

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step in (self.kill, self.fault):
            until(lambda: self.spot.last_committed_step == step - 1, "the last snapshot")
        if step == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == self.fault:
            there = torch.zeros(4, device="cuda")
            there[torch.tensor([10**6], device="cuda")] += 1  # an assertion on the device: nothing works there any more


def train(root: Path, kill: int = -1, fault: int = -1) -> None:
    """Train to the end; killed in the middle of a backward pass, or ended by an error that takes the device away."""
    torch.use_deterministic_algorithms(True)
    pl.seed_everything(3, verbose=False)
    callback = SpotCheckpoint(str(root / "run"), interval=EverySteps(2), keep=100, on_full="wait")
    trainer(callback, EndAt(callback, kill, fault), **ON_GPU).fit(Exact(), data())


def test_killed_and_without_its_device_it_goes_on_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    whole = run(sys.executable, train, tmp_path / "whole")
    root = tmp_path / "broken"
    run(sys.executable, train, root, kill=13, code=-signal.SIGKILL)
    began_s = time.monotonic()
    lost = run(sys.executable, train, root, fault=27, code=1)
    assert "device-side assert" in lost.log  # the error of the training, no other in its place
    assert time.monotonic() - began_s < 60
    done = run(sys.executable, train, root)
    assert done.resumed == [12, 26]
    assert whole.snapshots[0].step == 40
    done.check_end(whole)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_training_on_the_second_device_uses_nothing_of_the_first(tmp_path: Path) -> None:
    callback = SpotCheckpoint(str(tmp_path / "run-1"), interval=EverySteps(3), on_full="wait")
    trainer(callback, accelerator="gpu", devices=[1], max_steps=20).fit(Net(), data())
    assert torch.cuda.memory_allocated(0) == 0


TWO = pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"))


@pytest.mark.parametrize("ranks", [1, TWO])
def test_a_model_in_shards_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path, ranks: int) -> None:
    run(sys.executable, undisturbed_and_stopped, tmp_path, ranks=ranks, accelerator="gpu")
    Outcome(tmp_path / "broken").check_end(Outcome(tmp_path / "whole"))


@pytest.mark.parametrize("ranks", [1, TWO])
def test_snapshots_of_ddp_hold_the_parameters_of_their_steps(tmp_path: Path, ranks: int) -> None:
    done = run(sys.executable, train_ranks, tmp_path, ranks=ranks, steps=8, accelerator="gpu")
    done.check_states()
    assert [account["aborted"] for account in done.accounts(ranks)] == [0] * ranks
