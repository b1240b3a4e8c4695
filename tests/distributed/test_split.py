"""A checkpoint cut into shares: every byte is somebody's, shares are equal, and ranks that differ are told apart."""

from __future__ import annotations

import io
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning_spot.capture.share import ShareWriter
from lightning_spot.capture.split import Divider, Number, SharingRanks, Split
from lightning_spot.fit.together import ALONE, ALONE_SENT, GATHERED, TOGETHER, TOGETHER_SENT, How, Together
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

from lightning_spot.capture import following
from lightning_spot.capture.tensors import by_storage
from lightning_spot.capture.writer import Miss, SnapshotWriter
from lightning_spot.client import starting
from lightning_spot.client.embedded import EmbeddedHost
from lightning_spot.errors import (
    FailureReason,
    ServerRefusedError,
    ServerUnreachableError,
    ShareFault,
    ShareProblem,
    SnapshotFailedError,
    SpotError,
    TierReason,
)
from lightning_spot.exact import rank_states
from lightning_spot.exact.rank_states import Packing, Rooms, packed, unpacked
from lightning_spot.fit.topology import Topology
from lightning_spot.image.layout import Layout, filled, lay_out, lay_out_plain
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.image.portion import Portion, Portions
from lightning_spot.memory.host import Lease
from lightning_spot.staging.copier import Copier
from tests.support.fake_device import FakeDevice
from tests.support.said import keys, said
from tests.support.small_trainer import RUN_ID, info_of
from tests.support.waiting import new_process

pytestmark = pytest.mark.guarantee("G10")

LAST_S = 600.0  # of what never takes so long


def tensors(seed: int, count: int = 7) -> list[torch.Tensor]:
    dice = random.Random(seed)
    return [torch.rand(dice.randrange(1, 5000), generator=torch.Generator().manual_seed(seed)) for _ in range(count)]


