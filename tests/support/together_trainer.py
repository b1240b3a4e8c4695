"""Trains on several ranks (gloo, or NCCL) that save together: ``python -m tests.support.together_trainer ROOT …``.

Each rank leaves an account in ``ROOT/rank-K.json``, and the state of each step in ``ROOT/steps`` as a checksum.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.capture.writer import SnapshotWriter
from tests.support.exact_cases import loader
from tests.support.strike import Strike
from tests.support.trainer import digest
from tests.support.trainer import trainer as quiet
from tests.support.waiting import until

STEPS = 12


class Wide(pl.LightningModule):
    """Some megabytes of parameters, BatchNorm that differs from rank to rank, and dropout."""

    def __init__(self, width: int, unlike: bool = False, zero: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, width), nn.BatchNorm1d(width)
        self.middle, self.last = nn.Linear(width, width), nn.Linear(width, 1)
        self.unlike, self.zero = unlike, zero

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(batch[0])))
        hidden = nn.functional.dropout(self.middle(hidden), 0.1)
        return nn.functional.mse_loss(self.last(hidden), batch[1])

    def configure_optimizers(self) -> Any:
        if self.zero:
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=1e-3)
        amsgrad = self.unlike and self.trainer.global_rank == 1
        return torch.optim.AdamW(self.parameters(), lr=1e-3, amsgrad=amsgrad)


class Account(pl.Callback):
    """Notes the state of each step, ends a rank where it is told to, and says at the end what was done."""

    def __init__(
        self, root: Path, spot: SpotCheckpoint, kill: tuple[int, int], notice: tuple[int, int], hold: int
    ) -> None:
        self.root, self.spot, self.kill, self.notice, self.hold = root, spot, kill, notice, hold

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.is_global_zero:
            self.wait_for_servers(trainer.global_step)
            with open(self.root / "steps", "a") as file:
                file.write(f"{trainer.global_step} {digest(module.state_dict())}\n")

    @property
    def writer(self) -> SnapshotWriter:
        """That of this rank."""
        snapshotter = self.spot.snapshots.snapshotter
        assert snapshotter is not None
        assert snapshotter.writing.attempt is not None
        return snapshotter.writing.attempt.writer

    def wait_for_servers(self, step: int) -> None:
        """Where there are snapshot servers, begin when it is known that they take the run; and once another does."""
        writer, count = self.writer, self.spot.snapshots.replicas
        if step == self.hold:
            until((self.root / "go").exists, "to be told to go on", 300.0)
        if count and step in (1, self.hold + 2):
            settled = step == 1
            if not settled:
                writer.settle(60.0)
            until(
                lambda: writer.host is not None and len(writer.host.destinations()) >= (count if settled else 1), "it"
            )

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        # Its share of the snapshot of the step before is not copied when this comes, or is not reported.
        if (trainer.global_rank, trainer.global_step) == self.kill:
            os._exit(9)
        if (trainer.global_rank, trainer.global_step) == self.notice:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        writer = self.writer
        writer.settle(60.0)
        told = {"copied": writer.copied_bytes, "aborted": writer.aborted, "skipped": self.spot.num_skipped}
        (self.root / f"rank-{trainer.global_rank}.json").write_text(json.dumps(told))


def be_on_host(number: int) -> None:
    """Have this rank find, or start, another node than those of other hosts."""
    for name in ("LIGHTNING_SPOT_RUNTIME_DIR", "LIGHTNING_SPOT_SHM_DIR"):
        if not (of_all := os.environ.get(f"{name}_OF_ALL", os.environ.get(name, ""))):
            continue
        folder = Path(of_all) / f"h{number}" if number else Path(of_all)
        folder.mkdir(mode=0o700, exist_ok=True)
        os.environ[name], os.environ[f"{name}_OF_ALL"] = str(folder), of_all  # ranks are started by the first one


_TOOK = "seconds of fit:"


def longest_fit_s(log: str) -> float:
    """How long the rank took that took longest, as a log of its process says; to start it takes long elsewhere."""
    return max(float(line.removeprefix(_TOOK)) for line in log.splitlines() if line.startswith(_TOOK))


def struck(rank: str, step: str, where: str) -> list[pl.Callback]:
    """What has a function of ours fail on this rank, if it is to."""
    is_here = int(os.environ.get("LOCAL_RANK", "0")) == int(rank)
    return [Strike(where, MemoryError("of a test"), step=int(step))] if is_here else []


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--accelerator", default="cpu", help="gpu: on CUDA devices, by NCCL")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--memory", default="auto", help="of several nodes: URLs, with commas between them")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=1, help="ranks believe to be on so many hosts")
    parser.add_argument("--turned", action="store_true", help="rank 0 is on the last host")
    parser.add_argument("--durable-every", type=float, default=0.0)
    parser.add_argument("--nodes", type=int, default=1, help="machines, on each of which this was started")
    parser.add_argument("--unlike", action="store_true", help="rank 1 has another optimizer")
    parser.add_argument("--zero", action="store_true", help="each rank has the optimizer's state of some parameters")
    parser.add_argument("--lossy", choices=["topk"])
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--ckpt", help="checkpoint that the user names")
    parser.add_argument("--hold", type=int, default=-9, help="step at which to wait for ROOT/go, and then for a node")
    parser.add_argument("--kill", type=int, nargs=2, default=(-1, -1), help="rank and step")
    parser.add_argument("--notice", type=int, nargs=2, default=(-1, -1), help="rank and step of a SIGTERM")
    parser.add_argument(
        "--strike", nargs=3, default=(-1, 0, ":"), help="rank and step at which a function of ours fails"
    )
    arguments = parser.parse_args()
    host = int(os.environ.get("LOCAL_RANK", "0")) * arguments.hosts // arguments.ranks
    be_on_host(arguments.hosts - 1 - host if arguments.turned else host)
    torch.set_num_threads(1)
    pl.seed_everything(11, verbose=False)
    nodes = [] if arguments.memory in ("auto", "none") else arguments.memory.split(",")
    spot = SpotCheckpoint(
        str(arguments.root / "run"),
        servers=nodes or None,
        local_server=arguments.memory != "none",
        replicas=arguments.replicas,
        interval=EverySteps(arguments.every),
        on_full="wait",
        keep=100,
        min_upload_interval_s=arguments.durable_every,
        on_error="raise" if arguments.strict else "warn",
        lossy=arguments.lossy,
    )
    account = Account(arguments.root, spot, tuple(arguments.kill), tuple(arguments.notice), arguments.hold)
    backend = "gloo" if arguments.accelerator == "cpu" else "nccl"
    trainer = quiet(
        *(account, *struck(*arguments.strike), spot),
        max_epochs=-1,
        max_steps=arguments.steps,
        accelerator=arguments.accelerator,
        devices=arguments.ranks // arguments.nodes,
        num_nodes=arguments.nodes,
        strategy=DDPStrategy(process_group_backend=backend, broadcast_buffers=False),
    )
    began_s = time.monotonic()
    try:
        trainer.fit(Wide(arguments.width, arguments.unlike, arguments.zero), loader(), ckpt_path=arguments.ckpt)
    finally:
        print(f"{_TOOK} {time.monotonic() - began_s:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
