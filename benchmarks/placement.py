"""Keeps the threads with which torch computes on processors of their own.

The scheduler may put two of them on one processor, and leaves them there for seconds: each computes while the other
waits. A training without any snapshots then takes up to twice its time, more often after other threads have run. What
is compared here is far less than that.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

_TASKS = Path("/proc/self/task")


def bind_team() -> list[int]:
    """Bind all threads with which the calling one computes, but itself, to a processor each.

    The calling thread stays free, and so do those that it starts: they inherit where they may run. Call it before
    training, on the thread that trains.

    Returns:
        the processors. Empty where torch computes with one thread, or has more of them than processors.
    """
    team = torch.get_num_threads()
    processors = sorted(os.sched_getaffinity(0))[1:team]
    before = set(os.listdir(_TASKS))
    # Large enough that it is shared among all threads, which are started by that.
    torch.ones(team * 1_000_000).add_(1)
    started = sorted(int(task) for task in set(os.listdir(_TASKS)) - before)
    if not started and team > 1:
        raise RuntimeError("torch's threads were there before; call bind_team() before anything is computed")
    if len(started) != len(processors):
        return []
    for thread, processor in zip(started, processors, strict=True):
        os.sched_setaffinity(thread, {processor})
    return processors
