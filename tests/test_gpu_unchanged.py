"""Frozen parameters on a GPU: not copied again, looked at beside training, and right whatever wrote to them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_spot.capture import contents, on_gpus
from lightning_spot.capture.tensors import by_storage
from lightning_spot.capture.turns import CHECK_EVERY
from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.errors import SpotError, TornSnapshot
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.staging import scratch
from lightning_spot.staging.batch import SlotView
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.samples import Sampler, Samples
from lightning_spot.staging.schedule import Schedule
from lightning_spot.staging.scratch import Scratch
from tests import test_writer
from tests.fake_device import FakeDevice

WEIGHT = 300 * 100 * 4
SMALL = 30_000  # all that is no weight
WARM = 9
"""Snapshots until each slot was filled, and what is frozen was found as it was."""


class Desk(test_writer.Desk):
    """A training on a GPU, with some frozen weights and a trained one; a write is counted when it is launched."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        super().__init__(root)
        self.writer.close()
        self.device = FakeDevice(seed)
        self.trained = nn.Parameter(torch.randn(300, 100))
        self.weights = [nn.Parameter(torch.randn(300, 100), requires_grad=False) for _ in range(5)]
        self.begin_writer()

    def begin_writer(self) -> None:
        copier = Copier(buffer_bytes=1000, device=self.device)
        self.writer = SnapshotWriter(self.host, copier=copier, schedule=Schedule("eager"))

    def close(self) -> None:
        self.writer.close()
        assert not self.device.pinned
        self.host.leave(complete=True)

    def write(self, weight: torch.Tensor, change: Callable[[torch.Tensor], Any], *, counted: bool = True) -> None:
        """Training launches a write: the device comes to it whenever it does."""
        data = weight.data
        if counted:
            torch.autograd.graph.increment_version(weight)
        self.device.do(lambda: change(data))

    def step(self) -> None:
        """The optimizer steps."""
        self.write(self.trained, lambda data: data.add_(1.0))

    def now(self) -> list[torch.Tensor]:
        """What all weights are, where the training's own stream has come to; nobody reads it from the side."""
        found: list[torch.Tensor] = []
        weights = [*self.weights, self.trained]
        self.device.do(lambda: found.extend(weight.detach().clone() for weight in weights))
        return found

    def start(self, number: int, *, complete: bool = False) -> tuple[Any, list[torch.Tensor]]:
        """Begin a snapshot; and what is to be in it, once the device has come there."""
        self.device.own([*self.weights, self.trained])
        wanted = self.now()
        weights = [weight.detach() for weight in (*self.weights, self.trained)]
        checkpoint = {"state": {"w": weights, "b": self.buffer}}
        name = snapshot_name(number, 1, complete=complete)
        manifest = Manifest(run="run", name=name, step=number, attempt=1, nbytes=0, complete=complete)
        owned, kept = by_storage([self.trained]), by_storage([*self.weights, self.trained])
        return self.writer.begin(checkpoint, manifest, owned=owned, kept=kept, wait_s=30.0), wanted

    def take(self, number: int, *, complete: bool = False) -> int:
        """Bytes that were copied for a snapshot, which holds what it should; training steps at once."""
        before = self.writer.copied_bytes
        done, wanted = self.start(number, complete=complete)
        self.writer.copied()
        self.step()
        done.result(30)
        assert self.is_as(number, wanted, complete=complete)
        return self.writer.copied_bytes - before

    def is_as(self, number: int, wanted: list[torch.Tensor], *, complete: bool = False) -> bool:
        saved = self.saved(number, complete=complete)["state"]["w"]
        return len(saved) == len(wanted) and all(map(torch.equal, saved, wanted))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors count as large ones do. No bytes are noted by the host, as of what lies on a GPU in truth."""
    monkeypatch.setattr(on_gpus, "LEAST_BYTES", WEIGHT)
    monkeypatch.setattr(Sampler, "take", lambda *_: Samples((), 0))


@pytest.fixture
def desks(tmp_path: Path) -> Iterator[Callable[[int], Desk]]:
    made: list[Desk] = []

    def make(seed: int) -> Desk:
        made.append(Desk(tmp_path / str(seed), seed))
        for number in range(WARM):
            made[-1].take(number)
        return made[-1]

    yield make
    for desk in made:
        desk.close()


@pytest.fixture
def desk(desks: Callable[[int], Desk]) -> Desk:
    return desks(0)


def scratch_of(desk: Desk) -> Scratch:
    return desk.writer._copying.copier.scratch


def test_only_what_is_trained_or_was_written_is_copied(desk: Desk) -> None:
    assert desk.take(10) < WEIGHT + SMALL
    desk.write(desk.weights[1], lambda data: data.add_(1.0))
    assert 2 * WEIGHT < desk.take(11) < 2 * WEIGHT + SMALL
    copied = [desk.take(number) for number in range(12, 18)]
    assert max(copied[-2:]) < WEIGHT + SMALL  # every slot has it by now
    assert desk.writer.torn == 0
    assert not desk.device.unpinned_copies
    assert len(scratch_of(desk)._free) == 1


def test_nothing_is_left_out_before_it_was_found_as_it_was(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    copied = [desk.take(number) > 5 * WEIGHT for number in range(WARM)]
    assert copied == sorted(copied, reverse=True)
    assert 3 <= sum(copied) < WARM  # each slot once, and once more
    desk.close()


@pytest.mark.parametrize(
    "write",
    [
        lambda desk: desk.weights.__setitem__(2, nn.Parameter(torch.randn(300, 100), requires_grad=False)),
        lambda desk: setattr(desk.weights[2], "data", torch.randn(300, 100)),
        lambda desk: desk.weights.pop(1),
        lambda desk: desk.weights.insert(0, nn.Parameter(torch.ones(500), requires_grad=False)),
        lambda desk: desk.write(desk.weights[2], lambda data: data.mul_(2)),
        lambda desk: desk.weights[2].requires_grad_(True),
        lambda desk: desk.weights.__setitem__(2, nn.Parameter(desk.weights[2].data, requires_grad=False)),
    ],
    ids=["new", "data", "gone", "more", "counted", "trained", "another on its memory"],
)
def test_whatever_is_written_is_saved(desk: Desk, write: Callable[[Desk], Any]) -> None:
    for number in range(10, 24):
        if number in (12, 13, 19):
            write(desk)
        desk.take(number)
    assert desk.writer.torn == 0


@pytest.mark.parametrize("number", range(6))
def test_what_is_written_past_the_counts_each_time_costs_no_snapshot(tmp_path: Path, number: int) -> None:
    """As averages are by ``parameter.data``: it is copied each time, and what else is frozen is not."""
    desk = Desk(tmp_path, number)
    copied = []
    for step in range(14):
        desk.write(desk.weights[2], lambda data: data.mul_(1.5), counted=False)
        copied.append(desk.take(step))
    assert desk.writer.torn == 0
    assert 2 * WEIGHT < copied[-1] < 2 * WEIGHT + SMALL
    desk.close()


@pytest.mark.parametrize("number", range(6))
def test_a_write_past_the_counts_drops_the_snapshot_and_nothing_is_left_out_any_more(
    desks: Callable[[int], Desk], caplog: pytest.LogCaptureFixture, number: int
) -> None:
    desk = desks(number)
    desk.write(desk.weights[3], lambda data: data.mul_(2.0), counted=False)
    done, _ = desk.start(20)
    desk.writer.copied()
    desk.write(desk.weights[3], lambda data: data.mul_(2.0))  # a counted one comes too late to hide it
    with caplog.at_level(logging.WARNING), pytest.raises(TornSnapshot, match="1 tensors were not as"):
        done.result(30)
    assert caplog.text.count("past torch's count of writes") == 1
    assert f"the last {CHECK_EVERY} snapshots" in caplog.text
    for later in range(21, 28):
        desk.write(desk.weights[later % 5], lambda data: data.add_(1.0), counted=False)
        assert desk.take(later) > 5 * WEIGHT
    assert desk.writer.torn == 1
    assert scratch_of(desk).take(1) is not None


def test_one_number_of_a_large_tensor_is_found_in_its_turn(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpus, "CHECK_BYTES", 1)
    monkeypatch.setattr(on_gpus, "_SPOT_BYTES", 64)
    looked = desk.writer._copying.on_gpus.looked_bytes
    desk.write(desk.weights[3].view(-1)[7:8], lambda data: data.fill_(1e9), counted=False)
    for number in range(10, 10 + 4 * CHECK_EVERY):
        done, _ = desk.start(number)
        desk.writer.copied()
        try:
            done.result(30)
        except TornSnapshot:
            break
    assert desk.writer.torn == 1
    taken = number - 9
    each = 5 * WEIGHT / CHECK_EVERY + 5 * 64
    assert desk.writer._copying.on_gpus.looked_bytes - looked < taken * (each + 5)


def test_of_more_than_the_most_a_share_is_looked_at_that_fits(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpus, "CHECK_BYTES", 100)
    monkeypatch.setattr(on_gpus, "MOST_BYTES", WEIGHT // 8)
    before = desk.writer._copying.on_gpus.looked_bytes
    desk.take(10)
    looks = desk.writer._copying.on_gpus.looked_bytes - before
    assert looks == 5 * 1024 + WEIGHT // 8
    assert desk.writer._copying.on_gpus._turns._among == 40


@pytest.mark.parametrize("number", range(4))
def test_what_is_written_in_forward_hides_no_write_past_the_counts(desks: Callable[[int], Desk], number: int) -> None:
    desk = desks(number)
    desk.write(desk.weights[3], lambda data: data.mul_(2.0), counted=False)
    done, _ = desk.start(20)
    desk.write(desk.weights[3], lambda data: data.add_(1.0))
    desk.writer.copied()
    with pytest.raises(TornSnapshot, match="1 tensors were not as"):
        done.result(30)


def test_what_is_written_after_it_hides_none_either(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that no spot shows."""
    monkeypatch.setattr(on_gpus, "_spot_in", lambda item: item._replace(start=0, stop=64))
    desk.write(desk.weights[3].view(-1)[700:701], lambda data: data.fill_(1e9), counted=False)
    done, _ = desk.start(20)
    desk.writer.copied()
    desk.write(desk.weights[3], lambda data: data.add_(1.0))
    with pytest.raises(TornSnapshot, match="1 tensors were not as"):
        done.result(30)


