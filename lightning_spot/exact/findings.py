"""What of a resume is not exact: one message for all that is known when training begins, with one finding a line."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from lightning_spot.say import say


def say_not_exact(findings: Iterable[str]) -> None:
    """Log what is not exact, if there is anything, on rank 0.

    Args:
        findings: each a cause, what follows, and what to do.
    """
    if found := tuple(dict.fromkeys(findings)):
        text = "a resume is not exact in these points, of which each says what to do:{about}"
        lines = "".join(f"\n  - {each}" for each in found)
        say(logging.WARNING, "not-exact", text, about=lines, only_rank_zero=True, findings=found)
