"""How many files a program may have open: each connection is one."""

from __future__ import annotations

import contextlib
import logging
import os
import resource

logger = logging.getLogger(__name__)

_UNLIMITED = 2**30


def allow_descriptors(more: int) -> None:
    """Let this process open so many files more, as far as it may raise its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = more
    with contextlib.suppress(OSError):  # where nothing shows what is open
        wanted += len(os.listdir("/proc/self/fd"))
    wanted = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            logger.debug("the limit of open files stays at %d: %s", soft, error)


def open_files() -> int:
    """How many files this process may have open at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft
