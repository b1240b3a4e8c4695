"""A resumed run ends exactly as an undisturbed one, to the bit."""

from __future__ import annotations

import contextlib
import csv
import random
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.errors import SettingsError
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.state import fit_state
from lightning_spot.state.buffers import Buffers
from lightning_spot.state.compare import differences
from lightning_spot.store.local import LocalStore
from tests.support import exact_cases
from tests.support.exact_cases import CASES, train
from tests.support.trainer import Stop, StopAfter

pytestmark = pytest.mark.guarantee("G5")


@pytest.fixture(autouse=True)
def short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs of 12 batches: half of what the programs have that are killed."""
    monkeypatch.setattr(exact_cases, "SAMPLES", 48)


def newest(root: Path) -> tuple[Manifest, dict[str, Any]]:
    manifest = LocalStore(root / "run").survey().manifests[0]
    return manifest, torch.load(root / "run" / manifest.data_path, weights_only=True)


def final(root: Path) -> dict[str, Any]:
    manifest, checkpoint = newest(root)
    assert manifest.complete
    return checkpoint


def rows(folder: Path, ignored: tuple[str, ...] = ()) -> list[dict[str, str]]:
    """What was logged into a folder; not goodput, which depends on time, nor columns with an ``ignored`` part."""
    with open(folder / "metrics.csv", newline="") as file:
        found = list(csv.DictReader(file))
    ignored = ("spot/", *ignored)
    plain = [{name: row[name] for name in row if not any(part in name for part in ignored)} for row in found]
    return [row for row in plain if any(value for name, value in row.items() if name not in ("step", "epoch"))]


def logged(root: Path, ignored: tuple[str, ...] = ()) -> list[dict[str, str]]:
    """What all attempts of a run logged, of every epoch: the final checkpoint has the values of the last one only."""
    return [row for folder in sorted((root / "logs").glob("*")) for row in rows(folder, ignored)]


def spot(root: Path, every: int) -> SpotCheckpoint:
    settings = {"local_server": False, "on_full": "wait", "keep": 100, "notices": "signal"}
    return SpotCheckpoint(str(root / "run"), interval=EverySteps(every), **settings)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directory of a case trained without a break; made once for each case."""
    made: dict[str, Path] = {}

    def of(case: str) -> Path:
        if case not in made:
            root = tmp_path_factory.mktemp(case)
            train(case, root, seed=11, max_epochs=2, spot=spot(root, every=1000))
            made[case] = root
        return made[case]

    return of


@pytest.mark.parametrize("case", [case for case in CASES if case != "limited"])
def test_killed_twice_and_equal(case: str, tmp_path: Path, undisturbed: Any, seed: int) -> None:
    chance = random.Random(seed)
    # Five batches are a step of "accumulation"; before the first there is nothing to resume from.
    every, earliest = (1, 5) if case == "accumulation" else (3, 4)
    for attempt in range(2):
        in_validation = chance.random() < 0.25
        stop = StopAfter(chance.randrange(*((1, 6) if in_validation else (earliest, 11))), in_validation=in_validation)
        with contextlib.suppress(Stop):  # a run of few validation batches comes to its end
            train(case, tmp_path, stop, seed=100 + attempt, max_epochs=2, spot=spot(tmp_path, every))
    train(case, tmp_path, seed=200, max_epochs=2, spot=spot(tmp_path, every=1000))
    assert list(differences(final(undisturbed(case)), final(tmp_path))) == []
    assert logged(tmp_path) == logged(undisturbed(case)) != []


