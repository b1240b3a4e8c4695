"""Object stores: whole or not at all, nothing of dead attempts left, no bucket made, many connections at once."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import functools
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import s3fs
from botocore import retryhandler
from botocore.exceptions import ClientError
from botocore.retries import standard

from lightning_spot.client.stores import open_store
from lightning_spot.errors import CorruptSnapshotError, SettingsError, SpotError, TierError
from lightning_spot.retry import RetryPolicy
from lightning_spot.run.location import Location
from lightning_spot.run.survey import survey
from lightning_spot.store import fsspec_client
from lightning_spot.store import s3 as s3_requests
from lightning_spot.store.fsspec_client import tier_errors
from lightning_spot.store.objects import ObjectStore
from tests.support.oracle import claim_of
from tests.support.proxy import Proxy
from tests.support.store import Kept, fetched, parts_of, put, snapshot
from tests.support.waiting import until

KIB, MIB = 2**10, 2**20
BLOCK_BYTES = 8 * KIB


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads in blocks, with little data."""
    monkeypatch.setattr("lightning_spot.store.s3.BLOCK_BYTES", BLOCK_BYTES)


@pytest.fixture
def raw(s3: str) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)


def uploads_of(raw: s3fs.S3FileSystem, bucket: str) -> list[str]:
    return [item["Key"] for item in raw.list_multipart_uploads(bucket.removeprefix("s3://")) or []]


def test_a_retried_request_draws_no_random_number_of_a_training(s3: str) -> None:
    """A bucket that did not answer for 8 s made a training draw other numbers from then on."""
    ObjectStore(f"{s3}/run-1")
    state = random.getstate()
    assert retryhandler.delay_exponential("rand", 2, 1) < 1
    assert standard.ExponentialBackoff().delay_amount(SimpleNamespace(attempt_number=1)) < 1
    assert random.getstate() == state


@pytest.mark.parametrize("fail_at", [0, 3, 20])
@pytest.mark.parametrize("kind", ["s3", "kept"])
def test_an_error_in_the_middle_leaves_what_was_there(kind: str, s3: str, raw: s3fs.S3FileSystem, fail_at: int) -> None:
    """Leaving ``with fs.open(…)`` by an exception completed the object: 67 of 105 MB replaced the good file."""
    store = ObjectStore(f"{s3 if kind == 's3' else f'kept://in-the-middle-{fail_at}'}/checkpoints")
    first = put(store, 1, nbytes=30 * KIB, name="last.ckpt", file="")
    second, image = snapshot(2, nbytes=40 * KIB, name="last.ckpt", file="")
    with pytest.raises(SpotError, match="source is gone"):
        store.put_parts(replace(second, checksums=()), parts_of(image, 256, fail_at), attempt=1)
    assert store.has(first)
    first.verify(fetched(store, first), "s3")
    assert uploads_of(raw, s3) == []


def test_a_missing_bucket_is_an_error_and_is_not_created(s3: str, raw: s3fs.S3FileSystem) -> None:
    nowhere = f"{s3}-not-made"
    store = open_store(f"{nowhere}/run-1")
    with pytest.raises(TierError, match=nowhere.removeprefix("s3://")):
        store.survey()
    with pytest.raises(TierError):
        store.claim(claim_of(1))
    with pytest.raises(TierError):
        put(store, 1)
    assert not raw.exists(nowhere)


@pytest.mark.parametrize(("part_bytes", "at_once"), [(8 * MIB, 16), (32 * MIB, 4), (512 * MIB, 1)])
def test_large_chunks_take_fewer_connections_to_bound_memory(part_bytes: int, at_once: int) -> None:
    under_way, lock = [0, 0], threading.Lock()

    def job() -> None:
        with lock:
            under_way[0] += 1
            under_way[1] = max(under_way)
        time.sleep(0.01)
        with lock:
            under_way[0] -= 1

    fsspec_client.move((job for _ in range(40)), part_bytes)
    assert 1 <= under_way[1] <= at_once


def test_no_part_is_left_on_its_way_after_an_error() -> None:
    running: list[int] = []
    done: list[int] = []
    failed = threading.Event()

    def job(index: int) -> None:
        running.append(index)
        if index == 5:
            done.append(index)
            failed.set()
            raise OSError("part 5")
        assert failed.wait(120)
        time.sleep(0.5)  # by then it is known
        done.append(index)

    with pytest.raises(OSError, match="part 5"):
        fsspec_client.move((functools.partial(job, index) for index in range(100)), MIB)
    assert sorted(running) == sorted(done)
    assert len(done) < 100


def test_a_block_whose_connection_breaks_is_sent_from_its_start(
    s3: str, s3_server: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("lightning_spot.store.s3.BLOCK_BYTES", 256 * KIB)
    proxy = Proxy(s3_server.replace("http://", "spot://"), seed)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url.replace("spot://", "http://"))
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        store = ObjectStore(f"{s3}/run-1")
        assert store.survey().manifests == []
        proxy.cut_after = 100 * KIB
        healing = threading.Timer(0.5, setattr, (proxy, "cut_after", None))
        healing.start()
        manifest = put(store, 1, nbytes=900 * KIB)
        healing.join()
        manifest.verify(fetched(store, manifest), "s3")
    finally:
        proxy.close()


RULE = {"ID": "abort", "Status": "Enabled", "Filter": {}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}}


