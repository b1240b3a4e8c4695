"""Every step of a commit as a crash point: enumerated, not sampled. Also: the disk fills at every step, and the order
of fsync and rename, which kill -9 alone cannot test (a reclaimed VM loses its page cache).
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.errors import SpotError
from lightning_spot.image.files import FileSpan
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.memory.node import Node
from lightning_spot.tiers.local import LocalStore
from lightning_spot.tiers.store import retain
from tests.oracle import claim_of, run_info

WATCHED = ("fsync", "replace", "unlink", "mkdir", "rmdir", "open")
NBYTES = 9000
STEPS = 5
FILES = (FileSpan(".metadata", 0, 100), FileSpan("__0_0.distcp", 4096, NBYTES - 4096))
"""Every second snapshot is of several files."""


class AtCall:
    """Does something at the N-th call that changes files or directories."""

    def __init__(self, number: int, action: Callable[[], None]) -> None:
        self.left = number
        self.action = action
        self._lock = threading.Lock()

    def watch(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            with self._lock:
                self.left -= 1
                now = self.left == 0
            if now:
                self.action()
            return real(*arguments, **more)

        return call

    def install(self) -> None:
        for name in WATCHED:
            setattr(os, name, self.watch(getattr(os, name)))


def image_of(step: int) -> bytes:
    image = random.Random(step).randbytes(NBYTES)
    return image if step % 2 else image[: FILES[0].stop].ljust(FILES[1].offset, b"\0") + image[FILES[1].offset :]


def manifest_of(step: int, attempt: int = 1) -> Manifest:
    made = Manifest(
        run="run", name=snapshot_name(step, attempt), step=step, attempt=attempt, nbytes=NBYTES, part_bytes=2048
    )
    return made if step % 2 else replace(made, files=FILES)


def use_store(root: Path, told: Callable[[int], None]) -> None:
    store = LocalStore(root / "durable")
    store.claim(claim_of(1))
    for step in range(1, STEPS + 1):
        manifest = manifest_of(step).sealed(memoryview(image_of(step)))
        store.put(manifest, memoryview(image_of(step)), attempt=1)
        told(step)
        retain(store, 2, manifest)


def use_node(root: Path, told: Callable[[int], None]) -> None:
    node = Node(slots=2, memory_bytes=2**24, open_store=LocalStore, allow=None, area=root / "area")
    node.open_run(run_info(root))
    for step in range(1, STEPS + 1):
        upload = node.lease("run", 1, NBYTES, wait_s=20.0)
        with upload.slot.view(NBYTES) as view:
            view[:] = image_of(step)
        node.seal(upload.id, manifest_of(step))
        told(step)
    assert node.flush("run", 20.0) == []


def newest_durable(root: Path) -> int:
    store = LocalStore(root / "durable")
    found = store.survey().manifests
    for manifest in found:  # what counts is whole
        buffer = bytearray(manifest.nbytes)
        store.fetch(manifest, memoryview(buffer))
        manifest.verify(memoryview(buffer), "durable")
        assert bytes(buffer) == image_of(manifest.step)
    return max((manifest.step for manifest in found), default=0)


def newest_anywhere(root: Path) -> int:
    heir = Node(slots=2, memory_bytes=2**24, open_store=LocalStore, allow=None, area=root / "area")
    in_memory = [manifest.step for slot in heir.ring.committed("run") if (manifest := slot.manifest)]
    heir.flush("run", 20.0)
    heir.close()
    return max([newest_durable(root), *in_memory])


def in_child(run: Callable[[Callable[[int], None]], None], fault: AtCall) -> tuple[int, int]:
    """Run in a forked process; return its exit status and the last step it was told about."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            fault.install()
            run(lambda step: os.write(writer, bytes([step])) and None)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    told = 0
    while data := os.read(reader, 100):
        told = data[-1]
    os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), told


SOME_OR_ALL = pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.soak)], ids=["some", "all"])
"""The everyday suite takes every so many-th call, the soak takes each; test_crash strikes in every write besides."""


@SOME_OR_ALL
@pytest.mark.parametrize(("use", "newest"), [(use_store, newest_durable), (use_node, newest_anywhere)])
def test_killed_at_every_call(
    tmp_path: Path, use: Callable[[Path, Callable[[int], None]], None], newest: Callable[[Path], int], stride: int
) -> None:
    points = 0
    for number in range(random.randrange(stride) + 1, 1000, stride):
        root = tmp_path / str(number)
        root.mkdir()
        fault = AtCall(number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        status, told = in_child(lambda tell, root=root: use(root, tell), fault)
        assert newest(root) >= told, f"killed at call {number}"
        if status == 0:
            assert told == STEPS
            break
        assert status == -signal.SIGKILL, f"call {number}: exit {status}"
        points += 1
    assert points > 30 // stride
    print(f"{points} crash points")


@SOME_OR_ALL
def test_disk_full_at_every_call(tmp_path: Path, stride: int) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    for number in range(random.randrange(stride) + 1, 1000, stride):
        root = tmp_path / str(number)
        root.mkdir()
        told: list[int] = []

        def run(tell: Callable[[int], None], root: Path = root) -> None:
            try:
                use_store(root, tell)
            except SpotError:
                os._exit(3)

        status, last = in_child(run, AtCall(number, fail))
        told.append(last)
        assert status in (0, 3), f"call {number}: exit {status}: an error that is none of ours"
        assert newest_durable(root) >= last
        LocalStore(root / "durable").put(
            manifest_of(9).sealed(memoryview(image_of(9))), memoryview(image_of(9)), attempt=1
        )
        assert newest_durable(root) == 9  # once there is room again
        if status == 0 and number > 100:
            break


@pytest.mark.parametrize(("step", "names"), [(1, ["model.ckpt"]), (2, [".metadata", "__0_0.distcp"])])
def test_bytes_are_on_the_disk_before_the_name_and_the_manifest_is_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, names: list[str]
) -> None:
    calls: list[str] = []

    def name_of(fd: int) -> str:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        return "directory" if path.is_dir() else "file"

    real_fsync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(f"fsync {name_of(fd)}"), real_fsync(fd)))
    monkeypatch.setattr(
        os,
        "replace",
        lambda source, target: (calls.append(f"rename {Path(target).name}"), real_replace(source, target)),
    )
    image = memoryview(image_of(step))
    LocalStore(tmp_path).put(manifest_of(step).sealed(image), image, attempt=1)
    assert calls == [
        "fsync directory",  # the run's, in which the snapshot's folder was made
        *("fsync file" for _ in names),
        "fsync file",
        *(f"rename {name}" for name in names),
        "fsync directory",
        "rename manifest.json",
        "fsync directory",
        "fsync directory",  # the run's own, which holds the snapshot's name
    ]
