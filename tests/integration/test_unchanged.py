"""What was not written to since a slot held it is not copied again; what was is, however it was written to."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.capture import contents
from lightning_spot.capture.contents import CHECK_EVERY, ShareTurns, Unchecked, share_of
from lightning_spot.capture.partitions import Partition, Span
from lightning_spot.capture.schedule import Schedule, Timetable
from lightning_spot.errors import FailureReason, SnapshotFailedError
from lightning_spot.snapshot.manifest import snapshot_name
from lightning_spot.store.local import LocalStore
from tests.support.filled import check_archive
from tests.support.ranks import Desk, same
from tests.support.said import said
from tests.support.trainer import Net, data, trainer

pytestmark = pytest.mark.guarantee("G9")


class FrozenDesk(Desk):
    """Its tensors are parameters, which an optimizer owns."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.weights = [nn.Parameter(torch.randn(300, 100)) for _ in range(5)]
        self.more: list[torch.Tensor] = []

    def owned(self) -> list[torch.Tensor]:
        return [*self.weights, *self.more]

    def checkpoint(self, note: str = "", **more: Any) -> dict[str, Any]:
        weights = [weight.detach() for weight in self.weights]
        return {"note": note, "state": {"w": weights, "b": self.buffer}, **more}

    def take(self, step: int, note: str = "", *, complete: bool = False) -> int:
        """Bytes that were copied for a snapshot, which holds what it should."""
        before = self.writer.copied_bytes
        done = self.begin(step, self.checkpoint(note), complete=complete)
        self.writer.copied()
        done.result(30)
        assert same(self.saved(step, complete=complete), self.weights, self.buffer)
        path = self.store.root / snapshot_name(step, 1, complete=complete) / "model.ckpt"
        check_archive(path)
        return self.writer.copied_bytes - before


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[FrozenDesk]:
    with contextlib.closing(FrozenDesk(tmp_path)) as made:
        for step in range(6):  # each slot has been filled
            made.take(step)
        yield made


WEIGHT = 300 * 100 * 4
SMALL = 30_000  # all that is no weight


def test_only_what_changed_is_copied(desk: FrozenDesk) -> None:
    assert desk.take(6) < SMALL
    with torch.no_grad():
        desk.weights[1].add_(1)
    assert WEIGHT < desk.take(7) < WEIGHT + SMALL
    desk.buffer.add_(1)  # counted or not: it is always copied
    assert desk.take(8, "a longer note" * 50) < WEIGHT + SMALL
    copied = [desk.take(step) for step in range(9, 15)]
    assert max(copied[-2:]) < SMALL  # every slot has the new weight by now


@pytest.mark.parametrize(
    "write",
    [
        lambda desk: desk.weights.__setitem__(2, nn.Parameter(desk.weights[2].data + 1)),
        lambda desk: setattr(desk.weights[2], "data", desk.weights[2].data + 1),
        lambda desk: desk.weights.pop(1),
        lambda desk: desk.weights.insert(0, nn.Parameter(torch.ones(500))),
        lambda desk: desk.weights[2].data.mul_(2),
        lambda desk: desk.weights[2].detach().zero_(),
        lambda desk: desk.weights[2].data.view(-1)[:1].copy_(torch.full((1,), 5.0)),
        lambda desk: torch.optim.AdamW(desk.weights, foreach=True).step(),
        lambda desk: step(torch.optim.AdamW(desk.weights, fused=True), desk),
        lambda desk: step(torch.optim.SGD(desk.weights, lr=0.1, foreach=True), desk),
    ],
    ids=["new", "data", "gone", "more", "past", "counted", "at a spot", "nothing", "fused", "foreach"],
)
def test_whatever_is_written_is_saved(
    desk: FrozenDesk, write: Callable[[FrozenDesk], Any], request: pytest.FixtureRequest
) -> None:
    # One number of many, past the counts: no glance is sure to see it, and the first snapshot is dropped then.
    unseen = "at a spot" in request.node.name
    for step_ in range(6, 20):
        if step_ in (8, 9, 15):
            write(desk)
        try:
            desk.take(step_)
        except SnapshotFailedError as error:
            if error.reason is not FailureReason.TORN:
                raise
            assert unseen
            assert step_ in (8, 15)