@pytest.mark.parametrize(
    ("rule", "is_one"),
    [
        (RULE, True),
        ({**RULE, "Filter": {"Prefix": "runs/"}}, True),
        ({**RULE, "Filter": {"Prefix": "others/"}}, False),
        ({**RULE, "Status": "Disabled"}, False),
        ({"ID": "old", "Status": "Enabled", "Filter": {}, "Expiration": {"Days": 30}}, False),
        (None, False),
    ],
    ids=["all", "prefix", "another prefix", "off", "another", "none"],
)
def test_the_rule_that_ends_unfinished_uploads_is_found(
    s3: str, raw: s3fs.S3FileSystem, rule: dict[str, Any] | None, is_one: bool
) -> None:
    if rule is not None:
        name = s3.removeprefix("s3://")
        raw.call_s3("put_bucket_lifecycle_configuration", Bucket=name, LifecycleConfiguration={"Rules": [rule]})
    assert s3_requests.aborts_unfinished(raw, f"{s3}/runs/1") == is_one


def test_missing_credentials_are_an_error_that_says_so(no_credentials: None) -> None:
    with pytest.raises(SettingsError, match=r"s3://bucket/run .*AWS_ACCESS_KEY_ID") as caught:
        survey(Location.of("s3://bucket/run", local_server=False), RetryPolicy(tries=1))
    assert "resume=False" not in str(caught.value)


def test_a_silent_name_server_keeps_no_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[threading.Thread] = []
    go_on = threading.Event()

    def getaddrinfo(*_: Any, **__: Any) -> Any:
        asked.append(threading.current_thread())
        go_on.wait(120)
        raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://nowhere.invalid:9000")
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    s3fs.S3FileSystem.clear_instance_cache()
    asking = threading.Thread(
        target=lambda: survey(Location.of("s3://bucket/run", local_server=False), RetryPolicy(tries=1))
    )
    asking.start()
    try:
        until(lambda: asked, "the endpoint's name to be asked for")
        # Python joins those of pools, and all that are no daemons, before it exits.
        assert asked[0].daemon
        assert asked[0] not in concurrent.futures.thread._threads_queues
    finally:
        go_on.set()
        asking.join()
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("times", [1, 2])
def test_a_part_that_comes_damaged_is_read_once_more(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """A line that flips a bit cost the newest snapshot: it was passed over, as one that is damaged there."""
    store = open_store(f"kept://damaged-{times}/run")
    manifest, left, read = put(store, 1), [times], Kept.cat_file

    def flipped(files: Kept, path: str, **which: Any) -> bytes:
        data = bytearray(read(files, path, **which))
        if which and left[0]:  # a range of it
            left[0] -= 1
            data[7] ^= 1
        return bytes(data)

    monkeypatch.setattr(Kept, "cat_file", flipped)
    if times == 1:
        assert fetched(store, manifest) == snapshot(1, nbytes=1000)[1]
    else:
        with pytest.raises(CorruptSnapshotError, check=lambda error: error.part == 0):
            fetched(store, manifest)


@pytest.mark.parametrize("fails", [False, True])
def test_a_file_another_saved_meanwhile_gets_no_wrong_manifest(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """It was looked at when the save began; of a snapshot, no other attempt writes that."""
    url = f"kept://{random.getrandbits(64):x}/run"
    ours, theirs = ObjectStore(url), ObjectStore(url)
    pipe, manifest = Kept.pipe_file, snapshot(2, nbytes=1200, name="mine.ckpt", file="")[0]

    def image() -> Iterator[memoryview]:
        yield from parts_of(snapshot(2, nbytes=1200)[1], 256)
        put(theirs, 1, name="mine.ckpt", file="")
        if fails:
            monkeypatch.setattr(Kept, "pipe_file", broken)

    def broken(files: Kept, path: str, value: bytes) -> None:
        if not path.endswith("mine.ckpt"):
            pipe(files, path, value)
            return
        pipe(files, path, b"half of ours, and then the link was cut")
        raise OSError("its link is cut")

    with pytest.raises(TierError) if fails else contextlib.nullcontext():
        ours.put_parts(replace(manifest, checksums=()), image(), attempt=1)
    monkeypatch.setattr(Kept, "pipe_file", pipe)
    assert ours.has(manifest) is not fails
    assert ours._noted(manifest) == (replace(manifest, checksums=()) if fails else manifest)


@pytest.mark.parametrize(
    ("code", "message", "said"),
    [
        (
            "NotImplemented",
            "A header is not implemented",
            r"\(NotImplemented\).*AWS_REQUEST_CHECKSUM",
        ),
        ("InvalidRequest", "None", r"OSError: InvalidRequest\..*AWS_REQUEST_CHECKSUM"),
        ("AccessDenied", "None", r"OSError: AccessDenied$"),
        ("SlowDown", "Reduce your rate", r"OSError: Reduce your rate \(SlowDown\)$"),
    ],
)
def test_an_error_of_a_store_carries_its_code_and_what_helps(
    code: str, message: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """s3fs leaves the code out; a store that is not AWS may send no message at all."""
    monkeypatch.delenv("AWS_REQUEST_CHECKSUM_CALCULATION", raising=False)
    cause = ClientError({"Error": {"Code": code}}, "PutObject")
    with pytest.raises(TierError, match=said), tier_errors("s3://bucket/run"):
        raise OSError(message) from cause
