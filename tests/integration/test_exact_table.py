"""For everything that Lightning ships: a resumed run is equal to an undisturbed one, or a warning named it before."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch import callbacks as shipped
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import combined_loader
from torch.utils.data import DataLoader

from lightning_spot.state.compare import differences
from tests.integration.test_exact import final, logged, spot
from tests.support import exact_kept as kept
from tests.support import exact_models as m
from tests.support.exact_table import CALLBACKS, CASES, LOADERS, SETTINGS, STREAM, Case, train
from tests.support.trainer import Stop, StopAfter, StopIn
from tests.support.waiting import new_process

pytestmark = pytest.mark.guarantee("G5")

NO_CALLBACKS = {"Callback", "Checkpoint", "ProgressBar", "WeightAveraging", "BasePredictionWriter"}
"""Base classes, and what only predicts."""

NO_SETTINGS = {
    *("accelerator", "strategy", "devices", "num_nodes", "sync_batchnorm", "plugins", "benchmark", "model_registry"),
    *("limit_test_batches", "limit_predict_batches", "fast_dev_run", "barebones", "enable_autolog_hparams"),
    *("callbacks", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "default_root_dir"),
}
"""Where a run trains (other tests have DDP), what does not train or takes no callbacks, and what each case has."""

NO_OPTIONS = {"pin_memory", "pin_memory_device", "timeout", "multiprocessing_context"}
"""Of a DataLoader: how batches travel, not which."""


SELDOM = 1000
"""So many steps that a run has no snapshot but that of its end."""


def _marked(name: str, case: Case) -> list[Any]:
    """A case stopped once, and in the soak as often as it says."""
    once = pytest.param(case, case.stops[:1], id=name, marks=[pytest.mark.soak] if case.soak else [])
    again = pytest.param(case, case.stops, id=f"{name}-again", marks=pytest.mark.soak)
    return [once, again] if len(case.stops) > 1 else [once]


def check(case: Case, root: Path, *stops: pl.Callback, every: int = 2) -> None:
    """Stop a run where these callbacks do, and go on each time: it is equal to one that nothing stops, or warned of."""
    for attempt, stop in enumerate(stops):
        with pytest.raises(Stop):
            train(case, root / "broken", stop, seed=11 + attempt, every=every)
    said = train(case, root / "broken", seed=200, every=SELDOM)
    assert any(case.says in text for text in said) if case.says else said == []
    if case.differs:
        return
    told: list[str] = []
    train(case, root / "undisturbed", seed=11, every=SELDOM, told=told)
    assert case.says or not told
    found = list(differences(final(root / "undisturbed"), final(root / "broken")))
    assert [text for text in found if not any(part in text for part in case.ignored)] == []
    expected = logged(root / "undisturbed", case.ignored)
    assert logged(root / "broken", case.ignored) == expected
    assert bool(expected) == bool(case.settings.get("logger", True))


@pytest.mark.parametrize(("case", "stops"), [item for name, case in CASES.items() for item in _marked(name, case)])
def test_equal_or_warned_of(case: Case, stops: tuple[int, ...], tmp_path: Path) -> None:
    check(case, tmp_path, *(StopAfter(abs(stop), in_validation=stop < 0) for stop in stops))


AT_ENDS = {
    "stream": (
        Case(
            model=m.Evaluating,
            loaders=lambda: DataLoader(m.Stream(), m.BATCH),
            val=None,
            settings={"limit_val_batches": 0},
            says=STREAM,
        ),
        StopIn("on_train_epoch_end", 1),
    ),
    "told-to-stop-before-it-may": (
        Case(
            callbacks=lambda: [shipped.EarlyStopping("val_loss", patience=0, min_delta=10.0)],
            settings={"val_check_interval": 2, "min_steps": 17, "max_epochs": 6},
        ),
        StopIn("on_train_epoch_end", 2),
    ),
    "several-loaders-in-cycles": (
        Case(model=m.Several, loaders=m.combined("max_size_cycle"), settings={"val_check_interval": 2}),
        StopIn("on_train_epoch_end", 1),
    ),
}
"""Stopped behind the last step of an epoch, with no validation in between."""


@pytest.mark.parametrize("name", AT_ENDS)
def test_equal_where_no_batch_is_left_of_an_epoch(name: str, tmp_path: Path) -> None:
    case, stop = AT_ENDS[name]
    check(case, tmp_path, stop, every=1)


def test_a_start_where_averaging_begins_is_not_warned_of(tmp_path: Path) -> None:
    """A run that had taken all its steps there is given more of them."""
    case = CASES["weight-averaging-stochastic"]
    train(replace(case, settings={**case.settings, "max_steps": 5}), tmp_path / "broken", seed=11, every=1)
    assert train(case, tmp_path / "broken", seed=200, every=SELDOM) == []
    train(case, tmp_path / "undisturbed", seed=11, every=SELDOM)
    assert list(differences(final(tmp_path / "undisturbed"), final(tmp_path / "broken"))) == []


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize(("found", "given", "trained"), [(4, 3, 4), (4, 6, 6), (2, 3, 2)])
def test_a_limit_of_a_hook_returns_unless_another_is_given(
    found: int, given: int, trained: int, tmp_path: Path
) -> None:
    """A finished run that is started again would train on."""
    train(Case(model=lambda: kept.Limited(found)), tmp_path, seed=11, every=SELDOM)
    train(Case(model=lambda: kept.Limited(found), settings={"max_epochs": given}), tmp_path, seed=200, every=SELDOM)
    assert final(tmp_path)["epoch"] == trained


def test_a_trial_before_the_fit_replaces_no_due_validation(tmp_path: Path) -> None:
    """That was left out, and all epochs after it were without a batch: the run was complete, as was said."""
    ends = []
    for root, stop in ((tmp_path / "twin", None), (tmp_path, StopIn("on_train_epoch_end", 1)), (tmp_path, None)):
        new_process()
        pl.seed_everything(11, verbose=False)
        settings = {"accelerator": "cpu", "max_epochs": 3, "logger": False, "enable_checkpointing": False}
        trainer = pl.Trainer(**settings, callbacks=[*([stop] if stop else []), spot(root, every=5)])
        module = m.Net()
        Tuner(trainer).lr_find(module, early_stop_threshold=0.0, update_attr=False)  # validates then
        with pytest.raises(Stop) if stop else contextlib.nullcontext():
            trainer.fit(module)
        ends.append(trainer.global_step)
    assert ends == [30, 10, 30]
    assert list(differences(final(tmp_path / "twin"), final(tmp_path))) == []


def test_all_that_lightning_and_torch_offer_is_in_the_table() -> None:
    kinds = [type(each) for case in CALLBACKS.values() for each in case.callbacks()]
    ours = {next(each.__name__ for each in kind.__mro__ if each.__name__ in shipped.__all__) for kind in kinds}
    assert set(shipped.__all__) - ours == NO_CALLBACKS
    settings = inspect.signature(pl.Trainer).parameters.keys()
    assert settings - {name for case in SETTINGS.values() for name in case.settings} == NO_SETTINGS & settings
    covered = {name for case in LOADERS.values() for name in case.covers}
    assert inspect.signature(DataLoader).parameters.keys() - covered == NO_OPTIONS
    assert set(combined_loader._SUPPORTED_MODES) <= covered
