"""What memory nodes would do for a run, tried before there is one: no snapshot is left anywhere."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from lightning_spot.client.remote import NodeStore
from lightning_spot.memory.runs import RunInfo, run_text


def why_not_carried(node: str, durable_url: str) -> str:
    """Why a node would not bring runs to a durable directory, ``""`` if it would.

    Args:
        node: its URL.
        durable_url: below which, or at which, runs are to be durable.

    Raises:
        SpotError: if it does not answer.
    """
    run = RunInfo(
        name="doctor", id=secrets.token_hex(6), location="", attempt=1, token="", durable_url=durable_url, spread=True
    )
    store = NodeStore(f"{node.rstrip('/')}/{run_text(run.name, run.id)}")
    try:
        return store.open_run(run).why_not
    finally:
        store.open_run(replace(run, durable_url=None, carry=False))  # nothing is brought there for it any more


def together(nodes: Sequence[str], speed: Callable[[str], float]) -> float:
    """Bytes per second that several nodes take at the same time.

    Args:
        nodes: their URLs.
        speed: bytes per second that one takes.
    """
    with ThreadPoolExecutor(len(nodes)) as pool:
        return sum(pool.map(speed, nodes))