@pytest.mark.parametrize("number", range(3))
def test_what_an_optimizer_may_write_is_copied_each_time_whatever_counts_say(
    desks: Callable[[int], Desk], number: int
) -> None:
    """Replays of graphs, and some fused kernels, count nothing."""
    desk = desks(number)
    desk.weights[2].requires_grad_(True)
    for step in range(20, 30):
        done, wanted = desk.start(step)
        desk.writer.copied()
        for weight in (desk.weights[2], desk.trained):
            desk.write(weight, lambda data: data.mul_(1.5), counted=False)
        done.result(30)
        assert desk.is_as(step, wanted)
    assert desk.writer.torn == 0


@pytest.mark.parametrize("number", range(12))
def test_looks_come_after_the_step_before_and_before_what_is_written_next(
    desks: Callable[[int], Desk], number: int
) -> None:
    """Whichever stream goes first: a look that came late would find a difference, and one that came early none."""
    desk = desks(number)
    for step in range(20, 32):
        weight = desk.weights[step % 5]
        desk.write(weight, lambda data: data.add_(1.0))  # of the iteration before
        done, wanted = desk.start(step)
        desk.write(desk.weights[(step + 1) % 5], lambda data: data.add_(1.0))  # forward, counted
        desk.writer.copied()
        for other in desk.weights:  # whatever comes with the optimizer's step
            desk.write(other, lambda data: data.mul_(1.1), counted=step % 2 == 0)
        desk.step()
        if step % 2:
            for other in desk.weights:
                torch.autograd.graph.increment_version(other)
        done.result(30)
        assert desk.is_as(step, wanted)
    assert desk.writer.torn == 0


