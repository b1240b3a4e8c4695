"""Faults of the machine: a full disk, a tmpfs that is too small, a network that delays, cuts and corrupts."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.client.remote import ServerStore
from lightning_spot.errors import TierError
from lightning_spot.protocol.record import find_record
from lightning_spot.store.local import LocalStore
from tests.support.proxy import Proxy
from tests.support.said import said
from tests.support.server import RunningServer, StartServer
from tests.support.snapshots import check_all
from tests.support.trainer import Net, Probe, Stop, StopAt, data, trainer
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G21")


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount small tmpfs file systems; skipped where that is not allowed."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"small-{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_full_disk(small_tmpfs: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    disk = small_tmpfs("4m")
    filler = disk / "filler"
    path = str(disk / "run-1")
    # keep: what is deleted would make room again
    callback = SpotCheckpoint(path, interval=EverySteps(3), upload_timeout_s=3.0, on_full="wait", keep=1000)

    class Fill(StopAt):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 10 and not filler.exists():
                until(lambda: LocalStore(disk / "run-1").survey().manifests, "a durable snapshot")
                fd = os.open(filler, os.O_WRONLY | os.O_CREAT)
                try:
                    while os.write(fd, bytes(4096)):
                        pass
                except OSError:
                    os.close(fd)

    run = trainer(callback, Fill(31))
    with pytest.raises(Stop):
        run.fit(Net(), data())
    assert "No space left on device" in caplog.text
    assert callback.last_committed_step == 30  # memory went on protecting the run
    durable = LocalStore(disk / "run-1").survey().manifests
    assert durable  # what was durable before is whole
    for manifest in durable:
        buffer = bytearray(manifest.nbytes)
        LocalStore(disk / "run-1").fetch(manifest, memoryview(buffer))
        manifest.verify(memoryview(buffer), "disk")
    filler.unlink()
    again = SpotCheckpoint(str(disk / "run-1"), interval=EverySteps(3))
    trainer(again).fit(Net(), data())
    assert (again.resumed_from.step, again.resumed_from.tier) == (30, "host")
    assert LocalStore(disk / "run-1").survey().manifests[0].complete


def test_shm_too_small(
    small_tmpfs: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT_SHM_DIR", str(small_tmpfs("1m")))
    callback = SpotCheckpoint(str(tmp_path / "run-1"), interval=EverySteps(3), keep=1000, on_full="wait")
    probe = Probe()
    with pytest.raises(Stop):
        trainer(callback, probe, StopAt(31)).fit(Net(), data())
    check_all(tmp_path, probe)
    assert len(said(caplog, "shm-full")) == 1
    again = SpotCheckpoint(str(tmp_path / "run-1"), interval=EverySteps(3))
    trainer(again).fit(Net(), data())
    assert again.resumed_from.tier == "host"  # the server holds the memory files over the restart


@pytest.fixture
def proxied(start_server: StartServer, seed: int) -> Iterator[tuple[RunningServer, Proxy]]:
    server = start_server()
    proxy = Proxy(server.url, seed)
    yield server, proxy
    proxy.close()


def test_training_over_a_line_that_breaks_and_heals(
    tmp_path: Path, proxied: tuple[RunningServer, Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server, proxy = proxied
    # A fast trainer would have passed all its steps before the slots of a slow server are made.
    waits: dict[str, Any] = {"on_full": "wait", "upload_timeout_s": 30}
    callback = SpotCheckpoint(str(tmp_path / "run-1"), servers=proxy.url, interval=EverySteps(3), **waits)

    class Break(StopAt):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            proxy.cut_after = 100 if 10 <= trainer.global_step < 25 else None

    with pytest.raises(Stop):
        trainer(callback, Break(31)).fit(Net(), data())
    assert LocalStore(tmp_path / "run-1").survey().manifests[0].step == 30
    reached = ServerStore(f"{server.url}/run-1")
    until(
        lambda: 30 in [manifest.step for manifest in reached.survey().manifests],
        "the local server to try the line again",
        60.0,
    )
    # This host is lost with its memory and its disk: the server elsewhere still has it.
    record = find_record(str(tmp_path / "run-1"))
    process = record.process()
    assert process.kill(10.0)
    record.remove()
    for lost in (tmp_path / "run-1", record.area(Path(os.environ["LIGHTNING_SPOT_SHM_DIR"]))):
        shutil.rmtree(lost)
    again = SpotCheckpoint(str(tmp_path / "run-1"), servers=server.url, interval=EverySteps(3))
    trainer(again).fit(Net(), data())
    assert (again.resumed_from.step, again.resumed_from.tier) == (30, server.url)
    assert again.attempt == 2


def test_an_unwritable_folder_shows_at_the_save(tmp_path: Path) -> None:
    from lightning_spot import SpotCheckpointIO

    (tmp_path / "file").write_text("")
    plugin = SpotCheckpointIO()
    with pytest.raises(TierError, match=re.escape(str(tmp_path / "file"))):
        plugin.save_checkpoint({"global_step": 1}, tmp_path / "file" / "x.ckpt")
    plugin.teardown()
