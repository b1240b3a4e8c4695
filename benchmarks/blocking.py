"""What training waits for a snapshot of about 1 GB, on the CPU, against a warm copy and against Lightning's own saves.

The time is the sum over the hooks of our callback and the seams of training, where snapshots begin, measured from
outside. "Nothing overlaps" means that the optimizer step follows the snapshot at once, so that training waits for the
whole copy, which begins at once (``copy_mode="eager"``: ``auto`` would go through all ways).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.autograd.graph import increment_version
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.measure import Result, WarmCopy, bare_trainer, scratch, seconds
from benchmarks.peers.seam_watch import SeamWatch
from lightning_spot import EverySteps, SpotCheckpoint, SpotCheckpointIO
from lightning_spot.capture.writer import SnapshotWriter

HOOKS = ("on_train_batch_end", "on_before_optimizer_step", "on_validation_start", "on_train_epoch_end")


def writer_of(spot: SpotCheckpoint) -> SnapshotWriter | None:
    """Writes the snapshots of the ``fit`` under way, on rank 0."""
    snapshotter = spot.snapshots.snapshotter
    attempt = snapshotter.writing.attempt if snapshotter is not None else None
    return attempt.writer if attempt is not None else None


class Idle(torch.optim.Optimizer):
    """Adam's state without Adam's work: a step takes no time, so that only what we cost is seen.

    All of it counts as written, as after a step of Adam.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.ones_like(parameter), torch.ones_like(parameter)
                    state["step"] = torch.tensor(0.0)
                state["step"] += 1
                increment_version([parameter, state["exp_avg"], state["exp_avg_sq"]])


def gpt_parameters(layers: int = 8, width: int = 768, words: int = 32_000) -> list[int]:
    """Elements of each parameter of a GPT, by default of 82 million: with Adam's two moments 0.98 GB in 300 tensors."""
    layer = [width, width, 3 * width**2, 3 * width, width**2, width, width, width]
    layer += [4 * width**2, 4 * width, 4 * width**2, width]
    return [words * width, 1024 * width, *(elements for _ in range(layers) for elements in layer), width, width]


