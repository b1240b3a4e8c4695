"""``lightning-spot doctor``: measures this host and its tiers, and recommends settings."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from lightning_spot.cli.arguments import add_run, add_servers, location_of, takes_size, takes_time
from lightning_spot.cli.output import add_output, error_console, print_answer, warning
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.starting import start
from lightning_spot.client.stores import open_store, open_tier
from lightning_spot.config import format_bytes, format_seconds, read_environment
from lightning_spot.errors import ServerUnreachableError, SpotError, TierError
from lightning_spot.preemption.clouds import CLOUDS, detect_cloud
from lightning_spot.retry import DEFAULT_POLICY, unless_silent
from lightning_spot.run.location import Location, memory_limit_bytes
from lightning_spot.server.runs import RunInfo
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.store.fsspec_client import is_s3, open_filesystem, tier_errors
from lightning_spot.store.s3 import aborts_unfinished
from lightning_spot.store.store import Holdings, Store

if TYPE_CHECKING:
    from lightning_spot.simulation.simulator import Outlook

_USUAL_BYTES = 10**9
"""Size of a snapshot of which nothing is known."""
_SAMPLE_BYTES = 64 * 10**6
"""How much is written for a measurement."""
_MEMORY_FILES = "memory files are used, and end with the server that holds them"
_RULE = "set AbortIncompleteMultipartUpload, to 7 days say"
_ABORTS = (
    '{"Rules": [{"ID": "abort-unfinished-uploads", "Status": "Enabled", "Filter": {},'
    ' "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}}]}'
)
_WAY_ON = (
    ". Is one running there (`lightning-spot serve --listen HOST:PORT`), and does a firewall let this host through?"
)


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``."""
    add_run(parser, which=" that snapshots are to go to", servers=False, stored=True)
    add_servers(parser, "also measure this snapshot server; may be given several times")
    size = "size of a snapshot (that of the newest in RUN, or 1GB)"
    parser.add_argument("--snapshot-size", help=size, **takes_size())
    parser.add_argument("--lifetime", default=7200.0, help="of a machine, mean (2h)", **takes_time(above=True))
    add_output(parser)


def doctor(arguments: argparse.Namespace) -> int:
    """Measure and recommend; 1 if a tier cannot be used."""
    location = location_of(arguments.run, arguments.server)
    scratch = f"{location.url}/.doctor-{secrets.token_hex(4)}"
    problems, found = list[str](), None
    try:
        found = _ask(location.url)  # says better than a write what is wrong with it
    except SpotError as error:
        problems.append(_problem(location.url, location.url, error))
    newest = found.manifests[0].stored_bytes if found is not None and found.manifests else _USUAL_BYTES
    snapshot_bytes = arguments.snapshot_size or newest
    tiers = _speeds(location, scratch, problems, stores=found is not None)
    facts: dict[str, Any] = {"tiers_bytes_per_s": tiers, "problems": problems}
    error_console().print("starting a snapshot server on this host …")
    try:
        facts["local_server_bytes_per_s"] = committed = local_server_speed(scratch, _SAMPLE_BYTES)
    except (SpotError, OSError) as error:
        problems.append(f"the snapshot server on this host: {error}")
        committed = 0.0
    cloud = detect_cloud()
    facts |= {"cloud": cloud, "grace_period_s": CLOUDS[cloud]().grace_period_s if cloud is not None else None}
    outlook = _outlook(snapshot_bytes, committed, tiers, location.url, arguments.lifetime)
    facts["outlook"] = asdict(outlook) if outlook is not None else None
    servers = [url for url in location.servers if url in tiers]
    advice = _of_unfinished_uploads(location.url) if found is not None else []
    facts["advice"] = advice + _advice(outlook, snapshot_bytes, location.url, servers, facts["grace_period_s"])
    print_answer(arguments.output, facts, _lines(facts, outlook, snapshot_bytes))
    return 1 if problems else 0