@pytest.mark.parametrize("shares", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("buffers", [0, 50_000, 2_000_000], ids=["no buffers", "some", "more"])
def test_every_byte_is_written_by_one_rank_and_shares_are_equal(shares: int, buffers: int) -> None:
    weights, buffer = [torch.rand(20_000) for _ in range(8)], torch.zeros(buffers, dtype=torch.uint8)
    owned, rooms = by_storage(weights), Rooms()
    rooms.put(1, packed({"a": 1}))
    layout = lay_out({"w": weights, "b": buffer, "r": list(rooms.known.values())})
    split = Split.of(layout, owned, {}, SharingRanks(shares, rooms.known if shares > 1 else {}))
    assert Split.from_json(split.to_json()) == split
    mine = split.left_to_rank_0(layout)
    image = bytearray(layout.nbytes)
    counts = [sum(piece.nbytes for piece in mine.pieces)]
    spans = [(piece.offset, piece.nbytes) for piece in mine.pieces] + list(split.states.values())
    for share in range(1, shares):
        cut = split.share(share)
        counts.append(sum(nbytes for _, _, nbytes in cut))
        spans += [(split.places[index] + start, nbytes) for index, start, nbytes in cut]
    for offset, nbytes in spans:
        assert image.count(0, offset, offset + nbytes) == nbytes
        image[offset : offset + nbytes] = b"\1" * nbytes
    assert image.count(1) == sum(piece.nbytes for piece in layout.pieces)
    if buffers < 4 * 20_000 * 8 // shares:
        assert max(counts) - min(counts) <= 64 * 1024 + 64 * shares
    else:
        assert max(counts) == counts[0]  # rank 0 has more than its share by itself


def test_a_state_that_only_torch_can_write_is_not_divided() -> None:
    rooms = Rooms()
    rooms.put(1, b"x")
    with pytest.raises(SnapshotFailedError, match=r"plain torch\.save", check=FailureReason.SHARE_MISSING.caused):
        Divider().divide(lay_out_plain({"r": rooms.known}), snapshot_name(1, 1), {}, {}, SharingRanks(2, rooms.known))


def test_states_of_ranks_are_values_again_when_they_are_read() -> None:
    rooms, state = Rooms(), {"random": [1, 2], "mean": torch.ones(3)}
    room = rooms.put(1, packed(state))
    assert rooms.put(1, packed({"a": 1})) is room  # it keeps its place in the file
    rooms.put(1, packed(state))
    large = rooms.put(2, packed({"x": torch.zeros(10_000)}))
    read = unpacked([state, room, large, {"old": 1}], lambda file: torch.load(file, weights_only=True))
    assert torch.equal(read[1]["mean"], state["mean"])
    assert (read[0], read[1]["random"], read[3]) == (state, [1, 2], {"old": 1})
    assert rooms.put(1, packed({"x": torch.zeros(10_000)})) is not room


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_state_is_packed_as_it_was_and_a_gpu_is_waited_for_later(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    waited: list[Layout] = []
    monkeypatch.setattr(rank_states, "filled", lambda layout: waited.append(layout) or filled(layout))
    monkeypatch.setattr(rank_states, "_waits_for", lambda _storage: on_gpu)
    state: dict[str, Any] = {"random": [1, 2], "mean": torch.ones(3), "tail": [torch.arange(5)]}
    packing = Packing(state)
    assert bool(waited) != on_gpu
    state["random"].append(3)
    data = bytes(packing)
    assert len(packing) == len(data)
    assert len(waited) == 1
    (read,) = unpacked([Rooms().put(1, data)], lambda file: torch.load(file, weights_only=True))
    assert read["random"] == [1, 2]
    assert torch.equal(read["mean"], torch.ones(3))
    assert torch.equal(read["tail"][0], torch.arange(5))


# -- ranks of one process, each with a connection of its own to a node -------------------------------------------------


@dataclass
class Rank:
    """What a rank trains: weights that it shares with the others, and a state of its own."""

    weights: list[torch.Tensor]
    state: dict[str, Any]


class Desk:
    """Rank 0's writer and the share writers of the others."""

    def __init__(self, root: Path, ranks: int) -> None:
        self.url = str(root / "run")
        self.ranks = [Rank(tensors(1), {"rank": rank}) for rank in range(ranks)]
        self.hosts: list[EmbeddedHost] = []
        self.first = self.connect()
        self.first.open_run(info_of(self.url, 1))
        self.writer = SnapshotWriter(self.first)
        self.rooms = Rooms()
        for rank in range(1, ranks):
            self.rooms.put(rank, packed(self.ranks[rank].state))
        self.shares = [
            ShareWriter(self.joined(), self.joined, Number(rank, here=rank, rank=rank)) for rank in range(1, ranks)
        ]

    def connect(self) -> EmbeddedHost:
        settings = {"slots": 3, "memory_bytes": 2**26, "server_idle_timeout_s": 30.0}
        self.hosts.append(starting.start(self.url, "run", **settings))
        return self.hosts[-1]

    def joined(self) -> EmbeddedHost:
        host = self.connect()
        host.run, host.attempt = self.first.run, 1
        return host

    def begin(self, step: int) -> Any:
        """Begin a snapshot on all ranks."""
        self.begin_shares(step)
        return self.begin_first(step)

    def begin_shares(self, step: int) -> None:
        for writer, rank in zip(self.shares, self.ranks[1:], strict=True):
            writer.begin(snapshot_name(step, 1), by_storage(rank.weights), packed(rank.state))

    def begin_first(self, step: int) -> Any:
        name = snapshot_name(step, 1)
        first, rooms = self.ranks[0], self.rooms.known
        checkpoint = {"w": first.weights, "b": torch.zeros(9), "ranks": [first.state, *rooms.values()]}
        manifest = Manifest(run="run", run_id=RUN_ID, name=name, step=step, attempt=1, nbytes=0)
        ranks = SharingRanks(len(self.ranks), rooms)
        return self.writer.begin(checkpoint, manifest, owned=by_storage(first.weights), wait_s=30.0, ranks=ranks)

    def copied(self) -> None:
        self.writer.copied()
        for writer in self.shares:
            writer.copied()

    def train(self, value: float) -> None:
        """One step of the optimizers."""
        for rank in self.ranks:
            for weight in rank.weights:
                weight.add_(value)

    def saved(self, manifest: Manifest) -> dict[str, Any]:
        host = self.joined()
        fd = host.open_snapshot(manifest)  # its position is the node's
        saved = torch.load(io.BytesIO(os.pread(fd, manifest.nbytes, 0)), weights_only=True)
        os.close(fd)
        host.disconnect()  # which it reads no longer
        saved["ranks"] = unpacked(saved["ranks"], lambda data: torch.load(data, weights_only=True))
        return saved

    def close(self) -> None:
        for writer in self.shares:
            writer.close()
        self.writer.close()
        self.first.leave(complete=True)


@pytest.fixture
def desk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Desk]:
    made = Desk(tmp_path, getattr(request, "param", 3))
    yield made
    made.close()


def test_a_snapshot_written_by_three_ranks_is_that_of_its_step(desk: Desk) -> None:
    for step in range(1, 7):
        wanted = [weight.clone() for weight in desk.ranks[0].weights]
        done = desk.begin(step)
        desk.copied()
        desk.train(1.0)
        saved = desk.saved(done.result(LAST_S))
        assert all(torch.equal(*pair) for pair in zip(saved["w"], wanted, strict=True))
        assert saved["ranks"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert desk.writer.missed == 0
    copied = [writer.copied_bytes for writer in desk.shares]
    assert max(copied) - min(copied) <= 64 * 3 * 6


class OnGpu:
    """The state of a rank that lies on a GPU: notes who reads it, and may fail."""

    def __init__(self, device: FakeDevice, error: Exception | None = None) -> None:
        self.device, self.error = device, error
        self.data = packed({"rank": 1})
        self.read: list[bool] = []

    def __len__(self) -> int:
        return len(self.data)

    def __bytes__(self) -> bytes:
        self.read.append(threading.current_thread() in self.device.used_by)
        if self.error is not None:
            raise self.error
        return self.data


@pytest.mark.parametrize("desk", [2], indirect=True)
def test_a_thread_of_ours_that_reads_from_a_gpu_says_that_it_does(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """Else a thread beside training ends the recording of a CUDA graph, and takes memory on the first GPU."""
    device = FakeDevice()
    writer = ShareWriter(desk.joined(), desk.joined, Number(1, here=1, rank=1), Copier(device=device))
    try:
        for step, error in ((1, None), (2, torch.cuda.OutOfMemoryError("no room")), (3, None)):
            state = OnGpu(device, error)
            writer.begin(snapshot_name(step, 1), by_storage(desk.ranks[1].weights), state)
            done = desk.begin_first(step)
            writer.copied()
            if error is None:
                assert desk.saved(done.result(LAST_S))["ranks"][1] == {"rank": 1}
            else:
                with pytest.raises(
                    SnapshotFailedError, match=r"rank 1: .*no room", check=FailureReason.SHARE_MISSING.caused
                ):
                    done.result(LAST_S)
            assert state.read == [True]
    finally:
        writer.close()
    assert not device.used_by
    assert not said(caplog, "unexpected")


def test_what_did_not_change_is_not_copied_again_by_any_rank(desk: Desk) -> None:
    for step in range(1, 5):
        done = desk.begin(step)
        desk.copied()
        done.result(LAST_S)
        assert desk.first.flush(LAST_S) == []  # else a third slot may be made, which holds nothing yet
        before = [writer.copied_bytes for writer in desk.shares]
    desk.begin(5).result(LAST_S)
    nbytes = sum(weight.nbytes for weight in desk.ranks[0].weights)
    again = [writer.copied_bytes - old for writer, old in zip(desk.shares, before, strict=True)]
    assert max(again) < nbytes / 10  # its own state, and tensors that are quicker copied than compared


def test_a_tensor_of_another_rank_that_changes_meanwhile_drops_the_snapshot(desk: Desk) -> None:
    desk.begin(1).result(LAST_S)
    weight = desk.ranks[2].weights[-1]
    before = weight.clone()
    desk.begin_shares(2)
    weight.add_(1.0)
    done = desk.begin_first(2)
    with pytest.raises(SnapshotFailedError, match="rank 2", check=FailureReason.SHARE_MISSING.caused):
        done.result(LAST_S)
    assert desk.writer.missed == 1
    weight.copy_(before)
    desk.begin_shares(3)
    weight.add_(1.0)  # from now on it is copied before training goes on
    assert torch.equal(desk.saved(desk.begin_first(3).result(LAST_S))["w"][-1], before)


@pytest.mark.parametrize("desk", [2], indirect=True)
def test_what_was_written_past_the_counts_on_another_rank_is_copied_before_training_goes_on(desk: Desk) -> None:
    """The next such write may come before the slot does, and nothing would show it."""
    past = [rank.weights[-1].data.view(-1).numpy() for rank in desk.ranks]
    assert desk.ranks[1].weights[-1].nbytes >= 4096
    for step in range(1, 8):
        if step == 5:
            for numbers in past:
                numbers[-7:] = 1e9
        done = desk.begin(step)
        desk.copied()
        done.result(LAST_S)
        assert desk.first.flush(LAST_S) == []  # else a third slot may be made, which holds nothing yet
    for step in range(8, 11):
        desk.train(1.0)  # its count tells nothing of what comes past it
        wanted = desk.ranks[1].weights[-1].clone()
        desk.begin_shares(step)
        past[1][-7:] -= 5e8
        saved = desk.saved(desk.begin_first(step).result(LAST_S))
        desk.copied()
        past[1][-7:] += 5e8
        assert torch.equal(saved["w"][-1], wanted)


def test_ranks_that_do_not_train_the_same_are_named_and_the_former_snapshot_stands(desk: Desk) -> None:
    desk.begin(1).result(LAST_S)
    desk.ranks[1].weights[2] = torch.zeros(3)
    with pytest.raises(
        SnapshotFailedError, match=r"rank 1: tensor 2 .*12 bytes", check=FailureReason.SHARE_MISSING.caused
    ):
        desk.begin(2).result(LAST_S)
    desk.ranks[1].weights = [weight + 1 for weight in desk.ranks[0].weights]
    with pytest.raises(SnapshotFailedError, match="rank 1: its parameters", check=FailureReason.SHARE_MISSING.caused):
        desk.begin(3).result(LAST_S)
    assert [manifest.step for manifest in desk.first.manifests()] == [1]


def test_a_state_that_outgrew_its_room_drops_the_snapshot(desk: Desk) -> None:
    desk.ranks[1].state = {"rank": torch.zeros(100_000)}
    with pytest.raises(SnapshotFailedError, check=FailureReason.SHARE_MISSING.caused) as failed:
        desk.begin(1).result(LAST_S)
    assert failed.value.fault == ShareFault(ShareProblem.OUTGROWN, 1, len(packed(desk.ranks[1].state)))
    desk.rooms.put(1, packed(desk.ranks[1].state))
    assert torch.equal(desk.saved(desk.begin(2).result(LAST_S))["ranks"][1]["rank"], torch.zeros(100_000))


def test_a_rank_that_loses_its_connection_takes_part_again(desk: Desk) -> None:
    desk.begin(1).result(LAST_S)
    desk.shares[0].settle(LAST_S)  # else it is lost under the answer that its share is in place
    desk.shares[0]._host.disconnect()  # type: ignore[union-attr]
    assert desk.begin(2).result(LAST_S).step == 2


@pytest.mark.parametrize("lost", [1, 2])
def test_word_that_a_share_is_in_place_is_said_again_or_the_node_is_left(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """A process that stood still is out of time before it has sent that: the node saw the rank, and waited for it."""
    host, words = desk.shares[0]._host, list[str]()
    placed = host.placed

    def place(lease: Lease, torn: str = "", fault: ShareFault | None = None) -> None:
        words.append(torn)
        if len(words) <= lost:
            raise ServerUnreachableError("timed out")
        placed(lease, torn, fault)

    monkeypatch.setattr(host, "placed", place)
    done = desk.begin(1)
    if lost == 1:
        assert done.result(120.0).step == 1  # not after ten minutes
    else:
        with pytest.raises(SnapshotFailedError, match="rank 1 ended", check=FailureReason.SHARE_MISSING.caused):
            done.result(120.0)
    assert words == ["", ""]
    assert desk.begin(2).result(LAST_S).step == 2


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (ServerRefusedError("it went wrong", reason=TierReason.SERVER_FAILED), 1),
        (ServerUnreachableError("it went wrong"), 2),
    ],
)
@pytest.mark.parametrize("unheard", [0, 1])
def test_a_rank_whose_first_request_fails_is_not_waited_for(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, error: SpotError, times: int, unheard: int
) -> None:
    """The node had never heard of it: the snapshot was given up after ten minutes, in which there was no other one."""
    left = {"join": times, "decline": unheard}

    def failing(method: str) -> Callable[..., Any]:
        whole = getattr(EmbeddedHost, method)

        def ask(ring: EmbeddedHost, *arguments: Any, **how: Any) -> Any:
            if left[method] and (method == "decline" or how["share"] == 1):
                left[method] -= 1
                raise error
            return whole(ring, *arguments, **how)

        return ask

    for method in left:
        monkeypatch.setattr(EmbeddedHost, method, failing(method))
    monkeypatch.setattr(following, "_AGAIN_S", 0.1)
    with pytest.raises(SnapshotFailedError, match="rank 1: it went wrong", check=FailureReason.SHARE_MISSING.caused):
        desk.begin(1).result(120.0)
    assert left == {"join": 0, "decline": 0}
    assert desk.begin(2).result(LAST_S).step == 2


def test_a_rank_that_cannot_map_the_slot_says_so(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    host = desk.shares[0]._host
    assert host is not None

    def map_slot(_slot: int, _generation: int) -> None:
        raise OSError("no memory for a map")

    with monkeypatch.context() as failing:
        failing.setattr(host.session, "map_slot", map_slot)  # type: ignore[attr-defined]
        with pytest.raises(SnapshotFailedError, match="rank 1: no memory", check=FailureReason.SHARE_MISSING.caused):
            desk.begin(1).result(120.0)  # not after ten minutes
    assert desk.begin(2).result(LAST_S).step == 2


def test_training_does_not_wait_for_a_slot_that_never_comes(desk: Desk) -> None:
    writer, rank = desk.shares[0], desk.ranks[1]
    writer._max_stall_s = 0.01
    writer.begin(snapshot_name(1, 1), by_storage(rank.weights), b"")
    writer.copied()  # nobody has leased a slot
    writer._max_stall_s = 600.0
    assert desk.begin(2).result(LAST_S).step == 2  # by which the first one was overtaken


def test_who_waits_for_a_clean_slot_waits_on_every_rank(desk: Desk) -> None:
    writer, rank = desk.shares[0], desk.ranks[1]
    writer._max_stall_s = 0.01
    desk.shares[1].begin(snapshot_name(1, 1), by_storage(desk.ranks[2].weights), packed(desk.ranks[2].state))
    writer.begin(snapshot_name(1, 1), by_storage(rank.weights), packed(rank.state), wait_s=LAST_S)
    training = threading.Thread(target=writer.copied)
    training.start()
    training.join(0.1)  # rank 0 has not got a slot yet
    assert desk.begin_first(1).result(LAST_S).step == 1
    training.join()


# -- whether ranks write the next snapshot together --------------------------------------------------------------------


DIFFERS, ONE_WRITER = ShareFault(ShareProblem.DIFFERS, 1), ShareFault(ShareProblem.ONE_WRITER, 0)


class Fit:
    """As much of a trainer, its strategy, its attempt and the writer of that as the decision needs."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strategy = self.model = self.writer = self.settings = self
        self.optimizers: list[Any] = [torch.optim.SGD(tensors(1))]
        self.world_size, self.strict = 2, strict
        self.together, self.posted, self.missed, self.last_miss = 0, 0, 0, Miss("", None)
        self.carrier = ""
        self.across = SimpleNamespace(carrier="", is_under_way=False, brought=0)
        self.deciding = Together(self, self)  # type: ignore[arg-type]
        self.deciding._members = [0, 1]
        self.deciding.rooms.put(1, b"x")

    def how(self, missed: str | ShareFault = "", taken: int = 0) -> How | None:
        """How the next one is written, after one that was missed, or some that were taken."""
        if missed:
            miss = Miss(missed, None) if isinstance(missed, str) else Miss(missed.problem.value, missed)
            self.missed, self.last_miss = self.missed + 1, miss
        self.together += taken
        self.across.carrier = self.carrier  # as the snapshot before, when it was committed, was told
        return self.deciding.how(self)  # type: ignore[arg-type]

    def sent(self) -> How | None:
        """How the next one is written, after one for which ranks have sent what they know."""
        self.posted += 1
        return self.how(taken=1)


@pytest.mark.parametrize("strict", [False, True])
def test_ranks_go_on_together_after_what_passes(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    fit = Fit(strict=strict)
    for reason in (ShareFault(ShareProblem.OUTGROWN, 1, 9), "1 tensors changed", "rank 1 was late"):
        assert fit.how() == TOGETHER
        assert fit.how(missed=reason) == ALONE
        assert fit.how() == TOGETHER
        assert fit.how(taken=1) == TOGETHER
    assert fit.how(missed="rank 1 was late") == ALONE
    assert fit.how(missed="rank 1 was late") == ALONE  # begun before that was known: both count as one
    assert fit.how() == TOGETHER
    new_process()
    assert fit.how(missed="rank 1 was late") == ALONE
    assert keys(caplog) == {"ranks-apart"}
    caplog.clear()
    assert fit.how(taken=1) == ALONE


def test_ranks_whose_own_states_grow_go_on_together_and_drop_few_snapshots() -> None:
    """Metrics keep what they were given until an epoch ends."""
    fit, came, missed = Fit(), dict[str, Any](), 0
    for count in range(1, 65):
        state = packed({"seen": torch.zeros(10_000 * count)})
        how, came = fit.how(**came), {}
        if how != ALONE and len(state) <= fit.deciding.rooms.known[1].numel():
            came = {"taken": 1}
        elif how != ALONE:
            came, missed = {"missed": ShareFault(ShareProblem.OUTGROWN, 1, len(state))}, missed + 1
    assert fit.how(**came) == TOGETHER
    assert missed <= 7


def test_hosts_bring_snapshots_together_while_a_memory_node_carries_the_run_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    at, fit = replace(TOGETHER, at="spot://a:7070/run"), Fit()
    fit.deciding._members, fit.deciding._hosts = [], Topology(((0,), (1,)), can_bring=True)
    assert fit.how() == ALONE
    fit.carrier = "spot://a:7070/run"
    assert fit.how() == How.heard(at.word()) == at
    ranks = fit.deciding.ranks(at)
    assert (ranks.shares, list(ranks.states), ranks.hosts, ranks.at) == (2, [1], (1, 1), "spot://a:7070/run")
    assert fit.deciding.how(fit, across=False) == ALONE  # type: ignore[arg-type] # an urgent one
    fit.across.is_under_way = True
    assert fit.how() is None
    assert fit.deciding.how(fit, waits=True) == at  # type: ignore[arg-type]
    fit.across.is_under_way = False
    assert [fit.how(missed="late"), fit.how(), fit.how(taken=1), fit.how(missed="late"), fit.how()] == [
        *(ALONE, at, at, ALONE, at)
    ]
    fit.across.is_under_way = True
    assert fit.how() is None
    new_process()
    assert fit.how(missed="late") == ALONE
    assert keys(caplog) == {"hosts-apart", "upload-under-way"}
    caplog.clear()
    fit.across.is_under_way = False
    assert fit.how() == ALONE  # for a while
    fit.deciding._pause._until_s = 0.0
    assert fit.how() == at
    new_process()
    assert fit.how(missed=DIFFERS) == ALONE
    assert keys(caplog) == {"ranks-apart"}
    caplog.clear()
    assert fit.how() == ALONE


@pytest.mark.parametrize("hosts", [1, 2])
def test_what_rank_0_writes_alone_in_between_does_not_hide_that_ranks_fail_together(
    hosts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Else each second snapshot would be lost, for as long as training lasts, and without a word."""
    at, fit, how = replace(TOGETHER, at="spot://a:7070/run"), Fit(), TOGETHER
    fit.deciding._mail = SimpleNamespace(works=True)  # type: ignore[assignment]
    fit.deciding.rooms._rooms.clear()
    if hosts == 2:
        fit.carrier, how = "spot://a:7070/run", at
        fit.deciding._members, fit.deciding._hosts = [], Topology(((0,), (1,)), can_bring=True)
    assert fit.how() == ALONE_SENT
    fit.deciding.rooms.put(1, b"x")
    fit.posted += 1
    assert fit.how() == how
    assert fit.how(missed="late") == ALONE_SENT
    fit.posted += 1  # that one is committed
    assert fit.how() == how
    new_process()
    assert fit.how(missed="late") == ALONE_SENT
    assert keys(caplog) == {"hosts-apart" if hosts == 2 else "ranks-apart"}
    caplog.clear()
    fit.posted += 1
    assert fit.how() == ALONE_SENT


def test_what_one_rank_alone_can_write_costs_no_more_than_two_snapshots(caplog: pytest.LogCaptureFixture) -> None:
    fit = Fit()
    fit.deciding._mail = SimpleNamespace(works=True)  # type: ignore[assignment]
    fit.deciding.rooms._rooms.clear()
    assert fit.how() == ALONE_SENT
    assert fit.how(missed=ONE_WRITER) == ALONE
    fit.deciding.rooms.put(1, b"x")
    assert fit.how() == TOGETHER
    new_process()
    assert fit.how(missed=ONE_WRITER) == ALONE
    assert keys(caplog) == {"ranks-apart"}
    caplog.clear()
    assert [fit.how() for _ in range(4)] == [ALONE] * 4


@pytest.mark.parametrize(("members", "sent"), [([], ALONE_SENT), ([0, 1], TOGETHER_SENT)])
def test_what_ranks_on_other_hosts_know_is_sent_and_gathered_only_after_misses(
    members: list[int], sent: How, caplog: pytest.LogCaptureFixture
) -> None:
    fit = Fit()
    fit.world_size, fit.deciding._members = 3, members
    fit.deciding._mail = SimpleNamespace(works=True)  # type: ignore[assignment]
    gathered = GATHERED if members else ALONE
    assert fit.how() == sent  # also the first one
    fit.deciding.rooms.put(2, b"x")
    assert fit.how() == How.heard(sent.word()) == sent
    ranks = fit.deciding.ranks(sent)
    assert (ranks.shares, list(ranks.states), list(ranks.sent)) == (max(1, len(members)), [], [1, 2])
    assert [fit.how(missed="late"), fit.sent(), fit.sent()] == [ALONE_SENT, sent, sent]
    # Also what rank 0 writes alone after a miss is missed: it does without what is sent, before it gives that up.
    assert [fit.how(missed="late") for _ in range(3)] == [ALONE_SENT, ALONE_SENT, ALONE]
    assert fit.how() == sent
    new_process()
    assert fit.how(missed="late") == ALONE
    assert keys(caplog) == {"ranks-gather"}
    caplog.clear()
    assert fit.how(taken=1) == gathered  # for a while
    for fails_for_s in (120.0, 240.0):  # what was gathered meanwhile, and is committed now, says nothing of the mail
        fit.deciding._pause_of_mail._until_s = 0.0
        assert [fit.how(), fit.how(taken=1)] == [sent] * 2
        assert [fit.how(missed="late"), fit.how()] == [ALONE_SENT, sent]
        new_process()
        assert fit.how(missed="late") == ALONE
        assert keys(caplog) == {"ranks-gather"}
        caplog.clear()
        assert fails_for_s - 5.0 < fit.deciding._pause_of_mail._until_s - time.monotonic() <= fails_for_s
    fit.deciding._pause_of_mail._until_s = 0.0
    assert fit.how() == sent
    assert fit.sent() == sent
    assert fit.deciding._pause_of_mail._next_s == 60.0
    assert [fit.how(missed=ONE_WRITER), fit.how()] == [ALONE, sent]
    new_process()
    assert fit.how(missed=ONE_WRITER) == ALONE
    assert keys(caplog) == {"ranks-gather"}
    caplog.clear()
    fit.deciding._pause_of_mail._until_s = 0.0
    assert fit.how() == gathered  # for good: nothing can be put into such a file


@pytest.mark.parametrize("hosts", [(1, 1), (2, 1, 2), (1, 4)])
def test_every_byte_is_brought_by_one_host(hosts: tuple[int, ...]) -> None:
    weights, rooms, shares = [torch.rand(20_000) for _ in range(8)], Rooms(), sum(hosts)
    for share in range(1, shares):
        rooms.put(share, packed({"rank": share}))
    layout = lay_out({"w": weights, "b": torch.zeros(50_000), "r": list(rooms.known.values())})
    divider = Divider()
    ranks = SharingRanks(shares, rooms.known, hosts, "spot://a:7070/run")
    shared, mine, _ = divider.divide(layout, snapshot_name(1, 1), by_storage(weights), {}, ranks)
    assert (shared.shares, shared.at) == (hosts[0], "spot://a:7070/run")
    portions, split = Portions.read(shared.layout, layout.nbytes), Split.from_json(shared.layout)
    assert portions.ranks == hosts[1:]
    rest = portions.rest(layout.nbytes)
    assert sum(nbytes for each in (rest, *portions.ranges) for _, nbytes in each) == layout.nbytes
    numbers = [Number.of_hosts(hosts_of(hosts), rank) for rank in range(shares)]
    for number in numbers[hosts[0] :]:
        portion = Portion(portions.ranges[number.host - 1])
        assert portion.ranges == split.portion(number.host)
        for index, start, nbytes in split.share(number.share):
            first, last = (portion.place(split.places[index] + at) for at in (start, start + nbytes - 1))
            assert last - first == nbytes - 1
        portion.place(split.states[number.share][0])
    assert [number.here for number in numbers] == [
        here + bool(host) for host, count in enumerate(hosts) for here in range(count)
    ]
    whole = bytearray(layout.nbytes)
    for piece in mine.pieces:
        whole[piece.offset : piece.offset + piece.nbytes] = b"\1" * piece.nbytes
    assert not any(any(whole[start : start + nbytes]) for each in portions.ranges for start, nbytes in each)


def hosts_of(counts: tuple[int, ...]) -> list[list[int]]:
    """Ranks, dealt to hosts one after another."""
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [list(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]


def test_ranks_that_differ_never_write_together_again(caplog: pytest.LogCaptureFixture) -> None:
    fit = Fit()
    new_process()
    assert fit.how(missed=DIFFERS) == ALONE
    assert keys(caplog) == {"ranks-apart"}
    caplog.clear()
    assert fit.how(taken=1) == ALONE
    ends = Fit(strict=True).how(missed=DIFFERS)
    assert ends is not None
    with pytest.raises(SnapshotFailedError, match="differs"):
        How.heard(ends.word())


def test_ranks_that_hold_parameters_or_states_of_their_own_do_not_write_together() -> None:
    ignoring, averaging, hooked, local = Fit(), Fit(), Fit(), Fit()
    ignoring.parameters_to_ignore = {"weight"}  # type: ignore[attr-defined]
    averaging.optimizers[0].averager = None
    hooked._comm_hooks = [(fp16_compress_hook, None)]  # type: ignore[attr-defined] # all ranks step alike
    local._comm_hooks = [(post_localSGD_hook, PostLocalSGDState(None, None, 10))]  # type: ignore[attr-defined]
    fits = (Fit(), hooked, ignoring, averaging, local)
    assert [fit.how() for fit in fits] == [TOGETHER, TOGETHER, ALONE, ALONE, ALONE]


def test_storages_at_one_address_are_both_written() -> None:
    array = torch.rand(20_000).numpy()
    weight, alias = torch.from_numpy(array), torch.from_numpy(array)
    layout, owned = lay_out({"w": weight, "b": alias}), by_storage([weight])
    split = Split.of(layout, owned, {}, SharingRanks(4, {}))
    written = sum(piece.nbytes for piece in split.left_to_rank_0(layout).pieces)
    written += sum(nbytes for share in (1, 2, 3) for _, _, nbytes in split.share(share))
    assert written == sum(piece.nbytes for piece in layout.pieces) == 2 * array.nbytes
