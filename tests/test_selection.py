"""Which run a ``fit`` goes on with, of several at one ``dirpath``."""

from __future__ import annotations

import secrets
import uuid
from collections import UserDict, UserList
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

from lightning_spot.fit import earlier
from lightning_spot.fit.fingerprint import Fingerprint
from lightning_spot.fit.selection import Selection, select
from lightning_spot.image.manifest import Manifest
from lightning_spot.run.location import Location
from tests.models import Net, trainer

NAMED = Location.of("/nowhere/run", None, None)
FIRST, SECOND, THIRD = (earlier.numbered(NAMED, number).url for number in (1, 2, 3))


def fingerprint(model: str, settings: str = "s", data: str | None = None) -> Fingerprint:
    return Fingerprint(model, settings, data, limits=(10, -1), drawn="d")


LOOKED_AT: list[int] = []


def selected(mine: Fingerprint, *runs: tuple[Fingerprint | str, bool], has_more: bool = False) -> Selection:
    """What is selected where these runs are, each complete or not."""

    def look(location: Location) -> Any:
        number = 1 if location == NAMED else int(location.url.rpartition("-")[2])
        LOOKED_AT.append(number)
        if number > len(runs):
            return SimpleNamespace(candidates=[], durable=object(), unreadable={})
        theirs, complete = runs[number - 1]
        if theirs == UNREADABLE:
            return SimpleNamespace(candidates=[], durable=None, unreadable={})
        if theirs == DAMAGED:
            return SimpleNamespace(candidates=[], durable=object(), unreadable={"step-000000001-attempt-0001": "cut"})
        manifest = Manifest(
            run="run", name="s", step=1, attempt=1, nbytes=0, complete=complete, fingerprint=str(theirs)
        )
        return SimpleNamespace(candidates=[(manifest, None)], durable=object(), unreadable={})

    return select(NAMED, mine, lambda _: has_more, look)


A, B = fingerprint("a"), fingerprint("b")
TUNED = fingerprint("a", "t")
FOLDS = [fingerprint("a", data=str(number)) for number in range(3)]
DONE, STOPPED = True, False
UNREADABLE, DAMAGED = "unreadable", "damaged"


@pytest.mark.parametrize(
    ("mine", "runs", "where"),
    [
        (A, [], FIRST),
        (A, [(A, STOPPED)], FIRST),
        (A, [(A, DONE)], FIRST),
        (B, [(A, DONE), (B, STOPPED)], SECOND),  # a program that skips its first phase
        (B, [(A, DONE), (B, DONE)], SECOND),
        (B, [(A, DONE)], SECOND),  # which had ended before the second one began
        (A, [(A, DONE), (B, STOPPED)], FIRST),
        (TUNED, [(A, DONE), (TUNED, STOPPED)], SECOND),  # a sweep
        (TUNED, [(A, DONE), (TUNED, STOPPED), (B, DONE)], SECOND),
        (FOLDS[0], [(FOLDS[0], DONE), (FOLDS[1], STOPPED)], FIRST),
        (FOLDS[1], [(FOLDS[0], DONE), (FOLDS[1], STOPPED)], SECOND),
        (FOLDS[1], [(FOLDS[0], DONE), (FOLDS[1], DONE), (FOLDS[2], STOPPED)], SECOND),
        (A, [("", STOPPED)], FIRST),  # a snapshot that says nothing of its training
    ],
)
def test_a_training_finds_its_own_run(mine: Fingerprint, runs: Any, where: str) -> None:
    assert (selected(mine, *runs).location.url, selected(mine, *runs).warning) == (where, "")


@pytest.mark.parametrize(
    ("mine", "runs", "where", "warning"),
    [
        (B, [(A, STOPPED)], FIRST, "are of another training"),
        (TUNED, [(A, DONE)], SECOND, "with other hyperparameters: this fit is a run of its own"),
        (A, [(A, DONE), (A, STOPPED)], FIRST, "2 trainings in .* are alike"),
        (FOLDS[2], [(FOLDS[0], DONE), (FOLDS[1], DONE)], FIRST, "on other data.*the weights are not its own"),
        (FOLDS[1], [(FOLDS[0], STOPPED)], FIRST, "on other data"),
    ],
)
def test_what_cannot_be_told_apart_is_said(mine: Fingerprint, runs: Any, where: str, warning: str) -> None:
    found = selected(mine, *runs)
    assert found.location.url == where
    with pytest.raises(AssertionError, match=warning):
        raise AssertionError(found.warning)
    assert "a dirpath of its own" in found.warning


