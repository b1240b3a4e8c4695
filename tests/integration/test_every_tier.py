"""A snapshot at every step, at every tier that it reached: the server on the host, a snapshot server, the durable
directory.

As users have it: the server is its own process, and what no tier takes at once is committed before it has checksums.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spot import EverySteps, RemoteSnapshot
from lightning_spot.capture import schedule
from lightning_spot.client.local_server import LocalServer
from lightning_spot.client.stores import open_store
from lightning_spot.server.host import Lease
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.local import LocalStore
from tests.integration.test_every_step import Adapted, RunsAhead
from tests.support.server import MIB, served
from tests.support.trainer import Unhurried, data, digest_of, trainer

pytestmark = pytest.mark.guarantee("G3")


@dataclass
class Tiers:
    """Digests of what is in each snapshot, by its step, as it was committed at each tier.

    Attributes:
        url: of the snapshot server.
    """

    url: str = ""
    host: dict[int, str] = field(default_factory=dict)
    memory: dict[int, str] = field(default_factory=dict)
    durable: dict[int, str] = field(default_factory=dict)


def read(image: bytes) -> str:
    return digest_of(torch.load(io.BytesIO(image), weights_only=True))


@pytest.fixture
def tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tiers]:
    """A snapshot server in this process, that carries the run on. Small states are cut as large ones are."""
    monkeypatch.setattr(schedule, "LEAST_BYTES", 64)
    found = Tiers()
    real_seal = LocalServer.seal

    def seal(self: LocalServer, lease: Lease, manifest: Manifest, *more: Any, **named: Any) -> Any:
        done = real_seal(self, lease, manifest, *more, **named)
        image = bytes(lease.map[: manifest.nbytes])
        found.host.setdefault(manifest.step, read(image))
        return done

    monkeypatch.setattr(LocalServer, "seal", seal)
    server = SnapshotServer(slots=None, memory_bytes=256 * MIB, open_store=open_store, allow=[str(tmp_path)])

    def look() -> None:
        for slot in server.ring.slots:
            manifest = slot.manifest
            if manifest is not None and manifest.step not in found.memory:
                manifest.verify(slot.view(), "the snapshot server")
                found.memory[manifest.step] = read(bytes(slot.view(manifest.nbytes)))

    server.ring.watch(look)

    def and_read(real: Callable[..., Any]) -> Callable[..., Any]:
        def put(self: LocalStore, manifest: Manifest, *more: Any, **named: Any) -> Any:
            done = real(self, manifest, *more, **named)
            found.durable[manifest.step] = read((self.root / manifest.data_path).read_bytes())
            return done

        return put

    for name in ("put", "put_parts"):
        monkeypatch.setattr(LocalStore, name, and_read(getattr(LocalStore, name)))
    with served(server) as port:
        found.url = f"spot://127.0.0.1:{port}"
        yield found


STEPS = [pytest.param(24), pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
"""Of a training; validated at every fifth."""


def trained(
    root: Path, kind: type[Adapted], steps: int, caplog: pytest.LogCaptureFixture, **how: Any
) -> dict[int, str]:
    """Train with a snapshot at every step, waiting for slots only; the digests of what each is to be."""
    unhurried = Unhurried()
    snapshots = RemoteSnapshot(str(root / "run"), interval=EverySteps(1), on_full="wait", **how)
    with caplog.at_level(logging.WARNING):
        trainer(snapshots, unhurried, max_epochs=1, val_check_interval=5).fit(kind(), data(steps), data(2))
    each = {step: one for step, one in unhurried.digests.items() if step}
    assert len(each) == steps
    assert snapshots.num_dropped == 0
    assert "was dropped" not in caplog.text
    assert LocalStore(root / "run").survey().manifests[0].complete
    return each


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(("kind", "compression"), [(Adapted, "auto"), (RunsAhead, "always")])
def test_every_snapshot_is_its_step_at_each_tier_it_reached(
    tmp_path: Path, tiers: Tiers, caplog: pytest.LogCaptureFixture, kind: type[Adapted], compression: Any, steps: int
) -> None:
    """The snapshot server and the durable tier take the newest one whenever they are free."""
    each = trained(tmp_path, kind, steps, caplog, servers=tiers.url, compression=compression, min_upload_interval_s=0.0)
    assert tiers.host == each
    for tier in (tiers.memory, tiers.durable):
        assert tier.items() <= each.items()
        assert len(tier) > 1
        assert max(tier) == max(each)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kind", [Adapted, RunsAhead])
def test_every_snapshot_is_its_step_where_no_tier_takes_it(
    tmp_path: Path, tiers: Tiers, caplog: pytest.LogCaptureFixture, kind: type[Adapted], steps: int
) -> None:
    """No tier takes any but the first and the last: the others are superseded in memory."""
    each = trained(tmp_path, kind, steps, caplog, min_upload_interval_s=3600.0)
    assert tiers.host == each
