"""Which run a ``fit`` goes on with, of those that one ``dirpath`` has: its own, whatever the program has skipped.

The runs are in ``dirpath``, ``dirpath/fit-2`` and so on, in the order in which they were first begun. One that this
process has finished is none. Of the others it is the first whose newest snapshot has the fingerprint of this training.
Only trainings that are alike are told apart by their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_spot.fit import earlier
from lightning_spot.fit.fingerprint import Fingerprint
from lightning_spot.image.manifest import Manifest
from lightning_spot.run.location import Location
from lightning_spot.run.survey import Survey

_MOST_RUNS = 1000
_ADVICE = "Give each training a dirpath of its own"
LEAVE_OUT = "If one of them is drawn anew at each start, leave it out: save_hyperparameters(ignore=[…])"
"""What to do against warnings of hyperparameters that differ in each start."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The run of a ``fit``.

    Attributes:
        location: where it is.
        warning: what may be wrong with that; ``""`` if nothing.
        notice: what is worth to be known of it; ``""`` if nothing.
        drawn_anew: whether it is complete, and this training differs from it only in what is taken to be drawn anew at
            each start. That is said when the snapshot is read, with the names of what differs.
    """

    location: Location
    warning: str = ""
    notice: str = ""
    drawn_anew: bool = False


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that is there, by its newest snapshot."""

    location: Location
    newest: Manifest
    theirs: Fingerprint


def select(
    named: Location, mine: Fingerprint, has_more: Callable[[Manifest], bool], look: Callable[[Location], Survey]
) -> Selection:
    """Find the run of the ``fit`` that begins.

    Args:
        named: location that the user named.
        mine: of the training that begins.
        has_more: whether it would train on from such a snapshot.
        look: asks all tiers what they have of the run at a location.
    """
    alike: list[_Run] = []
    others: list[_Run] = []
    for number in range(1, _MOST_RUNS):
        location = earlier.numbered(named, number)
        if earlier.is_finished(location):
            continue
        newest = earlier.complete_at(location)
        if newest is None:
            found = look(location)
            newest = next((manifest for manifest, _ in found.candidates), None)
            if found.durable is None or (newest is None and found.unreadable):
                return Selection(location)  # it may be this one's: that it cannot be told is an error later
        if newest is None:
            return _of_what_is_there(alike, others, mine, has_more, free=location)
        earlier.seen(location, newest)
        theirs = Fingerprint.of_text(newest.fingerprint)
        if theirs is None:
            return Selection(location)
        run = _Run(location, newest, theirs)
        if not theirs.is_alike(mine):
            others.append(run)
        elif not (newest.complete or theirs.has_other_data(mine) or theirs.has_drawn_other(mine)):
            return _first_of([*_of_same_data(alike, mine), run], mine)
        else:
            alike.append(run)
    return _first_of(alike or others, mine)


def _of_what_is_there(
    alike: list[_Run], others: list[_Run], mine: Fingerprint, has_more: Callable[[Manifest], bool], free: Location
) -> Selection:
    """Where no run is beyond these, and ``free`` is the next place."""
    if alike:
        return _first_of(_of_same_data(alike, mine) or alike, mine)
    changed = [run for run in others if run.theirs.model == mine.model and _goes_on(run, mine, has_more)]
    if changed:
        return _first_of_changed(_of_same_data(changed, mine) or changed, mine, len(others))
    for run in others:
        if run.theirs.model != mine.model and not run.newest.complete:
            return Selection(
                run.location,
                f"the snapshots in {run.location.url} are of another training: the class of the model or of the data"
                f" module, or the model's parameters, have changed. {_ADVICE}",
            )
    if not others:
        return Selection(free)
    text = (
        f"the run in {others[0].location.url} is complete, and was {_other(others[0], mine)}: this fit is a run of its"
        f" own, in {free.url}"
    )
    if any(run.theirs.model == mine.model for run in others):
        return Selection(
            free,
            f"{text}. To go on with the finished one, raise max_epochs or max_steps. {LEAVE_OUT}. {_ADVICE}",
        )
    return Selection(free, notice=text)


def _goes_on(run: _Run, mine: Fingerprint, has_more: Callable[[Manifest], bool]) -> bool:
    """Whether a run was not finished, or is now asked for more than it was when it ended, perhaps early."""
    return not run.newest.complete or (has_more(run.newest) and mine.asks_for_more_than(run.theirs))


def _other(run: _Run, mine: Fingerprint) -> str:
    return "trained with other hyperparameters" if run.theirs.model == mine.model else "of another model"


def _of_same_data(runs: list[_Run], mine: Fingerprint) -> list[_Run]:
    return [run for run in runs if not run.theirs.has_other_data(mine)]


def _first_of_changed(runs: list[_Run], mine: Fingerprint, beside: int) -> Selection:
    """Of runs with other hyperparameters, the first. Which ones have changed is said, by name, when it is read."""
    first = _first_of(runs, mine)
    if first.warning or beside == 1:
        return first
    return replace(
        first,
        warning=f"none of {beside} trainings has the hyperparameters of this one, which is taken for that in"
        f" {first.location.url}. If it is not (another fold or trial), the weights are not its own. {_ADVICE}",
    )


def _first_of(runs: list[_Run], mine: Fingerprint) -> Selection:
    """Of several that cannot be told apart, the first: a program that is started again comes by all of them."""
    runs = [run for run in runs if not run.theirs.has_drawn_other(mine)] or runs
    first = runs[0]
    if first.theirs.has_other_data(mine):
        return Selection(
            first.location,
            f"the snapshots in {first.location.url} are of a training like this one, on other data. If it is not this"
            f" one (another fold), the weights are not its own. {_ADVICE}",
        )
    if len(runs) > 1:
        return Selection(
            first.location,
            f"{len(runs)} trainings in {runs[0].location.url} are alike, and this one is taken for the first that this"
            f" process has not done. If the program skips those that are finished, that is wrong. {_ADVICE}",
        )
    is_drawn = first.newest.complete and first.theirs.is_alike(mine) and first.theirs.has_drawn_other(mine)
    return Selection(first.location, drawn_anew=is_drawn)
