"""Ranks that are told of an event at different times agree on one place, and the first one leaves first."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_spot.session import ranks
from lightning_spot.session.ranks import Place, StopAgreement
from tests.support.said import said
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G26")


@pytest.fixture
def store() -> Iterator[list[TCPStore]]:
    """That of a process group, at which ranks meet; it is gone when nothing has it any more."""
    made = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    yield made
    made.clear()


def agreement(
    store: list[TCPStore], rank: int, called: Callable[[], dict[str, Any] | None] = lambda: None, world_size: int = 3
) -> StopAgreement:
    own = TCPStore("127.0.0.1", store[0].port, is_master=False, wait_for_workers=False)
    return StopAgreement(rank=rank, world_size=world_size, store=own, called=called)


@pytest.mark.parametrize("late_s", [0.0, 0.07])
@pytest.mark.parametrize("who", [[0], [1], [2], [0, 1, 2]])
def test_ranks_that_drift_agree_on_one_place(who: list[int], late_s: float, store: list[TCPStore]) -> None:
    """Ranks at different speeds (nothing holds them together here) all stop at one place, past the farthest."""
    called = [threading.Event() for _ in range(3)]

    def train(rank: int) -> tuple[Place, int]:
        agreed = agreement(store, rank, lambda: {"by": rank} if called[rank].is_set() else None)
        with contextlib.closing(agreed):
            for place in map(Place, range(1, 20_000)):
                time.sleep(0.002 + 0.003 * rank)
                if agreed.passed(place):
                    return place, agreed.facts["by"]
        raise AssertionError("it trained to its end")

    with ThreadPoolExecutor(3) as ranks:
        trainings = [ranks.submit(train, rank) for rank in range(3)]
        for rank in who:
            time.sleep(late_s)
            called[rank].set()
        places, by = zip(*(training.result(120) for training in trainings), strict=True)
    assert len(set(places)) == 1
    assert set(by) <= set(who)


def test_the_others_wait_until_the_first_rank_has_left(store: list[TCPStore], caplog: pytest.LogCaptureFixture) -> None:
    """So they do where no notice came, too: a signal that came behind the last place ends a process then."""
    first, *others = (agreement(store, rank) for rank in range(3))
    waits = [threading.Thread(target=other.wait_for_first, args=(120.0,)) for other in others]
    for wait in waits:
        wait.start()
    first.wait_for_first(120.0)  # not at all
    assert all(wait.is_alive() for wait in waits)
    first.leave(at_exit=False)
    for wait in waits:
        wait.join(60)
        assert not wait.is_alive()
    for other in others:
        assert not other.passed(Place(7))
        other.leave(at_exit=False)
    assert not caplog.records


def test_nobody_waits_for_a_store_that_is_gone(store: list[TCPStore], caplog: pytest.LogCaptureFixture) -> None:
    second = agreement(store, 1, world_size=2)
    assert not second.passed(Place(1))
    store.clear()
    second.wait_for_first(120.0)
    assert len(said(caplog, "ranks-unreachable")) == 1
    assert not second.passed(Place(2))
    second.leave(at_exit=False)


def test_a_notice_is_told_soon_however_many_ranks_there_are(store: list[TCPStore]) -> None:
    """Machines may be taken away after 30 s."""
    with contextlib.closing(agreement(store, 1, lambda: {"by": 1}, world_size=100_000)):
        until(lambda: store[0].check(["called"]), "the others to hear of it", 10.0)


def test_a_rank_that_does_not_answer_is_waited_for_a_while(
    store: list[TCPStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranks, "DECIDE_S", 0.3)
    with contextlib.closing(agreement(store, 0, lambda: {"by": 0}, world_size=2)) as first:
        until(lambda: first.passed(Place(1)), "it to stop alone")
    assert said(caplog, "stop-not-agreed")


@pytest.mark.parametrize("forged", ["[" * 10_000, "7", '{"else": 1}'])
def test_what_a_stranger_publishes_is_a_warning(
    forged: str, store: list[TCPStore], caplog: pytest.LogCaptureFixture
) -> None:
    store[0].set("called", '{"by": 1}')
    store[0].set("stop", forged)
    with contextlib.closing(agreement(store, 1, world_size=2)) as second:
        second.wait_for_first(120.0)
    assert len(said(caplog, "ranks-unreachable")) == 1
