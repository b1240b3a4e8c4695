"""The trainer that the kill tests kill. Forks a fresh one from a warm process for each line on its standard input.

With a request as its argument it trains once, in this process: a command like any user's.

Its state shows whether a snapshot is whole: all of a model with BatchNorm under Adam is a function of the step. What
it is told and sees goes to an oracle file by ``os.write``, which a kill cannot lose.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_spot import EverySteps, SpotCheckpoint
from tests.support.oracle import BETAS, EPS, LEARNING_RATE, MOMENTUM, mixed
from tests.support.trainer import trainer as quiet
from tests.support.warm import enter_network


class Watched(pl.LightningModule):
    """A linear layer and BatchNorm under Adam: the gradient of step t is -t and its input t, see ``oracle``."""

    def __init__(self, elements: int, pace_s: float, ballast: int) -> None:
        super().__init__()
        self.pace_s = pace_s
        self.count = torch.nn.Parameter(torch.zeros(elements))
        self.register_buffer("seen", torch.zeros(elements // 4))
        self.norm = torch.nn.BatchNorm1d(1, momentum=MOMENTUM)
        self.register_buffer("ballast", torch.zeros(ballast))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        number = self.trainer.global_step + 1
        self.seen.fill_(number)
        self.ballast.fill_(number)
        time.sleep(self.pace_s)
        x = torch.full((2, 1), float(number))
        linear = torch.nn.functional.linear(x[:1], self.count.unsqueeze(1))
        return -linear.sum() - self.norm(x).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS)

    def whole(self, step: int) -> bool:
        return not mixed(self.state_dict(), step)


class Oracle(pl.Callback):
    """Writes down what the trainer is told."""

    def __init__(self, path: str, spot: SpotCheckpoint) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.spot = spot
        self.told = -1

    def say(self, *words: Any) -> None:
        os.write(self.fd, (" ".join(map(str, words)) + "\n").encode())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        start = self.spot.resumed_from
        whole = pl_module.whole(trainer.global_step)
        self.say("attempt", self.spot.attempt)
        self.say("from", start.step if start else 0, start.tier if start else "nowhere", "whole" if whole else "TORN")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.say("begun", trainer.global_step + 1)
        told = self.spot.last_committed_step
        if told is not None and told != self.told:
            self.told = told
            self.say("told", told)


def train(
    dirpath: str,
    oracle: str,
    elements: int = 200_000,
    pace_s: float = 0.002,
    max_steps: int = 10**6,
    ballast: int = 0,
    every: int = 1,
    alarm_s: int = 0,
    **settings: Any,
) -> None:
    """Train until killed (or ``max_steps``, or for ``alarm_s``), with a snapshot at every step by default.

    The other arguments are those of ``SpotCheckpoint``.
    """
    signal.alarm(alarm_s)  # 0 sets none
    torch.set_num_threads(1)
    usual = {"slots": 3, "server_idle_timeout_s": 30.0, "upload_timeout_s": 10.0}
    spot = SpotCheckpoint(dirpath, interval=EverySteps(every), **{**usual, **settings})
    trainer = quiet(spot, Oracle(oracle, spot), max_epochs=-1, max_steps=max_steps)
    trainer.fit(Watched(elements, pace_s, ballast), DataLoader(TensorDataset(torch.zeros(50, 1)), 1))


def move(namespace: str, directory: str, environment: dict[str, str], python: str) -> None:
    """Go on in another network namespace, as on another machine; its server is started there, by ``python``."""
    sys.executable = python
    os.environ.update(environment)
    os.chdir(directory)
    enter_network(f"/var/run/netns/{namespace}")


def serve() -> None:
    """Fork a trainer for each request; say its process id, and later how it ended."""
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                request = json.loads(line)
                if (machine := request.pop("machine", None)) is not None:
                    move(**machine)
                train(**request)
                code = 0
            finally:
                os._exit(code)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(**json.loads(sys.argv[1]))
    else:
        serve()
