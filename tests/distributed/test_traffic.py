"""What ranks say to each other, and to the server, for one snapshot: little, and training waits for none of it."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import lightning_spot
from lightning_spot import EverySteps
from lightning_spot.client.local_server import Session
from lightning_spot.client.server_client import ServerClient
from lightning_spot.session.collectives import AsyncBroadcast
from lightning_spot.session.coordinator import Decision
from lightning_spot.session.snapshotter import Pacing
from tests.support.gpus import NEEDS_GPU
from tests.support.program import run
from tests.support.training import train

EVERY, STEPS = 4, 50
FIRST, LAST = 4 * EVERY, STEPS - EVERY  # by then slots are made and layouts agreed; what ends a run comes later


_OURS = str(Path(lightning_spot.__file__).parent)
_LOOPS = str(Path(pl.loops.__file__).parent)
_COLLECTIVES = (
    *("broadcast", "broadcast_object_list", "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_gather", "all_gather_object", "all_gather_into_tensor", "gather", "gather_object", "scatter"),
    *("scatter_object_list", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv"),
    *("barrier", "monitored_barrier", "new_group"),
)


class Traffic(pl.Callback):
    """Counts what ranks say, from when it is made. The last rank comes to each step boundary later than the others.

    Attributes:
        talks: collectives that ours have begun on the training thread: step, name, and whether it waits for others.
        asked: requests to servers: step, path, and whether the training thread waits for the answer.
    """

    def __init__(self, late_rank: int) -> None:
        self.step, self._late_rank, self._is_within = -1, late_rank, False
        self.talks: list[tuple[int, str, bool]] = []
        self.asked: list[tuple[int, str, bool]] = []
        for name in _COLLECTIVES:
            counted = self._counted(name, getattr(distributed_c10d, name))
            setattr(distributed_c10d, name, counted)
            setattr(dist, name, counted)
        ServerClient._exchange = self._noted(ServerClient._exchange)  # type: ignore[method-assign]
        Session._ask = self._noted(Session._ask)  # type: ignore[method-assign]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(0.05 * (trainer.global_rank == self._late_rank))

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.step = trainer.global_step

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **how: Any) -> Any:
            thread = threading.current_thread()
            if self._is_within or thread is not threading.main_thread() or not _is_ours():
                return call(*arguments, **how)
            self._is_within, begun_only = True, how.get("async_op")
            self.talks.append((self.step, name, not begun_only))
            try:
                given = call(*arguments, **how)
            finally:
                self._is_within = False
            return SimpleNamespace(wait=lambda: self._waited(name, given)) if begun_only else given

        return counted

    def _waited(self, name: str, work: Any) -> None:
        self.talks.append((self.step, f"{name}.wait", False))
        work.wait()

    def _noted(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def noted(client: Any, *arguments: Any, **how: Any) -> Any:
            path = arguments[1] if isinstance(client, ServerClient) else "channel"
            self.asked.append((self.step, path, threading.current_thread() is threading.main_thread()))
            return ask(client, *arguments, **how)

        return noted


def _is_ours() -> bool:
    """Whether ours call, and not a loop of Lightning, which runs within a method of ours all the time."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(_LOOPS):
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False


def train_counted(root: Path, ranks: int, **how: Any) -> None:
    """Train; each rank leaves every collective that ours begin on the training thread, and each request to a server."""
    traffic = Traffic(late_rank=ranks - 1)
    trainer = train(root, traffic, ranks=ranks, steps=STEPS, every=EVERY, width=64, **how)
    (root / f"traffic-{trainer.global_rank}.json").write_text(json.dumps([traffic.talks, traffic.asked]))


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, {}),
        (3, {"hosts": 2}),
        (2, {"local_server": False}),
        (4, {"sharded": True}),
        pytest.param(4, {}, marks=pytest.mark.soak),
        pytest.param(2, {"sharded": True}, marks=pytest.mark.soak),
    ],
)
def test_training_waits_for_no_collective_of_ours(
    warm_python: str, tmp_path: Path, ranks: int, how: dict[str, Any]
) -> None:
    """Nor for a rank that comes to each seam later than the others; the first snapshot is no other one."""
    run(warm_python, train_counted, tmp_path, ranks=ranks, **how)
    snapshots = (LAST - FIRST) // EVERY
    for rank in range(ranks):
        talks, requests = json.loads((tmp_path / f"traffic-{rank}.json").read_text())
        assert any(waits for step, _, waits in talks if step < 0)  # so those that wait are seen
        assert [name for step, name, waits in talks if 0 <= step < LAST and waits] == []
        said = [name for step, name, _ in talks if FIRST <= step < LAST]
        assert said == ["broadcast", "broadcast.wait"] * snapshots
        asked = Counter(_what(path) for step, path, _ in requests if FIRST <= step < LAST)
        # A slot, its commit; rank 0: whether the snapshot counts, how the tiers are. Some may come from the
        # snapshot before. A slot may be leased ahead in vain, or too early, be given back, and asked for again where
        # steps take long. Whether a server lives is asked while it takes long to answer; figures go at times.
        usual = {"channel", "uploads", "commit"} | (set() if rank else {"status", "awaited"})
        assert asked.keys() <= usual | {"healthz", "figures"}, asked
        for what in usual:
            assert asked[what] <= {"uploads": 4, "status": 2, "awaited": 4}.get(what, 1) * (snapshots + 2), asked
        # A slot that is leased ahead is not always there in time: steps take a moment here. One is asked for then, and
        # waited for where none is free.
        waited = Counter(_what(path) for step, path, waits in requests if FIRST <= step < LAST and waits)
        assert waited.keys() <= {"uploads", "healthz"}, waited
        assert waited["uploads"] <= 2 * (snapshots + 2), waited