@pytest.mark.parametrize("number", [*range(8), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(8, 80))])
def test_every_snapshot_is_right_or_dropped_whatever_training_does(tmp_path: Path, number: int) -> None:
    """Writes of all kinds at any time, freezing, thawing, other tensors: committed is what was there at the seam."""
    dice, desk, committed = random.Random(number), Desk(tmp_path, number), 0

    def disturb() -> None:
        chosen = dice.randrange(len(desk.weights))
        weight = desk.weights[chosen]
        kind = dice.randrange(12)
        if kind == 0:
            desk.write(weight, lambda data: data.add_(1.0), counted=False)
        elif kind < 3:
            desk.write(weight, lambda data: data.add_(1.0))
        elif kind == 3:
            desk.weights[chosen] = nn.Parameter(torch.randn(300, 100), requires_grad=False)
        elif kind == 4:
            weight.requires_grad_(not weight.requires_grad)
        elif kind == 5:
            desk.weights[chosen] = nn.Parameter(weight.data, requires_grad=weight.requires_grad)

    for step in range(30):
        if step % dice.choice((1, 5, 9)) == 0:
            disturb()
        desk.step()
        try:
            done, wanted = desk.start(step)
        except SpotError:
            continue
        if dice.random() < 0.2:
            desk.write(dice.choice(desk.weights), lambda data: data.add_(1.0))
        desk.writer.copied()
        if dice.random() < 0.3:
            disturb()
        try:
            done.result(30)
        except TornSnapshot:
            continue
        committed += 1
        assert desk.is_as(step, wanted)
    assert committed > 20
    assert len(scratch_of(desk)._lent) == 0
    desk.close()


