"""A user's own ModelCheckpoint through SpotCheckpointIO."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from signal import getsignal
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_spot import EverySteps, SpotCheckpoint, SpotCheckpointIO
from lightning_spot.checkpoint_io import _joined, _split
from lightning_spot.config import read_environment
from lightning_spot.errors import TierError
from lightning_spot.protocol.record import find_record
from lightning_spot.run import attempts
from lightning_spot.run.attempts import folder_info
from lightning_spot.snapshot.manifest import OWN_DIR, Manifest
from lightning_spot.state.sharded import checkpoint_of
from lightning_spot.store.local import LocalStore
from tests.support.filled import check_archive
from tests.support.server import server_pid
from tests.support.trainer import Net, data, trainer
from tests.support.waiting import new_process, until

pytestmark = pytest.mark.guarantee("G23")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Puts of ``held.ckpt`` from this process say that they begin, and wait for the second event."""
    begun, go = threading.Event(), threading.Event()
    put = LocalStore.put

    def gated(self: LocalStore, manifest: Manifest, image: memoryview, *, attempt: int) -> None:
        if manifest.name == "held.ckpt":
            begun.set()
            assert go.wait(120)
        put(self, manifest, image, attempt=attempt)

    monkeypatch.setattr(LocalStore, "put", gated)
    yield begun, go
    go.set()


