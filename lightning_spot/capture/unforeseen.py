"""Errors that nobody has foreseen, on the thread that trains: they cost a snapshot and not the training.

What the user's own code raises is none of these. Lightning raises it when it saves a checkpoint, and so do we.
"""

from __future__ import annotations

import logging
import sys
from types import TracebackType

from lightning_spot.errors import SnapshotFailed, SpotError

logger = logging.getLogger(__name__)

_OURS = frozenset(
    (
        *("lightning_spot", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"),
        *("torch", "torchmetrics", "numpy", "xxhash", "backports", "rich"),
        *("aiohttp", "yarl", "multidict", "fsspec", "s3fs", "aiobotocore", "botocore", "gcsfs", "adlfs", "ossfs"),
    )
)
"""Packages that work for us. With Python's own modules, whatever else is on the way to an error is the user's."""


def failure_of(error: Exception) -> SpotError:
    """What an error means that came up while a snapshot was taken: that there is none now.

    Args:
        error: that was just caught.

    Returns:
        the error itself where it is one of ours; else what says the same.

    Raises:
        Exception: the error itself, if code of the user's has raised it, or what that has called.
    """
    if not isinstance(error, SpotError) and is_of_user(error):
        raise error
    return as_failure(error)


def as_failure(error: Exception) -> SpotError:
    """The same where none of the user's code is at work."""
    if isinstance(error, SpotError):
        return error
    logger.debug("a snapshot could not be taken", exc_info=error)
    text = str(error)
    failure = SnapshotFailed(f"{type(error).__name__}: {text}" if text else type(error).__name__)
    failure.__cause__ = error.with_traceback(None)  # its frames would keep tensors alive
    return failure


def is_of_user(error: BaseException) -> bool:
    """Whether, where an error was raised, code was at work that is neither ours nor of what we build on."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in _OURS and name not in sys.stdlib_module_names:
            return True
        trace = trace.tb_next
    return False
