"""What is logged where snapshots are missed or waited for."""

from __future__ import annotations

import logging

from lightning_spot.capture.host_link import HostLink
from lightning_spot.errors import SnapshotFailedError
from lightning_spot.memory.tier import TierHealth
from lightning_spot.say import recovered, say

SAY_S = 10.0
"""A longer wait is logged, with its reason."""


def say_waiting(link: HostLink, full: SnapshotFailedError, left_s: float) -> None:
    """Log that training waits for a slot, and what fails meanwhile."""
    text = "training waits for a slot, for up to {left_s:.0f} s more: {error}. Increase slots= or the interval."
    say(logging.WARNING, "slot-awaited", text, left_s=left_s, error=full)
    say_failing(link)


def say_failing(link: HostLink) -> None:
    """Log what a server logs in its own file only: a tier fails, refuses this attempt, or lost a snapshot."""
    nothing: dict[str, TierHealth] = {}
    for url, tier in link.ask(lambda host: host.tiers(), nothing).items():
        if tier.error:
            text = "{about} fails ({why}). The local server retries; snapshots stay in memory meanwhile. Check it."
            say(logging.WARNING, "upload-failing", text, about=url, why=tier.error)
        else:
            recovered("upload-failing", "{about} works again", about=url)
        if tier.refused:
            text = "{about} takes no more snapshots of this attempt: {why}. End this trainer."
            say(logging.WARNING, "attempt-refused", text, about=url, why=tier.refused)
        if tier.silent:
            text = "{why}. The local server has closed that connection and retries. Check the network."
            say(logging.WARNING, "storage-silent", text, about=url, why=tier.silent)
        if tier.dropped:
            text = "{why}. {about} is dropped; the snapshot before it counts. Check the memory of this host."
            say(logging.ERROR, "snapshot-dropped", text, about=tier.dropped_name, why=tier.dropped)
