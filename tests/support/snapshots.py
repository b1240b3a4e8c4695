"""The usual callback, and what it must have saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.client.stores import open_store
from lightning_spot.sharded.file_plan import load_state, state_file
from lightning_spot.sharded.reader import ImageReader, consolidated, load_all, read_folder
from lightning_spot.snapshot.files import MODEL_FILE
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.local import LocalStore
from tests.support.trainer import Net, Probe, Stop, StopAt, data, equal, state_of, trainer
from tests.support.waiting import until


class EachDurable(pl.Callback):
    """Trains on only once the snapshot of every ``every``-th step is at ``url``: so none is superseded on its way.

    A tier takes the newest snapshot when it is free. Which ones a slow one takes depends on the machine otherwise. Give
    the callback that takes them ``min_upload_interval_s=0``: of those that follow each other in moments it gets only
    some.
    """

    def __init__(self, url: object, every: int) -> None:
        self.store, self.every = open_store(str(url)), every

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step and step % self.every == 0:
            until(lambda: step in {manifest.step for manifest in self.store.survey().manifests}, f"step {step} there")


def spot(root: Path, **more: Any) -> SpotCheckpoint:
    usual = {"interval": EverySteps(3), "keep": 1000, "on_full": "wait", "min_upload_interval_s": 0.0}
    return SpotCheckpoint(str(root / "run-1"), **{**usual, **more})


def interrupted(run: Path, **settings: Any) -> Path:
    """Train with a snapshot every 5 steps, each of which is stored, until something stops it."""
    usual = {"interval": EverySteps(5), "on_full": "wait", "min_upload_interval_s": 0.0}
    with pytest.raises(Stop):
        trainer(SpotCheckpoint(str(run), **{**usual, **settings}), EachDurable(run, 5), StopAt(31)).fit(Net(), data())
    return run


def manifests(root: Path) -> list[Manifest]:
    return LocalStore(root / "run-1").survey().manifests


def load(root: Path, manifest: Manifest) -> dict[str, Any]:
    return read(root / "run-1", manifest)


def read(run: Path, manifest: Manifest) -> dict[str, Any]:
    """A checkpoint; what only one of several ranks knew is in a file beside it."""
    path = run / manifest.name / MODEL_FILE
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    states = checkpoint.get("lightning_spot", {}).get("ranks", [])
    for rank in range(len(states), manifest.world_size if states else 0):
        states.append(torch.load(path.with_name(state_file(rank)), map_location="cpu", weights_only=True))
    return checkpoint


def content(run: Path, manifest: Manifest) -> dict[str, Any]:
    """All that is in a snapshot, in shards or not."""
    if not any(file.name.endswith(".distcp") for file in manifest.files):
        return read(run, manifest)
    image, manifest = read_folder(run / manifest.name)
    found = {**load_all(ImageReader(image, manifest)), **consolidated(image, manifest)}
    for file in manifest.files:
        if file.name.startswith("rank-") or file.name == "meta.pt":
            found[file.name] = load_state(image[file.offset : file.stop])
    return found


def check_all(root: Path, probe: Probe) -> list[Manifest]:
    """Every snapshot that is durable is, bit for bit, the state of its step; a slow tier takes the newest only."""
    found = manifests(root)
    assert found
    for manifest in found:
        checkpoint = load(root, manifest)
        assert checkpoint["global_step"] == manifest.step
        truth = {key: value.cpu() for key, value in probe.states[manifest.step].items()}
        assert equal(state_of(checkpoint), truth), manifest.name
    return found


def serverless(run: Path | str, **more: Any) -> SpotCheckpoint:
    """One that has no local server, unless it is given servers, and waits for no notice."""
    usual = {"interval": EverySteps(3), "local_server": "servers" in more, "on_full": "wait", "notices": None}
    return SpotCheckpoint(str(run), **{**usual, **more})
