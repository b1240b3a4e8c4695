"""Where no more threads can be had, those that there are do the work: nothing is lost, and training goes on."""

from __future__ import annotations

import io
import mmap
import os
import threading
from pathlib import Path

import pytest
import torch

from lightning_spot import threads
from lightning_spot.image.sealing import Sealing
from lightning_spot.staging import batch as batch_module
from lightning_spot.staging import job as job_module
from lightning_spot.staging import slot as slot_module
from lightning_spot.staging.copier import Copier
from lightning_spot.staging.slot import SlotMemory
from lightning_spot.threads import processors, work_together
from tests.conftest import until
from tests.gated import MIB, manifest_of
from tests.test_copier import Desk, Fixed
from tests.test_writer import Desk as WriterDesk


@pytest.fixture
def only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what several threads do together, a second one starts, and no third."""
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith(("spot-copy", "spot-map", "spot-seal", "spot-slots")):
            if started or thread.name == "spot-slots":
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    for module in (job_module, slot_module):
        monkeypatch.setattr(module, "processors", lambda: 4)


@pytest.mark.parametrize(
    ("says", "most"), [("250000 100000\n", 3), ("50000 100000\n", 1), ("max 100000\n", None), ("", None)]
)
def test_a_container_has_its_share_of_the_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, most: int | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(threads, "_QUOTA", tmp_path / "cpu.max")
    if says:
        (tmp_path / "cpu.max").write_text(says)
    assert processors.__wrapped__() == (64 if most is None else most)


def test_what_several_threads_do_together_is_done_by_those_there_are(only_one: None) -> None:
    left, by = list(range(50)), set()
    both = threading.Barrier(2)

    def work() -> None:
        by.add(threading.get_ident())
        both.wait(30)
        while left:
            left.pop()

    work_together(work, 8, "spot-copy")
    assert not left
    assert len(by) == 2


def test_what_one_of_them_raises_is_raised_when_all_have_ended() -> None:
    ended = threading.Event()

    def work() -> None:
        if threading.current_thread() is threading.main_thread():
            assert ended.wait(30)
        else:
            ended.set()
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        work_together(work, 2, "spot-copy")


def test_tensors_are_copied_while_training_stands_still(only_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "_LEAST_BATCH_BYTES", 64)
    desk, copier = Desk(), Copier(threads=0)
    copier.start(desk.pieces, desk.view, schedule=Fixed.still()).wait_cpu()
    assert all(map(desk.copied, range(4)))
    copier.close()


def test_a_slot_is_made(only_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_module, "_AT_ONCE_BYTES", mmap.PAGESIZE)
    memory = SlotMemory.create(MIB, None)
    assert memory.map[-1] == 0
    memory.close()


def test_a_snapshot_is_sealed(only_one: None) -> None:
    file = io.BytesIO()
    torch.save([torch.ones(1000) for _ in range(50)], file)
    image = memoryview(bytearray(file.getvalue()))
    sealed = Sealing(manifest_of(1, nbytes=len(image)), image).run(4)
    sealed.verify(image, "here")


def test_a_slot_that_cannot_be_made_beside_training_is_made_when_it_is_needed(only_one: None, tmp_path: Path) -> None:
    desk = WriterDesk(tmp_path)
    desk.writer.warm(700_000)
    until(lambda: desk.writer.ready, "no slot is waited for")
    desk.begin(1, desk.checkpoint()).result(30)
    desk.writer.close()
    desk.host.leave(complete=True)
