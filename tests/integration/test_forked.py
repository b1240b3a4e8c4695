"""Children that user code forks while a training is on: it is their parent's, and their own end is nobody else's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.goodput.records import read_records
from lightning_spot.preemption.signals import SignalSource
from lightning_spot.store.local import LocalStore
from tests.support.trainer import At, Net, data, trainer
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G27")

LEFT = 7


def once(act: Callable[[], None], look: Callable[[], None]) -> tuple[At, At]:
    """Do something in the middle of a step, and look at what has become of it in the next one."""
    return At(5, act, "on_after_backward"), At(7, look, "on_train_batch_start")


@pytest.mark.parametrize("local_server", [True, False])
def test_a_child_that_leaves_through_fit_spares_its_parent(tmp_path: Path, local_server: bool) -> None:
    """It told the server that the trainer left, wrote down that the attempt failed, or waited for a lock for ever."""
    spot = SpotCheckpoint(str(tmp_path / "run"), local_server=local_server, interval=EverySteps(1), notices="signal")
    parent, children = os.getpid(), list[int]()

    def fork() -> None:
        children.append(os.fork())
        if children[-1] == 0:
            raise SystemExit(LEFT)

    def wait_for_it() -> None:
        ended = until(lambda: (found := os.waitpid(children[0], os.WNOHANG))[0] and found, "the child to end")
        assert os.waitstatus_to_exitcode(ended[1]) == LEFT
        children.clear()
        if local_server:
            host: Any = spot.snapshots.snapshotter.writing.attempt.writer.host
            (run,) = host._call("GET", "/v1/status")["runs"].values()
            assert run["live"]

    try:
        trainer(*once(fork, wait_for_it), spot).fit(Net(), data())
    except SystemExit as left:
        if os.getpid() != parent:
            os._exit(int(str(left)))
        raise
    assert children == []
    assert LocalStore(tmp_path / "run").survey().manifests[0].complete
    assert [record.end for record in read_records(str(tmp_path / "run"))] == ["complete"]


def test_a_callback_of_a_users_own_needs_no_hash() -> None:
    class Equal(SpotCheckpoint):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

    assert Equal("run") == Equal("run")


def test_a_child_can_be_told_to_end(tmp_path: Path) -> None:
    """The handlers of the training were the child's, too: it noted the signal, and ``join`` waited for ever."""
    spot = SpotCheckpoint(str(tmp_path / "run"), local_server=False, interval=EverySteps(3), notices="signal")
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    handler = signal.getsignal(signal.SIGTERM)

    def end() -> None:
        child.terminate()
        child.join(120)

    trainer(*once(child.start, end), spot).fit(Net(), data())
    try:
        assert child.exitcode == -signal.SIGTERM
    finally:
        child.kill()
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_child_ends_even_if_our_handler_was_wrapped() -> None:
    """Ours was called again and again, since it was not there to be put back."""
    source = SignalSource(["SIGTERM"])
    source.install()
    ours: Any = signal.getsignal(signal.SIGTERM)
    former = signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
    try:
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os._exit(0)
        ended = until(lambda: (found := os.waitpid(child, os.WNOHANG))[0] and found, "the child to end")
    finally:
        signal.signal(signal.SIGTERM, former)
        source.restore()
    assert os.waitstatus_to_exitcode(ended[1]) == -signal.SIGTERM
