"""Whether a run would be well at a node now."""

from __future__ import annotations

from lightning_spot.memory.node import Node


def not_ready(node: Node) -> list[str]:
    """Why a run would not be well at a node now, in words that tell a stranger nothing; empty if it would."""
    reasons = ["shutting down"] if node.draining or node.closing else []
    if node.ring.full:
        slots, most = node.ring.files
        enough = slots < most
        reasons.append("memory is full" if enough else f"{slots} of {most} slots are in use, as open files allow")
    if any(health.error for health in list(node.flusher.health.values())) or node.uploads.abroad.bringing.failing():
        reasons.append("a tier below is failing")
    return reasons
