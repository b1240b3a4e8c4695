"""Which of the memory nodes that a user named are on this very machine: where each host is a node for the others."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Sequence

from lightning_spot.protocol.wire import parse_spot_url

logger = logging.getLogger(__name__)


def elsewhere(nodes: Sequence[str], replicas: int) -> tuple[str, ...]:
    """The nodes that outlive this machine; all of them if none does. A node at a loopback address counts as one.

    Args:
        nodes: ``spot://host:port`` of each.
        replicas: how many are wanted; fewer are said.
    """
    found = tuple(node for node in nodes if not is_here(parse_spot_url(node)[0].host))
    if len(found) < min(replicas, len(nodes)):
        logger.warning(
            "lightning_spot: replicas=%d, and %d of the memory nodes are on other machines (%s): a node here goes with"
            " this machine",
            replicas,
            len(found),
            ", ".join(found) or "none",
        )
    return found or tuple(nodes)


def is_here(host: str) -> bool:
    """Whether a host's name or address is one of this machine, other than loopback; what cannot be told is not."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_DGRAM)
    except OSError as error:
        logger.debug("%s cannot be looked up: %s", host, error)
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> bool:
    if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        return False
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)  # port 0: only what this machine has can be bound
    except OSError:
        return False
    return True
