"""Has what is about to be read sealed first. Not for how."""

from __future__ import annotations

import asyncio

from lightning_spot.memory.node import Node


async def have_sealed(node: Node, run: str) -> None:
    """Seal what a node holds of a run.

    Args:
        node: that holds it.
        run: key of the run.
    """
    if any(slot.unsealed for slot in node.ring.committed(run)):
        await asyncio.to_thread(node.seal_committed, run)
