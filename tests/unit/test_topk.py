"""Snapshots that are not exact: what is sent and comes out of them, when one is exact, what never goes for one."""

from __future__ import annotations

import io
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.client import encoding, remote
from lightning_spot.client.encoding import Approximation
from lightning_spot.config import MANIFEST_VERSION
from lightning_spot.errors import CorruptSnapshotError, ServerUnreachableError, SettingsError, TierError
from lightning_spot.server import reconcile
from lightning_spot.server.host import InProcessHost
from lightning_spot.server.runs import Opened, RunInfo
from lightning_spot.server.slots import Commit, Slot, SlotState, View, evictable
from lightning_spot.snapshot.manifest import Manifest, snapshot_name, snapshot_order
from lightning_spot.snapshot.ranges import Floats, read_floats
from lightning_spot.store.local import LocalStore
from lightning_spot.store.retention import Keep, retain
from tests.support.filled import check_archive
from tests.support.said import said
from tests.support.server import FIRST, MIB, RUN_ID, MakeWithServers, committed, image_of, manifest_of
from tests.support.waiting import until
from tests.support.wire_pair import RUN, Pair, Sender, floats, pair

pytestmark = pytest.mark.guarantee("G5")

__all__ = ["pair"]

NBYTES = 9 * MIB  # two parts
NUMBERS = (Floats(64, NBYTES - 128, "float32"),)


def moved(image: bytes, step: int) -> bytes:
    """A state of training one step later: every number has moved, and what is no number has changed, too."""
    source = np.random.default_rng(step)
    numbers = np.frombuffer(image[64 : NBYTES - 64], np.float32)
    numbers = numbers + 1e-3 * source.standard_normal(len(numbers)).astype(np.float32)
    return source.bytes(64) + numbers.astype(np.float32).tobytes() + image[NBYTES - 64 :]


def commit(pair: Pair, step: int, image: bytes, numbers: Any = NUMBERS, **fields: Any) -> Manifest:
    """Commit a snapshot at the trainer's server, and wait for nothing."""
    manifest = manifest_of(step, 1, len(image), **fields)
    return committed(pair.near.server, RUN, manifest, image, floats=numbers, wait_s=60)


def at_far(pair: Pair, step: int, *, exact: bool) -> Slot | None:
    name = snapshot_name(step, 1, exact=exact)
    return pair.far.server.ring.find(RUN_ID, name)


def arrive(pair: Pair, step: int, *, exact: bool) -> bytes:
    """Wait until the snapshot server has a snapshot, and nothing else of that step; its bytes."""
    until(lambda: at_far(pair, step, exact=exact), f"step {step}")
    slot = at_far(pair, step, exact=exact)
    assert slot.manifest.exact is exact
    slot.manifest.verify(slot.view(), "the snapshot server")
    until(lambda: not any(slot.readers for slot in pair.near.server.ring.slots), "the sender")
    assert at_far(pair, step, exact=not exact) is None
    return bytes(slot.view())


@pytest.fixture
def topk(pair: Pair) -> Pair:
    pair.open(compression="topk", session="a trainer that lives")
    return pair


def begun(pair: Pair) -> bytes:
    """The first snapshot, which is there, exact."""
    image = floats(1, NBYTES)
    commit(pair, 1, image)
    assert arrive(pair, 1, exact=True) == image
    return image


def test_one_number_in_a_hundred_is_sent_and_the_rest_is_exact(topk: Pair) -> None:
    image = begun(topk)
    sent, had = topk.near.sent_bytes, image
    for step in (2, 3, 4):
        image = moved(image, step)
        manifest = commit(topk, step, image)
        got = arrive(topk, step, exact=False)
        assert topk.near.sent_bytes - sent < 0.02 * NBYTES
        sent = topk.near.sent_bytes
        assert got[:64] == image[:64]
        assert got[NUMBERS[0].stop :] == image[NUMBERS[0].stop :]
        wanted, there, before = (np.frombuffer(each, np.float32)[16:-16] for each in (image, got, had))
        assert 0.009 < np.mean(there != before) < 0.011
        assert np.abs(wanted - there).mean() < np.abs(wanted - before).mean()
        had = got
        slot = topk.near.server.ring.find(RUN_ID, manifest.name)
        assert (slot.safe, topk.near.server.ring.owed([slot])) == ([], [f"{topk.url}/{RUN}"])
    until(
        lambda: [tier["inexact"] for tier in topk.near.server.status()["tiers"].values()] == [3], "it to be noted, too"
    )
    (tier,) = topk.near.server.status()["tiers"].values()
    assert (tier["flushed"], tier["inexact"]) == (1, 3)


