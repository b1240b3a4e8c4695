"""A snapshot to a bucket that is far, and a resume from there: how many requests, and how long they take.

One rank's file (as DDP writes it), and a sharded model that two hosts bring by themselves, of one rank each and of
two. The bucket is ``benchmarks.s3_server`` behind ``benchmarks.far``, each a process of its own.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lightning_spot.image.notes import Own
from lightning_spot.image.portion import Portions
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.joint_store import JointStore

from benchmarks.far import Far
from benchmarks.measure import Result, seconds
from benchmarks.s3_server import s3_behind
from lightning_spot.client.stores import open_store
from lightning_spot.image.files import FileSpan
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.image.ranges import Ranges
from lightning_spot.run.location import Location
from lightning_spot.run.survey import look_again, survey
from lightning_spot.tiers.fences import Claim
from lightning_spot.tiers.store import Store, retain

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


def files_of(ranks: int) -> tuple[FileSpan, ...]:
    """The files of a sharded model, in the order of the image."""
    sizes = {f"__{rank}_0.distcp": RANK_BYTES for rank in range(ranks)} | {"__0_1.distcp": 3_000}
    sizes |= {f"rank-{rank:04d}.pt": 5_000 for rank in range(ranks)}
    sizes |= {"meta.pt": 20_000, "shards.json": 4_000, ".metadata": 6_000}
    found, end = [], 0
    for name, nbytes in sizes.items():
        found.append(FileSpan(name, end, nbytes))
        end = -(-(end + nbytes) // _ALIGNMENT) * _ALIGNMENT
    return tuple(found)


def manifest_of(step: int, image: memoryview, files: tuple[FileSpan, ...] = ()) -> Manifest:
    """Of a snapshot, without checksums."""
    name = snapshot_name(step, 1)
    return Manifest(run="run", run_id=RUN_ID, name=name, step=step, attempt=1, nbytes=len(image), files=files)


def image_of(nbytes: int, files: tuple[FileSpan, ...] = ()) -> memoryview:
    """Bytes, with zeros between the files."""
    image = bytearray(os.urandom(2**16) * -(-nbytes // 2**16))[:nbytes]
    for before, behind in itertools.pairwise(files):
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
    files = files_of(ranks)
    image = image_of(files[-1].stop, files)
    ends = [*(file.offset for file in files[1:]), len(image)]

    def of_second(file: FileSpan) -> bool:
        return _rank_of(file) >= ranks // 2

    spans = [(file, (file.offset, end - file.offset)) for file, end in zip(files, ends, strict=True)]
    theirs: Ranges = tuple(span for file, span in spans if of_second(file))
    portions = Portions((theirs,), (ranks // 2,))
    hosts = [JointStore(store, RUN_ID) for _ in range(2)]

    def bring(number: int, step: int) -> Manifest:
        ranges = portions.ranges[0] if number else portions.rest(len(image))
        own = Own(tuple(file for file, _ in spans if of_second(file) == bool(number)))
        layout = json.dumps(portions.to_dict() | own.to_dict())
        shared = Shared(name=snapshot_name(step, 1), shares=ranks, digest="same", layout=layout, at=store.url)
        gathering = hosts[number].begin(shared, len(image), attempt=1, hosts=2)
        hosts[number].bring(gathering, image, ranges, None, _goes_on)
        if number:
            hosts[number].placed(gathering, number)
            return hosts[number].finish(gathering, number, _goes_on)
        return hosts[number].seal(gathering, manifest_of(step, image, files), _goes_on)

    def put(step: int) -> Manifest:
        with ThreadPoolExecutor(2) as pool:
            return next(iter(pool.map(functools.partial(bring, step=step), range(2))))

    return put


def _goes_on() -> None:
    """Nothing happens."""


def _rank_of(file: FileSpan) -> int:
    digits = "".join(each if each.isdigit() else " " for each in file.name).split()
    return int(digits[0]) if digits else 0


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
        retain(store, KEEP, manifest)
        for step in range(2, KEEP + 1):
            put(step)
        server.asked()
        for step in range(KEEP + 1, KEEP + 1 + rounds):
            began_s = time.perf_counter()
            manifest = put(step)
            taken.durable_s.append(time.perf_counter() - began_s)
            taken.retained_s.append(seconds(lambda m=manifest: retain(store, KEEP, m)))  # type: ignore[misc]
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