def test_another_parameter_on_the_same_memory_counts_anew(desk: FrozenDesk, caplog: pytest.LogCaptureFixture) -> None:
    with torch.no_grad():
        desk.weights[2].add_(1)
    for step_ in range(6, 12):
        desk.take(step_)
    desk.weights[2] = nn.Parameter(desk.weights[2].data)
    with torch.no_grad():
        desk.weights[2].add_(1)  # its count is that of the one before
    for step_ in range(12, 18):
        desk.take(step_)
    assert desk.writer.torn == 0
    assert not said(caplog, "writes-uncounted")


def test_a_second_tensor_on_the_same_memory_counts_too(desk: FrozenDesk) -> None:
    """As long as it is there: its writes are those of another count."""
    other = desk.weights[2].data
    desk.more = [other]
    desk.take(6)
    for step_ in range(7, 12):
        desk.take(step_)
    other.mul_(2)
    assert desk.take(12) > WEIGHT
    for step_ in range(13, 17):
        desk.take(step_)
    assert desk.take(17) < SMALL
    desk.more.clear()
    assert desk.take(18) > WEIGHT
    assert desk.writer.torn == 0


def step(optimizer: torch.optim.Optimizer, desk: FrozenDesk) -> None:
    for weight in desk.weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()


@pytest.mark.parametrize("all_each_time", ["small", "last", ""])
def test_writes_past_the_counts_are_found_and_said(
    desk: FrozenDesk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, all_each_time: str
) -> None:
    """One number of a large tensor, as an update of one row does: a glance sees it once in a hundred times."""
    monkeypatch.setattr(contents, "_SPOTS", 0)
    if all_each_time != "small":
        monkeypatch.setattr(contents, "CHECK_BYTES", 1)
    if all_each_time == "last":
        desk.writer.check_all()
    desk.weights[3].data.view(-1)[7] = 1e9
    torn = []
    with caplog.at_level(logging.WARNING):
        # A slot that is made meanwhile has nothing to compare with: that turn passes, and the next one finds it.
        for step_ in range(6, 6 + 30 * CHECK_EVERY):
            try:
                done = desk.begin(step_, desk.checkpoint())
                desk.writer.copied()
                done.result(30)
            except SnapshotFailedError as error:
                if error.reason is not FailureReason.TORN:
                    raise
                torn.append(step_)
            if torn and step_ >= torn[0] + 3:
                break
    assert desk.writer.torn == len(torn) == 1
    assert torn == [6] or not all_each_time
    assert len(said(caplog, "writes-uncounted")) == 1
    for later in range(step_ + 1, step_ + 6):
        desk.weights[3].data.view(-1)[8] = later
        assert desk.take(later) > WEIGHT  # always copied from now on


def hold(desk: FrozenDesk, gate: threading.Event) -> None:
    """Let the background do nothing before ``gate`` is set."""

    def wait() -> None:
        gate.wait(30)

    desk.writer._tasks.put(wait)


