"""A user's own ModelCheckpoint through SpotCheckpointIO."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_spot import EverySteps, SpotCheckpoint, SpotCheckpointIO
from lightning_spot.client.embedded import EmbeddedHost
from lightning_spot.client.node_client import NodeClient
from lightning_spot.errors import SettingsError, TierError
from lightning_spot.protocol.wire import Address
from tests.conftest import until
from tests.models import Net, data, trainer


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize("memory", ["auto", None])
@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint(tmp_path: Path, memory: str | None, save_last: Any) -> None:
    own = ModelCheckpoint(str(tmp_path), monitor="val_loss", save_top_k=2, save_last=save_last)
    run = trainer(own, plugins=[SpotCheckpointIO(memory=memory)], max_epochs=6)
    run.fit(Net(), data(), data(3))
    assert len(own.best_k_models) == 2
    assert files(tmp_path) == sorted([*(Path(path).name for path in own.best_k_models), "last.ckpt"])
    for name in files(tmp_path):
        tested = subprocess.run(["unzip", "-tq", str(tmp_path / name)], capture_output=True, check=False)
        assert tested.returncode == 0
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


def test_beside_our_own_snapshots(tmp_path: Path) -> None:
    own = ModelCheckpoint(str(tmp_path / "mine"), every_n_train_steps=7, save_top_k=-1)
    spot = SpotCheckpoint(str(tmp_path / "run-1"), interval=EverySteps(3), memory="auto")
    trainer(own, spot, plugins=[SpotCheckpointIO()]).fit(Net(), data())
    assert len(files(tmp_path / "mine")) == 5
    assert spot.last_committed_step == 40


def test_s3(s3: str) -> None:
    own = ModelCheckpoint(f"{s3}/mine", save_top_k=1, monitor="val_loss")
    trainer(own, plugins=[SpotCheckpointIO()], max_epochs=3).fit(Net(), data(), data(3))
    fs, path = fsspec.core.url_to_fs(own.best_model_path)
    fs.invalidate_cache()
    with fs.open(path) as file:
        assert torch.load(file, weights_only=True)["global_step"] > 0


def test_saved_means_committed_even_if_the_trainer_is_killed_at_once(tmp_path: Path, warm_python: str) -> None:
    code = (
        "import os, torch; from lightning_spot import SpotCheckpointIO\n"
        "plugin = SpotCheckpointIO()\n"
        f"plugin.save_checkpoint({{'global_step': 5, 'w': torch.ones(10**6)}}, {str(tmp_path / 'x.ckpt')!r})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([warm_python, "-c", code], check=False).returncode == -9
    until((tmp_path / "x.ckpt").exists, "the node to write what was saved")
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["global_step"] == 5


@pytest.mark.parametrize("memory", ["auto", None])
def test_overwrite_and_remove(tmp_path: Path, memory: str | None) -> None:
    plugin = SpotCheckpointIO(memory=memory)
    path = tmp_path / "last.ckpt"
    for step in range(5):
        plugin.save_checkpoint({"global_step": step, "w": torch.full((1000,), step)}, path)
        assert plugin.load_checkpoint(path)["global_step"] == step
    plugin.save_checkpoint({"global_step": 9}, tmp_path / "other.ckpt")
    plugin.remove_checkpoint(path)
    plugin.teardown()
    assert files(tmp_path) == ["other.ckpt"]
    plugin = SpotCheckpointIO(memory=memory)
    plugin.remove_checkpoint(tmp_path / "other.ckpt")  # saved by an earlier process
    plugin.teardown()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("memory", ["auto", None])
@pytest.mark.parametrize("left_memory", [False, True])
def test_the_best_one_stays_until_the_one_after_it_is_there(
    tmp_path: Path, memory: str | None, left_memory: bool
) -> None:
    """The old best was deleted at once, and a machine that went before the new one was written left neither."""
    plugin = SpotCheckpointIO(memory=memory, slots=2)
    old, new = tmp_path / "best-1.ckpt", tmp_path / "best-2.ckpt"
    plugin.save_checkpoint({"global_step": 1}, old)
    plugin.load_checkpoint(old)
    for step in range(3 if left_memory else 0):
        plugin.save_checkpoint({"global_step": step}, tmp_path / "other.ckpt")
        plugin.save_checkpoint({"global_step": step}, tmp_path / "another.ckpt")
        plugin.load_checkpoint(tmp_path / "other.ckpt")
    new.mkdir()  # in the way: the new one cannot be written yet
    (new / "in-the-way").touch()
    plugin.save_checkpoint({"global_step": 2}, new)
    plugin.remove_checkpoint(old)
    (writer,) = plugin._writers.values()
    assert writer.host is not None
    until(lambda: any(tier.failures_total > 1 for tier in writer.host.tiers().values()), "the new one to fail")
    assert old.exists()
    shutil.rmtree(new)
    plugin.teardown()
    assert torch.load(new, weights_only=True)["global_step"] == 2
    assert not old.exists()


def test_many_saves_wait_for_clean_slots(tmp_path: Path) -> None:
    plugin = SpotCheckpointIO(slots=2)
    for step in range(12):
        plugin.save_checkpoint({"global_step": step, "w": torch.full((10**5,), step)}, tmp_path / f"{step}.ckpt")
    plugin.teardown()
    assert len(files(tmp_path)) == 12
    assert all(torch.load(tmp_path / f"{n}.ckpt", weights_only=True)["global_step"] == n for n in range(12))


def test_a_failed_flush_shows_at_the_next_save_and_at_the_end(tmp_path: Path) -> None:
    plugin = SpotCheckpointIO(flush_timeout_s=1.0)
    folder = tmp_path / "mine"
    (folder / "x.ckpt").mkdir(parents=True)  # a directory where the file should go
    (folder / "x.ckpt" / "in-the-way").touch()
    plugin.save_checkpoint({"global_step": 1}, folder / "x.ckpt")
    (writer,) = plugin._writers.values()
    host = writer.host
    assert host is not None
    until(lambda: any(tier.error for tier in host.tiers().values()), "the flusher to fail")
    with pytest.raises(TierError, match="an earlier checkpoint could not be written"):
        plugin.save_checkpoint({"global_step": 2}, folder / "y.ckpt")
    with pytest.raises(TierError, match="not at their path"):
        plugin.teardown()


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="'auto' or None"):
        SpotCheckpointIO(memory="spot://h:1")
    with pytest.raises(SettingsError, match="slots=1"):
        SpotCheckpointIO(slots=1)
    with pytest.raises(TypeError, match="storage_options"):
        SpotCheckpointIO().save_checkpoint({}, tmp_path / "x.ckpt", storage_options={})


@pytest.mark.parametrize("memory", ["auto", None])
def test_what_fits_no_memory_is_saved_past_it(tmp_path: Path, memory: str | None) -> None:
    plugin = SpotCheckpointIO(memory=memory, memory_limit="4MiB")
    path = tmp_path / "x.ckpt"
    for step, elements in enumerate((10, 2_000_000, 10)):
        plugin.save_checkpoint({"global_step": step, "w": torch.full((elements,), step)}, path)
    plugin.teardown()
    assert torch.load(path, weights_only=True)["global_step"] == 2
    assert subprocess.run(["unzip", "-tq", str(path)], capture_output=True, check=False).returncode == 0


def test_a_dead_trainer_never_puts_an_older_file_over_a_newer_one(
    tmp_path: Path, runtime_dir: Path, warm_python: str
) -> None:
    """Its node went on trying, and replaced what the next trainer had saved meanwhile."""
    folder = tmp_path / "mine"
    code = (
        "import os, torch; from lightning_spot import SpotCheckpointIO\n"
        "plugin = SpotCheckpointIO()\n"
        f"plugin.save_checkpoint({{'global_step': 5}}, {str(folder / 'last.ckpt')!r})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    (folder / "last.ckpt").mkdir(parents=True)  # in the way: the node of the one that dies has to try again
    (folder / "last.ckpt" / "in-the-way").touch()
    assert subprocess.run([warm_python, "-c", code], check=False).returncode == -9
    time.sleep(1.1)  # attempts are told apart by seconds
    plugin = SpotCheckpointIO(memory=None)
    shutil.rmtree(folder / "last.ckpt")
    plugin.save_checkpoint({"global_step": 9}, folder / "last.ckpt")
    plugin.teardown()
    (http,) = runtime_dir.glob("*.http")  # the dead one's node, which now tries again
    NodeClient(Address(socket_path=str(http))).call("POST", "/v1/flush", {"wait_s": 10.0})
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 9


def test_a_node_killed_between_two_saves(tmp_path: Path) -> None:
    plugin = SpotCheckpointIO()
    plugin.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
    (writer,) = plugin._writers.values()
    host = writer.host
    assert isinstance(host, EmbeddedHost)
    os.kill(int(host.client.call("GET", "/v1/status")["pid"]), 9)
    plugin.save_checkpoint({"global_step": 2}, tmp_path / "b.ckpt")
    assert plugin.load_checkpoint(tmp_path / "b.ckpt")["global_step"] == 2
    plugin.teardown()
    assert files(tmp_path) == ["a.ckpt", "b.ckpt"]


def test_it_goes_in_by_the_cli_class_path() -> None:
    run = pl.Trainer(plugins=[SpotCheckpointIO()], logger=False, accelerator="cpu")
    assert isinstance(run.strategy.checkpoint_io, SpotCheckpointIO)