@pytest.mark.parametrize("why", ["who waits for safety", "the end of the run", "the trainer has gone"])
def test_the_exact_one_comes_when_it_counts(topk: Pair, why: str) -> None:
    image = moved(begun(topk), 2)
    last = commit(topk, 2, image, complete=why == "the end of the run")
    if not last.complete:
        arrive(topk, 2, exact=False)
    if why == "who waits for safety":
        assert topk.near.flush() == []
    elif not last.complete:
        topk.near.server.end_session("a trainer that lives")
    slot = until(lambda: topk.far.server.ring.find(RUN_ID, last.name), "the exact one")
    assert bytes(slot.view()) == image


def test_where_there_is_room_for_one_snapshot_it_is_exact(topk: Pair) -> None:
    """Nothing could take the place of an approximated one: there was no other snapshot until the end of training."""
    topk.near.close()
    topk.near = Sender(topk.near.root, topk.url, slots=1)
    topk.open(compression="topk", session="a trainer that lives")
    image = floats(1, NBYTES)
    for step in (1, 2, 3):
        image = moved(image, step)
        commit(topk, step, image)  # for which the one before has left memory
        slot = until(lambda step=step: at_far(topk, step, exact=True), f"step {step}")  # type: ignore[misc]
        assert bytes(slot.view()) == image


def test_now_and_then_one_is_exact(topk: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "EXACT_EVERY", 3)
    image = floats(1, NBYTES)
    for step in range(1, 8):
        image = moved(image, step)
        commit(topk, step, image)
        assert (arrive(topk, step, exact=step in (1, 4, 7)) == image) is (step in (1, 4, 7))


def test_a_server_that_has_something_else_gets_an_exact_one(topk: Pair) -> None:
    image = begun(topk)
    commit(topk, 2, moved(image, 2))
    arrive(topk, 2, exact=False)
    topk.far.server.remove(RUN, snapshot_name(2, 1, exact=False))  # as a server that was restarted has lost it
    commit(topk, 3, moved(image, 3))
    assert arrive(topk, 3, exact=True) == moved(image, 3)
    commit(topk, 4, moved(image, 4))
    arrive(topk, 4, exact=False)


def test_another_layout_begins_anew(topk: Pair) -> None:
    image = begun(topk)
    commit(topk, 2, moved(image, 2), (Floats(64, MIB, "float32"),))
    assert arrive(topk, 2, exact=True) == moved(image, 2)


