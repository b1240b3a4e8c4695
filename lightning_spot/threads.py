"""Work that several threads take pieces of: as many as can be had, the calling one among them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


def work_together(work: Callable[[], None], count: int, name: str) -> None:
    """Call ``work`` on this thread and up to ``count - 1`` others; returns when all calls have returned.

    Where no more threads can be had (a limit of processes was reached), those that are there do all of it.

    Args:
        work: takes pieces until none is left.
        count: threads at most.
        name: of the others.

    Raises:
        BaseException: what a call has raised, that on this thread first.
    """
    failures: list[BaseException] = []

    def help_out() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    helpers: list[threading.Thread] = []
    try:
        for _ in range(count - 1):
            helper = threading.Thread(target=help_out, name=name, daemon=True)
            try:
                helper.start()
            except RuntimeError as error:
                logger.debug("%d threads instead of %d: %s", len(helpers) + 1, count, error)
                break
            helpers.append(helper)
        work()
    finally:
        for helper in helpers:
            helper.join()
    if failures:
        raise failures[0]
