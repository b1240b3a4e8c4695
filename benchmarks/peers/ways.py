"""The ways of saving that are compared, by name, behind one small interface."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.baselines.asymcheck import AsymCheck
from benchmarks.baselines.asymcheck_topk import AsymCheckTopK
from benchmarks.baselines.baseline import DURABLE, HOST, PEER, Baseline
from benchmarks.baselines.checkfreq import CheckFreq
from benchmarks.baselines.dash import Dash
from benchmarks.baselines.datastates import DataStates
from benchmarks.baselines.gemini import Gemini
from benchmarks.baselines.oteacheck import OTeaCheck
from benchmarks.peers.dcp import DCP
from benchmarks.peers.seam_watch import SeamWatch
from benchmarks.peers.sightings import Sightings
from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.capture.partitions import MODES
from lightning_spot.client.stores import open_tier
from lightning_spot.run.sources import StoreSource

BASELINES: dict[str, type[Baseline]] = {
    "dash": Dash,
    "checkfreq": CheckFreq,
    "gemini": Gemini,
    "datastates": DataStates,
    "oteacheck": OTeaCheck,
    "asymcheck": AsymCheck,
    "asymcheck-topk": AsymCheckTopK,
}
SETTLE_S, LOOK_S = 60.0, 0.003


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One way, made for one fit.

    Attributes:
        callbacks: of the trainer.
        plugins: of the trainer.
        timed: whose hooks and saves training waits in.
        begun: see :class:`Baseline`; filled while training runs.
        safe: likewise.
        watched: directories in which snapshots that are safe show themselves, by tier: see ``sightings.py``.
        restore: reads the newest snapshot after the fit; ``None`` where there is nothing to restore.
        close: lets go of what ``restore`` needed.
        waited_elsewhere_s: seconds that training has waited so far outside the hooks of ``timed``.
        last_ones: snapshots taken at the end of training, besides those begun.
        spot: ours, if it is one of ours: it is called in the turns of others as well, and its interval tells it whose
            turn it is. All others are called in their own turns only.
        join: makes it the way that saves, before each of its turns, where several take turns within one training.
        settle: waits until all that was begun is as safe as it gets.
        leave: takes out what ``join`` has put in.
        tries: snapshots until they are taken as they will be from then on.
    """

    callbacks: list[pl.Callback] = field(default_factory=list)
    plugins: list[Any] = field(default_factory=list)
    timed: list[Any] = field(default_factory=list)
    begun: dict[int, float] = field(default_factory=dict)
    safe: list[tuple[int, str, float]] = field(default_factory=list)
    watched: dict[str, str] = field(default_factory=dict)
    restore: Callable[[], tuple[int, dict[str, Any]]] | None = None
    close: Callable[[], None] = lambda: None
    waited_elsewhere_s: Callable[[], float] = lambda: 0.0
    last_ones: int = 0
    spot: SpotCheckpoint | None = None
    join: Callable[[pl.Trainer], None] = lambda trainer: None
    settle: Callable[[], None] = lambda: None
    leave: Callable[[], None] = lambda: None
    tries: int = 3


class Way(Protocol):
    """Makes a :class:`Saving` that writes into a folder every so many steps."""

    def __call__(self, folder: Path, interval: EverySteps) -> Saving: ...


def none(folder: Path, interval: EverySteps) -> Saving:
    """No checkpoints."""
    return Saving()


# -- Lightning's own ----------------------------------------------------------------------------------------------


class _Noted(TorchCheckpointIO):
    """Notes when a checkpoint has been written (Lightning does not sync it), and keeps ``keep`` of them, or all."""

    def __init__(self, keep: int | None) -> None:
        self.safe: list[tuple[int, str, float]] = []
        self._keep = keep
        self._written: list[Any] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        self.safe.append((checkpoint["global_step"], DURABLE, time.monotonic()))
        self._written.append(path)
        while self._keep is not None and len(self._written) > self._keep:
            self.remove_checkpoint(self._written.pop(0))


