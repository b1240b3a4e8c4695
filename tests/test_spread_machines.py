"""Two machines that train in shards, and two with memory nodes, each of which has what one of them brings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import until
from tests.machines import Sharded, flushing, restoring, sending, staging, twin
from tests.network import listening, network_or_skip

__all__ = ["twin"]


class Spread(Sharded):
    """Snapshots are spread over the two nodes."""

    third = "a memory node"

    def start_node(self) -> None:
        known: dict[str, str] = getattr(self, "urls", {})
        for name in ("memory",) if known else ("memory", "other"):
            url = listening(self.network, name, 7070, self.root / name, "--allow", str(self.root))
            self.urls = known = {**known, name: url}
        self.url = ",".join(known.values())


def committing(machines: Any) -> None:
    """A portion has come to each node since a step has ended, or nearly so."""
    staging(machines)
    before = {name: machines.network.received(name) for name in ("memory", "other")}

    def came() -> bool:
        return all(machines.network.received(name) > there + 400_000 for name, there in before.items())

    until(came, "all of it to be there", 100.0)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Iterator[Spread]:
    with network_or_skip("spread", ("first", "second", "memory", "other"), warm_python) as network:
        yield Spread(network, tmp_path, monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("when", [staging, sending, committing, restoring, flushing])
@pytest.mark.parametrize("what", ["a rank", "a machine", "the first machine", "a memory node", "a link"])
def test_snapshots_are_spread_over_nodes_and_something_is_lost(
    machines: Spread, twin: Path, what: str, when: Callable[[Spread], None]
) -> None:
    machines.train_slowly_to(8)
    when(machines)
    machines.lose(what)
    assert machines.wait("run") == [0, 0], machines.log()
    machines.check(twin)
