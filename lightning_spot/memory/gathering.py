"""An upload that several hosts have sent: whether all of it is there, before it is sealed."""

from __future__ import annotations

import contextlib
import socket
import time

from lightning_spot.errors import CorruptSnapshot
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.portion import is_whole
from lightning_spot.memory.upload import Upload

_CLOSE_S = 10.0
_LOOK_S = 0.01


def gather(upload: Upload, manifest: Manifest) -> None:
    """Check that every byte has come once, and that nothing more can come.

    Args:
        upload: being sealed, so that no further frame is begun.
        manifest: of the snapshot.

    Raises:
        CorruptSnapshot: otherwise.
    """
    _end_streams(upload)
    if manifest.nbytes != upload.nbytes:
        raise CorruptSnapshot(f"{manifest.name} has {manifest.nbytes} bytes, this upload was for {upload.nbytes}")
    if not is_whole(upload.received.close(), upload.nbytes):
        raise CorruptSnapshot(f"what the hosts have sent of {manifest.name} is not every byte of it once")


def _end_streams(upload: Upload) -> None:
    """All hosts have said that they are done: what still comes is a mistake, and must not come in unseen."""
    deadline_s = time.monotonic() + _CLOSE_S
    while streams := list(upload.streams):
        for connection in streams:
            with contextlib.suppress(OSError):  # it was closed meanwhile
                connection.shutdown(socket.SHUT_RDWR)
        if time.monotonic() > deadline_s:
            raise CorruptSnapshot(f"hosts are still sending {upload.name}, and have said that they are done")
        time.sleep(_LOOK_S)