class StopAtTheEnd(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        raise Stop


def test_a_run_with_no_batches_left_is_asked_for_no_more(tmp_path: Path) -> None:
    """Lightning asks, and the loader had more than the limit: it counted as one that has ended."""
    train("limited", tmp_path / "twin", seed=11, max_epochs=1, spot=spot(tmp_path / "twin", every=1000))
    with pytest.raises(Stop):
        train("limited", tmp_path, StopAtTheEnd(), seed=11, max_epochs=1, spot=spot(tmp_path, every=1))
    assert newest(tmp_path)[0].step == 9
    train("limited", tmp_path, seed=5, max_epochs=1, spot=spot(tmp_path, every=1000))
    assert list(differences(final(tmp_path / "twin"), final(tmp_path))) == []


def test_the_generator_of_the_device_is_set_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, dropout draws from it; here it is only seen that it is asked for."""
    devices: list[torch.device | None] = []
    real = fit_state.restore_random

    def restore_random(state: dict[str, Any], device: torch.device | None = None) -> None:
        devices.append(device)
        real(state, device)

    with pytest.raises(Stop):
        train("plain", tmp_path, StopAfter(12), seed=11, max_epochs=2)
    monkeypatch.setattr(fit_state, "restore_random", restore_random)
    train("plain", tmp_path, seed=77, max_epochs=2)
    assert devices == [torch.device("cpu")]


LAST = 18


class Stops(pl.Callback):
    """Asks for the end of training."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= LAST


class KilledAfterLastStep(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step >= LAST:
            raise Stop


class Counts(pl.Callback):
    """Counts the batches that are trained on."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.batches += 1


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_steps": LAST}, id="max_steps"),
        pytest.param({"max_steps": LAST, "val_check_interval": 6}, id="max_steps-validation", marks=pytest.mark.soak),
        pytest.param({"limit_val_batches": 0}, id="should_stop", marks=pytest.mark.soak),
        pytest.param({"limit_val_batches": 2}, id="should_stop-validation"),
    ],
)
def test_a_run_that_has_taken_its_last_step_comes_to_its_end(settings: dict[str, Any], tmp_path: Path) -> None:
    """Lightning would not go into that epoch again: no hook at its end, or at that of training, would be called."""
    roots = [tmp_path / "undisturbed", tmp_path / "stopped"]
    for root, is_killed in ((roots[0], False), (roots[1], True), (roots[1], False)):
        callbacks: list[pl.Callback] = [spot(root, every=1000 if root is roots[0] else 1)]
        callbacks += [] if "max_steps" in settings else [Stops()]
        callbacks += [KilledAfterLastStep()] if is_killed else []
        with contextlib.suppress(Stop):
            train("plain", root, seed=77, callbacks=callbacks, **settings)
        manifest, _ = newest(root)
        assert (manifest.step, manifest.complete) == (LAST, not is_killed)
    assert list(differences(final(roots[0]), final(roots[1]))) == []
    assert logged(roots[1]) == logged(roots[0]) != []


@pytest.mark.parametrize("limits", [{"max_epochs": 2, "max_steps": 5}, {"max_epochs": 1}, {"max_epochs": 0}], ids=str)
def test_a_run_that_is_given_less_than_it_has_trained_is_refused(
    limits: dict[str, int], tmp_path: Path, undisturbed: Any
) -> None:
    """It ended without a word, or with an error of Lightning's. Given as much as before again, it goes on."""
    middle = StopAfter(len(exact_cases.loader()) * 3 // 2)
    with pytest.raises(Stop):
        train("plain", tmp_path, middle, seed=11, max_epochs=2, spot=spot(tmp_path, every=1))
    before, counts = newest(tmp_path)[0], Counts()
    with pytest.raises(SettingsError, match=rf"{[*limits][-1]}={[*limits.values()][-1]}\b"):
        train("plain", tmp_path, counts, seed=12, spot=spot(tmp_path, every=1), **limits)
    assert counts.batches == 0
    assert newest(tmp_path)[0] == before
    train("plain", tmp_path, seed=13, max_epochs=2, spot=spot(tmp_path, every=1000))
    assert list(differences(final(undisturbed("plain")), final(tmp_path))) == []


@pytest.mark.parametrize("left", [0, 3], ids=["after-the-last-step", "in-training"])
def test_a_run_stopped_before_a_validation_resumes_without_it(tmp_path: Path, left: int) -> None:
    """After its last step it trained on one more batch; before, with other random numbers than there were."""
    stopped, settings = tmp_path / "stopped", {"max_steps": 6 + left, "val_check_interval": 6}
    with pytest.raises(Stop):
        train("plain", stopped, StopAfter(0, in_validation=True), seed=11, **settings, spot=spot(stopped, every=6))
    finals = []
    for seed in (77, 78)[: 1 + bool(left)]:
        root, counts = tmp_path / str(seed), Counts()
        shutil.copytree(stopped, root)
        train("plain", root, counts, seed=seed, **settings, limit_val_batches=0, spot=spot(root, every=1000))
        assert counts.batches == left
        finals.append(final(root))
    assert list(differences(finals[0], finals[-1])) == []


def test_a_nested_buffer_which_has_no_shape_comes_back() -> None:
    """It ended the training."""
    model, resumed = torch.nn.Module(), torch.nn.Module()
    for module in (model, resumed):
        nested = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)])
        module.register_buffer("nested", nested, persistent=False)
    buffers = Buffers()
    buffers.begin(model)
    model.nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(5)])
    captured = buffers.capture(model, is_first=True)
    Buffers().restore(resumed, captured)
    assert [part.tolist() for part in resumed.nested.unbind()] == [[1.0] * 3, [1.0] * 5]
