"""Starts of a run that ended before they had a snapshot of their own: a resume that fails fails likewise each time."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal, get_args

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_spot.errors import SettingsError, SpotError
from lightning_spot.goodput.records import read_records
from lightning_spot.image.manifest import Manifest
from lightning_spot.run.identity import starts_between
from lightning_spot.run.survey import Survey

logger = logging.getLogger(__name__)

OnResumeFailure = Literal["error", "older"]

_STARTS_EACH = 2
"""How often each snapshot is gone on from, with ``"older"``: one start may have ended for another reason."""


def check_on_resume_failure(value: object) -> OnResumeFailure:
    """Check what the user gave.

    Raises:
        SettingsError: if it is no choice.
    """
    choices = get_args(OnResumeFailure)
    if value not in choices:
        raise SettingsError(f"on_resume_failure={value!r}: it is one of {', '.join(map(repr, choices))}")
    return value  # type: ignore[return-value] # one of them


def without_failed(found: Survey, attempt: int, on_failure: OnResumeFailure) -> Survey:
    """Leave the snapshots out from which resumes have failed, if older ones are to be tried, and say what is done.

    Args:
        found: what the tiers hold.
        attempt: that begins; 0 if it is not known.
        on_failure: what the user wants.
    """
    names = list(dict.fromkeys(manifest.name for manifest, _ in found.candidates))
    failed = _failed_since(found, found.candidates[0][0], attempt) if names else 0
    if not failed:
        return found
    gone = min(failed // _STARTS_EACH, len(names) - 1) if on_failure == "older" else 0
    starts = "1 start of this run has" if failed == 1 else f"{failed} starts of this run have"
    if gone:
        way_on = "Pass resume=False to start afresh"
    elif len(names) == 1:
        way_on = "No older snapshot is there: pass resume=False to start afresh if this start fails, too"
    elif on_failure == "older":
        way_on = f"The next start tries an older one, {names[1]}"
    else:
        way_on = "If this start fails, too, pass on_resume_failure='older' to try the one before, or resume=False"
    again = names[gone] if gone else "it again"
    rank_zero_warn(
        f"lightning_spot: {starts} ended without a snapshot since {names[0]}. This one goes on from {again}. {way_on}"
    )
    left_out = set(names[:gone])
    answers = [
        (source, replace(holdings, manifests=[each for each in holdings.manifests if each.name not in left_out]))
        for source, holdings in found.answers
    ]
    return replace(found, answers=answers)


def _failed_since(found: Survey, newest: Manifest, attempt: int) -> int:
    """How many attempts have ended since a snapshot was taken, and had none: not those that a notice ended."""
    count = starts_between(newest.attempt, attempt) - 1
    if count < 1:
        return 0
    try:
        records = read_records(found.location.url)
    except SpotError as error:  # a record is no condition of a resume
        logger.debug("lightning_spot: records of attempts cannot be read: %s", error)
        return count
    others = [
        record
        for record in records
        if newest.attempt < record.attempt < attempt and (record.end in ("preempted", "complete") or record.snapshots)
    ]
    return max(0, count - len(others))
