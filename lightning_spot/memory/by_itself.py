"""Where each host brings its part of a snapshot by itself, and asks no other one: what such places have in common."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_spot.errors import FailureReason, SettingsError, SnapshotFailedError
from lightning_spot.image.files import FileSpan, check_zero, pieces
from lightning_spot.image.manifest import snapshot_order
from lightning_spot.image.portion import Image
from lightning_spot.image.written import Ranges
from lightning_spot.memory.joint import Shared
from lightning_spot.memory.tier import Gathering


class ByItself:
    """Begins snapshots as such a :class:`~lightning_spot.memory.tier.JointTier` does."""

    def begin(self, shared: Shared, nbytes: int, *, attempt: int, hosts: int) -> Gathering:
        """See :meth:`JointTier.begin`. Every host begins by itself, and asks nobody."""
        if snapshot_order(shared.name) is None or hosts < 1 or attempt < 1:
            raise SettingsError(f"{shared.name!r} of attempt {attempt} is no snapshot that {hosts} hosts bring")
        return Gathering(shared.name, nbytes, None, shared)

    def join(self, name: str, *, attempt: int, host: int, wait_s: float) -> Gathering:
        """See :meth:`JointTier.join`. There is nobody to ask."""
        raise SnapshotFailedError(
            f"host {host} was not told what of {name} (attempt {attempt}) is its own within {wait_s} s",
            reason=FailureReason.SHARE_MISSING,
        )


def check_gaps(image: Image, ranges: Ranges, files: Sequence[FileSpan]) -> None:
    """Check that what a host has beside its files is zero, as it is when they are read.

    Args:
        image: as far as it is here.
        ranges: that the host brings.
        files: that are cut out of them.

    Raises:
        CorruptSnapshotError: if it is not zero.
    """
    for start, nbytes in ranges:
        for span, first, last in pieces(files, start, start + nbytes):
            if span is None:
                check_zero(image[first:last])
