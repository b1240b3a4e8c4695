"""How often and how long tiers are asked when an attempt begins."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Bounds.

    Attributes:
        tries: how often the durable tier is asked before it counts as unreadable, at least 1.
        first_pause_s: between the first two tries; it doubles.
        no_more_tries_after_s: no try begins later than this.
        answer_s: how long all answers together are waited for.
    """

    tries: int = 3
    first_pause_s: float = 2.0
    no_more_tries_after_s: float = 20.0
    answer_s: float = 60.0


PATIENCE = Patience()
"""What holds unless a caller says otherwise."""
