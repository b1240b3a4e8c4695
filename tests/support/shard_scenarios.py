"""Scenarios of snapshots of several writers for ``oracle``, which kills the process at each call that changes files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lightning_spot.errors import SpotError
from lightning_spot.server.runs import RunInfo
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.snapshot.shards import Status
from lightning_spot.store.commit import Look, put_shards
from lightning_spot.store.local import LocalStore
from lightning_spot.store.retention import Keep
from tests.support.server import RUN, RUN_ID
from tests.support.shards import failed_shard, sealed_apart, sealed_shard, shard_image

WRITERS, STEPS = 3, 4
ABORTED = 3
"""The step of which one writer fails."""
FAILING = 1
"""That writer."""
PLACES = ((0, 2), (1,))
"""Writers of each host, where there are two."""

Tell = Callable[..., None]


def run_info(root: Path, *, attempt: int = 1, session: str = "") -> RunInfo:
    url = str(root / "durable")
    named = {"name": "run", "id": RUN_ID, "location": f"file://{url}", "token": f"token-{attempt}"}
    return RunInfo(**named, attempt=attempt, keep=Keep(newest=2), durable_url=url, session=session)


def claim(root: Path, attempt: int = 1) -> None:
    store = LocalStore(root / "durable")
    if store.claimed() < attempt:
        store.claim(run_info(root, attempt=attempt).claim())


def server_of(root: Path) -> SnapshotServer:
    return SnapshotServer(slots=3, memory_bytes=2**26, open_store=LocalStore, allow=None, area=root / "area")


def write(server: SnapshotServer, step: int, rank: int) -> None:
    """Have a rank write its shard of a step, or say that it never will, as a trainer does where a disk is full."""
    manifest = sealed_shard(step, rank, WRITERS)
    if (step, rank) == (ABORTED, FAILING):
        server.uploads.fail(RUN, 1, failed_shard(step, rank, WRITERS))
        return
    upload = None
    try:
        upload = server.uploads.lease(RUN, 1, manifest.nbytes, wait_s=60, session=f"rank-{rank}", writer=rank)
        with upload.slot.view(manifest.nbytes) as view:
            view[:] = shard_image(manifest)
        server.uploads.seal(upload.id, manifest)
    except SpotError as error:
        if upload is not None:
            server.uploads.abort(upload.id)
        with contextlib.suppress(SpotError):
            server.uploads.fail(RUN, 1, failed_shard(step, rank, WRITERS, str(error)))


def use_ranks(root: Path, tell: Tell) -> None:
    """Three ranks of a host fill slots of one server, which brings to storage what is whole."""
    try:
        claim(root)
        server = server_of(root)
    except (SpotError, OSError) as error:
        tell("refused", type(error).__name__)  # the trainer says why and ends
        return
    for rank in range(WRITERS):
        server.registry.begin_session(f"rank-{rank}")
    server.open_run(run_info(root, session="rank-0"))
    for step in range(1, STEPS + 1):
        for rank in range(WRITERS):
            write(server, step, (rank + step) % WRITERS)
        if server.wait_for(RUN, snapshot_name(step, 1), 0.0)[0] is Status.COMMITTED:
            tell("committed", step)
            if step in (2, STEPS):
                left = server.flush("run", 10.0)
                assert not left, f"never clean: {left}"
                tell("durable", step)
    server.close(keep_unsafe=True)


def shards_of(step: int, writers: Iterable[int]) -> list[tuple[Manifest, memoryview]]:
    """Manifests and bytes of what these writers have of a step of a sharded model."""
    found: list[tuple[Manifest, memoryview]] = []
    for writer in writers:
        if (step, writer) == (ABORTED, FAILING):
            found.append((failed_shard(step, writer, WRITERS), memoryview(b"")))
        else:
            manifest = sealed_apart(step, writer, WRITERS)
            found.append((manifest, memoryview(shard_image(manifest))))
    return found


def bring(root: Path, step: int, place: int) -> Look:
    """What one host does with the shards that it has of a step."""
    return put_shards(LocalStore(root / "durable"), shards_of(step, PLACES[place]), attempt=1)


def use_places(root: Path, tell: Tell) -> None:
    """Two hosts bring to one storage what each of them has, in turn the one and the other first."""
    try:
        claim(root)
    except SpotError as error:
        tell("refused", type(error).__name__)
        return
    for step in range(1, STEPS + 1):
        for place in (0, 1, 0, 1) if step % 2 else (1, 0, 1, 0):  # each twice: what failed is done in the next round
            try:
                found = bring(root, step, place)
            except SpotError as error:
                tell("refused", type(error).__name__)
                continue
            if found.manifest is not None:
                tell("durable", step)


SCENARIOS: dict[str, Callable[[Path, Tell], Any]] = {"ranks": use_ranks, "places": use_places}
