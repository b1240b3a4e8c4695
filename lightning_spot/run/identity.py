"""Decides which run a trainer goes on with and which attempt it is, from what tiers answered. Pure: no tier is asked.

A run has a random id, made by its first attempt. It is kept in the claims of storage, in manifests and at
servers, so that two runs whose paths end alike are never taken for one, and a copied directory is a run of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from lightning_spot.config import HIGHEST_ATTEMPT, LARGEST
from lightning_spot.errors import SettingsError
from lightning_spot.store.fences import Claim
from lightning_spot.untrusted import FileName, Line, whole

JUMP = 1000
"""Attempts left free above everything seen when storage could not be read: what it holds lies below."""


def new_id() -> str:
    """A random identity of a run or a lineage: 12 hexadecimal digits."""
    return secrets.token_hex(6)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRun:
    """A run as a server lists it.

    Attributes:
        name: for people.
        id: its identity.
        location: its durable directory, see :attr:`~lightning_spot.run.location.Location.canonical`.
        attempt: highest attempt the server knows of.
        host: name of the machine that trained it; ``""`` if the server does not know, or is on this machine.
        live: whether its trainer is on the server's host, and is connected to it.
    """

    name: FileName
    id: FileName = ""
    location: Line = ""
    attempt: Annotated[int, whole(0, LARGEST)] = 0
    host: Line = ""
    live: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Which run it is.

    Attributes:
        run_id: 12 hexadecimal digits.
        copied_from: location of the run whose directory was copied here; ``""`` if it was not.
        unsure: a run of a directory of this path on another machine: this one, or a stranger's; ``None`` if there is
            none, or tiers answered which run this is.
    """

    run_id: str
    copied_from: str = ""
    unsure: ServerRun | None = None


def identify(
    *,
    location: str,
    inode: int,
    claim: Claim | None,
    runs: Sequence[ServerRun],
    host: str,
    named: bool,
    make_id: Callable[[], str] = new_id,
) -> Identity:
    """Decide which run the directory at ``location`` is.

    Args:
        location: of the directory, in its canonical form.
        inode: of its attempts directory, 0 where there is none.
        claim: newest claim in it, if there is one.
        runs: what servers hold.
        host: name of this machine.
        named: whether the user named the run, who then answers for it.
        make_id: makes the identity of a new run.
    """
    if claim is not None and claim.run_id:
        moved = inode != 0 and claim.inode == inode
        if claim.location == location or moved:
            return Identity(run_id=claim.run_id)
        return Identity(run_id=make_id(), copied_from=claim.location)
    # No claims: never there, or expired by a lifecycle rule. A server that holds a run of this very place knows.
    here = sorted((run for run in runs if run.id and run.location == location), key=lambda run: run.attempt)
    # But a directory of this path on another machine is another place, unless its disk was lost with that machine.
    sure = [run for run in here if named or not location.startswith("file://") or run.host in ("", host)]
    if sure:
        return Identity(run_id=sure[-1].id)
    return Identity(run_id=make_id(), unsure=here[-1] if here else None)


def next_attempt(seen: Iterable[int], *, durable_was_read: bool) -> int:
    """Number of the next attempt.

    Args:
        seen: attempts seen at the tiers that answered: of claims, names of snapshots, manifests and runs at servers.
        durable_was_read: whether storage was among them; otherwise the number lies above what it may hold.

    Raises:
        SettingsError: if there is no such number: a snapshot of it would have a name that nobody finds again.
    """
    number = max(seen, default=0) + (1 if durable_was_read else JUMP)
    if number > HIGHEST_ATTEMPT:
        raise SettingsError(
            f"the next attempt would be {number}, above the highest number, {HIGHEST_ATTEMPT}. Move the claim in"
            " attempts/, or the snapshot, that has such a number away, or choose another dirpath"
        )
    return number


def starts_between(earlier: int, attempt: int) -> int:
    """How often a run was started after attempt ``earlier``, ``attempt`` included.

    Each start takes the next number, or one far above what was seen where storage could not be read.
    """
    jumps, steps = divmod(max(0, attempt - earlier), JUMP)
    return jumps + steps
