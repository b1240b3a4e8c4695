"""Several servers, where no further thread can be had for a moment: they go on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_spot.store.local import LocalStore
from tests.support.server import FIRST, SECOND, WithServers

pytestmark = pytest.mark.guarantee("G24")

Lacking = Callable[[str, int], None]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_whose_servers_no_thread_asked_is_asked_for_later(
    tmp_path: Path, lacking: Lacking, replicas: int
) -> None:
    """Nothing of it went anywhere."""
    with contextlib.closing(WithServers(tmp_path, [str(tmp_path)])) as bench:
        lacking("spot-asker", 1)
        bench.open(servers=(FIRST, SECOND), replicas=replicas)
        assert bench.open(servers=(FIRST, SECOND), replicas=replicas).carries
        bench.save(1)
        assert bench.flush() == []
        assert [manifest.step for manifest in LocalStore(bench.tier().url).survey().manifests] == [1]
