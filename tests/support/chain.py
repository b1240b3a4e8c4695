"""A trainer's host with snapshot servers behind it, all in this process, for the tests of the chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.client.remote import ServerStore
from lightning_spot.server import reconcile
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.store.local import LocalStore
from tests.support.server import MIB, RUN_ID, Bench, NodeBehind
from tests.support.store import GatedStore

RUN = f"run@{RUN_ID}"
FIRST, SECOND, THIRD = "spot://first:7070", "spot://second:7070", "spot://third:7070"


class Chained(Bench):
    """A local server, and snapshot servers behind it; each has stores of its own over the same directories."""

    def __init__(self, root: Path, allow: list[str] | None) -> None:
        self.behind: dict[str, NodeBehind] = {}
        self.far: dict[str, dict[str, GatedStore]] = {FIRST: {}, SECOND: {}, THIRD: {}}
        self.nodes = {base: self.make_node(base, allow) for base in (FIRST, SECOND, THIRD)}
        super().__init__(root, slots=4)
        for base in (FIRST, SECOND, THIRD):
            self.behind[base] = NodeBehind(f"{base}/{RUN}", self.nodes[base])

    def make_node(self, base: str, allow: list[str] | None) -> SnapshotServer:
        stores = self.far[base]
        return SnapshotServer(
            slots=None,
            memory_bytes=64 * MIB,
            allow=allow,
            open_store=lambda url: stores.setdefault(url, GatedStore(url)),
        )

    def store(self, url: str) -> Any:
        return self.behind[url.rpartition("/")[0]] if url.startswith("spot://") else super().store(url)

    def by_node(self, base: str) -> GatedStore:
        """The durable tier as a snapshot server sees it."""
        url = self.tier().url
        return self.far[base].setdefault(url, GatedStore(url))

    def durable(self) -> list[int]:
        return [manifest.step for manifest in LocalStore(self.tier().url).survey().manifests]

    def start(self, *nodes: str, **more: Any) -> None:
        self.open(servers=nodes, **more)

    def close(self) -> None:
        for stores in self.far.values():
            for store in stores.values():
                store.open.set()
        for behind in self.behind.values():
            behind.open.set()
        super().close()
        for node in self.nodes.values():
            node.close()


class OverHttp(Bench):
    """A node on a trainer's host whose snapshot servers are processes."""

    def store(self, url: str) -> Any:
        if url.startswith("spot://"):
            return ServerStore(url)
        return super().store(url)


@contextmanager
def chained(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Chained]]:
    """Makes benches whose chains ask again soon; closes them."""
    monkeypatch.setattr(reconcile, "ASK_AGAIN_S", 0.2)
    monkeypatch.setattr(reconcile, "FIRST_AWAY_S", 0.1)
    made: list[Chained] = []

    def make(allow: list[str] | None = None) -> Chained:
        made.append(Chained(root, [str(root)] if allow is None else allow))
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            each.close()
