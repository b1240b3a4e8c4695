"""Whether a run would be well at a node now."""

from __future__ import annotations

from lightning_spot.memory.node import Node
from lightning_spot.memory.slots import SlotState


def not_ready(node: Node) -> list[str]:
    """Why a run would not be well at a node now, in words that tell a stranger nothing; empty if it would."""
    reasons = ["shutting down"] if node.draining or node.closing else []
    slots = list(node.ring.slots)
    if slots and all(slot.state is SlotState.FILLING or slot.dirty for slot in slots):
        reasons.append("memory is full")
    if any(health.error for health in list(node.flusher.health.values())):
        reasons.append("a tier below is failing")
    return reasons
