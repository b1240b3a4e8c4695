"""Two machines that train in shards, and two with snapshot servers, each of which has what one of them brings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.machines import Sharded, flushing, restoring, sending, staging, twin, twins
from tests.support.network import listening, network_or_skip
from tests.support.waiting import until

__all__ = ["twin", "twins"]


class Spread(Sharded):
    """Snapshots are spread over the two nodes."""

    third = "a snapshot server"
    memories: tuple[str, ...] = ("memory", "other")

    def start_node(self) -> None:
        known: dict[str, str] = getattr(self, "urls", {})
        for name in ("memory",) if known else self.memories:
            url = listening(self.network, name, 7070, self.root / name, "--allow-storage", str(self.root))
            self.urls = known = {**known, name: url}
        self.url = ",".join(known.values())


def committing(machines: Any) -> None:
    """A portion has come to each node since a step has ended, or nearly so."""
    staging(machines)
    before = {name: machines.network.received(name) for name in ("memory", "other")}

    def came() -> bool:
        return all(machines.network.received(name) > there + 400_000 for name, there in before.items())

    until(came, "all of it to be there", 100.0)


class Twice(Spread):
    """Snapshots are spread over three nodes, each portion is kept at two."""

    more = ("--replicas=2",)
    memories = ("memory", "other", "another")


@pytest.fixture
def machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str, request: pytest.FixtureRequest
) -> Iterator[Spread]:
    kind: type[Spread] = getattr(request, "param", Spread)
    with network_or_skip("spread", ("first", "second", *kind.memories), warm_python) as network:
        yield kind(network, tmp_path, monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("when", [staging, sending, committing, restoring, flushing])
@pytest.mark.parametrize("what", ["a rank", "a machine", "the first machine", "a snapshot server", "a link"])
def test_snapshots_are_spread_over_nodes_and_something_is_lost(
    machines: Spread, twin: Path, what: str, when: Callable[[Spread], None]
) -> None:
    machines.train_slowly_to(8)
    when(machines)
    machines.lose(what)
    assert machines.wait("run") == [0, 0], machines.log()
    machines.check(twin)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machines", [Twice], indirect=True)
@pytest.mark.parametrize("when", [staging, sending, committing, restoring, flushing])
@pytest.mark.parametrize("what", ["a machine", "the first machine"])
def test_with_replicas_a_machine_and_a_server_are_lost_at_once(
    machines: Spread, twin: Path, what: str, when: Callable[[Spread], None]
) -> None:
    """It goes on from the nodes that are left, with what a resume found there."""
    machines.train_slowly_to(8)
    when(machines)
    machines.network.lose("memory")
    machines.lose(what)
    until(lambda: "resumes at step" in machines.log() or machines.ended(), "it to go on", 200.0)
    machines.start_node()
    assert machines.wait("run") == [0, 0], machines.log()
    machines.check(twin)
