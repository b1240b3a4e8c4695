"""Threads beside training: torch computes alone on them, and nowhere else."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from lightning_spot.capture.copier import LoneThread
from lightning_spot.capture.writer import Background

LARGE = 4_000_000  # elements; torch shares from 32,768 on


@pytest.fixture
def team() -> Iterator[None]:
    """Torch computes with two threads here, and has done so."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(LARGE).add_(1)
    yield
    torch.set_num_threads(before)


def threads() -> set[str]:
    """All threads of this process, torch's included."""
    return set(os.listdir("/proc/self/task"))


def test_torch_starts_no_second_team_beside_training(team: None) -> None:
    started: list[set[str]] = []
    done = threading.Event()

    def compute() -> None:
        before = threads()
        torch.ones(LARGE).add_(1)
        new = threads() - before  # of those that were there some may have ended: other tests'
        started.append(new - {str(thread.native_id) for thread in threading.enumerate()})
        done.set()

    lone = LoneThread(target=compute, name="lone")
    lone.start()
    lone.join()
    background = Background("lone too")
    done.clear()
    background.put(compute)
    assert done.wait(120)
    background.close(60)
    assert started == [set()] * 2


def test_training_and_the_threads_of_others_keep_their_teams(team: None) -> None:
    LoneThread(target=lambda: None).start()
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert [torch.get_num_threads(), *others] == [2, 2]