def test_an_uncounted_write_is_found_before_a_counted_hides_it(
    desk: FrozenDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer steps before the background has come to compare: training compares itself."""
    monkeypatch.setattr(contents, "_looks_alike", lambda *_: True)
    desk.weights[3].data.view(-1)[7] = 1e9
    gate = threading.Event()
    hold(desk, gate)
    done = desk.begin(6, desk.checkpoint())
    desk.writer.copied()
    with torch.no_grad():
        desk.weights[3].mul_(2)
    gate.set()
    with pytest.raises(SnapshotFailedError, check=FailureReason.TORN.caused):
        done.result(30)
    desk.take(7)


class Later(Schedule):
    """Holds all copies back until the optimizer is about to step."""

    def timetable(self, addresses: Iterable[int], sizes: Sequence[int]) -> Timetable | None:
        spans = tuple(Span(piece, 0, nbytes) for piece, nbytes in enumerate(sizes) if nbytes)
        return Timetable((Partition(1, 0.0, spans),), 100.0) if spans else None


def test_uncounted_writes_are_copied_before_training_continues(
    desk: FrozenDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next such write, after a snapshot has begun, would be in it, and nothing would show it."""
    monkeypatch.setattr(contents, "_looks_alike", lambda *_: True)
    numbers = desk.weights[3].data.view(-1)
    numbers[7] = 1e9
    done = desk.begin(6, desk.checkpoint())
    desk.writer.copied()
    with pytest.raises(SnapshotFailedError, check=FailureReason.TORN.caused):
        done.result(30)
    monkeypatch.setattr(desk.writer._copying, "_schedule", Later())
    for step_ in range(7, 10):
        with torch.no_grad():
            torch._foreach_add_(desk.weights, 1.0)  # as the optimizer: its count tells nothing of what comes past it
        wanted = [weight.detach().clone() for weight in desk.weights]
        done = desk.begin(step_, desk.checkpoint())
        numbers[8] += 1.0
        desk.writer.copied()
        done.result(30)
        assert same(desk.saved(step_), wanted, desk.buffer)


def test_parameters_may_be_swapped(desk: FrozenDesk) -> None:
    """As ``module.to()`` does where ``torch.__future__`` says so: torch refuses it while there is a weak reference."""
    swap: Any = torch.utils.swap_tensors
    swap(desk.weights[2], nn.Parameter(torch.randn(300, 100)))
    assert desk.take(6) > WEIGHT
    swap(desk.weights[1], desk.weights[2])
    assert desk.take(7) > 2 * WEIGHT


@pytest.mark.parametrize("among", [1, 2, 3, 6, CHECK_EVERY])
def test_every_share_has_its_turn_in_every_slot(among: int) -> None:
    turns = ShareTurns()
    shares = [turns.next(among) for _ in range(300 * among)]
    for start in range(0, len(shares), among):
        assert set(shares[start : start + among]) == set(range(among))
    for slots in (2, 3, 4):
        for slot in range(slots):
            assert set(shares[slot::slots]) == set(range(among))
    assert turns.next(2) in (0, 1)  # of fewer, as the model has changed


@pytest.mark.parametrize("sizes", [[10_000_000], [3, 1, 7, 100_000, 5, 5], [64] * 50])
@pytest.mark.parametrize("turns", [2, 3, CHECK_EVERY])
def test_shares_are_cut_by_bytes_and_hold_each_once(sizes: list[int], turns: int) -> None:
    """A table of embeddings may be larger than all other tensors together: its bytes are shared out like any others."""
    pieces: list[Any] = [SimpleNamespace(nbytes=size) for size in sizes]
    unchecked = [Unchecked(piece, (), None, (), 0, piece.nbytes) for piece in pieces]
    nbytes = -(-sum(sizes) // turns)
    shares = [list(share_of(unchecked, nbytes * turn, nbytes)) for turn in range(turns)]
    assert all(sum(item.stop - item.start for item in share) <= nbytes for share in shares)
    for piece in pieces:
        parts = [(item.start, item.stop) for share in shares for item in share if item.piece is piece]
        assert [0, *(stop for _, stop in parts)] == [*(start for start, _ in parts), piece.nbytes]


def test_a_slot_that_another_has_filled_is_filled_anew(desk: FrozenDesk) -> None:
    lease = desk.host.lease(1000, 30.0)
    lease.map[:2_000_000] = bytes(2_000_000)
    desk.host.abort(lease)
    for step_ in range(6, 12):
        desk.take(step_)


def test_the_last_snapshot_copies_everything(desk: FrozenDesk) -> None:
    assert desk.take(6) < SMALL
    assert desk.take(7, complete=True) > 5 * WEIGHT


class Grown(Net):
    """With a part that does not change, and is too large to be compared each time."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(100_000), requires_grad=False)


class WritesPastTheCounts(pl.Callback):
    """Writes one number of the frozen part, in the step before the validation in which the notice comes."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, _optimizer: Any) -> None:
        if trainer.global_step == 7:
            module.frozen.data[7] = 1e9

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 8:
            os.kill(os.getpid(), signal.SIGTERM)


def test_at_a_notice_a_regular_snapshot_is_compared_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the last one of the attempt: no later one would find what was left for its turn.

    A regular snapshot of step 8 is there by then, of which a byte was compared: another one than those written to.
    There are two slots, each filled before: one that is made late holds nothing to compare, and is filled anew.
    """
    monkeypatch.setattr(contents, "CHECK_BYTES", 1)
    monkeypatch.setattr(ShareTurns, "next", lambda _, among: among - 1)  # another share than that number's
    monkeypatch.setattr(contents, "_looks_alike", lambda _piece, _view: True)
    usual: dict[str, Any] = {"interval": EverySteps(1), "on_full": "wait", "slots": 2, "notices": "signal"}
    spot = SpotCheckpoint(str(tmp_path / "run"), **usual, grace_period_s=60.0)
    with pytest.raises(SystemExit):
        trainer(WritesPastTheCounts(), spot, val_check_interval=8).fit(Grown(), data(12), data(2))
    newest = LocalStore(tmp_path / "run").survey().manifests[0]
    assert newest.step == 8
    saved = torch.load(tmp_path / "run" / newest.data_path, weights_only=False)["state_dict"]
    assert saved["frozen"][7] == 1e9
    assert not saved["frozen"][8:].any()
