"""Whatever goes wrong while changes are sent to a snapshot server: what it commits is right, and it gets there."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.client.encoding import OutgoingPart, Part, PartEncoder, packers
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.server_client import ServerClient
from lightning_spot.http import upload_requests
from lightning_spot.protocol.wire import Address, PartKind
from lightning_spot.server import ring
from lightning_spot.snapshot.parts import checksum
from tests.support.proxy import Proxy
from tests.support.server import MIB, RUN_ID, manifest_of
from tests.support.uploads import send
from tests.support.waiting import until
from tests.support.wire_pair import RUN, Pair, Sender, floats, kinds, needs_zstd, pair, state, trained

pytestmark = pytest.mark.guarantee("G20")

__all__ = ["kinds", "pair"]


@pytest.fixture
def image(pair: Pair, kinds: Counter[str]) -> bytearray:
    """Of a second snapshot, whose beginning is not that of the first one, which the receiver has."""
    pair.open()
    image = state(1, MIB)
    pair.near.bring(1, bytes(image))
    image[:1000] = bytes(1000)
    return image


def test_a_receiver_that_claims_what_it_has_not_gets_it_whole(
    pair: Pair, kinds: Counter[str], image: bytearray, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = upload_requests.base_info
    monkeypatch.setattr(
        upload_requests, "base_info", lambda upload: {**(of(upload) or {}), "checksums": [checksum(image)]}
    )
    pair.near.bring(2, bytes(image))
    assert kinds == {"SAME": 1, "WHOLE": 2}
    pair.check(2, bytes(image))


@pytest.mark.parametrize("answer", [7, {}, {"name": "x"}, {"name": "x", "nbytes": 5, "part_bytes": 0, "checksums": []}])
def test_a_receiver_that_answers_nonsense_gets_everything_whole(
    pair: Pair, kinds: Counter[str], monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    pair.open()
    image = bytes(state(1, 1000))
    pair.near.bring(1, image)
    monkeypatch.setattr(upload_requests, "base_info", lambda _upload: answer)
    pair.near.bring(2, image)
    assert kinds == {"WHOLE": 2}
    pair.check(2, image)


@pytest.mark.parametrize("compression", ["off", pytest.param("always", marks=needs_zstd)])
def test_a_base_that_is_not_the_same_at_both_ends_does_no_harm(
    pair: Pair, kinds: Counter[str], compression: str
) -> None:
    pair.open(compression=compression)
    image = bytearray(floats(1, MIB))
    pair.near.bring(1, bytes(image))
    slot = next(slot for slot in pair.near.server.ring.contents(RUN_ID))
    slot.view()[500_000] ^= 1  # the memory of the sender's host is at fault
    if compression == "off":
        image[:1000] = bytes(1000)
        image[500_000] ^= 1  # and hides that this has changed
    else:
        image[:] = trained(bytes(image))
    pair.near.bring(2, bytes(image))
    assert kinds["WHOLE"] == 2
    assert kinds.total() == 3
    pair.check(2, bytes(image))


def test_a_base_whose_slot_was_taken_at_the_sender_is_not_used(
    pair: Pair, kinds: Counter[str], image: bytearray, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = ServerStore.send

    def taken(store: ServerStore, *arguments: Any, earlier: ring.FindEarlier, **more: Any) -> Any:
        def find(run: str, name: str) -> ring.Glance | None:
            found = earlier(run, name)
            return None if found is None else replace(found, is_there=lambda: False)

        return send(store, *arguments, earlier=find, **more)

    monkeypatch.setattr(ServerStore, "send", taken)
    pair.near.bring(2, bytes(image))
    assert kinds == {"WHOLE": 2}
    pair.check(2, bytes(image))


def test_a_sender_without_room_for_a_base_sends_whole(tmp_path: Path, pair: Pair, kinds: Counter[str]) -> None:
    pair.near.close()
    with closing(Sender(tmp_path / "small", pair.url, slots=1)) as pair.near:
        pair.open()
        image = state(1, MIB)
        for step in (1, 2, 3):
            image[:1000] = bytes([step]) * 1000
            pair.near.bring(step, bytes(image))
            pair.check(step, bytes(image))
        assert kinds == {"WHOLE": 3}


@pytest.mark.parametrize("place", [100, 3 * MIB])
def test_a_connection_that_breaks_in_a_delta_costs_only_time(pair: Pair, place: int) -> None:
    with closing(Proxy(pair.url, seed=1)) as proxy:
        pair.open(proxy.url)
        image = state(1, 20 * MIB)
        pair.near.bring(1, bytes(image))
        image[: 6 * MIB] = random.Random(2).randbytes(6 * MIB)
        proxy.cut_after = place
        upload = pair.near.server.uploads.lease(RUN, 1, len(image), wait_s=60)
        upload.slot.view(len(image))[:] = image
        pair.near.server.uploads.seal(upload.id, manifest_of(2, 1, len(image)))
        until(lambda: any(health.failures_total for health in pair.near.server.tiers().values()), "the put to fail")
        assert [manifest.step for slot in pair.far.server.ring.contents(RUN_ID) if (manifest := slot.manifest)] == [1]
        proxy.cut_after = None
        assert pair.near.flush() == []
        pair.check(2, bytes(image))


def test_an_upload_the_receiver_forgot_midway_starts_again(
    pair: Pair, image: bytearray, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, forgotten = PartEncoder.encode, []

    def forgetting(self: PartEncoder, part: Part) -> OutgoingPart:
        if not forgotten:
            forgotten.extend(pair.far.server.uploads)
            for upload in forgotten:
                pair.far.server.uploads.abort(upload)
        return encode(self, part)

    monkeypatch.setattr(PartEncoder, "encode", forgetting)
    pair.near.bring(2, bytes(image))
    assert len(forgotten) == 1
    pair.check(2, bytes(image))


def test_packing_stands_back_behind_training() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()  # of tests that were started to stand back, too
    with packers() as threads:
        assert threads.submit(niceness).result() == max(10, before)
    assert niceness() == before


class Upload:
    """An upload of a second snapshot by hand."""

    def __init__(self, pair: Pair, image: bytes) -> None:
        self.client = ServerClient(Address("127.0.0.1", int(pair.url.rpartition(":")[2])))
        self.client.speak_for(1, "token-1")
        self.manifest = manifest_of(2, 1, len(image)).sealed(memoryview(image))
        self.image = image
        request = {"attempt": 1, "nbytes": len(image), "name": self.manifest.name}
        request["manifest"] = asdict(replace(self.manifest, checksums=()))
        self.leased = self.client.call("POST", f"/v1/runs/{RUN}/uploads", request)

    def send(self, *parts: OutgoingPart) -> list[str]:
        return send(self.client, self.leased["upload"], *parts)

    def part(self, kind: PartKind, content: bytes) -> OutgoingPart:
        return OutgoingPart(0, len(self.image), self.manifest.checksums[0], kind, content)

    def commit(self) -> None:
        self.client.call("POST", f"/v1/uploads/{self.leased['upload']}/commit", {"manifest": asdict(self.manifest)})
        self.client.close()


def test_a_removed_delta_base_stays_as_long_as_it_is_needed(pair: Pair) -> None:
    pair.open()
    image = bytes(state(1, MIB))
    pair.near.bring(1, image)
    upload = Upload(pair, image)
    name = upload.leased["base"]["name"]
    pair.far.server.remove(RUN, name)
    others = [pair.far.server.uploads.lease(RUN, 1, MIB) for _ in range(3)]  # none of them gets its slot
    for other in others:
        other.slot.view(MIB)[:] = bytes(MIB)
    assert upload.send(upload.part(PartKind.SAME, b"")) == list(upload.manifest.checksums)
    upload.commit()
    for other in others:
        pair.far.server.uploads.abort(other.id)
    pair.check(2, image)
