"""Which snapshots a policy keeps: rules as tables, and what holds of any of them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spot.errors import MalformedError, SettingsError
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.store.fences import Rewind, forgettable, rewinds_in
from lightning_spot.store.retention import Keep, expired, kept, read_keep
from lightning_spot.store.store import Holdings, newest_first

NOW_S = 1_000_000.0
HOUR_S = 3600.0


def of(step: int, attempt: int = 1, *, age_h: float = 0.0, complete: bool = False, **metrics: float) -> Manifest:
    return Manifest(
        run="run",
        name=snapshot_name(step, attempt, complete=complete),
        step=step,
        attempt=attempt,
        nbytes=0,
        complete=complete,
        created_unix_s=NOW_S - age_h * HOUR_S,
        metrics=metrics,
    )


def steps(manifests: list[Manifest], keep: Keep) -> list[tuple[int, int]]:
    names = kept(manifests, keep, NOW_S)
    return sorted((each.attempt, each.step) for each in manifests if each.name in names)


EVERY = Keep(newest=1, every_n_steps=100)
AGED = Keep(newest=1, newer_than="2h")
BEST = Keep(newest=1, best=2, monitor="val_loss")
RULES = {
    "newest": (Keep(newest=2), [of(1), of(2), of(3)], [2, 3]),
    "fewer": (Keep(newest=9), [of(1), of(2)], [1, 2]),
    "first of each": (EVERY, [of(step) for step in (5, 99, 101, 199, 200, 399, 410, 420)], [101, 200, 399, 410, 420]),
    "every step": (Keep(newest=1, every_n_steps=1), [of(step) for step in (0, 1, 2)], [1, 2]),
    "age": (AGED, [of(1, age_h=3), of(2, age_h=2), of(3, age_h=1), of(4, age_h=-5)], [2, 3, 4]),
    "all too old": (AGED, [of(1, age_h=4), of(2, age_h=3)], [2]),
    "best": (BEST, [of(1, val_loss=3.0), of(2, val_loss=1.0), of(3, val_loss=2.0), of(4, val_loss=9.0)], [2, 3, 4]),
    "largest": (
        replace(BEST, mode="max"),
        [of(1, val_loss=3.0), of(2, val_loss=1.0), of(3, val_loss=2.0), of(4)],
        [1, 3, 4],
    ),
    "first of a value": (
        BEST,
        [of(1, val_loss=1.0), of(2, val_loss=1.0), of(3, val_loss=2.0), of(4, val_loss=2.0), of(5, val_loss=7.0)],
        [1, 3, 5],
    ),
    "not a number": (BEST, [of(1, val_loss=math.nan), of(2), of(3, loss=0.0), of(4, val_loss=math.inf), of(5)], [5]),
    "union": (
        Keep(newest=1, every_n_steps=10, newer_than=HOUR_S, best=1, monitor="a", mode="max"),
        [of(3, age_h=9, a=5.0), of(4, age_h=8), of(11, age_h=7), of(12, age_h=6), of(13, age_h=0.5), of(14, age_h=2)],
        [3, 11, 13, 14],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("keep", "there", "stay"), RULES.values(), ids=RULES)
def test_a_rule(keep: Keep, there: list[Manifest], stay: list[int]) -> None:
    assert steps(there, keep) == [(1, step) for step in stay]


def test_what_a_later_attempt_has_trained_again_is_kept_once() -> None:
    """Attempt 2 resumed from step 150 of attempt 1, and trained the steps from there on once more."""
    there = [of(100), of(150), of(200, val_loss=0.0), of(300), of(200, 2), of(260, 2), of(310, 2, val_loss=1.0)]
    keep = Keep(newest=1, every_n_steps=100, best=1, monitor="val_loss")
    assert steps(there, keep) == [(1, 100), (2, 200), (2, 310)]


def test_the_end_of_a_run_is_kept_once() -> None:
    there = [of(100), of(200), of(200, complete=True)]
    assert kept(there, EVERY, NOW_S) == {there[0].name, there[2].name}


MANIFESTS = st.lists(
    st.builds(
        of,
        st.integers(0, 40),
        st.integers(1, 3),
        age_h=st.floats(-1, 5),
        complete=st.booleans(),
        a=st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf, -math.inf]),
    ),
    min_size=1,
    unique_by=lambda each: each.name,
)
KEEPS = st.builds(
    lambda newest, every, newer, best, mode: Keep(
        newest=newest, every_n_steps=every, newer_than=newer, best=best, monitor="a" if best else None, mode=mode
    ),
    st.integers(1, 4),
    st.none() | st.integers(1, 20),
    st.none() | st.floats(0, 4 * HOUR_S),
    st.integers(0, 3),
    st.sampled_from(["min", "max"]),
)


@given(MANIFESTS, KEEPS)
def test_the_newest_stays_whatever_the_rules(there: list[Manifest], keep: Keep) -> None:
    names = kept(there, keep, NOW_S)
    line = newest_first(there)
    assert line[0].name in names
    assert names <= {each.name for each in there}
    assert len(names) >= min(keep.newest, len(there))


@given(MANIFESTS, KEEPS)
def test_what_was_deleted_once_changes_nothing(there: list[Manifest], keep: Keep) -> None:
    """Retention runs after each upload, at several places."""
    names = kept(there, keep, NOW_S)
    assert kept([each for each in there if each.name in names], keep, NOW_S) == names


@given(MANIFESTS, KEEPS, st.integers(1, 3))
def test_more_of_the_newest_deletes_nothing_more(there: list[Manifest], keep: Keep, more: int) -> None:
    assert kept(there, keep, NOW_S) <= kept(there, replace(keep, newest=keep.newest + more), NOW_S)


# -- rewinds ----------------------------------------------------------------------------------------------------------


def held(*manifests: Manifest, rewinds: list[Rewind]) -> Holdings:
    return Holdings(newest_first(manifests), rewinds=rewinds)


def test_what_is_set_aside_stays_until_something_newer_is_stored() -> None:
    there = [of(100), of(200), of(300), of(300, 2), of(400, 2)]
    rewind = [Rewind(2, of(200).order)]
    now = held(*there, rewinds=rewind)
    assert [now.sets_aside(each.order) for each in there] == [False, False, True, True, True]
    assert expired(now, of(400, 2), Keep(newest=1), NOW_S) == []  # a late upload: what it goes back to stays
    assert expired(now, of(200), Keep(newest=1), NOW_S) == [of(100)]
    newer = of(210, 3)
    gone = expired(held(*there, newer, rewinds=rewind), newer, Keep(newest=2, every_n_steps=100), NOW_S)
    assert {each.name for each in gone} == {of(300).name, of(300, 2).name, of(400, 2).name}


@given(MANIFESTS, KEEPS, st.data())
def test_a_rewind_never_loses_what_it_goes_back_to(there: list[Manifest], keep: Keep, data: st.DataObject) -> None:
    to, current = data.draw(st.sampled_from(there)), data.draw(st.sampled_from(there))
    now = held(*there, rewinds=[Rewind(3, to.order)])
    gone = expired(now, current, keep, NOW_S)
    assert current not in gone
    if now.sets_aside(current.order):
        assert gone == []


def test_a_rewind_is_the_name_of_its_file() -> None:
    rewind = Rewind(3, of(200, 2, complete=True).order)
    assert rewind.file == "rewind-0003-step-000000200-attempt-0002-complete.json"
    others = ["attempt-0001.json", "rewind-0003.json", "rewind-x-step-000000200-attempt-0002.json", "rewind-1-a.json"]
    assert rewinds_in([rewind.file, *others]) == [rewind]
    assert forgettable([rewind.file, "attempt-0102.json", "rewind-0001-mine.json"], 4) == []
    assert forgettable([rewind.file, "attempt-0103.json", "rewind-0001-mine.json"], 4) == [rewind.file]


def test_a_rewind_is_kept_until_a_later_attempt_has_a_snapshot() -> None:
    """Hundreds of starts may fail before that, and an upload of what is aside may be late."""
    rewinds = [Rewind(number, of(200).order).file for number in range(1, 31)]
    names = [*rewinds, "attempt-0040.json", "attempt-0500.json"]
    assert forgettable(names, 1) == ["attempt-0040.json"]
    assert forgettable(names, 3) == [*rewinds[:2], "attempt-0040.json"]


# -- what is given, read and written ----------------------------------------------------------------------------------


NO_POLICY: list[Any] = [
    *(0, -1, 1.5, True, "2", None, [], {}),
    *({"newest": newest} for newest in (None, 0, 10**12)),
    *({"newer_than": age} for age in ("2", "soon", -1, math.nan)),
    *({"best": 2}, {"best": -1}, {"monitor": "val_loss"}, {"best": 1, "monitor": "a\nb"}, {"best": 1, "monitor": 3}),
    *({"newest": 2, "oldest": 1}, {"every_n_steps": 0}, {"mode": "best"}),
]


@pytest.mark.parametrize("given", NO_POLICY, ids=str)
def test_what_is_no_policy_is_refused(given: object) -> None:
    with pytest.raises(SettingsError):
        Keep.of(given)


def test_what_is_given_as_a_policy() -> None:
    assert Keep.of(3) == Keep(newest=3)
    assert Keep.of({"newer_than": "2d", "best": 1, "monitor": "a"}) == Keep(newer_than=172800.0, best=1, monitor="a")
    assert Keep.of(EVERY) is EVERY


def test_a_policy_travels() -> None:
    keep = Keep(newest=3, every_n_steps=7, newer_than="1h", best=2, monitor="a", mode="max")
    fields = {"keep": {**json.loads(json.dumps(asdict(keep))), "of a later version": 1}}
    assert read_keep(fields, "keep", None) == keep
    for bad in (3, [], {"newest": 0}, {"newest": "3"}, {"best": 1}, {"newer_than": [1]}, {"mode": 1}):
        with pytest.raises(MalformedError):
            read_keep({"keep": bad}, "keep", None)
