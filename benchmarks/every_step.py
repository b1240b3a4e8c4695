"""GPT-2 of 124 million parameters with AdamW, 1.5 GB, a snapshot at every step, in turns with none in one training.

Once as it is by default: durable at its own pace, some of them brought to the disk. Once with each brought there that
the disk can take. Once with them kept in memory: what writing to the disk costs is the difference.
"""

from __future__ import annotations

from typing import Any

from benchmarks.measure import Result
from benchmarks.partitions import NONE, added, measure, steps_of

NEEDS = ("transformers",)
WAYS = (NONE, "blocking", "eager")
PLACES: dict[str, dict[str, Any]] = {
    "durable at its own pace": {},
    "each to the disk": {"min_upload_interval_s": 0.0},
    "in memory only": {"min_upload_interval_s": 3600.0},
}


def run(quick: bool) -> list[Result]:
    from benchmarks.peers import models  # needs transformers

    rounds = 2 if quick else 6
    results = []
    for place, settings in PLACES.items():
        model, data = models.build("gpt2", "small" if quick else "full", steps_of(WAYS, rounds))
        clock = measure(model, data, WAYS, rounds, **settings)
        for way, values in added(clock, rounds).items():
            longer, waited = map(list, zip(*values, strict=True))
            name = f"GPT-2, a snapshot at every step {place}, {way}"
            results.append(Result(f"{name}: longer step", longer, 5.0, unit="%"))
            results.append(Result(f"{name}: waiting in hooks", waited, None, unit="%"))
    return results
