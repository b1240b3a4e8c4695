"""One snapshot server under many clients: nobody is refused, all wait for the same time, and memory is bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import scale
from lightning_spot.http.upload_requests import MOST_STREAMS


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_64_clients_are_served_alike_and_within_bounds(tmp_path: Path) -> None:
    memory_bytes = scale.CLIENTS * scale.SLOTS * scale.NBYTES * 2
    with scale.server(tmp_path, memory_bytes) as (url, process):
        load = scale.measure(url, process, clients=scale.CLIENTS, seconds=20.0)
        assert load.errors == []
        assert load.fairness >= 0.9
        assert min(load.commits) >= 1
        assert load.p99_s <= 3 * load.clients * scale.NBYTES / load.bytes_per_s
        assert load.own_bytes < 256 * 2**20
        assert load.threads < MOST_STREAMS + 64
        assert process.memory_info().shared <= memory_bytes + 64 * 2**20


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_clients_of_a_server_without_room_for_all_take_turns(tmp_path: Path) -> None:
    """The newest of each has room, and half as many more: senders wait for slots, and all get some."""
    slot_bytes = scale.NBYTES * 5 // 4
    with scale.server(tmp_path, 24 * slot_bytes) as (url, process):
        load = scale.measure(url, process, clients=16, seconds=20.0)
        assert min(load.commits) >= 1
        assert load.fairness >= 0.5
        assert all(error.startswith("SnapshotFailedError") for error in load.errors)
        assert process.memory_info().shared <= 24 * slot_bytes + 64 * 2**20
