"""Ranks that each write their shard of a snapshot: together these are one checkpoint, or that of a model in shards."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from lightning_spot.capture.copier import Copier
from lightning_spot.capture.layouts import (
    CheckpointLayouter,
    RankCheckpoint,
    ShardedCheckpoint,
    ShardedCheckpointLayouter,
    plan_ranges,
)
from lightning_spot.capture.tensors import by_storage, owned_nbytes
from lightning_spot.capture.writer import Background, SnapshotWriter
from lightning_spot.errors import (
    FailureReason,
    NotSerializableError,
    ServerUnreachableError,
    SnapshotFailedError,
    SpotError,
)
from lightning_spot.server.host import Host, InProcessHost, Lease
from lightning_spot.server.snapshot_server import IN_PROCESS, SnapshotServer
from lightning_spot.sharded.file_plan import load_state, state_file
from lightning_spot.sharded.reader import ImageReader, load_all
from lightning_spot.snapshot import layout
from lightning_spot.snapshot.files import MODEL_FILE
from lightning_spot.snapshot.manifest import Manifest, shard_name, snapshot_name
from lightning_spot.snapshot.shards import LEAST_PART_BYTES, Status
from lightning_spot.store.local import LocalStore
from tests.support.fake_device import FakeDevice
from tests.support.ranks import manifest_of, rows
from tests.support.said import said_about
from tests.support.server import named_run
from tests.support.waiting import until


def ring() -> SnapshotServer:
    """The server, at which a run is open."""
    made = SnapshotServer(slots=3, memory_bytes=2**30, open_store=LocalStore, allow=None)
    made.registry.begin_session(IN_PROCESS)
    made.open_run(named_run("run", session=IN_PROCESS))
    return made


class RankRing(InProcessHost):
    """That ring as one rank sees it.

    Args:
        server: that all of them see.

    Attributes:
        is_lost: whether it is, for this rank.
    """

    server_call_timeout_s = 5.0
    memory_bytes = 2**30

    def __init__(self, server: SnapshotServer) -> None:
        self.run, self.attempt, self.released, self.is_lost = "run", 1, None, False
        self._seen = server

    @property
    def _server(self) -> SnapshotServer:  # type: ignore[override] # there it is an attribute
        if self.is_lost:
            raise ServerUnreachableError("the ring is lost")
        return self._seen

    def check(self) -> None:
        assert self._server is self._seen

    def leave(self, *, complete: bool) -> None:
        """The others still have it."""


pytestmark = pytest.mark.guarantee("G10")

LAST_S = 60.0  # of what never takes so long
FAILED = FailureReason.SHARD_MISSING.caused


def tensors(seed: int, count: int = 9, least: int = 1) -> list[torch.Tensor]:
    dice = random.Random(seed)
    torch.manual_seed(seed)
    return [torch.rand(dice.randrange(least, 30_000)) for _ in range(count)]


class Desk:
    """The writers of the ranks of one training, each with what it trains."""

    def __init__(self, ranks: int = 3, ranges: tuple[int, ...] = (1, 2, 0)) -> None:
        self.server, self.ranges = ring(), ranges
        self.rings = [RankRing(self.server) for _ in range(ranks)]
        self.weights = [tensors(1) for _ in range(ranks)]
        self.own: list[Any] = [{"rank": rank, "draws": torch.arange(rank)} for rank in range(ranks)]
        self.buffer = torch.zeros(9)
        self.more: dict[str, Any] = {}
        self.writers = [
            SnapshotWriter(ring, self.another_ring, layouter=self.layouter(rank), rank=rank)
            for rank, ring in enumerate(self.rings)
        ]

    def layouter(self, _rank: int) -> Any:
        return CheckpointLayouter("token")

    def another_ring(self) -> RankRing:
        return RankRing(self.server)

    def content(self, rank: int) -> Any:
        values = {"w": self.weights[rank], "b": self.buffer, "ranks": [self.own[rank]], **self.more}
        return RankCheckpoint(values, self.own[rank], owned_nbytes(by_storage(self.weights[rank])), self.ranges)

    def begin(self, rank: int, step: int, **how: Any) -> Future[Manifest]:
        manifest = manifest_of(rank, len(self.writers), step)
        owned, writer = by_storage(self.weights[rank]), self.writers[rank]
        try:
            return writer.begin(self.content(rank), manifest, owned=owned, **how)
        except SpotError as error:
            writer.fail(manifest, error)
            raise

    def take(self, step: int) -> list[Future[Manifest]]:
        dones = [self.begin(rank, step) for rank in reversed(range(len(self.writers)))]
        self.copied()
        return dones[::-1]

    def copied(self) -> None:
        for writer in self.writers:
            writer.copied()

    def train(self, value: float) -> None:
        for weight in [each for weights in self.weights for each in weights]:
            weight.add_(value)

    def shards(self, step: int) -> list[Manifest]:
        """What is there of a snapshot."""
        name, slots = snapshot_name(step, 1), self.server.ring.contents("run")
        return [slot.manifest for slot in slots if slot.manifest is not None and slot.manifest.snapshot == name]

    def status(self, step: int) -> Status:
        return self.server.ring.status_of("run", snapshot_name(step, 1))[0]

    def image(self, step: int) -> tuple[memoryview, Manifest]:
        """A snapshot that counts, checked."""
        ((held, manifest),) = self.server.ring.readable("run", snapshot_name(step, 1))
        with self.server.ring.reading(held) as found:
            image = memoryview(bytes(found[0 : len(found)]))
        manifest.verify(image, "here")
        return image, manifest

    def saved(self, step: int) -> dict[str, Any]:
        """The checkpoint, with the states of all ranks."""
        image, manifest = self.image(step)
        files = {span.name: image[span.offset : span.stop] for span in manifest.files}
        saved: dict[str, Any] = torch.load(io.BytesIO(files[MODEL_FILE]), weights_only=True)
        saved["ranks"] += [load_state(files[state_file(rank)]) for rank in range(1, len(self.writers))]
        return saved

    def close(self) -> None:
        for writer in self.writers:
            writer.close()
        self.server.close()


@pytest.fixture
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    made = Desk(*getattr(request, "param", ()))
    yield made
    made.close()


def same(saved: dict[str, Any], weights: list[torch.Tensor]) -> bool:
    return len(saved["w"]) == len(weights) and all(map(torch.equal, saved["w"], weights))


@pytest.mark.parametrize(
    "desk",
    [(3, (1, 2, 0)), (2, (1, 0)), (4, (2, 0)), (3, (0,)), (5, (1, 2, 3, 4, 0))],
    indirect=True,
    ids=["three", "two", "two of four", "rank 0 alone", "five"],
)
def test_what_ranks_have_written_is_the_checkpoint_of_its_step(desk: Desk) -> None:
    for step, note in enumerate(["", "x" * 200_000, "y", "", ""], start=1):
        desk.more["note"] = note
        wanted = [weight.clone() for weight in desk.weights[0]]
        dones = desk.take(step)
        desk.train(1.0)
        assert [done.result(LAST_S).step for done in dones] == [step] * len(dones)
        saved = desk.saved(step)
        assert same(saved, wanted)
        assert saved["note"] == note
        assert [each["rank"] for each in saved["ranks"]] == list(range(len(dones)))
    _, manifest = desk.image(5)
    assert [span.name for span in manifest.files] == [MODEL_FILE, *map(state_file, range(1, len(dones)))]
    assert len({each.shard.start for each in desk.shards(5)}) == len(desk.ranges)


def test_optimizers_that_begin_and_cease_to_keep_something(desk: Desk) -> None:
    moments = [tensors(2, 5) for _ in desk.weights]
    for first, change in ((1, list.extend), (4, lambda mine, more: mine.__delitem__(slice(3, 3 + len(more))))):
        [done.result(LAST_S) for done in desk.take(first)]
        for mine, more in zip(desk.weights, moments, strict=True):
            change(mine, more)
        for step in (first + 1, first + 2):
            [done.result(LAST_S) for done in desk.take(step)]
            assert same(desk.saved(step), desk.weights[0])


def test_what_a_hook_takes_out_of_the_checkpoint_is_not_written(desk: Desk) -> None:
    usual = desk.content

    def content(rank: int) -> Any:
        return replace(usual(rank), values={"w": desk.weights[rank][3:], "ranks": [0]})

    desk.content = content  # type: ignore[method-assign]
    [done.result(LAST_S) for done in desk.take(1)]
    assert same(desk.saved(1), desk.weights[0][3:])
    left_out = sum(weight.nbytes for weight in desk.weights[0][:3])
    image, _ = desk.image(1)
    assert len(image) < sum(weight.nbytes for weight in desk.weights[0]) - left_out + 8 * LEAST_PART_BYTES


@pytest.mark.parametrize("differs", ["values", "sizes"])
def test_ranks_that_do_not_train_the_same_abort_the_snapshot(desk: Desk, differs: str) -> None:
    [done.result(LAST_S) for done in desk.take(1)]
    before = desk.weights[1]
    desk.weights[1] = [weight + 1 if differs == "values" else weight[1:].clone() for weight in before]
    first, *others = desk.take(2)
    with pytest.raises(SnapshotFailedError, check=FAILED):
        first.result(LAST_S)
    assert [done.result(LAST_S).step for done in others] == [2, 2]
    assert (desk.writers[0].aborted, desk.writers[0].committed.step) == (1, 1)  # type: ignore[union-attr]
    desk.weights[1] = before
    [done.result(LAST_S) for done in desk.take(3)]
    assert same(desk.saved(3), desk.weights[0])


def test_whatever_ranks_must_agree_on_is_in_the_digest() -> None:
    part = 64 * 1024
    first, last = (torch.empty(count * part, dtype=torch.uint8) for count in (1, 3))
    plans: list[Any] = [
        ([first, last], (1, 0), part, ("token", "sample")),
        ([last, first], (1, 0), part, ("token", "sample")),
        ([first, last.view(torch.int64)], (1, 0), part, ("token", "sample")),
        ([first, last], (1, 0), 2 * part, ("token", "sample")),
        ([first, last], (1, 0), part, ("token", "other")),
        ([first, last], (1, 2, 0), part, ("token", "sample")),
    ]
    assert len({plan_ranges(*plan)[1] for plan in plans}) == len(plans)
    of_another_rank = [first.clone(), last.clone()]
    assert plan_ranges(of_another_rank, *plans[0][1:])[1] == plan_ranges(*plans[0])[1]


def test_a_change_on_another_rank_aborts_the_snapshot(desk: Desk) -> None:
    desk.writers[2].close()
    copier = Copier(threads=0)  # nothing is copied in the background
    desk.writers[2] = SnapshotWriter(desk.rings[2], copier=copier, layouter=CheckpointLayouter("token"), rank=2)
    dones = [desk.begin(rank, 1) for rank in range(3)]
    for weight in desk.weights[2]:
        weight.add_(1)
    desk.copied()
    with pytest.raises(SnapshotFailedError, match=r"rank 2\b", check=FAILED):
        dones[0].result(LAST_S)
    assert desk.status(1) is Status.ABORTED
    assert desk.writers[2].dropped == 1
    assert (desk.writers[0].aborted, desk.writers[0].dropped) == (1, 1)


def test_a_rank_that_cannot_begin_says_so_and_nobody_waits(desk: Desk) -> None:
    first = desk.begin(0, 1)
    desk.own[1] = {"bad": lambda: 0}
    with pytest.raises(NotSerializableError):
        desk.begin(1, 1)
    desk.copied()
    with pytest.raises(SnapshotFailedError, match=r"rank 1\b", check=FAILED):
        first.result(LAST_S)
    desk.own[1] = {"rank": 1}
    [done.result(LAST_S) for done in desk.take(2)]
    assert same(desk.saved(2), desk.weights[0])


def test_where_rank_0_cannot_begin_the_others_are_done_at_once(desk: Desk) -> None:
    others = [desk.begin(rank, 1) for rank in (1, 2)]
    desk.more["bad"] = lambda: 0
    with pytest.raises(NotSerializableError):
        desk.begin(0, 1)
    desk.copied()
    assert [done.result(LAST_S).step for done in others] == [1, 1]
    assert desk.status(1) is Status.ABORTED


def test_a_checkpoint_that_only_torch_can_write_is_not_cut(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> bytes:
        raise AttributeError("another torch")

    monkeypatch.setattr(layout, "lay_out", fails)
    desk.own = [{}, {}, {}]
    with pytest.raises(SnapshotFailedError, match=r"torch\.save", check=FAILED):
        desk.begin(0, 1)
    assert "another torch" in desk.writers[0].layouter.why_alone
    desk.ranges = (0,)
    [done.result(LAST_S) for done in desk.take(2)]
    assert same(desk.saved(2), desk.weights[0])
    assert said_about(caplog, "saved-slowly")


def test_a_ring_lost_while_others_are_awaited_is_found_again(desk: Desk) -> None:
    first = desk.begin(0, 1)
    desk.writers[0].copied()
    until(lambda: desk.shards(1), "the shard of rank 0")
    desk.rings[0].is_lost = True
    until(lambda: desk.writers[0].link.losses == 1, "rank 0 to notice")
    others = [desk.begin(rank, 1) for rank in (1, 2)]
    desk.copied()
    assert [done.result(LAST_S).step for done in (first, *others)] == [1, 1, 1]


@pytest.mark.parametrize("is_known", [True, False])
def test_the_last_snapshot_waits_for_the_next_ring(is_known: bool) -> None:
    """The final weights were lost, and all steps since the snapshot before, though a new server was starting."""
    may_begin = threading.Event()

    class Slow(Desk):
        def another_ring(self) -> RankRing:
            assert may_begin.wait(LAST_S)
            return super().another_ring()

    with contextlib.closing(Slow()) as desk:
        desk.rings[0].is_lost = True
        if is_known:
            desk.writers[0].link.lose(cast(Host, desk.rings[0]), ServerUnreachableError("it has gone"))
        threading.Timer(0.2, may_begin.set).start()
        dones = []
        for rank, writer in enumerate(desk.writers):
            name = shard_name(snapshot_name(1, 1, complete=True), rank)
            manifest = replace(manifest_of(rank, len(desk.writers), 1), name=name, complete=True)
            dones.append(writer.begin(desk.content(rank), manifest, wait_s=LAST_S))
        desk.copied()
        assert [done.result(LAST_S).complete for done in dones] == [True] * 3


def test_who_awaits_a_rank_that_has_gone_ends_when_training_does(desk: Desk) -> None:
    first = desk.begin(0, 1)
    desk.begin(1, 1)
    desk.copied()
    desk.writers[0].wait_all(0.1)
    assert not first.done()
    assert desk.writers[0].is_under_way
    desk.writers[0].close()
    with pytest.raises(SnapshotFailedError, check=FAILED):
        first.result(LAST_S)
    assert desk.writers[0].aborted == 0  # it may count yet


def test_a_background_thread_failing_at_its_start_blocks_no_rank(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Want of memory may come up where a function is entered: ``fit`` waited for what was never to end."""
    [done.result(LAST_S) for done in desk.take(1)]
    put, count = Background.put, itertools.count(1)

    def strikes() -> None:
        raise MemoryError("none is left")

    def struck(tasks: Background, task: Callable[[], None], *failed: Any) -> None:
        put(tasks, strikes if next(count) == 2 else task, *failed)  # ranks 2, 1 and 0 begin in this order

    with monkeypatch.context() as patch:
        patch.setattr(Background, "put", struck)
        first, second, _ = desk.take(2)
        assert "none is left" in str(second.exception(LAST_S))
        with pytest.raises(SnapshotFailedError, match=r"rank 1: .*none is left", check=FAILED):
            first.result(LAST_S)
    for step in (3, 4, 5, 6):  # more than there are slots
        [done.result(LAST_S) for done in desk.take(step)]


