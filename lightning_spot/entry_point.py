"""What Lightning adds to each Trainer where ``LIGHTNING_SPOT`` is set: snapshots without a change of the program.

Every Trainer of an environment in which this package is installed calls it: it imports what it needs only then.
"""

from __future__ import annotations

from typing import Any

from lightning_spot.config import requested_run


def callbacks() -> list[Any]:
    """A :class:`SpotCheckpoint` for the run that ``LIGHTNING_SPOT`` names; none where it is not set.

    Raises:
        SettingsError: if it, or ``LIGHTNING_SPOT_SERVERS``, cannot be used.
    """
    if (run := requested_run()) is None:
        return []
    from lightning_spot.callbacks.spot_checkpoint import RequestedSpotCheckpoint

    dirpath, servers = run
    return [RequestedSpotCheckpoint(dirpath, servers=servers)]
