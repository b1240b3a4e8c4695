"""A training of several ranks (DDP, or FSDP2 in shards; gloo or NCCL) that can be killed, told to stop, and struck.

Rank 0 notes a checksum of the parameters of each step in ``ROOT/steps``, each rank leaves an account in
``ROOT/rank-K.json``. See ``program`` for how a test runs it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client.local_server import LocalServer
from tests.support.exact_cases import loader
from tests.support.strike import Strike
from tests.support.trainer import digest
from tests.support.trainer import trainer as quiet
from tests.support.waiting import until

STEPS = 12
NEVER = (-1, -1)


class Wide(pl.LightningModule):
    """Some megabytes of parameters, and dropout; without shards also BatchNorm, which differs from rank to rank.

    Args:
        optimizer: ``"unlike"``: rank 1 has another one; ``"zero"``: each rank has the state of some parameters.
    """

    def __init__(self, width: int, optimizer: str = "", *, sharded: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, width), nn.Identity() if sharded else nn.BatchNorm1d(width)
        self.middle, self.last = nn.Linear(width, width), nn.Linear(width, 1)
        self.optimizer, self.sharded = optimizer, sharded

    def configure_model(self) -> None:
        for layer in (self.first, self.middle, self.last) if self.sharded else ():
            if not hasattr(layer, "set_reshard_after_backward"):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])  # type: ignore[index] # set by the strategy

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(batch[0])))
        hidden = nn.functional.dropout(self.middle(hidden), 0.1)
        return nn.functional.mse_loss(self.last(hidden), batch[1])

    def configure_optimizers(self) -> Any:
        if self.optimizer == "zero":
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=1e-3)
        amsgrad = self.optimizer == "unlike" and self.trainer.global_rank == 1
        return torch.optim.AdamW(self.parameters(), lr=1e-3, amsgrad=amsgrad)


class Account(pl.Callback):
    """Notes the state of each step, ends a rank where it is told to, and says at the end what was done."""

    def __init__(self, root: Path, spot: SpotCheckpoint, kill: Sequence[int], notice: Sequence[int]) -> None:
        self.root, self.spot, self.kill, self.notice = root, spot, tuple(kill), tuple(notice)
        self.hold, self.loses_server, self.has_begun = NEVER[0], False, False

    @property
    def writer(self) -> SnapshotWriter:
        """That of this rank."""
        snapshotter = self.spot.snapshots.snapshotter
        return snapshotter.writing.attempt.writer

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        state = {
            name: getattr(item, "full_tensor", lambda item=item: item)() for name, item in module.state_dict().items()
        }  # type: ignore[misc]
        if trainer.is_global_zero:
            self.wait_for_servers(trainer.global_step)
            with open(self.root / "steps", "a") as file:
                file.write(f"{trainer.global_step} {digest(state)}\n")

    def wait_for_servers(self, step: int) -> None:
        """Where there are snapshot servers, begin when it is known that they take the run; and once another does."""
        writer, snapshots = self.writer, self.spot.snapshots
        count = snapshots._settings.ring.replicas if snapshots.location.servers else 0
        if step == self.hold:
            until((self.root / "go").exists, "to be told to go on", 300.0)
        if count and (not self.has_begun or step == self.hold + 2):
            if self.has_begun:
                writer.wait_all(60.0)
                count = 1
            until(lambda: writer.host is not None and len(writer.host.kept_at()) >= count, "the servers")
        self.has_begun = True

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        # Its shard of the snapshot of the step before is not copied when this comes, or is not reported.
        if (trainer.global_rank, trainer.global_step) == self.kill:
            os._exit(9)
        if (trainer.global_rank, trainer.global_step) == self.notice:
            stop = self.spot._guard._stop if self.spot._guard is not None else None
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: stop.facts is not None, "it to be heard")  # else all ranks may have trained to the end

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        writer = self.writer
        writer.wait_all(60.0)
        told = {"copied": writer.copied_bytes, "aborted": writer.aborted, "skipped": self.spot.num_skipped}
        (self.root / f"rank-{trainer.global_rank}.json").write_text(json.dumps(told))
        if self.loses_server and trainer.is_global_zero:
            assert isinstance(writer.host, LocalServer)
            lose_as_it_leases(writer.host)


def lose_as_it_leases(host: LocalServer) -> None:
    """Kill the local server when it is asked for a slot."""
    pid, lease = host._call("GET", "/v1/status")["pid"], host.lease

    def kill_first(*arguments: Any, **more: Any) -> Any:
        os.kill(pid, signal.SIGKILL)
        return lease(*arguments, **more)

    host.lease = kill_first  # type: ignore[method-assign]


def be_on_host(number: int) -> None:
    """Have this rank find, or start, another local server than those of other hosts."""
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


def train(
    root: Path,
    *callbacks: pl.Callback,
    ranks: int = 2,
    sharded: bool = False,
    hosts: int = 1,
    machines: int = 1,
    accelerator: str = "cpu",
    width: int = 256,
    optimizer: str = "",
    steps: int = STEPS,
    seed: int = 11,
    every: int = 1,
    servers: Sequence[str] = (),
    dirpath: str = "",
    ckpt: str | None = None,
    kill: Sequence[int] = NEVER,
    notice: Sequence[int] = NEVER,
    strike: tuple[int, int, str] | None = None,
    hold: int = NEVER[0],
    loses_server: bool = False,
    **settings: Any,
) -> pl.Trainer:
    """Train to the end, or go on.

    Args:
        hosts: the ranks believe to be on so many.
        machines: on each of which this was started.
        kill, notice, strike: rank and step at which the rank ends, gets a SIGTERM, or a function of ours fails.
        hold: step at which to wait for ``ROOT/go``, and then for a server.
        loses_server: rank 0's host loses its local server as the last snapshot begins.
        **settings: of ``SpotCheckpoint``.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    be_on_host(local * hosts // ranks)
    torch.set_num_threads(1)
    pl.seed_everything(seed, verbose=False)
    usual = {"on_full": "wait", "keep": 100, "min_upload_interval_s": 0.0, "servers": list(servers) or None}
    spot = SpotCheckpoint(dirpath or str(root / "run"), interval=EverySteps(every), **{**usual, **settings})
    account = Account(root, spot, kill, notice)
    account.hold, account.loses_server = hold, loses_server
    struck = [Strike(strike[2], MemoryError("of a test"), step=strike[1])] if strike and strike[0] == local else []
    backend = "gloo" if accelerator == "cpu" else "nccl"
    ddp = DDPStrategy(process_group_backend=backend, broadcast_buffers=False)
    trainer = quiet(
        *(*callbacks, account, *struck, spot),
        max_epochs=-1,
        max_steps=steps,
        accelerator=accelerator,
        devices=ranks // machines,
        num_nodes=machines,
        strategy=ModelParallelStrategy(ranks, 1) if sharded else ddp,
    )
    began_s = time.monotonic()
    try:
        trainer.fit(Wide(width, optimizer, sharded=sharded), loader(), ckpt_path=ckpt)
    finally:
        print(f"{_TOOK} {time.monotonic() - began_s:.3f}", flush=True)
    return trainer
