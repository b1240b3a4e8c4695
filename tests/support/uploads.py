"""The steps of an upload over HTTP, one by one: open a run, take a slot, fill it by a stream of parts, commit it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from lightning_spot.client.encoding import OutgoingPart
from lightning_spot.client.part_streams import PartStream
from lightning_spot.client.server_client import ServerClient
from lightning_spot.client.stores import open_store
from lightning_spot.protocol.wire import Address
from lightning_spot.server.runs import parse_run
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.snapshot.parts import checksum
from tests.support.server import served


def server_of(memory_bytes: int = 2**28, **more: Any) -> SnapshotServer:
    return SnapshotServer(**{"slots": None, "memory_bytes": memory_bytes, "open_store": open_store, **more})


@contextmanager
def asked(server: SnapshotServer, **more: Any) -> Iterator[ServerClient]:
    """A client of a server that is served as long as the context lasts."""
    with served(server, **more) as port, closing(ServerClient(Address("127.0.0.1", port, tls="tls" in more))) as client:
        yield client


def open_run(client: ServerClient, run: str = "run", attempt: int = 1, **more: Any) -> None:
    client.call("POST", f"/v1/runs/{run}/open", {"attempt": attempt, **more})


def begin(client: ServerClient, nbytes: int, run: str = "run", **more: Any) -> str:
    return str(client.call("POST", f"/v1/runs/{run}/uploads", {"attempt": 1, "nbytes": nbytes, **more})["upload"])


def part_of(data: bytes, start: int = 0, digest: str = "") -> OutgoingPart:
    return OutgoingPart.whole(start, memoryview(data), digest or checksum(data))


def send(client: ServerClient, upload: str, *parts: OutgoingPart) -> list[str]:
    """Send parts over a stream; the checksums that were answered."""
    with closing(PartStream(client, upload)) as stream:
        return [digest for _, digest in stream.send(parts)]


def plain_of(step: int, nbytes: int, run: str = "run", **fields: Any) -> Manifest:
    """A manifest of a snapshot, without checksums."""
    name, identity = parse_run(run)
    plain: dict[str, Any] = {"run": name, "run_id": identity, "name": snapshot_name(step, 1), "step": step}
    return Manifest(**{**plain, "attempt": 1, "nbytes": nbytes, **fields})


def commit(client: ServerClient, step: int, data: bytes, run: str = "run", upload: str = "") -> Manifest:
    """Send a snapshot, as an upload that was begun or as another one, and commit it."""
    manifest = plain_of(step, len(data), run).sealed(memoryview(data))
    upload = upload or begin(client, len(data), run)
    assert send(client, upload, part_of(data)) == [checksum(data)]
    client.call("POST", f"/v1/uploads/{upload}/commit", {"manifest": manifest.to_dict()})
    return manifest


@contextmanager
def streaming(client: ServerClient, nbytes: int, within_s: float = 30.0) -> Iterator[Any]:
    """The bare socket of a stream of parts, of an upload of its own that is given up in the end."""
    upload = begin(client, nbytes)
    with closing(PartStream(client, upload)) as stream:
        stream._socket.deadline_s = time.monotonic() + within_s
        stream._socket.settimeout(within_s)
        yield stream._socket
    client.call("DELETE", f"/v1/uploads/{upload}")
