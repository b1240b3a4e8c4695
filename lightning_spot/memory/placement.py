"""Which memory nodes a run goes to: rendezvous hashing, so that runs spread over nodes with nobody to ask."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def placed(nodes: Iterable[str], run_id: str) -> tuple[str, ...]:
    """The nodes in the order in which a run goes to them: to the first, or the first few, that work.

    The order depends on the names only, not on the order in which they are given: every host of a run finds the same.
    Each node is the first of about as many runs as any other. One that is added takes its part of them from all the
    others and moves nothing else; the runs of one that fails go to all the others in equal parts.

    Args:
        nodes: ``spot://host:port`` of each.
        run_id: identity of the run.
    """
    return tuple(sorted(nodes, key=lambda node: (_weight(node, run_id), node), reverse=True))


def _weight(node: str, run_id: str) -> bytes:
    return hashlib.blake2b(f"{node}\n{run_id}".encode(), digest_size=8).digest()
