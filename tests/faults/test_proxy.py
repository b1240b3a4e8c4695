"""Every message to a server is lost, cut, delayed or damaged once: what was told is true, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from lightning_spot.client.filesystem import SpotFileSystem
from lightning_spot.client.remote import ServerStore
from lightning_spot.errors import SpotError
from lightning_spot.snapshot.manifest import Manifest
from tests.support.proxy import KINDS, Proxy
from tests.support.server import RunningServer, StartServer
from tests.support.store import snapshot
from tests.support.waiting import until

NBYTES, PART_BYTES = 20_000, 6_000


def made(step: int, **more: Any) -> tuple[Manifest, memoryview]:
    manifest, data = snapshot(step, nbytes=NBYTES, part_bytes=PART_BYTES, **more)
    return manifest, memoryview(data)


class Case:
    """A client of a server behind a proxy, and one that asks the server directly afterwards."""

    def __init__(self, server: RunningServer, proxy: Proxy) -> None:
        self.proxy = proxy
        self.client = server.client()
        self.store = ServerStore(f"{server.url}/run")
        self.client.call("POST", "/v1/runs/run/open", {"attempt": 1})
        self.client.call("POST", "/v1/runs/safe/open", {"attempt": 1})
        self.safe, image = made(1, run="safe")
        ServerStore(f"{server.url}/safe").put(self.safe, image, attempt=1)

    def run(self, number: int, kind: str) -> bool:
        """Strike at message ``number`` of everything a client does; whether there were so many messages."""
        self.proxy.strike(number, kind)
        self._snapshot(*made(10 + number * len(KINDS) + KINDS.index(kind)))
        self._nothing_else()
        return self.proxy.struck

    def _snapshot(self, manifest: Manifest, image: memoryview) -> None:
        remote = ServerStore(f"{self.proxy.url}/run")
        said = self._try(lambda: remote.put(manifest, image, attempt=1))
        held = self._held("run")
        assert manifest.name in held or not said
        for other in held.values():
            assert replace(other, run_id=manifest.run_id) == (manifest if other.name == manifest.name else other)
        if manifest.name not in held:
            remote.put(manifest, image, attempt=1)
        buffer = bytearray(manifest.nbytes)
        self.store.fetch(manifest, memoryview(buffer))
        assert bytes(buffer) == image
        if self._try(lambda: remote.fetch(manifest, memoryview(buffer))) and not self.proxy.struck:
            assert bytes(buffer) == image
        self._file(f"run/{manifest.data_path}", image)
        if self._try(lambda: remote.delete(manifest)):
            assert manifest.name not in self._held("run")
        elif manifest.name in self._held("run"):
            self.store.delete(manifest)

    def _file(self, path: str, image: memoryview) -> None:
        remote = SpotFileSystem(*self.proxy.url.removeprefix("spot://").split(":"), skip_instance_cache=True)
        for read in (lambda: remote.cat_file(path), lambda: remote.open(path).read()):
            got: list[bytes] = []
            if self._try(lambda read=read, got=got: got.append(read())):  # type: ignore[misc]
                assert got == [image]
        found: list[list[str]] = []
        if self._try(lambda: found.append(remote.ls(path.rpartition("/")[0], detail=False))):
            assert path in found[0]

    def _try(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except SpotError:
            return False
        return True

    def _held(self, run: str) -> dict[str, Manifest]:
        listed = self.client.call("GET", f"/v1/runs/{run}/snapshots")["snapshots"]
        return {item["manifest"]["name"]: Manifest.from_dict(item["manifest"]) for item in listed}

    def _nothing_else(self) -> None:
        """What was there before is there still, and no slot is held for anybody."""
        assert list(self._held("safe")) == [self.safe.name]
        assert {run["name"] for run in self.client.call("GET", "/v1/runs")["runs"]} == {"run", "safe"}

        def filling() -> int:
            return sum(slot["state"] == "filling" for slot in self.client.call("GET", "/v1/status")["slots"])

        until(lambda: filling() == 0, "slots of broken uploads to be free")


@pytest.fixture
def case(start_server: StartServer, seed: int) -> Iterator[Case]:
    server = start_server("--slots", "8", environment={"LIGHTNING_SPOT_SHM_DIR": ""})
    proxy = Proxy(server.url, seed)
    yield Case(server, proxy)
    proxy.close()


def test_every_message_meets_one_fault(case: Case) -> None:
    number = 1
    while case.run(number, KINDS[number % len(KINDS)]):
        number += 1
    assert number > 15


@pytest.mark.soak
def test_every_message_meets_every_fault(case: Case) -> None:
    number = 1
    while all([case.run(number, kind) for kind in KINDS]):
        number += 1
    assert number > 15
