"""What all ranks must have in common: versions, and what our callbacks were told.

Ranks talk to each other at steps that each of them finds by itself. Where two find others, both would wait for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_spot.capture.attempt import versions
from lightning_spot.errors import SettingsError
from lightning_spot.fit.agreement import Agreement
from lightning_spot.fit.taking_part import parts_of

if TYPE_CHECKING:
    import lightning.pytorch as pl


def check_alike(trainer: pl.Trainer) -> None:
    """Refuse ranks that differ. Every rank calls it, before any other word; the same error is raised on all.

    Raises:
        SettingsError: naming the first difference.
    """
    ranks = Agreement(trainer)
    if ranks.size == 1:
        return
    first, *others = ranks.gather(_facts(trainer))
    for rank, facts in enumerate(others, start=1):
        for name in dict.fromkeys((*first, *facts)):
            here, there = first.get(name, "none"), facts.get(name, "none")
            if here != there:
                raise SettingsError(
                    f"all ranks must be alike, and {name} is {here} on rank 0 and {there} on rank {rank}: install the"
                    " same versions everywhere, and start all ranks with the same program and settings"
                )


def _facts(trainer: pl.Trainer) -> dict[str, str]:
    """What has to be the same on all ranks, for people; what only rank 0 decides by is not asked."""
    parts = list(parts_of(trainer))
    facts = {f"the version of {package}": version for package, version in versions().items()}
    facts["the list of our callbacks"] = ", ".join(type(part).__name__ for part in parts if hasattr(part, "in_common"))
    for part in parts:
        for name, value in getattr(part, "in_common", dict)().items():
            facts[f"{type(part).__name__}({name}=…)"] = str(value)
    return facts