def _what(path: str) -> str:
    """What a server is asked for, without names of runs and of uploads."""
    parts = [part for part in path.split("/") if part and not re.fullmatch("[0-9a-f]{32}|run%40.*", part)]
    return parts[-1]


class Ranks:
    """A trainer as far as a word needs one; what ranks wait for each other for is counted."""

    is_global_zero, num_nodes, global_step, estimated_stepping_batches = True, 1, 0, 100

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        self.world_size = world_size
        self.strategy = SimpleNamespace(broadcast=self.broadcast, root_device=torch.device(device))
        self.waited = 0

    def broadcast(self, said: Any) -> Any:
        self.waited += 1
        return said


@pytest.fixture(
    params=[
        "gloo",
        pytest.param("nccl", marks=NEEDS_GPU),
    ]
)
def group(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A process group of one rank, and a trainer that has it."""
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield cast(Any, Ranks(1, "cuda:0" if request.param == "nccl" else "cpu"))
    finally:
        dist.destroy_process_group()


def decision(ranks: int) -> list[Any]:
    """How so many ranks write a snapshot."""
    return [Decision(writers=ranks, ranges=tuple(range(ranks))).plain(), False, 40]


@pytest.mark.parametrize("said", ["", [None, False, 7], "é" * 100, json.loads(json.dumps(decision(512)))])
def test_a_word_comes_as_it_was_said(group: Any, said: Any) -> None:
    word = AsyncBroadcast(group)
    word.say(said)
    assert word.is_under_way
    assert word.hear() == said
    assert not word.is_under_way
    assert group.waited == 0


def test_for_a_word_that_is_too_long_all_ranks_wait(group: Any) -> None:
    word, dice = AsyncBroadcast(group), random.Random(1)
    said = "".join(f"{dice.randrange(2**64):x}" for _ in range(2000))
    word.say(said)
    assert word.hear() == said
    assert group.waited == 1


def taken_by(ranks: int, every: int, steps: list[int], lasts: float = 0.0) -> tuple[list[int], int]:
    """At which steps so many ranks take snapshots, each of which is under way for so long; and how often they wait."""
    trainer, pacing, over, taken = cast(Any, Ranks(ranks)), Pacing(EverySteps(every)), 0.0, list[int]()
    pacing.begin(trainer, 1, None)

    def can_begin() -> str:
        return "alone" if trainer.global_step >= over else ""

    for trainer.global_step in steps:
        if pacing.due(trainer, can_begin, float):
            taken.append(trainer.global_step)
            pacing.taken(trainer.global_step)
            over = trainer.global_step + lasts
        pacing.look_ahead(trainer, can_begin)
    return taken, trainer.waited


@pytest.mark.parametrize("seed", range(20))
def test_an_early_broadcast_changes_no_snapshot_step(seed: int) -> None:
    """Also where ``global_step`` moves on by more than one between two step boundaries (several optimizers)."""
    dice = random.Random(seed)
    every, steps = dice.randint(1, 6), list(itertools.accumulate(dice.choice((1, 1, 2, 3)) for _ in range(60)))
    (alone, _), (together, waited) = taken_by(1, every, steps), taken_by(2, every, steps)
    assert alone == together
    assert waited <= len(together)
    assert len(alone) >= steps[-1] // (2 * max(every, 3))


@pytest.mark.parametrize(("every", "lasts"), [(1, 0.5), (2, 1.5), (1, 3.5)])
def test_a_snapshot_that_has_ended_does_not_delay_the_next(every: int, lasts: float) -> None:
    """Nor do ranks wait at every step for one that takes several."""
    steps = list(range(1, 41))
    (alone, _), (together, waited) = taken_by(1, every, steps, lasts), taken_by(2, every, steps, lasts)
    assert waited <= 40 + len(together)
    if lasts < every:
        assert together == alone == list(range(every, 41, every))
    else:
        assert len(together) >= 8  # of 10: what is over is seen a step later