class Model(pl.LightningModule):
    def __init__(self, parameters: Sequence[int] | None = None) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.ones(elements) for elements in parameters or gpt_parameters())
        self.busy_s = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        end = time.perf_counter() + self.busy_s
        square = torch.ones(300, 300)
        while time.perf_counter() < end:
            square = (square @ square).clamp(-1, 1)
        return self.weights[0][0]

    def backward(self, loss: torch.Tensor) -> None:
        """No gradients: they would take more time than everything measured here."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Idle(self.parameters())


class Waits:
    """Counts the seconds that training spends in our hooks, and where snapshots begin.

    Args:
        spot: ours, whose hooks are wrapped.
        watch: of the seams, in the same trainer.
    """

    def __init__(self, spot: SpotCheckpoint, watch: SeamWatch) -> None:
        self._spot, self._watch = spot, watch
        self._in_hooks_s = 0.0
        for hook in HOOKS:
            self._time(hook)

    def _time(self, hook: str) -> None:
        real = getattr(self._spot, hook)

        def timed(*arguments: Any) -> None:
            self._in_hooks_s += seconds(lambda: real(*arguments))

        setattr(self._spot, hook, timed)

    @property
    def spent_s(self) -> float:
        """So far."""
        return self._in_hooks_s + self._watch.spent_s

    def quieten(self) -> None:
        """Nothing of what was begun runs any more."""
        writer = writer_of(self._spot)
        assert writer is not None
        writer.wait_all(60.0)
        assert writer.host is not None
        writer.host.flush(120.0)


class Rounds(pl.Callback):
    """In each round: one snapshot of ours, one warm copy, and Lightning's own saves of the same state."""

    def __init__(self, spot: SpotCheckpoint, watch: SeamWatch, folder: Path, every: int) -> None:
        self.spot, self.waits, self.folder, self.every = spot, Waits(spot, watch), folder, every
        self.before_s = 0.0
        self.ours: list[float] = []
        self.others: dict[str, list[float]] = {"copy": [], "async": [], "plain": [], "plugin": []}
        self.plugins: dict[str, Any] = {}
        self.copy: WarmCopy | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        step = trainer.global_step
        if step % self.every == 2 and step > self.every:
            # The last snapshot is over: the optimizer step after it has passed.
            spent_s = self.waits.spent_s - self.before_s
            self.waits.quieten()
            if self.spot.last_committed_step == step - 2:
                self.ours.append(spent_s)
                self._compare(trainer)
            else:
                print(f"  left out: step {step - 2} has no snapshot", flush=True)
        if step % self.every == self.every - 1:
            self.waits.quieten()
            self.before_s = self.waits.spent_s

    def _compare(self, trainer: pl.Trainer) -> None:
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(False)
        tensors = {f"{i}": parameter.detach() for i, parameter in enumerate(trainer.lightning_module.parameters())}
        for number, state in enumerate(trainer.optimizers[0].state.values()):
            tensors.update({f"{number}.{key}": value for key, value in state.items()})
        self.copy = self.copy or WarmCopy(tensors)
        if not self.plugins:
            self.plugins = {"async": AsyncCheckpointIO(TorchCheckpointIO()), "plugin": SpotCheckpointIO()}
            self.plugins["plugin"].save_checkpoint(checkpoint, self.folder / "plugin.ckpt")  # makes its slots
        self.others["copy"].append(seconds(self.copy))
        for name in ("async", "plugin"):
            plugin, path = self.plugins[name], self.folder / f"{name}.ckpt"
            self.others[name].append(seconds(lambda p=plugin, t=path: p.save_checkpoint(checkpoint, t)))
            plugin.teardown() if name == "async" else plugin._flush(str(self.folder))
        plain = TorchCheckpointIO()
        self.others["plain"].append(seconds(lambda: plain.save_checkpoint(checkpoint, self.folder / "plain.ckpt")))


def measure(rounds: int, busy_s: float) -> Rounds:
    with scratch() as folder:
        every = 4
        spot = SpotCheckpoint(str(folder / "run-1"), interval=EverySteps(every), on_full="wait", copy_mode="eager")
        watch = SeamWatch(spot)
        comparison = Rounds(spot, watch, folder, every)
        model = Model()
        model.busy_s = busy_s
        bare_trainer(every * (rounds + 2) + 3, [watch, spot, comparison]).fit(
            model, DataLoader(TensorDataset(torch.zeros(10_000, 1)), 1)
        )
        comparison.plugins["plugin"].teardown()
        return comparison


def _ratio(left: list[float], right: list[float]) -> list[float]:
    # The first round still makes, maps and warms slots.
    return [one / other for one, other in list(zip(left, right, strict=True))[1:]]


def run(quick: bool) -> list[Result]:
    rounds = 3 if quick else 5
    alone = measure(rounds, busy_s=0.0)
    beside = measure(rounds, busy_s=0.3)
    print(f"  ours, s: {[round(value, 3) for value in alone.ours]}, one warm copy: "
          f"{[round(value, 3) for value in alone.others['copy']]}")  # fmt: skip
    results = [Result("blocking time / one warm copy, nothing overlaps", _ratio(alone.ours, alone.others["copy"]), 1.2)]
    for label, found in (("beside compute", beside), ("nothing overlaps", alone)):
        for other, target in (("async", 5.0), ("plain", 20.0)):
            name = "AsyncCheckpointIO" if other == "async" else "plain ModelCheckpoint save"
            values = _ratio(found.others[other], found.ours)
            results.append(Result(f"{name}'s blocking time / ours, {label}", values, target, at_most=False))
    plugin = _ratio(alone.others["plain"], alone.others["plugin"])
    return [*results, Result("plain save / SpotCheckpointIO", plugin, 3, at_most=False)]
