"""Trains a model in shards (FSDP2, gloo) whose ranks believe to be on several hosts: ``… ROOT --memory URL``.

Rank 0 leaves an account in ``ROOT/rank-0.json``, and the state of each step in ``ROOT/steps`` as a checksum.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.client.embedded import EmbeddedHost
from tests.support.exact_cases import loader
from tests.support.together_trainer import be_on_host
from tests.support.trainer import digest
from tests.support.trainer import trainer as quiet
from tests.support.waiting import until


class Wide(pl.LightningModule):
    """Some megabytes of parameters in shards, and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1))

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index] # set by the strategy
        for layer in self.net:
            if isinstance(layer, nn.Linear) and not hasattr(layer, "set_reshard_after_backward"):
                fully_shard(layer, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(nn.functional.dropout(batch[0], 0.1)), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def is_sharded(value: Any) -> bool:
    return hasattr(value, "full_tensor")


def lose_as_it_leases(host: EmbeddedHost) -> None:
    """Kill the node of this host when it is asked for a slot."""
    pid, lease = host._call("GET", "/v1/status")["pid"], host.lease

    def kill_first(*arguments: Any, **more: Any) -> Any:
        os.kill(pid, signal.SIGKILL)
        return lease(*arguments, **more)

    host.lease = kill_first  # type: ignore[method-assign]


class Account(pl.Callback):
    """Notes the state of each step, ends a rank where it is told to, and says at the end what was done."""

    def __init__(
        self, root: Path, spot: SpotCheckpoint, kill: tuple[int, int], notice: tuple[int, int], lose_node: bool
    ) -> None:
        self.root, self.spot, self.kill, self.notice, self.lose_node = root, spot, kill, notice, lose_node

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        state = {name: value.full_tensor() for name, value in module.state_dict().items() if is_sharded(value)}
        if trainer.is_global_zero:
            self.wait_for_servers()
            with open(self.root / "steps", "a") as file:
                file.write(f"{trainer.global_step} {digest(state)}\n")

    def wait_for_servers(self) -> None:
        """Begin when it is known that the snapshot servers take the run."""
        snapshotter = self.spot.snapshots.snapshotter
        assert snapshotter is not None
        attempt = snapshotter.writing.attempt
        assert attempt is not None
        writer, count = attempt.writer, self.spot.snapshots.replicas
        if count and snapshotter.writing.begun_step < 0:
            until(lambda: writer.host is not None and len(writer.host.destinations()) >= count, "servers")

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == self.kill:
            os._exit(9)
        if (trainer.global_rank, trainer.global_step) == self.notice:
            stop = self.spot._guard._stop if self.spot._guard is not None else None
            assert stop is not None
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: stop.facts is not None, "it to be heard")  # else all ranks may have trained to the end

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        snapshotter = self.spot.snapshots.snapshotter
        assert snapshotter is not None
        attempt = snapshotter.writing.attempt
        if attempt is not None and trainer.is_global_zero:
            writer = attempt.writer
            writer.settle(60.0)
            (self.root / "rank-0.json").write_text(json.dumps({"aborted": writer.aborted}))
            if self.lose_node:
                assert isinstance(writer.host, EmbeddedHost)
                lose_as_it_leases(writer.host)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--memory", default="auto", help="snapshot servers, separated by commas")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--dir", help="the durable tier, if not below ROOT")
    parser.add_argument("--hosts", type=int, default=2, help="ranks believe to be on so many hosts")
    parser.add_argument("--nodes", type=int, default=1, help="machines, on each of which this was started")
    parser.add_argument("--kill", type=int, nargs=2, default=(-1, -1), help="rank and step")
    parser.add_argument("--notice", type=int, nargs=2, default=(-1, -1), help="rank and step of a SIGTERM")
    parser.add_argument("--lose-node", action="store_true", help="of rank 0's host, as the last snapshot begins")
    arguments = parser.parse_args()
    be_on_host(int(os.environ.get("LOCAL_RANK", "0")) * arguments.hosts // arguments.ranks)
    torch.set_num_threads(1)
    pl.seed_everything(arguments.seed, verbose=False)
    spot = SpotCheckpoint(
        arguments.dir or str(arguments.root / "run"),
        servers=arguments.memory.split(",") if arguments.memory != "auto" else None,
        replicas=arguments.replicas,
        interval=EverySteps(1),
        on_full="wait",
        keep=100,
    )
    kill, notice = tuple(arguments.kill), tuple(arguments.notice)
    account = Account(arguments.root, spot, kill, notice, arguments.lose_node)
    trainer = quiet(
        *(account, spot),
        max_epochs=-1,
        max_steps=arguments.steps,
        devices=arguments.ranks // arguments.nodes,
        num_nodes=arguments.nodes,
        strategy=ModelParallelStrategy(arguments.ranks, 1),
    )
    trainer.fit(Wide(arguments.width), loader())
    return 0


if __name__ == "__main__":
    sys.exit(main())
