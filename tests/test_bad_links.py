"""Machines whose links are slow, delay and lose packets, and are cut for a while: what is left is exact yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_spot.exact.compare import differences
from tests.link import Link
from tests.machines import PHASES, STEPS, Kind, Machines, Sharded, flushing, started, twin
from tests.test_sharded_bucket import Bucket
from tests.test_together import check_states, load, manifests

__all__ = ["twin"]

FAR = Link(delay_ms=40.0, jitter_ms=10.0, loss=0.005)
"""Another continent, by a line that loses packets."""
SLOW = Link(bits_per_s=200_000_000)
CUT_S = 20.0
LINKS = [pytest.param(FAR, id="far"), pytest.param(SLOW, id="slow")]


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> Link:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str, link: Link) -> Iterator[Machines]:
    yield from started(_by(Machines, link), tmp_path, monkeypatch, warm_python)


@pytest.fixture(params=[Sharded, Bucket])
def sharded(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warm_python: str,
    link: Link,
) -> Iterator[Sharded]:
    yield from started(_by(request.param, link), tmp_path, monkeypatch, warm_python)


def _by(kind: type[Kind], by: Link) -> type[Kind]:
    return type(kind.__name__, (kind,), {"link": by})


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("when", [*PHASES, flushing])
def test_two_machines_train_by_bad_links_and_one_is_cut(
    machines: Machines, tmp_path: Path, when: Callable[[Machines], None]
) -> None:
    machines.train("twin", STEPS)
    assert machines.wait("twin") == [0, 0]
    machines.train("run", STEPS)
    machines.come_to(8)
    when(machines)
    machines.cut_for_a_while("second", CUT_S)
    assert machines.wait("run") == [0, 0], machines.log()
    check_states(tmp_path / "run")
    ends = [load(root, manifests(root)[0]) for root in (tmp_path / "twin", tmp_path / "run")]
    assert differences(*ends) == []


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("when", [*PHASES, flushing])
def test_machines_train_in_shards_by_bad_links_and_one_is_cut(
    sharded: Sharded, twin: Path, when: Callable[[Sharded], None]
) -> None:
    if when is flushing and isinstance(sharded, Bucket):
        pytest.skip("each host brings its files to the bucket at once: there is no other phase than sending")
    sharded.train("run", STEPS)
    sharded.come_to(8)
    when(sharded)
    sharded.cut_for_a_while("second", CUT_S)
    assert sharded.wait("run") == [0, 0], sharded.log()
    sharded.check(twin)