def _speeds(location: Location, scratch: str, problems: list[str], *, stores: bool) -> dict[str, float]:
    """Bytes per second at which servers, and storage where it ``stores``, take snapshots; nothing is left there."""
    path = location.url.removeprefix("file://")
    folders = [] if "://" in path else [Path(path), *Path(path).parents]
    made = [folder for folder in folders if not folder.exists()]  # of a path that was mistyped, say
    places, tiers = {server: f"{server}/doctor" for server in location.servers}, dict[str, float]()
    if stores:
        places[location.url] = scratch
    for url, where in places.items():
        error_console().print(f"writing {format_bytes(_SAMPLE_BYTES)} to {url} …")
        try:
            tiers[url] = store_speed(open_tier(where), _SAMPLE_BYTES)
        except SpotError as error:
            problems.append(_problem(url, where, error))
    try:
        with tier_errors(scratch):
            files, written = open_filesystem(scratch)
            if stores and files.exists(written):
                files.rm(written, recursive=True)
    except TierError as error:
        if location.url in tiers:  # else it was said what is wrong there
            problems.append(f"what was written could not be deleted: {error}")
    for folder in made:
        with contextlib.suppress(OSError):  # it has something in it
            folder.rmdir()
    return tiers


def _problem(url: str, where: str, error: SpotError) -> str:
    """What is wrong with a tier, said of it, and not of the place below it that was made up to be measured."""
    said = str(error).replace(where, url)
    return f"{url}: {said.removeprefix(f'{url}: ')}{_WAY_ON if isinstance(error, ServerUnreachableError) else ''}"


def _ask(url: str) -> Holdings:
    """What is in storage.

    Raises:
        SpotError: if it cannot be used, or says nothing: its library may wait for minutes.
    """
    heard = threading.Event()

    def ask() -> Holdings:
        store = open_store(url)
        store.claimed()
        heard.set()
        return store.survey()

    return unless_silent(ask, heard, DEFAULT_POLICY.silent_s, url)


def store_speed(store: Store | ServerStore, nbytes: int) -> float:
    """Bytes per second at which a tier stores a snapshot durably; what was written is deleted again."""
    image = memoryview(os.urandom(1 << 20) * (nbytes >> 20 or 1))[:nbytes]
    unsealed = Manifest(run="doctor", name=snapshot_name(0, 1), step=0, attempt=1, nbytes=len(image))
    manifest = unsealed.sealed(image)
    started = time.perf_counter()
    store.put(manifest, image, attempt=1)
    took_s = time.perf_counter() - started
    store.delete(manifest)
    return len(image) / took_s


def local_server_speed(run_url: str, nbytes: int) -> float:
    """Bytes per second at which a snapshot server on this host commits a snapshot: copied into its slot and checked.

    Args:
        run_url: of a run that there is not; its server is started, and ends by itself.
        nbytes: how much to commit.
    """
    image = bytes(nbytes)
    room = 4 * nbytes + (64 << 20)  # slots are somewhat larger than what they hold
    host = start(run_url, "doctor", slots=2, memory_bytes=room, server_idle_timeout_s=1.0)
    try:
        attempt = host.open_run(RunInfo(name="doctor", id="", location="", attempt=1, token="")).attempt
        took_s = []
        for step in range(4):  # the first ones make the slots
            lease = host.lease(nbytes, 30.0)
            name = snapshot_name(step, attempt)
            manifest = Manifest(run="doctor", name=name, step=step, attempt=attempt, nbytes=nbytes)
            started = time.perf_counter()
            with memoryview(lease.map) as slot:
                slot[:nbytes] = image
            host.seal(lease, manifest)
            took_s.append(time.perf_counter() - started)
        for manifest in host.manifests():
            host.remove(manifest.name)  # safe nowhere else: the server would leave its slot in memory
        return nbytes / min(took_s)
    finally:
        host.leave(complete=True)


def _outlook(
    snapshot_bytes: int, committed: float, tiers: dict[str, float], durable_url: str, lifetime_s: float
) -> Outlook | None:
    """What to expect with storage, and the first snapshot server that works; ``None`` if that cannot be said."""
    from lightning_spot.simulation.simulator import SimulatedJob, chain, outlook, server_tier, storage_tier

    if durable_url not in tiers or not committed:
        return None
    servers = [server_tier(snapshot_bytes, speed) for url, speed in tiers.items() if url != durable_url]
    links = chain(*servers[:1], storage_tier(snapshot_bytes, tiers[durable_url]))
    return outlook(SimulatedJob(work_s=lifetime_s, stall_s=snapshot_bytes / committed, tiers=links), lifetime_s)