def test_a_finished_run_is_trained_on_with_other_hyperparameters_if_more_is_asked_for() -> None:
    assert selected(replace(TUNED, limits=(20, -1)), (A, DONE), has_more=True).location == NAMED
    assert selected(B, (A, DONE), has_more=True).location.url == SECOND


@pytest.mark.parametrize("problem", [UNREADABLE, DAMAGED])
@pytest.mark.parametrize("mine", [A, B, TUNED])
def test_a_run_that_cannot_be_read_is_not_taken_for_none(mine: Fingerprint, problem: str) -> None:
    assert selected(mine, (A, DONE), (problem, STOPPED)).location.url == SECOND


def test_a_run_that_ended_early_is_trained_on_with_other_hyperparameters_only_if_more_is_asked_for() -> None:
    stopped_early = (replace(A, limits=(100, -1)), DONE)
    places = {}
    for epochs, steps in [(100, -1), (50, -1), (101, -1), (-1, -1), (100, 10)]:
        mine = replace(TUNED, limits=(epochs, steps))
        assert Fingerprint.of_text(str(mine)) == mine
        places[epochs, steps] = selected(mine, stopped_early, has_more=True).location.url
    assert places == {(100, -1): SECOND, (50, -1): SECOND, (101, -1): FIRST, (-1, -1): FIRST, (100, 10): SECOND}


def test_with_other_hyperparameters_one_fold_is_not_taken_for_another_without_a_word() -> None:
    tuned = [replace(fold, settings="t") for fold in FOLDS]
    assert "on other data" in selected(tuned[0], (FOLDS[0], DONE), (FOLDS[1], STOPPED)).warning
    earlier.forget()
    assert "taken for that in" in selected(TUNED, (A, DONE), (A, STOPPED)).warning
    earlier.forget()
    assert selected(TUNED, (A, STOPPED)).warning == ""  # what has changed is named later


def test_runs_that_are_complete_are_looked_at_once() -> None:
    for fold in FOLDS:
        LOOKED_AT.clear()
        selected(fold, *((fold, DONE) for fold in FOLDS))
    assert LOOKED_AT == [4]


def test_a_finished_run_is_not_trained_once_more_because_an_id_or_a_seed_was_drawn_anew() -> None:
    """The program was started again after its end, and trained from the beginning, in a run of its own."""
    first, again = (of(Tried(32, run_id=str(uuid.uuid4()), seed=seed)) for seed in (718_281_828, 31_415_926))
    found = selected(again, (first, DONE))
    assert found == Selection(NAMED, drawn_anew=True)  # it might be another one: that is said
    earlier.forget()
    assert selected(again, (first, STOPPED)) == Selection(NAMED)
    for ends in [(DONE, STOPPED), (DONE, DONE), (STOPPED, STOPPED)]:  # trials with large seeds
        runs = list(zip((first, again), ends, strict=True))
        earlier.forget()
        assert selected(again, *runs) == Selection(earlier.numbered(NAMED, 2))
        earlier.forget()
        assert selected(first, *runs) == Selection(NAMED)
    small = [of(Tried(32, seed=seed)) for seed in (3, 4)]  # of a sweep, perhaps
    found = selected(small[1], (small[0], DONE))
    assert found.location.url == SECOND
    assert "drawn anew at each start" in found.warning


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Path("/fold-1/train.csv"), Path("/fold-2/train.csv")),
        (["/fold-1/train.csv"], ["/fold-2/train.csv"]),
        ({"seed": 3_000_000_000}, {"seed": 4_000_000_000}),
    ],
)
def test_a_finished_run_is_not_taken_for_another_training_without_a_word(one: Any, other: Any) -> None:
    """The second fold was given the weights of the first: neither what tells trainings apart nor a warning saw it."""
    first, second = of(Tried(data=one)), of(Tried(data=other))
    assert selected(second, (first, DONE)).drawn_anew
    assert selected(first, (first, DONE)) == Selection(NAMED)
    assert selected(second, (first, DONE), (second, STOPPED)).location.url == SECOND


