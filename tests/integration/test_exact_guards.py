"""What an exact resume leans on inside Lightning may change: then that part is off, with one warning, and no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.state import fit_state, loops
from lightning_spot.state.loaders import Loaders
from lightning_spot.state.module_state import ModuleState
from tests.support import exact_models as m
from tests.support.exact_table import Case, train
from tests.support.said import said
from tests.support.trainer import Net, Stop, StopAfter, trainer

pytestmark = pytest.mark.guarantee("G5")

PARTS = [
    (ModuleState, "begin", "what hooks changed"),
    (ModuleState, "capture", "what hooks changed"),
    (Loaders, "follow_requests", "requests for loaders"),
    (loops, "even_out", "skipped batches"),
    (fit_state, "around_loaders", "the position in the data"),
    (fit_state, "checkpoints", "ModelCheckpoint's last score"),
]


@pytest.mark.parametrize(("owner", "name", "what"), PARTS, ids=[f"{name}-{what}" for _, name, what in PARTS])
def test_a_part_that_fails_is_off(
    owner: Any, name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise AttributeError("'_FitLoop' object has no attribute '_renamed'")

    if owner is fit_state:
        parts = tuple(replace(part, capture=gone) if part.name == name else part for part in fit_state.PARTS)
        monkeypatch.setattr(fit_state, "PARTS", parts)
    else:
        monkeypatch.setattr(owner, name, gone)
    case = Case(settings={"max_epochs": 2})
    told: list[str] = []
    with pytest.raises(Stop):
        train(case, tmp_path, StopAfter(7), seed=11, told=told)
    assert len([text for text in told if text.startswith(f"{what} is off") and "_renamed" in text]) == 1, told
    train(case, tmp_path, seed=12)


def test_changes_no_checkpoint_holds_are_named_before_resuming(tmp_path: Path) -> None:
    case = Case(data=m.Folds, loaders=None, val=None, callbacks=lambda: [m.Tally(), m.Keeping(), m.Tally()])
    told: list[str] = []
    with pytest.raises(Stop):
        train(case, tmp_path, StopAfter(7), seed=11, told=told)
    assert [text for text in told if "state_dict" in text] == []
    for _ in range(2):  # what was lost once is lost for good
        with pytest.raises(Stop):
            train(case, tmp_path, StopAfter(3), seed=12, told=told)
        (said,) = (text for text in told if "state_dict" in text)
        lost = "Folds.fold, Folds.sizes, StopAfter.left, Tally#2.counts, Tally#2.rng, Tally.counts, Tally.rng"
        assert f"begin anew: {lost}. " in said
        told.clear()


@pytest.mark.parametrize("now", [6, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_with_another_batch_size_the_epoch_continues_and_says_so(
    tmp_path: Path, now: int, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It continues after as many batches as before, and the log says so."""

    class Seen(pl.Callback):
        def __init__(self) -> None:
            self.samples: dict[int, list[float]] = {}

        def on_train_batch_end(self, trainer: pl.Trainer, _m: Any, _o: Any, batch: Any, batch_idx: int) -> None:
            self.samples.setdefault(trainer.current_epoch, []).extend(batch[1].flatten().tolist())

    def fit(batch: int, *more: pl.Callback) -> Seen:
        rows = TensorDataset(torch.randn(48, 16), torch.arange(48.0)[:, None])
        seen, spot = (
            Seen(),
            SpotCheckpoint(str(tmp_path / "run"), local_server=False, interval=EverySteps(1), on_full="wait"),
        )
        loader = DataLoader(rows, batch, num_workers=workers)
        trainer(seen, *more, spot, max_epochs=3).fit(Net(), loader)
        return seen

    with pytest.raises(Stop):
        fit(4, StopAfter(16))  # four batches of the second epoch
    after = fit(now)
    findings = [each for facts in said(caplog, "not-exact") for each in facts["findings"]]
    assert [f"the batch size was 4 and is {now}" in each for each in findings].count(True) == 1
    assert not [each for each in findings if "first batch" in each]  # it is another one, of course
    assert after.samples == {1: list(range(4 * now, 48)), 2: list(range(48))}


def test_no_loader_of_ours_stays(tmp_path: Path) -> None:
    combined = m.combined("min_size")()
    train(Case(model=m.Several, loaders=lambda: combined, settings={"max_epochs": 1}), tmp_path, seed=11)
    assert [type(loader) for loader in combined.flattened] == [DataLoader, DataLoader]
