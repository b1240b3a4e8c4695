"""The model of shards at several places, searched as far as some minutes go."""

from __future__ import annotations

import pytest

from tests.support.commit_model import Model, search

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    "model",
    [
        Model(writers=2, servers=1, snapshots=3, attempts=2, values=("a", "b", "")),
        Model(writers=2, servers=2, snapshots=3, attempts=3),
        Model(writers=3, servers=2, snapshots=3, attempts=2),
    ],
    ids=["one server", "two servers", "three writers"],
)
def test_no_state_of_a_million_loses_or_mixes_a_snapshot(model: Model) -> None:
    seen, problem = search(model, most=1_000_000)
    assert not problem
    assert seen >= 1_000_000
