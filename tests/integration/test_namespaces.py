"""The same Lightning by either of its names, ``lightning.pytorch`` and ``pytorch_lightning``, and by one alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import numpy as np
import pytest

import lightning_spot
from lightning_spot import EverySteps, SpotCheckpoint, SpotCheckpointIO
from lightning_spot.state import namespaces
from tests.support.snapshots import serverless
from tests.support.trainer import Stop


@pytest.fixture
def other() -> Any:
    """Lightning by its other name. Imported by who asks for it: most tests have one namespace, as most users do."""
    return pytest.importorskip("pytorch_lightning")


SCRIPT = """
import sys
for name in [*sys.modules]:  # what a fork has imported already
    if name.partition(".")[0] in ("lightning_spot", "lightning_fabric", BLOCKED.split(".")[0]):
        del sys.modules[name]
sys.modules[BLOCKED.split(".")[0]] = None  # as if it were not installed
import importlib.metadata
real = importlib.metadata.version
def version(name):
    if name.replace("-", "_") == BLOCKED.split(".")[0]:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
from lightning_spot import EverySteps, SpotCheckpoint, SpotCheckpointIO
callback = lambda path: SpotCheckpoint(path, local_server=False, interval=EverySteps(2), on_full="wait", notices=None)
import {name} as pl
from {name}.callbacks import ModelCheckpoint
from {name}.demos.boring_classes import BoringModel
from {name}.loggers import CSVLogger

class Stop(Exception):
    pass

class StopAt(pl.Callback):
    def on_before_backward(self, trainer, *_):
        if trainer.global_step == 5:
            raise Stop

class Logs(BoringModel):
    def training_step(self, batch, batch_idx):
        found = super().training_step(batch, batch_idx)
        self.log("loss", found["loss"], on_step=True, on_epoch=True)
        return found

def fit(path, *callbacks, seed):
    pl.seed_everything(seed, verbose=False)
    settings = dict(accelerator="cpu", max_epochs=2, limit_train_batches=4, limit_val_batches=1)
    quiet = dict(enable_progress_bar=False, enable_model_summary=False)
    spot = callback(path + "/run")
    trainer = pl.Trainer(
        logger=CSVLogger(path), plugins=[SpotCheckpointIO(local_server=False)], default_root_dir=path,
        callbacks=[*callbacks, spot], **settings, **quiet,
    )
    model = Logs()
    trainer.fit(model)
    assert isinstance(trainer.checkpoint_callback, ModelCheckpoint)
    return [value.clone() for value in model.state_dict().values()], dict(trainer.logged_metrics), spot

truth, logged, _ = fit(sys.argv[1] + "/twin", seed=1)
try:
    fit(sys.argv[1] + "/here", StopAt(), seed=1)
except Stop:
    pass
found, again, spot = fit(sys.argv[1] + "/here", seed=2)
assert spot.resumed_from.step == 4, spot.resumed_from
assert all((one == two).all() for one, two in zip(truth, found, strict=True)), (truth, found)
assert logged == again, (logged, again)
assert BLOCKED not in [name for name, module in sys.modules.items() if module is not None]

from {name}.cli import LightningCLI
cli = LightningCLI(BoringModel, run=False, args=["--trainer.callbacks+=lightning_spot.SpotCheckpoint",
    "--trainer.callbacks.dirpath=" + sys.argv[1], "--trainer.plugins+=lightning_spot.SpotCheckpointIO"])
assert [type(item).__name__ for item in cli.trainer.callbacks].count("SpotCheckpoint") == 1
"""


@pytest.mark.parametrize(
    ("name", "blocked"),
    [("pytorch_lightning", "lightning.pytorch"), ("lightning.pytorch", "pytorch_lightning")],
    ids=["pytorch_lightning", "lightning"],
)
def test_one_alone(warm_python: str, tmp_path: Path, name: str, blocked: str) -> None:
    code = f"BLOCKED = {blocked!r}\n" + SCRIPT.replace("{name}", name)
    command = [warm_python, "-c", "import warnings; warnings.simplefilter('ignore')\n" + code, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_classes_defined_first_fit_a_lightning_imported_later(other: Any) -> None:
    namespaces.SpotCallback.__bases__ = (namespaces.Copied, lightning.pytorch.Callback)
    assert not issubclass(SpotCheckpoint, other.Callback)
    spot, plugin = SpotCheckpoint("x"), SpotCheckpointIO()
    for home, fabric in ((other, "lightning_fabric"), (lightning.pytorch, "lightning.fabric")):
        assert isinstance(spot, home.Callback)
        assert isinstance(spot.snapshots, home.Callback)
        assert isinstance(plugin, sys.modules[f"{fabric}.plugins"].CheckpointIO)
        assert spot in home.Trainer(callbacks=spot, logger=False, enable_checkpointing=False).callbacks


def test_classes_of_both_are_known(other: Any, tmp_path: Path) -> None:
    demos = pytest.importorskip("pytorch_lightning.demos.boring_classes")

    def stop(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            raise Stop

    def fit(*callbacks: Any) -> SpotCheckpoint:
        spot = serverless(tmp_path / "run", interval=EverySteps(2))
        frozen = other.callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        run = other.Trainer(max_epochs=2, accelerator="cpu", callbacks=[*callbacks, frozen, spot], **quiet)
        run.fit(demos.BoringModel())
        return spot

    with pytest.raises(Stop):
        fit(other.callbacks.LambdaCallback(on_before_backward=stop))
    assert fit().resumed_from.step == 4


def test_why_a_name_cannot_be_imported_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older numpy has no such module; Python said that the name cannot be imported, and no more."""
    home = ModuleType(lightning_spot.YoungDaly.__module__)
    home.__getattr__ = lambda _name: np.none_such  # type: ignore[method-assign, attr-defined]
    monkeypatch.setitem(sys.modules, home.__name__, home)
    with pytest.raises(ImportError, match=r"YoungDaly.*none_such"):
        from lightning_spot import YoungDaly  # noqa: F401 # it is never had
