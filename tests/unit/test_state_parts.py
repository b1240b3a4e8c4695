"""The table of state parts: what is captured, and at which stage each part of it is put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_spot.state import state_parts
from lightning_spot.state.state_parts import PARTS, Stage, StatePart, StateParts
from tests.support.said import said_about


class Trainer(SimpleNamespace):
    """One to which there can be weak references."""


@pytest.fixture
def trainer() -> Any:
    return Trainer(lightning_module=torch.nn.Linear(1, 1))


def test_state_parts_have_unique_names_and_every_stage_has_one() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert {stage for part in PARTS for stage in part.restore} == set(Stage)


def test_state_parts_are_restored_by_stage_in_table_order(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, Any]] = []

    def part(name: str, value: Any, *stages: Stage) -> StatePart:
        return StatePart(
            name, None, lambda _: value, dict.fromkeys(stages, lambda _, saved: done.append((name, saved)))
        )

    rows = part("a", 1, Stage.LOAD, Stage.END), part("b", False, Stage.LOAD), part("c", None, Stage.LOAD), part("d", 4)
    monkeypatch.setattr(state_parts, "PARTS", rows)
    parts = StateParts(trainer)
    saved = parts.capture(at_end=True)
    assert (saved, parts.at_end) == ({"a": 1, "b": False, "c": None, "d": 4}, True)
    for stage in Stage:
        parts.restore(stage, {name: value for name, value in saved.items() if name != "d"})
    assert done == [("a", 1), ("b", False), ("a", 1)]


def test_a_part_that_fails_is_off_and_the_others_are_captured(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(_: StateParts) -> None:
        raise AttributeError("_renamed")

    monkeypatch.setattr(state_parts, "PARTS", (StatePart("a", "a part", gone), StatePart("b", None, lambda _: 2)))
    parts = StateParts(trainer)
    assert parts.capture() == {"a": None, "b": 2}
    assert said_about(caplog, "part-off") == ["a part"]
    assert not parts.switches.is_on("a part")
    assert parts.capture() == {"a": None, "b": 2}
    monkeypatch.setattr(state_parts, "PARTS", (StatePart("b", None, gone),))
    with pytest.raises(AttributeError):  # which costs the snapshot, and is said there
        parts.capture()
