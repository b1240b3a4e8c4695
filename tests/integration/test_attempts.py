"""An attempt that cannot begin leaves nothing behind; what keeps one from its snapshots is said."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_spot.capture.attempt import Attempt
from lightning_spot.capture.host_link import HostLink
from lightning_spot.client.stores import open_store
from lightning_spot.errors import (
    FailureReason,
    FencedError,
    ServerUnreachableError,
    SnapshotFailedError,
    TierError,
    TierReason,
)
from lightning_spot.run import location
from lightning_spot.run.location import Location
from lightning_spot.server.host import Host, InProcessHost
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from tests.support.ranks import RING, begun
from tests.support.said import informed, said
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G13")


def ring_here() -> InProcessHost:
    return InProcessHost(slots=2, memory_bytes=2**20, open_store=open_store)


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[Attempt]:
    made = begun(Location.of(str(tmp_path / "run"), local_server=False), ring_here(), RING)
    yield made
    made.finish(0.0, complete=False)


def test_only_consequences_of_a_logged_loss_are_not_logged_again(
    attempt: Attempt, caplog: pytest.LogCaptureFixture
) -> None:
    """A server elsewhere that a hook has asked was silently passed over once the server of this host had been lost."""
    host = attempt.writer.host
    lost = cast(Host, SimpleNamespace(server_call_timeout_s=1.0, disconnect=lambda: None))
    is_there = threading.Event()
    attempt.writer.link = link = HostLink(lost, lambda: host if is_there.wait(120) else lost)
    first, later = ServerUnreachableError("it has gone"), ServerUnreachableError("the same line, for another snapshot")
    try:
        for error in (first, later):
            link.lose(lost, error)
        with pytest.raises(ServerUnreachableError) as missing:
            attempt.writer.begin({}, Manifest(run="run", name="x", file="", step=1, attempt=1, nbytes=0))
        caplog.clear()
        for error in (first, later, missing.value, ServerUnreachableError("nobody answers at 10.0.0.5")):
            attempt.write(error, owned={}, step=1, epoch=0, world_size=1, wait_s=0.0)
    finally:
        is_there.set()
    assert [str(facts["error"]) for facts in said(caplog, "no-snapshot")] == ["nobody answers at 10.0.0.5"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_of_a_host_never_write_into_rings_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ranks: int
) -> None:
    """One rank could not restart the lost server and wrote into itself; no snapshot was whole any more.

    A single one may, and no server is said to run again.
    """
    caplog.set_level("INFO")
    host = ring_here()
    attempt = begun(Location.of(str(tmp_path / "run")), host, RING)
    attempt.writers_here = ranks

    def refused(*_: Any, **__: Any) -> Host:
        raise ServerUnreachableError("it has gone, too")

    monkeypatch.setattr(location, "start", refused)
    try:
        attempt.writer.link.lose(host, ServerUnreachableError("it has gone"))
        found = attempt.writer.link.wait(1.0)
        assert isinstance(found, InProcessHost) if ranks == 1 else found is None
        until(lambda: ranks > 1 or "local-server-lost" in informed(caplog), "what is there now to be said")
        assert "runs on this host again" not in caplog.text
    finally:
        attempt.finish(0.0, complete=False)
        host.leave(complete=False)


def test_ranks_learn_that_a_fenced_rank_0_writes_no_snapshot(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears of that beside training."""
    told = list[Any]()
    monkeypatch.setattr(attempt.writer.host, "fail", lambda *what: told.append(what))
    attempt.writer.fence = FencedError("attempt 2 has taken over", current=2)
    how: dict[str, Any] = {"owned": {}, "epoch": 0, "world_size": 2, "wait_s": 0.0}
    attempt.write({}, step=4, writers=2, **how)
    attempt.write({}, step=5, **how)  # of what it writes alone, nobody waits for anything
    attempt.finish(0.0, complete=False)
    (manifest, why), *others = told
    assert (manifest.snapshot, why) == (snapshot_name(4, attempt.info.attempt), "attempt 2 has taken over")
    assert (manifest.shard.writer, others) == (0, [])


@pytest.mark.parametrize(("reason", "is_for_good"), [(FailureReason.TOO_LARGE, True), (TierReason.FAILED, False)])
def test_want_of_memory_passes_unless_a_shard_is_too_large(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, reason: Any, is_for_good: bool
) -> None:
    """Rank 0 wrote alone, past memory, until the end of the attempt."""
    kind = SnapshotFailedError if is_for_good else TierError
    how: dict[str, Any] = {"owned": {}, "epoch": 0, "world_size": 2, "wait_s": 0.0, "writers": 2}
    assert not attempt.lacks_memory
    attempt.write(kind("no memory", reason=reason), step=1, **how)
    assert attempt.lacks_memory
    now_s = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now_s + 100.0)
        assert attempt.lacks_memory == is_for_good


def test_a_server_that_outlives_its_starter_is_no_leak_to_python(tmp_path: Path) -> None:
    """Where warnings are looked at (``-X dev``), each start of a training had one."""
    code = (
        "from lightning_spot.client import starting\n"
        f"host = starting.start({str(tmp_path / 'run')!r}, 'run', slots=2, memory_bytes=2**22,"
        " server_idle_timeout_s=1.0)\n"
        "host.leave(complete=True)"
    )
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