def test_a_send_that_broke_off_leaves_both_ends_at_one(topk: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    image = begun(topk)
    real, broken = remote.send_parts, threading.Event()

    def breaking(*what: Any) -> Any:
        if broken.is_set():
            return real(*what)
        broken.set()
        raise ServerUnreachableError("the line broke")

    monkeypatch.setattr(remote, "send_parts", breaking)
    commit(topk, 2, moved(image, 2))
    assert arrive(topk, 2, exact=True) == moved(image, 2)  # the next try; what is here is not what the server has
    assert broken.is_set()


def test_a_real_file_is_read_by_torch_and_by_zipfile(topk: Pair, tmp_path: Path) -> None:
    """Weights and moments are approximated; counters, integers, small tensors and the rest are not."""
    host = InProcessHost(slots=3, memory_bytes=64 * MIB, open_store=topk.near._open)
    info = RunInfo(name="run", id=RUN_ID, location="", attempt=2, token="u", servers=(topk.url,), compression="topk")
    host.open_run(info)
    writer = SnapshotWriter(host, approximates=True)
    weight = torch.nn.Parameter(torch.randn(512, 512))
    half = torch.nn.Parameter(torch.randn(512, 512, dtype=torch.bfloat16))
    small, foreign, counts = torch.nn.Parameter(torch.randn(64)), torch.randn(40_000), torch.arange(40_000)
    owned = {each.untyped_storage().data_ptr(): [each] for each in (weight, half, small)}
    for step in (1, 2):
        with torch.no_grad():
            for each in (weight, half, small, foreign):
                each.add_(torch.randn_like(each), alpha=0.01)
            counts += 1
        state = {"weight": weight, "half": half, "small": small, "foreign": foreign, "counts": counts, "step": step}
        manifest = replace(manifest_of(step, 2), checksums=())
        done = writer.begin(state, manifest, owned=owned)
        writer.copied()
        done.result(120)
        name = snapshot_name(step, 2, exact=step == 1)
        until(lambda name=name: topk.far.server.ring.find(RUN_ID, name), name)  # type: ignore[misc]
    slot = topk.far.server.ring.find(RUN_ID, name)
    check_archive(slot.view())
    loaded = torch.load(io.BytesIO(bytes(slot.view())), weights_only=True)
    for name in ("small", "foreign", "counts", "step"):
        assert torch.equal(torch.as_tensor(loaded[name]), torch.as_tensor(state[name])), name
    for name, numbers in (("weight", weight), ("half", half)):
        right = (loaded[name] == numbers).float().mean()
        assert 0.005 < right < 0.5, name
        assert torch.allclose(loaded[name], numbers.detach(), atol=0.1), name
    writer.close()
    host.leave(complete=False)


def test_a_host_without_memory_for_it_sends_exactly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoding, "available_bytes", lambda: 1000)
    known, image, numbers = Approximation(), memoryview(floats(1, 4096)), [Floats(64, 3968, "float32")]
    manifest = manifest_of(1, 1, 4096).sealed(image)
    known.begin(manifest, image, numbers)
    assert not known.leads_to(manifest, numbers)
    assert [facts["size"] for facts in said(caplog, "lossy-no-memory")] == ["2.10 MB"]


def test_an_exact_one_is_never_deleted_for_one_that_is_not(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))

    def put(step: int, exact: bool) -> list[tuple[int, bool]]:
        plain = manifest_of(step)
        image = memoryview(bytes(1000))
        manifest = (plain if exact else plain.inexact()).sealed(image)
        store.put(manifest, image, attempt=1)
        retain(store, Keep(newest=2), manifest)
        return sorted((item.step, item.exact) for item in store.survey().manifests)

    put(1, True)
    put(2, True)
    for step in (3, 4, 5):
        left = put(step, False)
        assert (1, True) in left
        assert (2, True) in left
    assert left == [(1, True), (2, True), (4, False), (5, False)]
    assert put(5, True) == [(2, True), (5, False), (5, True)]
    assert put(6, True) == [(5, True), (6, True)]


def test_memory_keeps_the_newest_exact_snapshot_whatever_follows() -> None:
    def slot(index: int, step: int, exact: bool) -> Slot:
        manifest = manifest_of(step)
        manifest = manifest if exact else manifest.inexact()
        return Slot(index, state=SlotState.HELD, run=RUN_ID, manifest=manifest, commit=Commit(index))

    slots = [slot(0, 1, True), slot(1, 2, True), slot(2, 3, False), slot(3, 4, False)]
    assert View(slots).newest == {slots[1], slots[3]}
    assert evictable([View(slots)], 0.0) == [slots[0], slots[2], slots[3]]
    exact = slot(4, 4, True)
    assert View([*slots, exact]).newest == {exact}


def test_only_the_manifest_of_an_inexact_snapshot_is_marked() -> None:
    exact = manifest_of(7).sealed(memoryview(bytes(1000)))
    assert "exact" not in json.loads(exact.to_json())
    inexact = exact.inexact().sealed(memoryview(bytes(1000)))
    assert json.loads(inexact.to_json())["exact"] is False
    assert json.loads(inexact.to_json())["format"] == MANIFEST_VERSION  # what cannot read it must not take it for exact
    assert Manifest.from_json(inexact.to_json()) == inexact
    assert Manifest.from_json(exact.to_json()) == exact
    assert inexact.name == "step-000000007-attempt-0001-inexact"
    names = [snapshot_name(7, 1, exact=False), snapshot_name(7, 1), snapshot_name(7, 1, complete=True)]
    orders = [snapshot_order(name) for name in names]
    assert orders == sorted(orders, key=lambda order: order or ())
    assert [inexact.order, exact.order, replace(exact, complete=True).order] == orders
    assert inexact.order > manifest_of(6).order
    for wrong in ({"exact": "no"}, {"complete": True}, {"file": ""}):
        with pytest.raises(CorruptSnapshotError, match="exact"):
            Manifest.from_dict({**inexact.to_dict(), **wrong})