def test_what_this_process_has_finished_is_no_other_ones() -> None:
    earlier.finished(NAMED, NAMED)
    assert selected(A, (A, DONE), (A, STOPPED)).location.url == SECOND
    earlier.finished(NAMED, earlier.numbered(NAMED, 2))
    assert selected(A, (A, DONE), (A, STOPPED)).location.url == THIRD


class Tried(Net):
    def __init__(self, width: int = 32, **hyperparameters: Any) -> None:
        super().__init__(width)
        self.save_hyperparameters()


class Unset(UserDict[str, Any]):
    """A configuration with values that are missing yet, as omegaconf's: it had ended ``fit``."""

    def __getitem__(self, key: str) -> Any:
        if self.data[key] == "???":
            raise ValueError("missing mandatory value")
        return self.data[key]


def of(model: pl.LightningModule, loader: Any = None) -> Fingerprint:
    run = trainer()
    run.strategy.connect(model)
    run.fit_loop._data_source.instance = loader
    return Fingerprint.of(run)


def test_a_fingerprint_is_of_what_stays() -> None:
    data = TensorDataset(torch.arange(20.0), torch.arange(20.0))
    usual = of(Net(), DataLoader(data, 2))
    assert usual == of(Net(), DataLoader(data, 4, shuffle=True)) == Fingerprint.of_text(str(usual))
    assert not usual.is_alike(of(Net(width=8)))
    assert not of(Tried(rate=0.1)).is_alike(of(Tried(rate=0.2)))
    assert not of(Tried(fold=np.int64(1))).is_alike(of(Tried(fold=np.int64(2))))
    assert not of(Tried(layers=UserList([1]))).is_alike(of(Tried(layers=UserList([2]))))  # such as omegaconf's
    assert of(Tried(config=Unset(rate=0.1, root="???"))).is_alike(of(Tried(config=Unset(rate=0.1, root="???"))))
    assert not of(Tried(config=Unset(rate=0.1, root="???"))).is_alike(of(Tried(config=Unset(rate=0.2, root="???"))))
    assert of(Tried(thing=object())).is_alike(of(Tried(thing=object())))
    assert of(Tried(root="/a/x", name="2026-01-01_10-00")).is_alike(of(Tried(root="/b/x", name="2026-02-01_11-30")))
    for one, other in (
        ("2026-11-26/12-34-18", "2026-11-27/09-01-02"),
        ("2026-11-26/12-34-18/", "2026-11-27/09-01-02/"),
    ):
        assert of(Tried(folder=f"/x/outputs/{one}")).is_alike(of(Tried(folder=f"/x/outputs/{other}")))  # Hydra's
    assert not of(Tried(folder="/x/2026-11-26/12-34-18/0")).is_alike(of(Tried(folder="/x/2026-11-26/12-34-18/1")))
    assert of(Tried(begun=1.7e9)).is_alike(of(Tried(begun=1.8e9)))
    for drawn in (lambda: str(uuid.uuid4()), lambda: f"run-{uuid.uuid4().hex}", lambda: secrets.token_hex(8) + "0f"):
        assert of(Tried(run_id=drawn(), ids={"a": [drawn()]})).is_alike(of(Tried(run_id=drawn(), ids={"a": [drawn()]})))
    assert of(Tried(seed=1_234_567)).is_alike(of(Tried(seed=987_654_321)))
    assert not of(Tried(seed=1)).is_alike(of(Tried(seed=2)))  # a sweep's
    assert not of(Tried(steps=1_234_567)).is_alike(of(Tried(steps=1_234_568)))
    for one, other in (("bert-base", "bert-large"), ("deadbeef", "facade"), ("relu", "gelu"), ("a" * 12, "b" * 12)):
        assert not of(Tried(name=one)).is_alike(of(Tried(name=other)))
    assert usual.has_other_data(of(Net(), DataLoader(TensorDataset(torch.arange(1.0, 21), torch.arange(20.0)))))
    folds = [DataLoader(Subset(data, indices)) for indices in ([0, 1, 2], [3, 4, 5])]
    assert of(Net(), folds[0]).has_other_data(of(Net(), folds[1]))
    samplers = [SubsetRandomSampler(indices) for indices in ([0, 1, 2], [3, 4, 5])]
    orders = [of(Net(), DataLoader(data, sampler=sampler)) for sampler in samplers]
    assert orders[0].has_other_data(orders[1])
    assert not of(Net(), folds[0]).has_other_data(of(Net()))
    assert Fingerprint.of_text("") is None
