"""The states of loops are those that Lightning saves, whatever they hold, and whoever has a way of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_spot.exact import loop_states, private
from lightning_spot.exact.checkpoint import checkpoint_of
from lightning_spot.exact.loop_states import states_of
from tests.models import Net, data, trainer

LOOPS = private.loops_of(pl.Trainer)


def as_it_is(_part: str, do: Callable[[], Any]) -> Any:
    return do()


def by_lightning(run: pl.Trainer) -> Any:
    return private.LOOP_STATES.of(private.LOOPS_CONNECTOR.of(run))()


def trained(root: Path, *callbacks: pl.Callback) -> pl.Trainer:
    run = trainer(*callbacks, max_epochs=2, default_root_dir=root)
    run.fit(Net(), data(4), data(1))
    return run


class Compares(pl.Callback):
    """At each batch of training and of validation."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(states_of(trainer))
        assert self.seen[-1] == by_lightning(trainer)

    on_validation_batch_end = on_train_batch_start = on_train_batch_end


def test_in_training_they_are_those_that_lightning_saves(tmp_path: Path) -> None:
    compares = Compares()
    run = trained(tmp_path, compares)
    assert len(compares.seen) > 16
    assert all(one != other for one, other in zip(compares.seen, compares.seen[1:], strict=False))
    made = states_of(run)
    before = by_lightning(run)
    assert made == before
    assert [list(part) for part in made.values()] == [list(part) for part in before.values()]
    for part in made.values():  # all of it is its own
        for state in part.values():
            state.clear()
    assert by_lightning(run) == before == states_of(run)


@dataclass
class Lists(LOOPS._BaseProgress):  # type: ignore[misc, name-defined]
    rows: list[int] = field(default_factory=lambda: [1, 2])
    inner: Any = field(default_factory=lambda: LOOPS._BaseProgress())


@dataclass
class OwnWay(LOOPS._BaseProgress):  # type: ignore[misc, name-defined]
    count: int = 3

    def state_dict(self) -> dict[str, Any]:
        return {"all": self.count}


class OwnLoop(LOOPS._Loop):  # type: ignore[misc, name-defined]
    def state_dict(self, destination: Any = None, prefix: str = "") -> Any:
        destination = {} if destination is None else destination
        destination[f"{prefix}mine"] = 4
        return destination


class SavesMore(LOOPS._Loop):  # type: ignore[misc, name-defined]
    def __init__(self, run: pl.Trainer) -> None:
        super().__init__(run)
        self.progress = OwnWay(7)

    def on_save_checkpoint(self) -> dict[str, Any]:
        return {"more": [1]}


def of_this_object(owner: Any) -> Any:
    def state_dict(destination: Any = None, prefix: str = "") -> Any:
        return {} if destination is None else destination.update({f"{prefix}own": 1})

    owner.state_dict = state_dict
    return owner


ADDED: dict[str, Callable[[pl.Trainer], Any]] = {
    "a list among counters": lambda _: Lists(),
    "counters with a way of their own": lambda _: OwnWay(),
    "a loop with a way of its own": OwnLoop,
    "a loop that saves more": SavesMore,
    "an object with a way of its own": lambda run: of_this_object(SavesMore(run)),
    "counters with a way of their own, each": lambda _: of_this_object(Lists()),
    "what is no loop": lambda _: {"not": "saved"},
}


@pytest.mark.parametrize("what", ADDED)
@pytest.mark.parametrize("deep", [False, True])
def test_whatever_a_loop_has_is_saved_as_lightning_does(what: str, deep: bool, tmp_path: Path) -> None:
    run = trainer(default_root_dir=tmp_path)
    plain = states_of(run)
    owner = run.fit_loop.epoch_loop if deep else run.validate_loop
    vars(owner)["added"] = ADDED[what](run)
    assert states_of(run) == by_lightning(run)
    assert (states_of(run) == plain) == (what == "what is no loop")
    before = by_lightning(run)
    for part in states_of(run).values():  # lists, too, are its own
        for state in part.values():
            if isinstance(state, dict) and isinstance(state.get("rows"), list):
                state["rows"].append(9)
    assert states_of(run) == before


def test_another_loop_in_the_place_of_one(tmp_path: Path) -> None:
    run = trainer(default_root_dir=tmp_path)
    run.test_loop = OwnLoop(run)  # type: ignore[assignment]
    assert states_of(run) == by_lightning(run)
    assert states_of(run)["test_loop"] == {"mine": 4}


def test_a_checkpoint_has_them_from_here_and_nothing_is_left_in_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path)
    before, kept = by_lightning(run), dict(vars(private.LOOPS_CONNECTOR.of(run)))
    made = []
    monkeypatch.setattr(loop_states, "states_of", lambda owner: made.append(owner) or states_of(owner))  # type: ignore[func-returns-value]
    assert checkpoint_of(run, as_it_is)["loops"] == before
    assert made == [run]
    assert vars(private.LOOPS_CONNECTOR.of(run)) == kept
    assert checkpoint_of(run, lambda *_: None)["loops"] == before  # the part is off
    assert made == [run]
    answers = iter((True, False))
    assert checkpoint_of(run, lambda _, do: do() if next(answers) else None)["loops"] == before  # it fails on the way
    monkeypatch.setattr(run.fit_loop, "on_save_checkpoint", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        checkpoint_of(run, as_it_is)
    assert vars(private.LOOPS_CONNECTOR.of(run)) == kept


def test_who_has_them_made_in_another_way_has_that_way(tmp_path: Path) -> None:
    run = trained(tmp_path)
    private.LOOP_STATES.set(private.LOOPS_CONNECTOR.of(run), lambda: {"fit_loop": "mine"})
    assert checkpoint_of(run, as_it_is)["loops"] == {"fit_loop": "mine"}
    assert by_lightning(run) == {"fit_loop": "mine"}


@pytest.mark.parametrize("more", [{"my_loop": 1}, {"fit_loop": 1}, {}])
def test_a_lightning_that_saves_other_loops_is_left_to_itself(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path)
    kind: Any = type(private.LOOPS_CONNECTOR.of(run))
    original = private.LOOP_STATES.of(kind)
    monkeypatch.setattr(kind, private.LOOP_STATES.name, lambda self: {**original(self), **more})
    failed: list[BaseException] = []

    def tried(_part: str, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except AttributeError as error:
            failed.append(error)
            return None

    assert checkpoint_of(run, tried)["loops"] == by_lightning(run)
    assert len(failed) == (1 if more else 0)


@pytest.mark.parametrize("changed", ["loop", "progress"])
def test_a_lightning_that_saves_them_otherwise_is_left_to_itself(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path)
    kind: Any = LOOPS._Loop if changed == "loop" else LOOPS._BaseProgress
    original = kind.state_dict

    def state_dict(self: Any, *given: Any) -> Any:
        return {**original(self, *given), "version": 2}

    monkeypatch.setattr(kind, "state_dict", state_dict)
    with pytest.raises(AttributeError):
        states_of(run)
