"""Generators that stay as they are have the same state in each snapshot, and others never an old one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from lightning_spot.state.compare import differences
from lightning_spot.state.randomness import Generators, capture_random, restore_random

DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "python's gauss": lambda: random.gauss(0.0, 1.0),
    "numpy": lambda: np.random.rand(),
    "numpy's gauss": lambda: np.random.randn(),
    "torch": lambda: torch.rand(1),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Other tests draw what they would have."""
    before = capture_random()
    yield
    restore_random(before)


def test_what_stays_is_the_same_tensor() -> None:
    generators = Generators()
    first, second = generators.capture(), generators.capture()
    assert first["python"][1] is second["python"][1]
    assert first["numpy"]["state"]["key"] is second["numpy"]["state"]["key"]
    assert first["torch"] is second["torch"]
    assert first["torch"] is not capture_random()["torch"]


@pytest.mark.parametrize("draw", DRAWS)
def test_a_draw_shows_in_the_next_snapshot_and_in_no_former_one(draw: str) -> None:
    generators = Generators()
    first, before = generators.capture(), capture_random()
    for _ in range(3):
        DRAWS[draw]()
        now = generators.capture()
        assert differences(now, capture_random()) == []
        assert differences(now, first) != []
    assert differences(first, before) == []
    drawn = [DRAWS[draw]() for _ in range(3)]
    restore_random(now)
    assert [DRAWS[draw]() for _ in range(3)] == drawn
    restore_random(first)
    assert differences(generators.capture(), before) == []
