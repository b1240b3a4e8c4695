"""Which snapshot servers a run goes to: rendezvous hashing, so that runs spread over servers with nobody to ask."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def placed(servers: Iterable[str], run_id: str) -> tuple[str, ...]:
    """The servers by a run's preference: it goes to the first, or the first few, that work.

    It depends on the names only, not on which is given first: every host of a run finds the same.
    Each server is the first of about as many runs as any other. One that is added takes its part of them from all the
    others and moves nothing else; the runs of one that fails go to all the others in equal parts.

    Args:
        servers: ``spot://host:port`` of each.
        run_id: identity of the run.
    """
    return tuple(sorted(servers, key=lambda server: (_weight(server, run_id), server), reverse=True))


def placed_apart(servers: Iterable[str], run_id: str, hosts: int, replicas: int) -> list[tuple[str, ...]]:
    """For each of several hosts, the servers by the preference of its shards of a snapshot.

    Each host has a preference of its own, by rendezvous hashing. But a server is the first choice of no more hosts
    than its even part of them, with each replica: with few hosts, chance alone would leave one with far more than
    another, and its memory is what bounds the snapshot. Everybody who is given the same finds the same.

    Args:
        servers: all that may be used, sorted or not.
        run_id: identity of the run.
        hosts: how many have shards of a snapshot.
        replicas: how many servers each shard is kept at.
    """
    servers = sorted(servers)
    replicas = min(replicas, len(servers))
    room = dict.fromkeys(servers, -(-hosts * replicas // len(servers))) if servers else {}
    found: list[tuple[str, ...]] = []
    for host in range(hosts):
        preferred = placed(servers, f"{run_id}\n{host}")
        left = hosts - host  # who has room for each of these gets this one, or would not fill up
        chosen = sorted(preferred, key=lambda server: (room[server] <= 0, room[server] < left))[:replicas]
        for server in chosen:
            room[server] -= 1
        found.append((*chosen, *(server for server in preferred if server not in chosen)))
    return found


def _weight(server: str, run_id: str) -> bytes:
    return hashlib.blake2b(f"{server}\n{run_id}".encode(), digest_size=8).digest()