def inexact(step: int) -> dict[str, Any]:
    return {"exact": False, "name": snapshot_name(step, 1, exact=False)}


def test_a_server_that_sends_it_on_to_the_next_one_does_so_once(with_servers: MakeWithServers) -> None:
    bench = with_servers()
    bench.start(FIRST)
    for step, fields in ((1, {}), (2, inexact(2)), (3, inexact(3)), (3, {})):
        bench.save(step, wait_s=60, **fields)
        assert bench.flush() == []
    assert bench.behind[FIRST].arrived == [1, 2, 3, 3]
    assert bench.durable().count(3) == 2
    health = bench.server.status()["tiers"][f"{FIRST}/{RUN}"]
    assert (health["flushed"], health["inexact"]) == (2, 2)


def test_approximations_of_two_replicas_are_never_mixed_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both bring theirs on, under one name, while the run goes from one to the other: the worst moment of all."""
    stores = [LocalStore(tmp_path / "run") for _ in range(2)]
    exact, *images = (memoryview(image_of(number, 1000)) for number in range(3))
    stores[0].put(manifest_of(2).sealed(exact), exact, attempt=1)
    replace_file, between = os.replace, [lambda: stores[1].put(theirs, images[1], attempt=1)]
    mine, theirs = (manifest_of(3, **inexact(3)).sealed(image) for image in images)

    def replaced(source: Any, target: Any) -> None:
        replace_file(source, target)
        if Path(target).name == "model.ckpt" and between:  # its manifest is still to come
            between.pop()()

    monkeypatch.setattr(os, "replace", replaced)
    stores[0].put(mine, images[0], attempt=1)
    newest, older = stores[0].survey().manifests
    assert (newest.exact, older.exact) == (False, True)
    into = memoryview(bytearray(1000))
    with pytest.raises(CorruptSnapshotError):
        stores[0].fetch(newest, into)
    stores[0].fetch(older, into)
    assert into == exact
    stores[0].put(mine, images[0], attempt=1)
    stores[0].fetch(newest, into)
    assert into == images[0]


def test_that_it_is_durable_lets_no_exact_one_go(
    with_servers: MakeWithServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = with_servers(allow=[])  # the server behind does not write there: it is told
    bench.start(FIRST)
    open_run, names = bench.behind[FIRST].open_run, list[str]()

    def noted(info: RunInfo) -> Opened:
        names.extend(filter(None, [info.persisted]))
        return open_run(info)

    monkeypatch.setattr(bench.behind[FIRST], "open_run", noted)
    monkeypatch.setattr(reconcile, "ASK_AGAIN_S", 0.1)
    failing = snapshot_name(2, 1)
    bench.tier().errors = lambda kind, it: TierError("full") if (kind, it.name) == ("put", failing) else None
    bench.save(2, wait_s=60)
    until(lambda: bench.behind[FIRST].arrived == [2], "the server behind to have it")
    bench.save(3, wait_s=60, **inexact(3))
    until(lambda: bench.durable() == [3], "the other one to be durable")
    bench.tier().fail(None)
    assert bench.flush() == []
    until(lambda: len(names) > 1, "the server behind to be told")
    assert {*names} == {snapshot_name(2, 1)}


def test_what_a_trainer_says_of_its_numbers_is_checked() -> None:
    assert read_floats([[0, 8, "float32"], [8, 2, "bfloat16"]], 10) == ((0, 8, "float32"), (8, 2, "bfloat16"))
    for wrong in (
        7,
        [7],
        [[0, 8]],
        [[0, 7, "float32"]],
        [[0, 8, "int32"]],
        [[4, 8, "float32"]],
        [[0, 0, "float32"]],
        [[4, 4, "float32"], [0, 4, "float32"]],
        [[-4, 4, "float32"]],
        [[0.0, 8, "float32"]],
    ):
        with pytest.raises(SettingsError):
            read_floats(wrong, 10)