def _advice(
    found: Outlook | None, snapshot_bytes: int, url: str, servers: list[str], grace_period_s: float | None
) -> list[str]:
    advice = _of_memory(4 if servers else 3, snapshot_bytes)
    if found is None:
        return [*advice, f"nothing can be recommended for {url}: fix the problems above, and ask again"]
    if not servers and found.uploaded_s > found.interval_s / 2:
        advice.append(
            "most of what a preemption takes is on its way to storage: a snapshot server would help."
            " `lightning-spot simulate --server-speed` says how much"
        )
    if grace_period_s is not None and found.uploaded_s > grace_period_s:
        advice.append(
            f"a notice leaves {grace_period_s:.0f} s, a snapshot takes {found.uploaded_s:.0f} s to upload: after a"
            " notice the run resumes from its last regular snapshot"
        )
    memory = f", servers={servers!r}" if servers else ""
    return [*advice, f"SpotCheckpoint({url!r}{memory})  # the interval finds itself"]


def _of_unfinished_uploads(url: str) -> list[str]:
    """What is to be said of uploads to S3 that killed processes left: a rule of the bucket must abort them."""
    files, path = open_filesystem(url)
    if not is_s3(files):
        return []
    try:
        with tier_errors(url):
            if aborts_unfinished(files, path):
                return []
    except TierError as error:
        return [f"whether a lifecycle rule aborts unfinished uploads below {url} could not be read ({error}): {_RULE}"]
    bucket = path.partition("/")[0]
    return [
        f"no lifecycle rule aborts unfinished uploads below {url}: parts that a killed process was sending stay"
        f" there, and are paid for, until you remove them: {_RULE}. Where the bucket has no other rule: aws s3api"
        f" put-bucket-lifecycle-configuration --bucket {bucket} --lifecycle-configuration '{_ABORTS}'"
    ]


def _of_memory(slots: int, snapshot_bytes: int) -> list[str]:
    """What is to be said of the memory for the slots: two, and one for storage and for a snapshot server."""
    need = slots * snapshot_bytes
    half = memory_limit_bytes(None)
    advice = []
    if need > half:
        advice.append(
            f"{slots} slots need {format_bytes(need)}, half of this host's memory is {format_bytes(half)}: use slots=2,"
            " or a larger machine"
        )
    shm = read_environment().shm_dir
    if shm is None:
        advice.append(
            "there is no directory for slots (LIGHTNING_SPOT_SHM_DIR, by default /dev/shm) that may be written to:"
            f" {_MEMORY_FILES}. Name a tmpfs by that variable"
        )
    elif (free := shutil.disk_usage(shm).free) < need:
        advice.append(
            f"{shm} is too small for the slots, {format_bytes(free)} of the {format_bytes(need)} that they need are"
            f" free: {_MEMORY_FILES}. Make it larger (docker run --shm-size=…), or name another tmpfs by"
            " LIGHTNING_SPOT_SHM_DIR"
        )
    return advice


def _lines(facts: dict[str, Any], found: Outlook | None, snapshot_bytes: int) -> Iterator[str | Text]:
    cloud = facts["cloud"] or "none found; signals and the notice file are watched"
    yield f"cloud: {cloud}" + (f", a notice leaves {facts['grace_period_s']:.0f} s" if facts["grace_period_s"] else "")
    if "local_server_bytes_per_s" in facts:
        yield f"committed by a local server: {format_bytes(facts['local_server_bytes_per_s'])}/s"
    for url, speed in facts["tiers_bytes_per_s"].items():
        yield f"stored at {url}: {format_bytes(speed)}/s"
    yield from map(warning, facts["problems"])
    if found is not None:
        yield (
            f"snapshots of {format_bytes(snapshot_bytes)}: one every {format_seconds(found.interval_s)},"
            f" overhead {100 * found.overhead:.2f} % at most; uploaded after {format_seconds(found.uploaded_s)};"
            f" a preemption without notice takes {format_seconds(found.loss_s)} of work on average"
        )
    yield from (f"→ {line}" for line in facts["advice"])
