"""The node of a host that takes part is lost with what its ranks have written: the other hosts hear of it."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lightning_spot.capture.following import Follower, Task
from lightning_spot.capture.split import Number

from lightning_spot.capture import following
from lightning_spot.errors import ServerUnreachableError
from lightning_spot.memory.host import Host, Lease
from tests.support.waiting import until

AT = "spot://10.0.0.5:7070/run spot://10.0.0.6:7070/run"


class Node(SimpleNamespace):
    """The node of a host, as a rank knows it."""

    server_call_timeout_s = 5.0

    def __init__(self) -> None:
        super().__init__(lives=True, asked=0, declined=list[tuple[Any, ...]]())

    def join(self, name: str, **_: Any) -> Any:
        return SimpleNamespace(name=name)

    def placed(self, *_: Any) -> None:
        """All is in its slot."""

    def check(self) -> None:
        self.asked += 1
        if not self.lives:
            raise ServerUnreachableError("it was killed")

    def decline(self, *told: Any) -> None:
        self.declined.append(told)

    def disconnect(self) -> None:
        self.lives = False


class Rank(Follower[str]):
    def _fill(self, host: Host, lease: Lease, task: Task[str], what: str) -> None:
        """Nothing is to be copied."""

    def _say(self, host: Host, lease: Lease, torn: str) -> None:
        """Its bytes are in place."""

    def write(self, name: str, at: str) -> None:
        task = Task(name, "rank 3", Number(3, 1, 1, 2), at, "something", 5.0)
        self._put(task)
        task.done.result(10.0)


@pytest.mark.parametrize("at", [AT, ""])
def test_other_hosts_hear_that_the_node_is_lost(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They waited for a minute, twice, and training with them."""
    monkeypatch.setattr(following, "_AGAIN_S", 0.05)
    nodes = [Node(), Node()]
    ready = threading.Event()

    def connect() -> Host:
        ready.wait(10.0)  # it takes a while to start
        return cast(Host, nodes[1])

    with contextlib.closing(Rank(cast(Host, nodes[0]), connect)) as rank:
        rank.write("step-000000001-attempt-0001", at)
        rank.write("step-000000002-attempt-0001", at)
        if at:
            until(lambda: nodes[0].asked, "it to be asked whether it lives")
        nodes[0].lives = False
        ready.set()
        if at:
            until(lambda: nodes[1].declined, "it to be said")
    why = "rank 3: the server of its host was lost"
    assert nodes[1].declined == ([("step-000000002-attempt-0001", why, at, 1, 1)] if at else [])
    assert not nodes[0].declined
