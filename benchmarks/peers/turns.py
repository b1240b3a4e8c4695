"""One training in which all ways of saving take turns, some steps each, in another order every round.

What a way costs is much less than one process differs from the next, and than a machine does from one minute to the
next. Here all of that touches all ways alike. A way does nothing in the turns of others, and what it has still to do at
the end of its own is waited for there, and counted as its own.
"""

from __future__ import annotations

import logging
import os
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.measure import bare_trainer
from benchmarks.peers import processes
from benchmarks.peers.cell import Stopwatch
from benchmarks.peers.models import build, state_bytes
from benchmarks.peers.ways import WAYS, Saving
from benchmarks.placement import bind_team
from lightning_spot import EverySteps

NONE = "none"
LEAST_STEPS = 4
WITHOUT_END = 10**6
_EVERY_TURN = ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
_WHOLE_FIT = ("setup", "on_fit_start", "on_train_start", "on_train_end", "on_fit_end", "on_exception", "teardown")

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is measured.

    Attributes:
        model: one of ``MODELS``.
        interval: optimizer steps between snapshots.
        ways: of ``WAYS``; ``none`` is always there.
        scale: one of ``SCALES``.
        device: ``"cpu"`` or ``"cuda"``.
        rounds: at most; in each, every way has one turn, and ``none`` two.
        seconds: no round is begun that would not be over by then, but for the first.
        warm_up: steps at least of the first turn of each way, which does not count.
        longest: steps of a turn at most. A snapshot of a greater interval has as many steps to come to its end.
        seed: of the random order.
    """

    model: str
    interval: int
    ways: tuple[str, ...]
    scale: str
    device: str
    rounds: int = 12
    seconds: float = 300.0
    warm_up: int = 6
    longest: int = 20
    seed: int = 0

    @property
    def steps(self) -> int:
        """Of a turn: ``interval``, within bounds; with a smaller one, several of it."""
        short = -(-LEAST_STEPS // self.interval) * self.interval
        return short if self.interval < LEAST_STEPS else min(self.interval, max(self.longest, LEAST_STEPS))

    def folder_of(self, way: str, folder: Path) -> Path:
        """Where a way saves to."""
        return folder / re.sub(r"\W+", "-", way)

    def failed(self, way: str, error: Exception) -> dict[str, Any]:
        """How it is told that a way has failed."""
        return {"model": self.model, "interval": self.interval, "way": way, "error": repr(error).splitlines()[0]}


class Due(EverySteps):
    """Snapshots in the turns of one way only, the first where its turn begins."""

    def __init__(self) -> None:
        super().__init__(1)
        self._first = self._every = self._taken = 0

    def begin(self, step: int, every: int) -> None:
        """Its turn begins after ``step`` steps."""
        self._first, self._every, self._taken = step, every, -1

    def end(self) -> None:
        self._every = 0

    def due(self, step: int, now_s: float) -> bool:
        return self._every > 0 and (step - self._first) // self._every > self._taken

    def taken(self, step: int, now_s: float) -> None:
        self._taken = (step - self._first) // self._every if self._every else self._taken

    def passed_over(self, step: int) -> int:
        return 0


@dataclass
class _Turn:
    """Clocks where a turn began."""

    way: str
    round: int
    first: int
    steps: int
    cpu_s: float
    blocked_s: float
    wall_s: float


class Conductor(pl.Callback):
    """Gives each way its turns, and reads the clocks in between. The first callback of the trainer.

    Args:
        training: what is measured.
        savings: each way, ready to save.
        dues: their intervals.
        command: process id of whoever counts what this process and its children use.
        tell: is told of each turn, and of each way that failed.
    """

    def __init__(
        self, training: Training, savings: dict[str, Saving], dues: dict[str, Due], command: int, tell: Tell
    ) -> None:
        self._training, self._savings, self._dues, self._command, self._tell = training, savings, dues, command, tell
        self._watches = {way: Stopwatch() for way in savings}
        for way, saving in savings.items():
            for timed in saving.timed:
                self._watches[way].wrap(timed)
        self._random = random.Random(f"{training.seed} {training.model} {training.interval}")
        self._round, self._left = -1, list(savings)
        self._began_s = self._round_began_s = time.monotonic()
        self._turn: _Turn | None = None
        self._alive = set(savings)

    # -- which turn it is -----------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any) -> None:
        step = trainer.global_step
        if self._turn is None or step >= self._turn.first + self._turn.steps:
            self._end_turn(trainer)
            if not self._left:
                self._next_round(trainer)
            if not trainer.should_stop:
                self._begin_turn(trainer, self._left.pop())
        for way, saving in self._savings.items():
            if saving.spot is not None and not self._is_on(way) and (own := saving.spot.snapshots.snapshotter):
                own.disturbed()  # the steps of others tell nothing of its own
        if self._turn is not None and self._dues[self._turn.way].due(step, 0.0):
            if self._savings[self._turn.way].spot is None:
                self._dues[self._turn.way].taken(step, 0.0)
            self._call(self._turn.way, "on_train_batch_end", trainer, pl_module, *rest)

    def _is_on(self, way: str) -> bool:
        return self._turn is not None and self._turn.way == way

    def _next_round(self, trainer: pl.Trainer) -> None:
        now_s = time.monotonic()
        self._round += 1
        will_take_s = now_s - self._round_began_s if self._round > 1 else 0.0
        self._round_began_s = now_s
        over = self._round >= self._training.rounds or now_s + will_take_s > self._began_s + self._training.seconds
        if over and self._round > 0:
            trainer.should_stop = True
            return
        # The one that all others are compared with has two turns.
        self._left = [way for way in self._savings if way in self._alive] + [NONE]
        self._random.shuffle(self._left)

    def _begin_turn(self, trainer: pl.Trainer, way: str) -> None:
        saving, step, training = self._savings[way], trainer.global_step, self._training
        warming = self._round < 0
        every = min(training.interval, 2) if warming else training.interval
        steps = max(training.warm_up, saving.tries * every) if warming else training.steps
        try:
            saving.join(trainer)
        except Exception as error:
            self._give_up(way, error)
            return
        cpu_s = processes.cpu_s(self._command)
        self._synchronize(trainer)
        self._dues[way].begin(step, every)
        self._turn = _Turn(way, self._round, step, steps, cpu_s, self._blocked_s(way), time.monotonic())

    def _end_turn(self, trainer: pl.Trainer) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        self._synchronize(trainer)
        saving, ended_s = self._savings[turn.way], time.monotonic()
        blocked_s = self._blocked_s(turn.way) - turn.blocked_s
        self._dues[turn.way].end()
        try:
            saving.settle()
            settled_s = time.monotonic()
            cpu_s = processes.cpu_s(self._command) - turn.cpu_s
            saving.leave()
        except Exception as error:
            self._give_up(turn.way, error)
            return
        os.sync()  # some do not: what the kernel has still to write would fall into the turns of others
        last = turn.first + turn.steps
        self._tell(
            {
                "turn": {
                    "model": self._training.model,
                    "interval": self._training.interval,
                    "way": turn.way,
                    "round": turn.round,
                    "steps": turn.steps,
                    "wall_s": ended_s - turn.wall_s,
                    "left_s": settled_s - ended_s,
                    "sync_s": time.monotonic() - settled_s,
                    "cpu_s": cpu_s,
                    "blocked_s": blocked_s,
                    "begun": {step: at for step, at in saving.begun.items() if turn.first <= step < last},
                    "safe": [event for event in saving.safe if turn.first <= event[0] < last],
                }
            }
        )

    def _blocked_s(self, way: str) -> float:
        return self._watches[way].spent_s + self._savings[way].waited_elsewhere_s()

    def _synchronize(self, trainer: pl.Trainer) -> None:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()

    # -- those that are called in their turns only ------------------------------------------------------------------

    def _call(self, way: str, hook: str, *arguments: Any) -> None:
        if way not in self._alive or self._savings[way].spot is not None:
            return
        for callback in self._savings[way].callbacks:
            try:
                getattr(callback, hook)(*arguments)
            except Exception as error:
                self._give_up(way, error)
                return

    def _give_up(self, way: str, error: Exception) -> None:
        """A way has failed: it has no turns any more, the others go on."""
        traceback.print_exception(error)
        self._alive.discard(way)
        self._dues[way].end()
        if self._is_on(way):
            self._turn = None
        self._left = [other for other in self._left if other != way]
        self._tell({"failed": self._training.failed(way, error)})


def _in_its_turn(hook: str) -> Callable[..., None]:
    def call(self: Conductor, *arguments: Any) -> None:
        if self._turn is not None:
            self._call(self._turn.way, hook, *arguments)

    return call


def _in_the_whole_fit(hook: str) -> Callable[..., None]:
    def call(self: Conductor, *arguments: Any, **named: Any) -> None:
        for way in self._savings:
            self._call(way, hook, *arguments, *named.values())
            if hook == "on_train_start" and way in self._alive:
                self._savings[way].leave()

    return call


for _hook in _EVERY_TURN:
    setattr(Conductor, _hook, _in_its_turn(_hook))
for _hook in _WHOLE_FIT:
    setattr(Conductor, _hook, _in_the_whole_fit(_hook))


def run(training: Training, folder: Path, command: int, tell: Tell) -> None:
    """Train.

    Args:
        training: what is measured.
        folder: where it may write; empty.
        command: process id of whoever counts what this process and its children use.
        tell: is told each turn as soon as it is over, and which ways failed.
    """
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    bind_team()
    model, data = build(training.model, training.scale, WITHOUT_END)
    savings: dict[str, Saving] = {}
    dues = {way: Due() for way in dict.fromkeys([NONE, *training.ways])}
    for way, due in dues.items():
        place = training.folder_of(way, folder)
        place.mkdir()
        try:
            savings[way] = WAYS[way](place, due)
        except Exception as error:
            traceback.print_exception(error)
            tell({"failed": training.failed(way, error)})
    conductor = Conductor(training, savings, dues, command, tell)
    always = [callback for saving in savings.values() if saving.spot is not None for callback in saving.callbacks]
    accelerator = "gpu" if training.device == "cuda" else "cpu"
    trainer = bare_trainer(WITHOUT_END, [conductor, *always], accelerator=accelerator, devices=1)
    try:
        trainer.fit(model, data)
    finally:
        for saving in savings.values():
            saving.close()
    tell({"state_bytes": state_bytes(trainer)})