class _Begun(ModelCheckpoint):
    """Notes when it begins to save."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.begun: dict[int, float] = {}

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        self.begun[trainer.global_step] = time.monotonic()
        super()._save_checkpoint(trainer, filepath)


def model_checkpoint(folder: Path, interval: EverySteps, *, in_background: bool = False) -> Saving:
    """``ModelCheckpoint(every_n_train_steps)``, with ``AsyncCheckpointIO`` or without."""
    # With AsyncCheckpointIO Lightning would delete a file that is still being written, and fail now and then.
    settings = {"dirpath": folder, "every_n_train_steps": interval.n, "save_on_train_epoch_end": False}
    callback = _Begun(**settings, save_top_k=-1 if in_background else 1)
    writer = _Noted(keep=1 if in_background else None)
    plugin: Any = AsyncCheckpointIO(writer) if in_background else writer

    def join(trainer: pl.Trainer) -> None:
        trainer.strategy.checkpoint_io = plugin

    def settle() -> None:
        _until(lambda: len(writer.safe) == len(callback.begun), "what AsyncCheckpointIO was given is not written")

    def restore() -> tuple[int, dict[str, Any]]:
        path = max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        checkpoint = torch.load(path, weights_only=False)
        return checkpoint["global_step"], checkpoint

    return Saving(
        callbacks=[callback],
        plugins=[plugin],
        timed=[callback],
        begun=callback.begun,
        safe=writer.safe,
        restore=restore,
        close=plugin.teardown,
        join=join,
        settle=settle,
    )


def _until(done: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + SETTLE_S
    while not done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{otherwise} within {SETTLE_S:g} s")
        time.sleep(LOOK_S)


# -- other libraries, and the re-implementations --------------------------------------------------------------------


def of_callback(make: Callable[[Path, int], Baseline]) -> Way:
    """The way of a callback with the interface of the baselines."""

    def way(folder: Path, interval: EverySteps) -> Saving:
        made = make(folder, interval.n)
        return Saving(
            callbacks=[made],
            timed=[made],
            begun=made.begun,
            safe=made.safe,
            restore=made.restore,
            close=made.close,
            join=made.join,
            settle=made.settle,
            leave=made.leave,
            tries=made.tries,
        )

    return way


def _dcp(by: AsyncCheckpointerType, staged: bool) -> Way:
    return of_callback(lambda folder, every: DCP(folder, every, by=by, staged=staged))


def _torchsnapshot(folder: Path, every: int) -> Baseline:
    from benchmarks.peers.torchsnapshot import TorchSnapshot  # not everybody has it

    return TorchSnapshot(folder, every)


# -- ours -----------------------------------------------------------------------------------------------------------


def ours(folder: Path, interval: EverySteps, *, memory_node: bool = False, **settings: Any) -> Saving:
    """``SpotCheckpoint`` with a server of its own and a local directory; or a snapshot server on loopback besides.

    Each snapshot that the disk can take is brought there, as the others' are; or with ``min_upload_interval_s=None`` as
    seldom as by default: what is owed to the disk at the end of a turn is waited for behind it, and not counted.

    With a snapshot server, training stands still for the copies: what is compared there is how they are sent.
    """
    durable = folder / "run"
    settings.setdefault("min_upload_interval_s", 0.0)
    shm = Path(os.environ["LIGHTNING_SPOT_SHM_DIR"])
    watched, close, source = {HOST: str(shm), DURABLE: str(durable)}, lambda: None, str(durable)
    if memory_node:
        settings["copy_mode"] = "blocking"
        process, source = _memory_node(far_folder(shm, folder))
        watched[PEER] = str(far_folder(shm, folder))
        settings["servers"] = source
        source = f"{source}/run"

        def close() -> None:
            process.terminate()
            process.wait()

    spot = SpotCheckpoint(str(durable), interval=interval, notices="signal", resume=False, **settings)
    watch = SeamWatch(spot)
    below = Sightings([(tier, place) for tier, place in watched.items() if tier != HOST])

    def is_safe() -> bool:
        below.look()
        seen = {tier for step, tier, _ in below.safe if step == max(watch.begun, default=0)}
        return not watch.begun or seen == watched.keys() - {HOST}

    def settle() -> None:
        _until(is_safe, "the newest snapshot was not safe everywhere")

    waits = {"leave" if settings["min_upload_interval_s"] is None else "settle": settle}
    return Saving(
        callbacks=[watch, spot],
        timed=[spot],
        waited_elsewhere_s=lambda: watch.spent_s,
        begun=watch.begun,
        last_ones=1,
        watched=watched,
        restore=lambda: _restored(source),
        close=close,
        spot=spot,
        **waits,
        tries=40 if settings.get("copy_mode", "auto") == "auto" else 3,
    )


def far_folder(shm: Path, folder: Path) -> Path:
    """Where the snapshot server of the way that saves to ``folder`` keeps its slots."""
    return shm / f"far-{folder.name}"


def _memory_node(shm: Path) -> tuple[subprocess.Popen[str], str]:
    shm.mkdir()
    command = [sys.executable, "-m", "lightning_spot", "serve", "--listen", "127.0.0.1:0"]
    environment = {**os.environ, "LIGHTNING_SPOT_SHM_DIR": str(shm)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    assert process.stdout is not None
    return process, process.stdout.readline().split("listening on ")[1].split(",")[0]


def _restored(url: str) -> tuple[int, dict[str, Any]]:
    source = StoreSource(open_tier(url), url)
    manifest = max(source.survey().manifests, key=lambda manifest: (manifest.attempt, manifest.step))
    snapshot = source.open(manifest)
    try:
        with snapshot.reader() as reader:
            return manifest.step, torch.load(reader.as_file(), weights_only=True)
    finally:
        snapshot.close()


def _ours(**settings: Any) -> Way:
    return lambda folder, interval: ours(folder, interval, **settings)


def _ways() -> dict[str, Way]:
    thread, process = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
    ways: dict[str, Way] = {
        "none": none,
        "none again": none,  # the noise
        "ours": ours,
        "ours+node": _ours(memory_node=True),
        "ModelCheckpoint": model_checkpoint,
        "AsyncCheckpointIO": lambda folder, interval: model_checkpoint(folder, interval, in_background=True),
        "DCP thread": _dcp(thread, staged=False),
        "DCP thread staged": _dcp(thread, staged=True),
        "DCP process": _dcp(process, staged=False),
        "DCP process staged": _dcp(process, staged=True),
        "torchsnapshot": of_callback(_torchsnapshot),
        **{name: of_callback(kind) for name, kind in BASELINES.items()},
    }
    ways |= {f"ours {mode}": _ours(copy_mode=mode) for mode in MODES}
    ways["ours blocking own pace"] = _ours(copy_mode="blocking", min_upload_interval_s=None)
    sent: dict[str, dict[str, Any]] = {"delta": {"compression": "always"}, "whole": {"compression": "off"}}
    for name, how in {**sent, "topk": {"lossy": "topk"}}.items():
        ways[f"ours+node {name}"] = _ours(memory_node=True, **how)
    return ways


WAYS = _ways()
