"""Threads beside training on which torch computes by itself, without a team of more threads."""

from __future__ import annotations

import threading
from typing import Any

import torch


def compute_alone() -> None:
    """Have torch compute without a team on the calling thread.

    That becomes the default of threads that torch meets for the first time afterwards, too: see :class:`LoneThread`.
    """
    torch.get_num_threads()  # sets this thread up with the default; torch would do so later, and undo the next line
    torch.set_num_threads(1)


class LoneThread(threading.Thread):
    """A daemon thread on which torch never starts a team of its own.

    A second team does harm as long as it exists, even where it is idle. GNU's OpenMP counts the threads of all teams,
    and when these are more than the processors, no team waits actively any more (``gomp_managed_threads``, ``wait.h``
    of libgomp): the threads of training then sleep and are woken for each operation, which took up to half as long
    again for small models.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(daemon=True, **settings)
        self._is_alone = threading.Event()

    def start(self) -> None:
        """Start it, and return when torch computes alone there."""
        default = torch.get_num_threads()
        super().start()
        self._is_alone.wait()
        torch.set_num_threads(default)  # torch keeps the number for each thread, but the last one set is the default

    def run(self) -> None:
        """What the thread does: what it was given, alone."""
        compute_alone()
        self._is_alone.set()
        super().run()
