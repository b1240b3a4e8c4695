"""The simulation of what places do, with thousands of seeds."""

from __future__ import annotations

import pytest

from tests.support.reconcile_model import simulate

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("first", range(0, 10_000, 1000))
def test_no_seed_of_thousands_loses_mixes_or_leaves_anything(first: int) -> None:
    assert [problem for seed in range(first, first + 1000) if (problem := simulate(seed))] == []