def test_nothing_comes_into_a_slot_that_was_given_back(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was still to be copied came there later on, when the slot may be another snapshot's."""

    def refused(lease: Lease, *_: Any, **__: Any) -> bool:
        raise SnapshotFailedError("it is not wanted", reason=FailureReason.SHARD_MISSING)

    monkeypatch.setattr(desk.rings[1], "seal", refused)
    done = desk.begin(1, 1)
    (pending,) = desk.writers[1]._pending
    desk.writers[1].copied()
    with pytest.raises(SnapshotFailedError, check=FAILED):
        done.result(LAST_S)
    held = bytes(pending.view.map)
    for weight in desk.weights[1]:
        weight.fill_(3)
    desk.copied()
    assert bytes(pending.view.map) == held


def test_a_rank_s_state_on_a_gpu_is_copied_without_waiting(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    device, drawn = FakeDevice(), torch.rand(2000)
    wanted = drawn.clone()
    device.own([drawn])
    desk.writers[1].close()
    copier = Copier(buffer_bytes=1, device=device)
    desk.writers[1] = SnapshotWriter(desk.rings[1], copier=copier, layouter=CheckpointLayouter("token"), rank=1)
    desk.own[1] = {"rank": 1, "drawn": drawn}
    synchronize, waited = device.synchronize, list[threading.Thread]()
    monkeypatch.setattr(
        device, "synchronize", lambda event: waited.append(threading.current_thread()) or synchronize(event)
    )
    for _ in range(20):  # what is ordered before that takes its time
        device.do(lambda: None)
    begun = [desk.begin(rank, 1) for rank in range(3)]
    desk.copied()
    assert threading.current_thread() not in waited
    [done.result(LAST_S) for done in begun]
    assert torch.equal(desk.saved(1)["ranks"][1]["drawn"], wanted)


def test_what_ranks_disagree_on_stays_aborted(desk: Desk) -> None:
    """Rank 0 takes the slot of one of them: it waited for that shard for a minute."""
    desk.writers[1].layouter = CheckpointLayouter("another token")
    for rank in (2, 1):
        desk.begin(rank, 1)
        desk.copied()
    until(lambda: desk.status(1) is Status.ABORTED, "it to be aborted")
    first = desk.begin(0, 1)
    desk.copied()
    with pytest.raises(SnapshotFailedError, check=FAILED):
        first.result(LAST_S / 2)


# -- a model in shards ------------------------------------------------------------------------------------------------


class ShardedDesk(Desk):
    """The same, of a model of which each rank has some rows."""

    def __init__(self) -> None:
        super().__init__(ranks=2)
        self.frozen = torch.rand(100_000)
        self.parts = [torch.rand(30, 50) for _ in self.writers]

    def layouter(self, rank: int) -> Any:
        return ShardedCheckpointLayouter(rank, 2, "token")

    def content(self, rank: int) -> Any:
        tensors = {"part": rows(self.parts[rank], 2), "f": self.frozen, "w": self.weights[rank][0]}
        return ShardedCheckpoint({"state_dict": tensors, "groups": [{"lr": 0.1}]}, self.own[rank], {"epoch": 1})

    def begin(self, rank: int, step: int, **how: Any) -> Future[Manifest]:
        owned = by_storage([self.parts[rank], *self.weights[rank]])
        return self.writers[rank].begin(self.content(rank), manifest_of(rank, 2, step), owned=owned, **how)


@pytest.fixture
def sharded() -> Iterator[ShardedDesk]:
    made = ShardedDesk()
    yield made
    made.close()


def test_each_rank_writes_its_files(sharded: ShardedDesk) -> None:
    for step in range(1, 4):
        wanted = torch.cat(sharded.parts)
        dones = sharded.take(step)
        for part in sharded.parts:
            part.add_(1)
        [done.result(LAST_S) for done in dones]
        image, manifest = sharded.image(step)
        saved = load_all(ImageReader(image, manifest))["state_dict"]
        assert torch.equal(saved["part"], wanted)
        assert torch.equal(saved["f"], sharded.frozen)
        for rank in range(2):
            span = manifest.span_of(state_file(rank))
            assert load_state(image[span.offset : span.stop])["rank"] == rank
        sharded.frozen.data.add_(1)


def test_writers_are_no_threads_of_anybody_after_the_end(desk: Desk) -> None:
    [done.result(LAST_S) for done in desk.take(1)]
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("spot-writer")]
    desk.close()
    until(lambda: len([thread for thread in mine if thread.is_alive()]) <= len(mine) - len(desk.writers), "the end")
