"""One of the nodes that a run is to be kept at, as the chain to them knows it. No decisions."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_spot.memory.next_node import NextNode

FIRST_LOOK_S = 0.1


@dataclass(eq=False, slots=True)
class Replica:
    """One of the nodes that a run is to be kept at.

    Attributes:
        node: which one it is now; ``None`` while none works.
        trying: the one that is being asked whether it works; no other replica asks it meanwhile.
        doubted: whether something is to be asked of it at once.
        is_behind: whether it is to be let go, see :class:`~lightning_spot.memory.chain.LeftBehind`.
        look_s: until it is asked next what is durable.
    """

    node: NextNode | None = None
    trying: NextNode | None = None
    doubted: bool = False
    is_behind: bool = False
    look_s: float = FIRST_LOOK_S