def test_the_last_snapshot_and_those_that_may_be_the_last_are_copied_whole(desk: Desk) -> None:
    assert desk.take(10) < WEIGHT + SMALL
    assert desk.take(11, complete=True) > 6 * WEIGHT
    desk.writer.check_all()
    assert min(desk.take(number) for number in range(12, 16)) > 6 * WEIGHT


def test_where_a_graph_is_recorded_all_is_copied(desk: Desk) -> None:
    desk.writer._copying.copier._cuda.records_graphs = True
    assert min(desk.take(number) for number in range(10, 14)) > 6 * WEIGHT


def test_where_no_memory_is_free_to_look_all_is_copied(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """More snapshots are on their way than there may be looks at once."""
    monkeypatch.setattr(scratch, "MOST", 1)
    lent = scratch_of(desk).take(1)
    assert lent is not None
    assert min(desk.take(number) for number in range(10, 14)) > 6 * WEIGHT
    scratch_of(desk).give_back(lent)
    assert desk.take(14) < WEIGHT + SMALL


@pytest.mark.parametrize("is_written", [True, False])
def test_what_was_left_to_later_ones_is_compared_where_none_follows(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    monkeypatch.setattr(on_gpus, "CHECK_BYTES", WEIGHT // 3)
    monkeypatch.setattr(on_gpus, "_spot_in", lambda item: item._replace(start=0, stop=64))
    monkeypatch.setattr(on_gpus, "_share", lambda *_: [])
    if is_written:
        desk.write(desk.weights[3].view(-1)[700:701], lambda data: data.fill_(1e9), counted=False)
    done, wanted = desk.start(10)
    desk.writer.copied()
    done.result(30)
    assert desk.is_as(10, wanted) != is_written
    assert desk.writer.newest_differs() == is_written
    assert not desk.writer.newest_differs()
    desk.take(11)
    assert desk.writer.torn == 0


def test_memory_that_training_gives_back_is_not_kept_for_that(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpus, "CHECK_BYTES", WEIGHT // 3)
    desk.take(10)
    desk.device.run()
    for stream in desk.device.streams:  # what is done is over, and keeps nothing
        stream.work = [(None, lambda: None)] * stream.done
    given_back = StorageWeakRef(desk.weights[3].untyped_storage())
    desk.weights[3].data = torch.ones(300, 100)
    assert given_back.expired()
    desk.device.own(desk.weights)
    assert not desk.writer.newest_differs()
    desk.take(11)


def test_a_snapshot_that_fails_gives_its_scratch_back(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = desk.writer._commit

    def fails(*_: Any) -> bool:
        raise TornSnapshot("a share")

    monkeypatch.setattr(desk.writer, "_commit", fails)
    for number in range(10, 14):
        done, _ = desk.start(number)
        desk.writer.copied()
        with pytest.raises(TornSnapshot, match="a share"):
            done.result(30)
    monkeypatch.setattr(desk.writer, "_commit", commit)
    for number in range(14, 20):
        desk.take(number)
    assert desk.take(20) < WEIGHT + SMALL
    assert len(scratch_of(desk)._free) == 1


@pytest.mark.parametrize(("owner", "call"), [(on_gpus, "placed"), (on_gpus, "_held"), (contents, "in_order")])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_fails_as_a_snapshot_is_planned_leaves_no_scratch_lent(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, owner: Any, call: str, error: type[BaseException]
) -> None:
    """The memory was lent for good: after a few of these, nothing frozen was left out any more."""

    def fails(*_: Any) -> Any:
        raise error

    if owner is on_gpus and (leaves_out := desk.writer._copying.unchanged._on_gpus) is not None:
        leaves_out._proven.clear()  # so that all is to be proven
    with monkeypatch.context() as patched:
        patched.setattr(owner, call, fails)
        with pytest.raises(error):
            desk.start(10)
    assert scratch_of(desk)._lent == []
    for number in range(11, 18):
        desk.take(number)
    assert desk.take(18) < WEIGHT + SMALL
    assert len(scratch_of(desk)._free) == 1


class Ring:
    """What was page-locked, and on which thread."""

    def __init__(self) -> None:
        self.pinned: list[SlotView] = []

    def pin(self, view: SlotView, index: int) -> None:
        self.pinned.append(view)

    def unpin(self, view: SlotView) -> None:
        self.pinned.remove(view)


def test_scratch_memory_is_made_as_it_is_wanted_and_let_go() -> None:
    ring = Ring()
    lends = Scratch(ring.pin, ring.unpin)
    assert lends.take(1) is None
    for _ in range(3):
        lends.make(1000, 0)  # one is free by then
    assert len(ring.pinned) == 1
    first = lends.take(1000)
    assert first is not None
    assert lends.take(1) is None
    for _ in range(scratch.MOST + 2):
        lends.make(1000, 0)
        lends.take(1000)
    assert len(ring.pinned) == scratch.MOST
    lends.give_back(first)
    lends.give_back(first)
    larger = len(first.map) + 1
    assert lends.take(larger) is None
    lends.make(larger, 0)  # in the place of one that is too small
    assert first not in ring.pinned
    assert len(ring.pinned) == scratch.MOST
    assert lends.take(larger) is not None
    lends.close()
    assert ring.pinned == []
    lends.make(1000, 0)
    assert lends.take(1) is None


def test_what_is_made_while_it_is_closed_is_let_go() -> None:
    ring = Ring()
    lends = Scratch(lambda view, index: (ring.pin(view, index), lends.close())[0], ring.unpin)
    lends.make(1000, 0)
    assert ring.pinned == []


def test_where_there_is_no_memory_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError("none is left")

    monkeypatch.setattr(scratch.mmap, "mmap", full)
    ring = Ring()
    lends = Scratch(ring.pin, ring.unpin)
    lends.make(1000, 0)
    assert lends.take(1) is None
