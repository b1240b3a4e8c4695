"""The best models of a ``ModelCheckpoint`` whose folder is another one in each start."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_spot import EverySteps
from tests.support.said import listening, points
from tests.support.snapshots import serverless
from tests.support.trainer import Net, Stop, StopAt, data, trainer
from tests.support.waiting import new_process

SCORES = (0.3, 0.1, 0.5, 0.4)
"""Of each epoch: the best comes before the resume."""


class Scored(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", SCORES[self.current_epoch])


def fit(root: Path, folder: Path | str, *callbacks: pl.Callback, **more: Any) -> tuple[ModelCheckpoint, list[str]]:
    """A start, and our warnings of folders."""
    new_process()
    best = ModelCheckpoint(folder, monitor="score", save_top_k=2, save_last=True, filename="{epoch}", **more)
    fits = trainer(best, *callbacks, serverless(root / "run", interval=EverySteps(1)), max_epochs=4)
    with listening() as logged, contextlib.suppress(Stop):
        fits.fit(Scored(), data(4), data(1))
    return best, [text for text in points(logged) if "ModelCheckpoint" in text]


def names(paths: Any) -> list[str]:
    return sorted("/".join(Path(path).parts[-2:]) for path in paths)


def test_the_best_so_far_comes_back_with_its_path(tmp_path: Path) -> None:
    """Whatever came after the resume was the best, and nothing was said."""
    fit(tmp_path, tmp_path / "a", StopAt(10))
    best, said = fit(tmp_path, tmp_path / "b")
    assert said == []
    assert names([best.best_model_path]) == ["a/epoch=1.ckpt"]
    assert best.best_model_score == pytest.approx(0.1)
    assert names(best.best_k_models) == ["a/epoch=0.ckpt", "a/epoch=1.ckpt"]
    assert names([best.kth_best_model_path]) == ["a/epoch=0.ckpt"]
    assert Path(best.best_model_path).exists()


def test_in_a_bucket_too(s3: str, tmp_path: Path) -> None:
    fit(tmp_path, f"{s3}/a", StopAt(10))
    best, _ = fit(tmp_path, f"{s3}/b")
    assert names([best.best_model_path]) == ["a/epoch=1.ckpt"]


def test_those_that_are_left_come_back(tmp_path: Path) -> None:
    fit(tmp_path, tmp_path / "a", StopAt(10))
    (tmp_path / "a" / "epoch=0.ckpt").unlink()
    best, _ = fit(tmp_path, tmp_path / "b")
    assert names(best.best_k_models) == ["a/epoch=1.ckpt", "b/epoch=3.ckpt"]


def test_where_the_best_is_gone_that_is_said(tmp_path: Path) -> None:
    fit(tmp_path, tmp_path / "a", StopAt(10))
    shutil.rmtree(tmp_path / "a")
    best, said = fit(tmp_path, tmp_path / "b")
    assert [f"ModelCheckpoint in {tmp_path / 'a'} is gone" in text for text in said] == [True]
    assert names([best.best_model_path]) == ["b/epoch=3.ckpt"]
