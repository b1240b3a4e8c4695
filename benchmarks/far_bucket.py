"""A snapshot to a bucket that is far, and a resume from there: how many requests, and how long they take.

One rank's file (as DDP writes it), and a sharded model that two hosts bring by themselves, of one rank each and of
two. The bucket is ``benchmarks.s3_server`` behind ``benchmarks.far``, each a process of its own.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from benchmarks.far import Far
from benchmarks.measure import Result, seconds
from benchmarks.s3_server import s3_behind
from lightning_spot.client.stores import open_store
from lightning_spot.run.location import Location
from lightning_spot.run.survey import look_again, survey
from lightning_spot.snapshot.files import FileSpan
from lightning_spot.snapshot.manifest import Manifest, ShardOf, shard_name, snapshot_name
from lightning_spot.snapshot.shards import part_bytes_for
from lightning_spot.store.commit import Shard, put_shards
from lightning_spot.store.fences import Claim
from lightning_spot.store.retention import Keep, retain
from lightning_spot.store.store import Store

DELAYS_MS = (1.0, 40.0, 100.0)
RANK_BYTES = 2 * 2**20
KEEP = 3
RUN_ID = "0123456789ab"
_ALIGNMENT = 4096


@dataclass
class Taken:
    """What snapshots of one kind have taken, and the resume after them.

    Attributes:
        durable_s: until each counted.
        retained_s: and then, until older ones were gone.
        requests: of each, both together.
        asked: of all of them, by what for.
        resume_s: to survey, to claim, to survey again and to fetch.
        resume_requests: for that.
    """

    durable_s: list[float] = field(default_factory=list)
    retained_s: list[float] = field(default_factory=list)
    requests: list[float] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    resume_s: float = 0.0
    resume_requests: float = 0.0


def files_of(rank: int) -> tuple[FileSpan, ...]:
    """The files of one rank of a sharded model, in the order of its image."""
    sizes = {f"__{rank}_0.distcp": RANK_BYTES, f"rank-{rank:05d}.pt": 5_000}
    sizes |= {} if rank else {"__0_1.distcp": 3_000, "meta.pt": 20_000, ".metadata": 6_000}
    found, end = [], 0
    for name, nbytes in sizes.items():
        found.append(FileSpan(name, end, nbytes))
        end = -(-(end + nbytes) // _ALIGNMENT) * _ALIGNMENT
    return tuple(found)


def manifest_of(step: int, image: memoryview) -> Manifest:
    """Of a snapshot, without checksums."""
    name = snapshot_name(step, 1)
    return Manifest(run="run", run_id=RUN_ID, name=name, step=step, attempt=1, nbytes=len(image))


def image_of(nbytes: int, files: tuple[FileSpan, ...] = ()) -> memoryview:
    """Bytes, with zeros between the files and after them."""
    image = bytearray(os.urandom(2**16) * -(-nbytes // 2**16))[:nbytes]
    gaps = itertools.pairwise([*files, FileSpan("", nbytes, 0)]) if files else ()
    for before, behind in gaps:
        image[before.stop : behind.offset] = bytes(behind.offset - before.stop)
    return memoryview(image)


def put_alone(store: Store) -> Callable[[int], Manifest]:
    """What brings a snapshot of one file."""
    image = image_of(4 * RANK_BYTES)

    def put(step: int) -> Manifest:
        manifest = manifest_of(step, image).sealed(image)
        store.put(manifest, image, attempt=1)
        return manifest

    return put


def put_in_shards(store: Store, ranks: int) -> Callable[[int], Manifest]:
    """What brings a snapshot of several ranks on two hosts, each its own files."""
    files = [files_of(rank) for rank in range(ranks)]
    part_bytes = part_bytes_for(max(of_rank[-1].stop for of_rank in files))
    images = [image_of(-(-of_rank[-1].stop // part_bytes) * part_bytes, of_rank) for of_rank in files]

    def shard_of(rank: int, step: int) -> Shard:
        plain = manifest_of(step, images[rank])
        of_rank = {"name": shard_name(plain.name, rank), "files": files[rank], "shard": ShardOf(rank, ranks, "plan")}
        return replace(plain, part_bytes=part_bytes, **of_rank).sealed(images[rank]), images[rank]

    def put(step: int) -> Manifest:
        hosts = [[shard_of(rank, step) for rank in range(first, ranks, 2)] for first in range(2)]
        with ThreadPoolExecutor(2) as pool:
            found = pool.map(lambda shards: put_shards(store, shards, attempt=1).manifest, hosts)
        return next(manifest for manifest in found if manifest is not None)

    return put


def resume(url: str, nbytes: int) -> None:
    """What a resume asks of storage."""
    location = Location.of(url, local_server=False)
    found = survey(location)
    claim = Claim(attempt=2, run_id=RUN_ID, digest="t", location=url, started_unix_s=1.0)
    open_store(url).claim(claim)
    manifest, _ = look_again(found).candidates[0]
    open_store(url).fetch(manifest, memoryview(bytearray(nbytes)))


def measured(kind: int, delay_ms: float, rounds: int) -> Taken:
    """Snapshots, and a resume.

    Args:
        kind: ranks that have the sharded model; 1 for one file.
        delay_ms: each way.
        rounds: snapshots; one more opens the connections.
    """
    taken = Taken()
    with s3_behind(lambda port: Far(port, delay_ms)) as server:
        url = "s3://benchmark/run"
        store = open_store(url)
        store.claim(Claim(attempt=1, run_id=RUN_ID, digest="t", location=url, started_unix_s=1.0))
        put = put_alone(store) if kind == 1 else put_in_shards(store, kind)
        manifest = put(1)
        retain(store, Keep(newest=KEEP), manifest)
        for step in range(2, KEEP + 1):
            put(step)
        server.asked()
        for step in range(KEEP + 1, KEEP + 1 + rounds):
            began_s = time.perf_counter()
            manifest = put(step)
            taken.durable_s.append(time.perf_counter() - began_s)
            taken.retained_s.append(seconds(lambda m=manifest: retain(store, Keep(newest=KEEP), m)))  # type: ignore[misc]
            asked = server.asked()
            taken.requests.append(asked.total())
            taken.asked += asked
        taken.resume_s = seconds(lambda: resume(url, manifest.nbytes))
        taken.resume_requests = server.asked().total()
    return taken


def run(quick: bool) -> list[Result]:
    found = []
    for kind, what in ((1, "one file"), (2, "in 2 shards"), (4, "in 4 shards")):
        for delay_ms in DELAYS_MS:
            taken = measured(kind, delay_ms, 2 if quick else 7)
            at = f"{what}, bucket {delay_ms:g} ms away"
            print(f"  {at}: {dict(taken.asked)}", flush=True)
            found += [
                Result(f"snapshot, {at}: until it counts", taken.durable_s, None, unit="s"),
                Result(f"snapshot, {at}: then, until older ones are gone", taken.retained_s, None, unit="s"),
                Result(f"snapshot, {at}: requests", taken.requests, None, unit="requests"),
                Result(f"resume, {at}", [taken.resume_s], None, unit="s"),
                Result(f"resume, {at}: requests", [taken.resume_requests], None, unit="requests"),
            ]
    return found
