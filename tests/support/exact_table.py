"""What Lightning ships, as data: each feature in a run small enough to be stopped and resumed within a second.

``test_exact_table.py`` trains every case, and asks that a resumed run is equal to an undisturbed one, or that a warning
named the feature before training began.
"""

from __future__ import annotations

import functools
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch import callbacks as shipped
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.state.compare import differences
from tests.support import exact_kept as kept
from tests.support import exact_models as m
from tests.support.exact_cases import Estimated, Gan, Lean, Model
from tests.support.exact_models import BATCH, Rows, rows, validation
from tests.support.program import Outcome
from tests.support.said import listening, points
from tests.support.trainer import Stop
from tests.support.trainer import trainer as quiet
from tests.support.waiting import new_process


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One feature in a run; equal to itself only.

    Attributes:
        model: makes the module; one that logs little, but where logging may matter.
        loaders: makes what is passed to ``fit`` as training loaders; ``None`` if the module or ``data`` has them.
        val: makes the loaders for validation.
        data: makes a data module instead of both.
        callbacks: makes callbacks of Lightning or of a user, besides ours.
        settings: of the Trainer.
        says: what the warning of a resumed run says before training, where it may not be exact.
        differs: whether it is not exact indeed; then this is not asked.
        spot: of ``SpotCheckpoint``.
        ignored: parts of names of entries, and of what is logged, that cannot be equal, being clocks.
        stops: batches (or validation batches, if negative) of each attempt after which it is stopped.
        covers: names of what loaders offer that this case stands for; callbacks and settings stand for themselves.
        soak: whether it is left to the long run.
    """

    model: Callable[[], pl.LightningModule] = Lean
    loaders: Callable[[], Any] | None = rows
    val: Callable[[], Any] | None = validation
    data: Callable[[], pl.LightningDataModule] | None = None
    callbacks: Callable[[], list[pl.Callback]] = list
    settings: Mapping[str, Any] = field(default_factory=dict)
    spot: Mapping[str, Any] = field(default_factory=dict)
    says: str = ""
    differs: bool = False
    ignored: tuple[str, ...] = ()
    stops: tuple[int, ...] = (9, 5)
    covers: tuple[str, ...] = ()
    soak: bool = False


def own(model: Callable[[], pl.LightningModule], **more: Any) -> Case:
    """A case whose module has its loaders, or a data module."""
    return Case(model=model, loaders=None, val=None, **more)


STREAM = "not exact unless this stream yields the same samples each time"

# -- the table ----------------------------------------------------------------------------------------------------

CALLBACKS: dict[str, Case] = {
    "backbone-finetuning": own(
        m.Net,
        callbacks=lambda: [shipped.BackboneFinetuning(1, m.half, train_bn=False, should_align=False)],
        stops=(13, 10),
    ),
    "base-finetuning": own(m.Net, callbacks=lambda: [m.Thaw()], stops=(13, 10), soak=True),
    "accumulation-scheduler": Case(
        callbacks=lambda: [shipped.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})], stops=(8, 4)
    ),
    "weight-averaging-stochastic": Case(
        model=m.Plain,
        callbacks=lambda: [shipped.StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=2)],
        settings={"max_epochs": 4},
        stops=(3,),
    ),
    "weight-averaging-stochastic-under-way": Case(
        callbacks=lambda: [shipped.StochasticWeightAveraging(0.02, swa_epoch_start=1)],
        stops=(8,),
        says="StochasticWeightAveraging",
        differs=True,
    ),
    "weight-averaging-ema": Case(callbacks=lambda: [shipped.EMAWeightAveraging(decay=0.8)]),
    "pruning": Case(
        callbacks=lambda: [shipped.ModelPruning("l1_unstructured", amount=0.2, parameter_names=["weight"])],
        says="ModelPruning",
        differs=True,
    ),
    "spike-detection": Case(
        callbacks=lambda: [shipped.SpikeDetection(window=4, rtol=50.0)], says="SpikeDetection", differs=True
    ),
    "learning-rate-finder": own(m.Measured, callbacks=lambda: [shipped.LearningRateFinder(num_training_steps=5)]),
    "learning-rate-finder-makes-workers": Case(
        model=m.Measured,
        loaders=lambda: rows(num_workers=1, persistent_workers=True),
        val=lambda: DataLoader(Rows(), BATCH, num_workers=1, persistent_workers=True),
        callbacks=lambda: [shipped.LearningRateFinder(num_training_steps=5)],
        settings={"val_check_interval": 4},
        stops=(8, 4),
    ),
    "batch-size-finder": own(
        m.Net,
        callbacks=lambda: [shipped.BatchSizeFinder(max_trials=2, steps_per_trial=1)],
        soak=True,  # tuned as by the one above
    ),
    "early-stopping": Case(
        model=Model,
        callbacks=lambda: [shipped.EarlyStopping("loss_epoch", patience=2, min_delta=10.0)],
        settings={"max_epochs": 5},
    ),
    "model-checkpoint-last": Case(
        model=Model, callbacks=lambda: [shipped.ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)]
    ),
    "model-checkpoint-by-time": Case(
        callbacks=lambda: [shipped.ModelCheckpoint(train_time_interval=timedelta(hours=1))], says="train_time_interval"
    ),
    "progress-bars-and-timers": Case(
        callbacks=lambda: [shipped.RichProgressBar(), shipped.RichModelSummary(), shipped.Timer("01:00:00:00")],
        settings={"enable_progress_bar": True, "enable_model_summary": True},
        soak=True,
    ),
    "monitors": Case(
        callbacks=lambda: [
            shipped.LearningRateMonitor("step", log_momentum=True),
            shipped.ModelSummary(),
            shipped.TQDMProgressBar(),
            shipped.LambdaCallback(on_train_batch_end=lambda *_: torch.rand(())),
            shipped.DeviceStatsMonitor(cpu_stats=True),
        ],
        settings={"enable_model_summary": True, "enable_progress_bar": True},
        ignored=("DeviceStats", "device"),
    ),
    "throughput": Case(
        callbacks=lambda: [shipped.ThroughputMonitor(lambda batch: len(batch[0]), window_size=2)],
        ignored=("logged.", "train/", "validate/"),
        says="ThroughputMonitor",
    ),
    "on-exception": Case(
        callbacks=lambda: [shipped.OnExceptionCheckpoint(tempfile.gettempdir(), f"spot-table-{os.getpid()}")],
        says="OnExceptionCheckpoint",
    ),
}

_ALIKE: dict[str, Any] = {
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.1,
    "gradient_clip_algorithm": "value",
    "max_time": "01:00:00:00",
    "detect_anomaly": True,
    "inference_mode": False,
    "use_distributed_sampler": False,
    "log_every_n_steps": 5,
    "profiler": "simple",
    "deterministic": True,
}
SETTINGS: dict[str, Case] = {
    "what-leaves-no-state": Case(settings=_ALIKE, stops=(8, 7), soak=True),
    "double": Case(settings={"precision": "64-true"}, loaders=lambda: rows(False), soak=True),
    "bf16": Case(model=Model, settings={"precision": "bf16-mixed"}),
    "val-often": Case(model=Model, settings={"val_check_interval": 0.4}),
    "val-across-epochs": Case(
        settings={"val_check_interval": 7, "check_val_every_n_epoch": None}, stops=(8, 5), soak=True
    ),
    "val-not-asked-for-yet": own(
        m.DrawingForValidation, settings={"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0, "max_epochs": 4}
    ),
    "val-by-time": Case(settings={"val_check_interval": "00:00:00:10"}, says="val_check_interval"),
    "limited": Case(model=Model, settings={"limit_train_batches": 3, "limit_val_batches": 1}, stops=(5, 4)),
    "overfit": Case(settings={"overfit_batches": 4}, stops=(6, 4)),
    "reload-every-second-epoch": own(
        m.WithData, settings={"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5}, stops=(7, 9)
    ),
    "loaders-of-a-data-module": Case(
        data=m.Data, loaders=None, val=None, settings={"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4}
    ),
    "sanity-check-whole": Case(settings={"num_sanity_val_steps": -1}, stops=(-3, 3), soak=True),
    "max-steps": Case(settings={"max_steps": 13, "max_epochs": -1, "val_check_interval": 3}, stops=(9, 3)),
    "min-epochs": Case(
        callbacks=lambda: [shipped.EarlyStopping("val_loss", patience=0, min_delta=10.0)],
        settings={"min_epochs": 3, "min_steps": 17, "max_epochs": 5},
        soak=True,
    ),
    "no-logger": Case(settings={"logger": False}, soak=True),
}

LOADERS: dict[str, Case] = {
    "estimated-in-setup": Case(model=lambda: Estimated("setup"), loaders=rows),
    "estimated-in-configure-model": own(lambda: Estimated("configure_model"), data=m.Data),
    "workers": Case(
        model=Model,
        loaders=lambda: rows(
            batch_size=3, num_workers=2, prefetch_factor=3, worker_init_fn=m.seed_worker, drop_last=True
        ),
        covers=("num_workers", "prefetch_factor", "worker_init_fn", "drop_last"),
    ),
    "workers-that-persist": Case(
        loaders=lambda: rows(num_workers=2, persistent_workers=True), covers=("persistent_workers",)
    ),
    "workers-that-persist-own-generators": Case(
        loaders=lambda: DataLoader(
            m.Noisy(),
            BATCH,
            sampler=m.Holding(),
            num_workers=2,
            persistent_workers=True,
            collate_fn=m.Collate(),
            generator=torch.Generator().manual_seed(4),
        ),
        covers=("collate_fn", "generator"),
    ),
    "workers-that-persist-for-validation": Case(
        val=lambda: validation(num_workers=2, persistent_workers=True), stops=(9, -1, 3)
    ),
    "workers-that-persist-for-validation-limited": Case(
        val=lambda: DataLoader(Rows(), BATCH, num_workers=2, persistent_workers=True),
        settings={"limit_val_batches": 3, "val_check_interval": 4},
        soak=True,
    ),
    "stream-for-validation-with-workers-that-persist": Case(
        val=lambda: DataLoader(m.Silent(), BATCH, num_workers=1, persistent_workers=True),
        settings={"limit_val_batches": 2, "val_check_interval": 4},
        says="workers persist",
    ),
    "validation-with-own-generators": Case(
        val=lambda: DataLoader(m.Noisy(), 16, sampler=m.Own(random.Random(3))), settings={"val_check_interval": 4}
    ),
    "out-of-order": Case(
        loaders=lambda: rows(num_workers=2, in_order=False), says="in_order", differs=True, covers=("in_order",)
    ),
    "own-numpy-state": Case(
        loaders=lambda: rows(shuffle=False, sampler=m.Own(np.random.RandomState(5), eager=True)), covers=("sampler",)
    ),
    "popping-sampler": Case(loaders=lambda: rows(shuffle=False, sampler=m.Popping()), says="Popping", differs=True),
    "batch-sampler": Case(loaders=lambda: DataLoader(Rows(), batch_sampler=m.Batches()), covers=("batch_sampler",)),
    "without-batches": Case(
        loaders=lambda: DataLoader(m.Chunks(), batch_size=None, shuffle=True),
        covers=("batch_size", "shuffle", "dataset"),
    ),
    "generators-of-nested-data": Case(
        loaders=lambda: DataLoader(ConcatDataset([Subset(m.Noisy(), range(8)), m.Noisy()]), BATCH, shuffle=True),
        stops=(9, 7),
    ),
    **{
        f"combined-{mode.replace('_', '-')}": Case(
            model=m.Several, loaders=m.combined(mode), stops=stops, covers=(mode,), soak=True
        )
        for mode, stops in (("max_size_cycle", (9, 5)), ("min_size", (4, 2)), ("max_size", (9, 5)))
    },
    "combined-in-a-dictionary": Case(
        model=m.Listed, loaders=lambda: {"first": rows(), "more": [rows(), rows(num_workers=1)]}
    ),
    "combined-validation": Case(
        model=m.Several,
        loaders=m.combined("max_size_cycle"),
        val=lambda: CombinedLoader([validation(), validation()], "sequential"),
        covers=("sequential",),
        soak=True,
    ),
    "loader-of-ones-own": Case(loaders=m.HandMade, says=STREAM),
    "loader-that-iterates-in-its-own-way": Case(
        loaders=lambda: m.Generating(Rows(), BATCH, shuffle=True), says="iterates in a way of its own"
    ),
    "loader-that-iterates-in-its-own-way-persistent": Case(
        loaders=lambda: m.Generating(Rows(), BATCH, shuffle=True, num_workers=1, persistent_workers=True),
        says="workers persist",
        differs=True,
        soak=True,
    ),
    "epoch-of-the-data": Case(
        loaders=lambda: DataLoader(m.Epochs(), BATCH, shuffle=True),
        callbacks=lambda: [shipped.LambdaCallback(on_train_epoch_start=m.tell_the_epoch)],
    ),
    "stream-with-a-generator": Case(loaders=lambda: DataLoader(m.Shuffling(), BATCH), says=STREAM, soak=True),
    "stream-with-workers-that-persist": Case(
        loaders=lambda: DataLoader(m.Stream(), BATCH, num_workers=2, persistent_workers=True),
        says="workers persist",
        differs=True,
    ),
}


_Plateau = torch.optim.lr_scheduler.ReduceLROnPlateau

LOOPS: dict[str, Case] = {
    "manual": Case(model=Gan, stops=(7, 5)),
    "precise-state": Case(  # a product in float32, beside parameters in bfloat16
        model=lambda: m.Optimized(partial(torch.optim.NAdam, lr=0.01)), settings={"precision": "bf16-true"}
    ),
    "counts-and-masks": Case(model=lambda: m.Optimized(m.CountingSGD)),
    "plateau-of-the-epoch": Case(
        model=lambda: m.Scheduled(partial(_Plateau, patience=0, factor=0.7, threshold=0.3), monitor="loss_epoch")
    ),
    "plateau-of-validation": Case(
        model=lambda: m.Scheduled(partial(_Plateau, patience=0, threshold=0.3), monitor="val_loss"),
        stops=(10, 3),
        soak=True,
    ),
    "changed-in-the-sanity-check": own(m.Remembering, stops=(5, 7)),
    "changed-in-the-sanity-check-and-not-kept": Case(model=kept.Checking, says="Checking.checked"),
    "changed-in-a-trial": own(
        partial(m.Remembering, counts_requests=False),  # a trial asks once more
        callbacks=lambda: [shipped.LearningRateFinder(num_training_steps=5)],
        stops=(7, 6),
        soak=True,
    ),
    "cache-of-the-module": Case(model=m.Caching, says="Caching.cache, Caching.cached"),
    "plain-values-and-generators": Case(model=kept.Kinds, stops=(8, 4)),
    "generator-of-the-module-and-its-sampler": own(m.SharedGenerator, stops=(8, 4)),
    "buffers-outside-the-state-dict": Case(model=kept.Beside, stops=(8, 4)),
    "buffers-that-training-makes": Case(model=kept.Growing, says=kept.MADE, differs=True),
    "objects-of-the-module": Case(model=kept.Holding, says=kept.LOST, differs=True),
    "optimizer-with-attributes": Case(
        model=lambda: m.Optimized(kept.Averaging), says="Averaging.seen, Averaging.slow", differs=True
    ),
    "scheduler-that-is-not-returned": Case(model=kept.Apart, says="begin anew: Apart.rate. ", differs=True),
    "average-of-ones-own": Case(
        callbacks=lambda: [kept.Averager()], says="begin anew: Averager.average. ", differs=True
    ),
    "scheduler-replaced": Case(model=kept.Replacing, says=kept.REPLACED, differs=True),
    "more-epochs-later": Case(model=lambda: kept.Limited(4), stops=(18,), ignored=("hooked.before",)),
    "fewer-epochs-later": Case(model=lambda: kept.Limited(2), stops=(8,), ignored=("hooked.before",)),
    "extra-state-and-lazy-layer": Case(model=kept.Extra, stops=(8, 4)),
    "buffers-without-a-shape": Case(model=kept.Odd, stops=(8, 4)),
    "left-out-of-the-state-dict": Case(model=kept.LeavingOut, stops=(8, 4)),
    "toggled-over-batches": Case(model=kept.Toggling, stops=(2, 5)),
    "gathered-outputs": Case(model=m.Gathering),
    "skipped-batches": Case(model=m.Skipping, loaders=lambda: rows(batch_size=3), stops=(9, 6)),
    "iterator-step": Case(model=m.Fetching),
    "logging": Case(model=m.Logging),
}

CASES: dict[str, Case] = {**CALLBACKS, **SETTINGS, **LOADERS, **LOOPS}


def train(
    case: Case, root: Path, *callbacks: pl.Callback, seed: int, every: int = 2, told: list[str] | None = None
) -> list[str]:
    """Train a case to its end, or go on with it; every process begins with another ``seed``.

    Args:
        case: what to train.
        root: directory of everything it writes.
        *callbacks: in front of its own.
        seed: of this process.
        every: so many steps a snapshot is taken.
        told: takes all our warnings, also of a run that is stopped.

    Returns:
        our warnings, up to the first training batch.
    """
    new_process()
    torch.set_num_threads(1)
    pl.seed_everything(seed, verbose=False)
    module, data = case.model(), case.data() if case.data is not None else None
    loaders = case.loaders() if case.loaders is not None else None
    val = case.val() if case.val is not None else None
    told_to = {"local_server": False, "on_full": "wait", "keep": 100, **case.spot}
    spot = SpotCheckpoint(str(root / "run"), interval=EverySteps(every), **told_to)
    said: list[str] = []
    usual = {"max_epochs": 3, "log_every_n_steps": 1, "logger": CSVLogger(str(root), name="logs")}
    usual |= {"default_root_dir": str(root), "enable_checkpointing": True}
    trainer = quiet(*callbacks, *case.callbacks(), spot, **{**usual, **case.settings})
    with listening() as logged, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def ours() -> list[str]:
            texts = [str(item.message) for item in caught]
            return [*points(logged), *(text for text in texts if text.startswith("lightning_spot:"))]

        first = shipped.LambdaCallback(on_train_batch_start=lambda *_: said.extend(ours()) if not said else None)
        trainer.callbacks.insert(0, first)  # type: ignore[attr-defined] # not a part of the run
        try:
            trainer.fit(module, loaders, val, datamodule=data)
        finally:
            # Lightning ends only the workers of the loop at which a fit stops: those of training outlive one that stops
            # in validation, until garbage is collected, whenever that is; then each of them is waited for, 5 s long.
            trainer.fit_loop.teardown()
            if told is not None:
                told += ours()
    return said


@functools.lru_cache(maxsize=8)
def _undisturbed(case: Case) -> dict[str, Any]:
    """What a case ends with that nothing stops: trained once for tests, one after another, that stop it elsewhere."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as root:
        train(case, Path(root), seed=11, every=1000)
        return Outcome(Path(root)).final()


def equal_or_named(case: Case, root: Path, stops: Iterable[pl.Callback]) -> list[str]:
    """Stop a run where these callbacks do, and go on each time: it ends as one that is not stopped, or that is named.

    Returns:
        what the resumes said.
    """
    said: list[str] = []
    for attempt, stop in enumerate(stops):
        with pytest.raises(Stop):
            train(case, root / "broken", stop, seed=11 + attempt, every=1, told=said if attempt else None)
    train(case, root / "broken", seed=200, every=1000, told=said)
    said = [text for text in said if ".left" not in text]  # of what stops it
    if not said:
        found = differences(_undisturbed(case), Outcome(root / "broken").final())
        assert [text for text in found if "_base_seed" not in text] == []  # of workers that are made anew
    return said
