"""One snapshot server that has the shards of a whole fleet: what each costs it, and how long its listing is.

512 hosts of 8 ranks write 4,096 shards a snapshot. Each is as small as one may be here (64 KiB), so that only what a
shard costs by itself is measured; the clients are threads of this process, and only the server's time counts. Whether
the cost of one stays the same as there are more of them is what a target is for. Slots are of 2 MiB at least: where
this machine has no memory, or files, for so many, there are fewer writers.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import scale
from benchmarks.measure import Result
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.server_client import quoted
from lightning_spot.protocol.listening import open_files
from lightning_spot.protocol.slot import available_bytes
from lightning_spot.server.runs import RunInfo
from lightning_spot.snapshot.files import FileSpan
from lightning_spot.snapshot.manifest import Manifest, ShardOf, shard_name, snapshot_name
from lightning_spot.snapshot.shards import LEAST_PART_BYTES

FEW = 64
WRITERS = (FEW, 256, 1024, 4096)
SNAPSHOTS = 3
SLOT_BYTES = 2 * 2**20
MOST_GROWTH = 2.0
_CLIENTS = 4


@dataclass(frozen=True)
class Cost:
    """What the last snapshot of so many writers cost a server.

    Attributes:
        cpu_s: seconds of processors for one shard.
        listed_bytes: of a listing, for one shard.
        listed_s: seconds of processors that one listing took.
        wall_s: from the first shard to the last.
    """

    cpu_s: float
    listed_bytes: float
    listed_s: float
    wall_s: float


def shard(run_id: str, step: int, writer: int, writers: int) -> tuple[Manifest, bytes]:
    """What one rank has of a snapshot of a sharded model."""
    image = f"{step}-{writer}".encode().ljust(LEAST_PART_BYTES, b"\0")
    plain = Manifest(
        run="run",
        run_id=run_id,
        name=shard_name(snapshot_name(step, 1), writer),
        step=step,
        attempt=1,
        nbytes=LEAST_PART_BYTES,
        part_bytes=LEAST_PART_BYTES,
        files=(FileSpan(f"__{writer}_0.distcp", 0, LEAST_PART_BYTES),),
        shard=ShardOf(writer, writers, "plan"),
        world_size=writers,
    )
    return plain.sealed(memoryview(image)), image


def measure(url: str, process: psutil.Process, writers: int) -> Cost:
    """Send snapshots, and look what the last one cost."""
    run_id = f"{writers:012x}"
    store = ServerStore(f"{url}/run@{run_id}")
    hosts = max(1, writers // 8)
    store.open_run(RunInfo(name="run", id=run_id, location=f"file:///{run_id}", attempt=1, token="t", hosts=hosts))
    for step in range(1, SNAPSHOTS + 1):
        shards = [shard(run_id, step, writer, writers) for writer in range(writers)]
        before_s, begun_s = _cpu_s(process), time.monotonic()
        with ThreadPoolExecutor(_CLIENTS) as pool:
            list(pool.map(lambda item: store.put(item[0], memoryview(item[1]), attempt=1), shards))
        spent_s, wall_s = _cpu_s(process) - before_s, time.monotonic() - begun_s
    before_s = _cpu_s(process)
    listed = json.dumps(store.client.call("GET", f"/v1/runs/{quoted(store.run)}/snapshots"))
    return Cost(spent_s / writers, len(listed) / writers, _cpu_s(process) - before_s, wall_s)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _most_writers() -> int:
    """How many there may be: half of the server's slots are for one run, see :meth:`Limits.has_files`."""
    left = available_bytes() or 0
    return int(min(left // 2 // (SNAPSHOTS * SLOT_BYTES), open_files() // 4 // 2 // SNAPSHOTS))


def run(quick: bool) -> Sequence[Result]:
    """Measure."""
    most = _most_writers()
    costs: dict[int, list[Cost]] = {writers: [] for writers in WRITERS if writers <= max(FEW, most)}
    for _ in range(1 if quick else 3):
        for writers, found in costs.items():
            limit = writers * SNAPSHOTS * SLOT_BYTES
            with tempfile.TemporaryDirectory() as folder, scale.node(Path(folder), limit) as (url, process):
                found.append(measure(url, process, writers))
    many = max(costs)
    growth = [large.cpu_s / small.cpu_s for small, large in zip(costs[FEW], costs[many], strict=True)]
    return [
        Result(f"CPU of a server for a shard, {many} writers, compared with {FEW}", growth, MOST_GROWTH),
        *(
            Result(
                f"CPU of a server for a shard, {writers} writers",
                [1000 * each.cpu_s for each in found],
                None,
                unit="ms",
            )
            for writers, found in costs.items()
        ),
        Result("listing, bytes for a shard", [each.listed_bytes for each in costs[many]], None, unit="B"),
    ]