def step_in(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def in_the_way(path: Path) -> None:
    """Nothing can be written there until this is removed."""
    path.mkdir(parents=True)
    (path / "in-the-way").touch()


def saved_by_one_that_is_killed(python: str, path: Path) -> None:
    """What another process has saved, which then is killed."""
    code = (
        "import os, torch; from lightning_spot import SpotCheckpointIO\n"
        f"SpotCheckpointIO().save_checkpoint({{'global_step': 5, 'w': torch.ones(10**6)}}, {str(path)!r})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([python, "-c", code], check=False).returncode == -9


def small(**settings: Any) -> SpotCheckpointIO:
    """In this process, with memory for small checkpoints only; ``LARGE`` goes past it."""
    return SpotCheckpointIO(local_server=False, memory_limit="4MiB", **settings)


LARGE = {"w": torch.ones(2_000_000)}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize("local_server", [True, False])
@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint(tmp_path: Path, local_server: bool, save_last: Any) -> None:
    own = ModelCheckpoint(str(tmp_path), monitor="val_loss", save_top_k=2, save_last=save_last)
    run = trainer(own, plugins=[SpotCheckpointIO(local_server=local_server)], max_epochs=6)
    run.fit(Net(), data(), data(3))
    assert len(own.best_k_models) == 2
    assert files(tmp_path) == sorted([*(Path(path).name for path in own.best_k_models), "last.ckpt"])
    for name in files(tmp_path):
        check_archive(tmp_path / name)
    assert stat.S_IMODE(os.stat(own.best_model_path).st_mode) == 0o666 & ~_umask()
    run.validate(ckpt_path="best", dataloaders=data(3), verbose=False)
    Net.load_from_checkpoint(own.best_model_path)
    again = trainer(enable_checkpointing=False, max_epochs=7)
    again.fit(Net(), data(), ckpt_path=str(tmp_path / "last.ckpt"))
    assert again.global_step == 140


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_a_resumed_run_reads_what_its_server_has_saved(s3: str) -> None:
    """Lightning's file system had listed the bucket when the run began, and found nothing that came later."""
    seen: list[ModelCheckpoint] = []
    for epochs in (2, 4):
        new_process()
        own = ModelCheckpoint(f"{s3}/mine", save_top_k=2, monitor="val_loss", save_last=True)
        spot = SpotCheckpoint(f"{s3}/run-1", interval=EverySteps(10), local_server=False, notices=None)
        run = trainer(own, spot, plugins=[SpotCheckpointIO()], max_epochs=epochs)
        run.fit(Net(), data(), data(3))
        seen.append(own)
    assert own.best_model_path != seen[0].best_model_path
    for path in {own.best_model_path, own.last_model_path, *own.best_k_models}:
        Net.load_from_checkpoint(path)
    run.test(ckpt_path="best", dataloaders=data(3), verbose=False)
    files, path = fsspec.core.url_to_fs(f"{s3}/run-1")
    assert any("step-000000080" in name for name in files.find(path))


def test_saved_means_committed_even_if_the_trainer_is_killed(tmp_path: Path, warm_python: str) -> None:
    saved_by_one_that_is_killed(warm_python, tmp_path / "x.ckpt")
    until((tmp_path / "x.ckpt").exists, "the server to write what was saved")
    assert step_in(tmp_path / "x.ckpt") == 5


@pytest.mark.parametrize("local_server", [True, False])
def test_overwrite_and_remove(tmp_path: Path, local_server: bool) -> None:
    plugin = SpotCheckpointIO(local_server=local_server)
    path = tmp_path / "last.ckpt"
    for step in range(5):
        plugin.save_checkpoint({"global_step": step, "w": torch.full((1000,), step)}, path)
        assert plugin.load_checkpoint(path)["global_step"] == step
    plugin.save_checkpoint({"global_step": 9}, tmp_path / "other.ckpt")
    plugin.remove_checkpoint(path)
    plugin.teardown()
    assert files(tmp_path) == ["other.ckpt"]
    plugin = SpotCheckpointIO(local_server=local_server)
    plugin.remove_checkpoint(tmp_path / "other.ckpt")  # saved by an earlier process
    plugin.teardown()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("local_server", [True, False])
@pytest.mark.parametrize("left_memory", [False, True])
def test_the_best_one_stays_until_the_one_after_it_is_there(
    tmp_path: Path, local_server: bool, left_memory: bool
) -> None:
    """The old best was deleted at once, and a machine that went before the new one was written left neither."""
    plugin = SpotCheckpointIO(local_server=local_server, slots=2)
    old, new = tmp_path / "best-1.ckpt", tmp_path / "best-2.ckpt"
    plugin.save_checkpoint({"global_step": 1}, old)
    plugin.load_checkpoint(old)
    for step in range(3 if left_memory else 0):
        plugin.save_checkpoint({"global_step": step}, tmp_path / "other.ckpt")
        plugin.save_checkpoint({"global_step": step}, tmp_path / "another.ckpt")
        plugin.load_checkpoint(tmp_path / "other.ckpt")
    in_the_way(new)
    plugin.save_checkpoint({"global_step": 2}, new)
    plugin.remove_checkpoint(old)
    (writer,) = plugin._writers.values()
    until(lambda: any(tier.failures_total > 1 for tier in writer.host.tiers().values()), "the new one to fail")
    assert old.exists()
    shutil.rmtree(new)
    plugin.teardown()
    assert step_in(new) == 2
    assert not old.exists()


def test_a_failed_flush_shows_at_the_next_save_and_at_the_end(tmp_path: Path) -> None:
    plugin = SpotCheckpointIO(upload_timeout_s=1.0)
    folder = tmp_path / "mine"
    in_the_way(folder / "x.ckpt")
    plugin.save_checkpoint({"global_step": 1}, folder / "x.ckpt")
    (writer,) = plugin._writers.values()
    host = writer.host
    until(lambda: any(tier.error for tier in host.tiers().values()), "the upload to fail")
    with pytest.raises(TierError, match=re.escape(str(folder))):
        plugin.save_checkpoint({"global_step": 2}, folder / "y.ckpt")
    with pytest.raises(TierError, match=r"x\.ckpt"):
        plugin.teardown()


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        SpotCheckpointIO().save_checkpoint({}, tmp_path / "x.ckpt", storage_options={})


@pytest.mark.parametrize("local_server", [True, False])
def test_what_fits_no_memory_is_saved_past_it(tmp_path: Path, local_server: bool) -> None:
    plugin = SpotCheckpointIO(local_server=local_server, memory_limit="4MiB")
    path = tmp_path / "x.ckpt"
    for step, elements in enumerate((10, 2_000_000, 10)):
        plugin.save_checkpoint({"global_step": step, "w": torch.full((elements,), step)}, path)
        assert plugin.load_checkpoint(path)["global_step"] == step  # a slow disk is not at it any more
    plugin.teardown()
    assert step_in(path) == 2
    check_archive(path)


@pytest.mark.parametrize("local_server", [True, False])
@pytest.mark.parametrize("is_repeated", [True, False])
def test_a_refused_file_is_never_said_to_be_saved(tmp_path: Path, local_server: bool, is_repeated: bool) -> None:
    """Another process had saved to its place meanwhile; that was said with the next save only, if there was one."""
    path = tmp_path / "two.ckpt"
    first = SpotCheckpointIO(local_server=local_server, slots=2, wait_timeout_s=20.0)
    first.save_checkpoint({"global_step": 1}, path)
    first.load_checkpoint(path)
    second = SpotCheckpointIO(local_server=False)
    second.save_checkpoint({"global_step": 2}, path)
    second.teardown()
    first.save_checkpoint({"global_step": 3}, path)
    with pytest.raises(TierError, match=r"two\.ckpt .*\b3\b"):
        first.load_checkpoint(path)
    assert first.load_checkpoint(path)["global_step"] == 2
    for name in ("a", "b", "c"):  # the slot of what was refused is free again
        first.save_checkpoint({"global_step": 4}, tmp_path / name)
    if is_repeated:
        second.remove_checkpoint(path)
        first.save_checkpoint({"global_step": 4}, path)
        first.teardown()
        assert step_in(path) == 4
    else:
        with pytest.raises(TierError, match=r"two\.ckpt .*\b3\b"):
            first.teardown()
    assert files(tmp_path) == ["a", "b", "c", "two.ckpt"]


@pytest.mark.parametrize("nbytes", [10, 2_000_000])
def test_half_written_files_of_a_kill_go_with_the_next_save(tmp_path: Path, nbytes: int) -> None:
    left = tmp_path / OWN_DIR / f".lightning-spot-tmp-0007-aaaaaaaaaaaa-{'0' * 32}"
    left.parent.mkdir()
    left.write_text("half")
    os.utime(left, (1.0, 1.0))
    plugin = small()
    plugin.save_checkpoint({"global_step": 1, "w": torch.zeros(nbytes)}, tmp_path / "x.ckpt")
    plugin.teardown()
    assert [path.name for path in (tmp_path / OWN_DIR).iterdir()] == ["x.ckpt.manifest.json"]


def test_of_very_many_files_none_fences_who_saves_next(tmp_path: Path) -> None:
    """64 manifests were read; one of a host whose clock is ahead, beyond these, refused all that was saved."""
    noted = Manifest(run="files", name="x", file="", step=1, attempt=1, nbytes=0)
    (tmp_path / OWN_DIR).mkdir()
    for number in range(100):
        (tmp_path / replace(noted, name=f"{number}.ckpt").manifest_path).write_text(noted.to_json())
    last = os.listdir(tmp_path / OWN_DIR)[-1]
    (tmp_path / OWN_DIR / last).write_text(replace(noted, attempt=2).to_json())
    assert folder_info(str(tmp_path), now_unix_s=0.0).attempt == 3


def test_a_first_save_reads_a_bounded_number_of_manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a folder were read, however many ``save_top_k=-1`` had left there."""
    monkeypatch.setattr(attempts, "MOST_READ", 3)
    noted = Manifest(run="files", name="x", file="", step=1, attempt=1, nbytes=0)
    (tmp_path / OWN_DIR).mkdir()
    for name, attempt in {"a": 20, "b": 7, "c": 8, "d": 6, "last": 9}.items():
        manifest = replace(noted, name=f"{name}.ckpt", attempt=attempt)
        (tmp_path / manifest.manifest_path).write_text(manifest.to_json())
    assert folder_info(str(tmp_path), now_unix_s=0.0).attempt == 10  # the last ones by name


@pytest.mark.parametrize("name", ["x.ckpt", "held.ckpt"])
def test_a_save_past_memory_comes_after_what_is_on_its_way(tmp_path: Path, gate: Any, name: str) -> None:
    """A deletion that waited for another file took the new one; or an older one of that name was tried for ever."""
    begun, go = gate
    plugin = small()
    plugin.save_checkpoint({"global_step": 1}, tmp_path / "x.ckpt")
    plugin.load_checkpoint(tmp_path / "x.ckpt")
    plugin.save_checkpoint({"global_step": 1}, tmp_path / "held.ckpt")
    assert begun.wait(120)
    plugin.remove_checkpoint(tmp_path / "x.ckpt")
    threading.Timer(0.1, go.set).start()
    plugin.save_checkpoint({"global_step": 2, **LARGE}, tmp_path / name)
    assert step_in(tmp_path / name) == 2
    plugin.teardown()
    assert files(tmp_path) == sorted({"held.ckpt", name})
    assert step_in(tmp_path / name) == 2


def test_a_save_past_memory_fails_with_what_is_before_it(tmp_path: Path) -> None:
    plugin = small(upload_timeout_s=0.5)
    in_the_way(tmp_path / "x.ckpt")
    plugin.save_checkpoint({"global_step": 1}, tmp_path / "x.ckpt")
    with pytest.raises(TierError, match=r"x\.ckpt"):
        plugin.save_checkpoint({"global_step": 2, **LARGE}, tmp_path / "y.ckpt")
    with pytest.raises(TierError, match=r"x\.ckpt"):
        plugin.teardown()


class Saving(pl.Callback):
    """Saves after every batch, and notes whether the plugin has taken that for training. Ends with an exception."""

    def __init__(self, plugin: SpotCheckpointIO, path: Path) -> None:
        self.plugin, self.path = plugin, path
        self.found: list[bool] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)
        self.found.append(bool(self.plugin._writers))
        if len(self.found) % 3 == 0:
            raise KeyError("the third one")


def test_that_training_goes_on_is_known_whoever_saves(tmp_path: Path) -> None:
    """Also where no Trainer is among the callers: a plugin around this one saves from a thread."""
    plugin = SpotCheckpointIO(local_server=False)
    saving = Saving(plugin, tmp_path / "x.ckpt")
    run = trainer(saving, enable_checkpointing=False, plugins=[plugin], max_epochs=1)
    for _ in range(2):
        with pytest.raises(KeyError, match="third"):
            run.fit(Net(), data())
        assert saving.found == [True] * 3
        saving.found.clear()
        for name in ("one.ckpt", "two.ckpt"):
            plugin.save_checkpoint(checkpoint_of(run), tmp_path / name)
            assert (tmp_path / name).exists()
            assert not plugin._writers


def test_nothing_of_ours_is_left_after_fit(tmp_path: Path) -> None:
    """What Lightning's own tests look for: threads, environment, signal handlers; and the server, and what it held."""
    loader, run_url = data(), tmp_path / "run-1"
    before = (set(threading.enumerate()), dict(os.environ), {number: getsignal(number) for number in (2, 10, 12, 15)})
    own = ModelCheckpoint(str(tmp_path / "own"), save_last=True)
    run = trainer(own, SpotCheckpoint(str(run_url), interval=EverySteps(3)), plugins=[SpotCheckpointIO()], max_epochs=1)
    run.fit(Net(), loader)
    threads = {thread for thread in threading.enumerate() if thread.name != "fsspecIO"}
    assert threads <= before[0]
    assert (dict(os.environ), {number: getsignal(number) for number in (2, 10, 12, 15)}) == before[1:]
    assert run.train_dataloader is loader
    assert "__iter__" not in vars(loader)
    until(lambda: not find_record(str(run_url)).running(), "the server of the run to end")
    until(lambda: not list(read_environment().shm_dir.iterdir()), "all slots to be given back")


def test_one_folder_is_one_place_however_it_is_written() -> None:
    for spelled in ("s3a://b/mine/x.ckpt", "s3://b/mine//x.ckpt", "S3://b/mine/x.ckpt/"):
        assert _split(spelled) == ("s3://b/mine", "x.ckpt")
    assert _split("gcs://b/x.ckpt") == _split("gs://b/x.ckpt") == ("gs://b", "x.ckpt")
    assert _joined(*_split("kept://x.ckpt")) == "kept://x.ckpt"
    for spelled in ("file:///a//b/x.ckpt", "local:///a/b/x.ckpt", "FILE:///a/b/x.ckpt", "/a/b/x.ckpt"):
        assert _split(spelled) == ("/a/b", "x.ckpt")


def test_a_server_killed_between_two_saves(tmp_path: Path) -> None:
    plugin = SpotCheckpointIO()
    plugin.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
    (writer,) = plugin._writers.values()
    os.kill(server_pid(writer.host), 9)
    plugin.save_checkpoint({"global_step": 2}, tmp_path / "b.ckpt")
    assert plugin.load_checkpoint(tmp_path / "b.ckpt")["global_step"] == 2
    plugin.teardown()
    assert files(tmp_path) == ["a.ckpt", "b.ckpt"]
