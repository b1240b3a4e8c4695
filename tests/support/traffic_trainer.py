"""Trains on several ranks (gloo) and counts what ours say: ``python -m tests.support.traffic_trainer ROOT --ranks N``.

Each rank leaves ``ROOT/traffic-K.json``: every call of ``torch.distributed`` that comes from this package in the
training thread, and every request to a node, each with the step at which it was made.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard

import lightning_spot
from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.client.embedded import Session
from lightning_spot.client.server_client import ServerClient
from tests.support.exact_cases import loader
from tests.support.together_trainer import Wide, be_on_host
from tests.support.trainer import trainer as quiet

_OURS = str(Path(lightning_spot.__file__).parent)
_LOOPS = str(Path(pl.loops.__file__).parent)
_COLLECTIVES = (
    *("broadcast", "broadcast_object_list", "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_gather", "all_gather_object", "all_gather_into_tensor", "gather", "gather_object", "scatter"),
    *("scatter_object_list", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv"),
    *("barrier", "monitored_barrier", "new_group"),
)


@dataclass(frozen=True)
class Talk:
    """A collective that ours have begun.

    Attributes:
        step: at which.
        name: of torch's function.
        waits: whether it returns when other ranks have come to it only.
        blocked_s: how long the thread has slept in it, and in waiting for what it gives.
    """

    step: int
    name: str
    waits: bool
    blocked_s: float


class Traffic(pl.Callback):
    """Counts, from when it is made.

    Args:
        late: a rank that comes to each seam later than the others, and how much later, seconds.
    """

    def __init__(self, late: tuple[int, float] = (-1, 0.0)) -> None:
        self.step = -1
        self._late = late
        self.talks: list[Talk] = []
        self.asked: list[tuple[int, str, bool]] = []
        self._inside = False
        for name in _COLLECTIVES:
            counted = self._counted(name, getattr(distributed_c10d, name))
            setattr(distributed_c10d, name, counted)
            setattr(dist, name, counted)
        for client in (ServerClient, Session):
            client._ask = self._noted(client._ask)  # type: ignore[method-assign, assignment]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        rank, seconds = self._late
        if trainer.global_rank == rank:
            time.sleep(seconds)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.step = trainer.global_step

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **how: Any) -> Any:
            thread = threading.current_thread()
            if self._inside or thread is not threading.main_thread() or not _is_ours():
                return call(*arguments, **how)
            self._inside = True
            try:
                with self._timing(name, waits=not how.get("async_op")):
                    given = call(*arguments, **how)
            finally:
                self._inside = False
            return _Waited(given, lambda: self._timing(f"{name}.wait", waits=False)) if how.get("async_op") else given

        return counted

    @contextmanager
    def _timing(self, name: str, *, waits: bool) -> Iterator[None]:
        before_s = _asleep_s()
        yield
        self.talks.append(Talk(self.step, name, waits, _asleep_s() - before_s))

    def _noted(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def noted(client: Any, *arguments: Any) -> Any:
            request = arguments[1] if isinstance(client, ServerClient) else None
            waits = threading.current_thread() is threading.main_thread()
            self.asked.append((self.step, request.path if request is not None else "channel", waits))
            return ask(client, *arguments)

        return noted


class _Waited:
    """What torch gives for a collective that is only begun."""

    def __init__(self, work: Any, timing: Callable[[], Any]) -> None:
        self._work, self._timing = work, timing

    def wait(self) -> None:
        with self._timing():
            self._work.wait()


def _is_ours() -> bool:
    """Whether ours call, and not a loop of Lightning, which runs within a method of ours all the time."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(_LOOPS):
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _asleep_s() -> float:
    """Seconds for which this thread has not wanted a processor: neither had one, nor waited for one to be free."""
    waited_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return time.perf_counter() - time.thread_time() - waited_ns / 1e9


class WideInShards(Wide):
    """The same with its layers in shards."""

    def configure_model(self) -> None:
        for layer in (self.first, self.middle, self.last):
            if not hasattr(layer, "set_reshard_after_backward"):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])  # type: ignore[index] # set by the strategy


def _strategy(arguments: argparse.Namespace) -> Strategy:
    if arguments.sharded:
        return ModelParallelStrategy(data_parallel_size=arguments.ranks, tensor_parallel_size=1)
    return DDPStrategy(process_group_backend="gloo", broadcast_buffers=False)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--memory", default="auto", help="none: the ring is in rank 0's process")
    parser.add_argument("--hosts", type=int, default=1, help="ranks believe to be on so many hosts")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--every", type=int)
    parser.add_argument("--late", type=int, default=-1, help="a rank that comes to each seam later than the others")
    parser.add_argument("--late-ms", type=float, default=50.0)
    arguments = parser.parse_args()
    traffic = Traffic((arguments.late, arguments.late_ms / 1000))
    torch.set_num_threads(1)
    pl.seed_everything(11, verbose=False)
    be_on_host(int(os.environ.get("LOCAL_RANK", "0")) * arguments.hosts // arguments.ranks)
    spot = SpotCheckpoint(
        str(arguments.root / "run"),
        servers=None if arguments.memory in ("auto", "none") else arguments.memory,
        local_server=arguments.memory != "none",
        interval=EverySteps(arguments.every),
        on_full="wait",
    )
    where = {"devices": arguments.ranks, "strategy": _strategy(arguments)}
    trainer = quiet(traffic, spot, max_epochs=-1, max_steps=arguments.steps, **where)
    trainer.fit((WideInShards if arguments.sharded else Wide)(64), loader())
    told = {"talks": [asdict(talk) for talk in traffic.talks], "asked": traffic.asked}
    (arguments.root / f"traffic-{trainer.global_rank}.json").write_text(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
