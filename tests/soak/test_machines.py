"""Machines that train together, and one thing of them is lost in one phase of a snapshot or of a resume.

Each thing that may be lost, at each time, is a test. Training goes on or is started again, and ends as its twin does,
bit for bit.

==================  =====================================================================================
lost                a rank; the second machine (all its processes and memory); the first machine, which
                    has rank 0; the snapshot server; the link of the second machine, for some seconds
when                staging, sending, committing, flushing, restoring, or any moment of training
trained             DDP and FSDP2, each on two and on four ranks
==================  =====================================================================================

Elsewhere the same is lost without a snapshot server (DDP: ``test_across.py``; FSDP2, by way of a bucket:
``test_sharded_bucket.py``), with snapshots spread over several nodes (``test_spread_machines.py``), by bad links
(``test_bad_links.py``), and on one host (``test_together.py``, ``test_sharded_fit.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.test_together import accounts, check_run, check_states
from tests.support.machines import PHASES, STEPS, Machines, Sharded, flushing, lose, started, training, twins, variant

__all__ = ["twins"]

LOST = ("a rank", "a machine", "the first machine", "the snapshot server", "a link")
TWO, FOUR = 1, 2
"""Ranks of each machine."""

EVERYDAY = [("the first machine", flushing, TWO)]
CELLS = [
    pytest.param(
        *(what, when, local),
        marks=[] if (what, when, local) in EVERYDAY else pytest.mark.soak,
        id=f"{what}-{when.__name__}-{2 * local} ranks",
    )
    for what in LOST
    for when in (training, *PHASES, flushing)
    for local in (TWO, FOUR)
]


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str, local: int) -> Iterator[Machines]:
    yield from started(variant(Machines, local=local), tmp_path, monkeypatch, warm_python)


@pytest.fixture
def sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str, local: int) -> Iterator[Sharded]:
    yield from started(variant(Sharded, local=local), tmp_path, monkeypatch, warm_python)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("what", "when", "local"), CELLS)
def test_machines_train_and_something_is_lost(
    machines: Machines, tmp_path: Path, what: str, when: Callable[[Machines], None]
) -> None:
    machines.train("twin", STEPS)
    assert set(machines.wait("twin")) == {0}
    check_states(tmp_path / "twin")
    assert accounts(tmp_path / "twin", machines.count)[0]["aborted"] == 0
    machines.train("run", STEPS)
    machines.come_to(12)
    when(machines)
    lose(machines, what, STEPS)
    assert set(machines.wait("run")) == {0}
    check_run(tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("what", "when", "local"), CELLS)
def test_machines_train_in_shards_and_something_is_lost(
    sharded: Sharded, twins: Callable[[int], Path], what: str, when: Callable[[Sharded], None]
) -> None:
    sharded.train_slowly_to(8)
    when(sharded)
    sharded.lose(what)
    assert sharded.wait("run") == [0, 0], sharded.log()
    sharded.check(twins(sharded.count))
