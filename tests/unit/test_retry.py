"""One loop tries again what failed."""

from __future__ import annotations

import itertools

import pytest

from lightning_spot import retry
from lightning_spot.retry import growing, pause_after, retried


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr(retry.time, "sleep", pauses.append)
    return pauses


@pytest.mark.parametrize(("first_s", "pauses"), [(1.0, [1.0, 2.0, 4.0, 5.0, 5.0]), (9.0, [5.0, 5.0])])
def test_pauses_grow_up_to_the_longest(first_s: float, pauses: list[float]) -> None:
    assert list(itertools.islice(growing(first_s, 5.0), len(pauses))) == pauses
    assert [pause_after(failures, first_s, 5.0) for failures in range(1, len(pauses) + 1)] == pauses
    assert pause_after(10**6, first_s, 5.0) == 5.0


@pytest.mark.parametrize("failures", [0, 1, 2, 3])
def test_it_is_tried_as_often_as_there_are_pauses(failures: int, slept: list[float]) -> None:
    tried: list[int] = []

    def action() -> str:
        tried.append(1)
        if len(tried) <= failures:
            raise OSError(str(len(tried)))
        return "done"

    noted: list[tuple[str, float]] = []

    def note(error: Exception, pause_s: float) -> None:
        noted.append((str(error), pause_s))

    if failures == 3:
        with pytest.raises(OSError, match="3"):
            retried(action, (0.1, 0.2), lambda _: True, note)
    else:
        assert retried(action, (0.1, 0.2), lambda _: True, note) == "done"
    assert slept == [0.1, 0.2][:failures]
    assert noted == [("1", 0.1), ("2", 0.2)][:failures]


def test_what_would_fail_again_is_not_tried_again(slept: list[float]) -> None:
    def action() -> None:
        raise FileNotFoundError("gone")

    with pytest.raises(FileNotFoundError):
        retried(action, itertools.repeat(1.0), lambda error: not isinstance(error, FileNotFoundError))
    assert slept == []
