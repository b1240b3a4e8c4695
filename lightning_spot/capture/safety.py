"""Brings what is committed to safety before a deadline, and says how it went."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from lightning_spot.capture.writer import SnapshotWriter
from lightning_spot.config import format_bytes
from lightning_spot.errors import SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.interval.costs import Failure, TierPace
from lightning_spot.interval.deadline import Deadline, DeadlinePlan, plan_urgent
from lightning_spot.memory.health import TierHealth
from lightning_spot.memory.joint import nodes_of

_POLL_S = 0.05
_NOTICES_S = 15.0  # a node on this host notices in this time, too, that the memory node is lost


class Safety:
    """What is safe outside this machine, and how soon more can be.

    Args:
        writer: of the snapshots.
        durable_every_s: least seconds between two snapshots brought to the durable tier.
    """

    def __init__(self, writer: SnapshotWriter, durable_every_s: float = 0.0) -> None:
        self._writer = writer
        self._durable_every_s = durable_every_s

    def plan(self, deadline: Deadline | None) -> DeadlinePlan:
        """Plan an urgent snapshot of the size of the last one (any size fits if there was none).

        Args:
            deadline: that it has to meet, ``None`` for none.
        """
        left_s = deadline.left_s if deadline is not None and deadline.is_named else None
        newest = self._writer.committed
        nbytes = newest.nbytes if newest is not None else 0
        nbytes = self._writer.across.own_nbytes or nbytes  # each host sends its own at the same time
        tiers = self._writer.link.ask(lambda host: host.tiers(), None)
        if tiers is None:
            return plan_urgent(nbytes, left_s, {})
        safe_step = self._safe_step(self._writer.link.ask(lambda host: host.safe_step(), None))
        speeds = {
            url: tier.flushed_bytes / tier.flush_s for url, tier in tiers.items() if tier.flush_s and not tier.carried
        }
        at = self._writer.across.at
        carrier = self._writer.link.ask(lambda host: host.carrier(), at).partition(" ")[0]
        is_lost = bool(at) and carrier not in at.split()
        # What is committed and not safe yet goes first; where only a lost memory node had it, the one before it.
        waits = newest is not None and (is_lost or safe_step < newest.step)
        return plan_urgent(nbytes, left_s, speeds, waiting_bytes=nbytes if waits else 0)

    def usual_s(self) -> float | None:
        """Measured seconds until a snapshot is safe; ``None`` before any was."""
        return self.plan(None).expected_s if self._writer.committed is not None else None

    def paces(self) -> tuple[TierPace, ...]:
        """How fast each working tier takes snapshots, as measured."""
        return paces_of(self._writer.link.ask(lambda host: host.tiers(), {}), self._durable_every_s)

    def bring(
        self,
        deadline: Deadline,
        plan: DeadlinePlan,
        cut_short: Callable[[], bool],
        again: Callable[[], None] | None = None,
    ) -> str:
        """Wait until the newest snapshot is committed, and safe at one tier below.

        Args:
            deadline: how long to wait at most.
            plan: what was expected.
            cut_short: asked while waiting: whether to give up at once.
            again: takes the newest snapshot once more, if it was dropped; ``None`` if that is not possible.

        Returns:
            one line for people.
        """
        started_s = time.monotonic()
        writer = self._writer
        of = f" of {deadline.end_s - started_s:.0f} s" if deadline.is_named else ""
        writer.settle(deadline.left_s)
        newest = writer.committed
        if newest is None:
            return "no snapshot of this attempt is committed; the run resumes from what an earlier one left"
        what = f"step {newest.step} ({format_bytes(newest.stored_bytes)})"
        if not plan.take:
            what = f"a new snapshot would take {plan.expected_s or 0:.0f} s to be safe, too long; the newest is {what}"
        if lost := self._lost(newest, deadline):
            return f"{what} is not known to be safe: {lost}; {self._bring_older(deadline, cut_short)}"
        nothing_owed = False
        while not cut_short():
            try:
                if self._safe_step(writer.host.safe_step() if writer.host is not None else None) >= newest.step:
                    return f"{what} is safe in {time.monotonic() - started_s:.1f} s{of}"
                if nothing_owed and (why := self._why_dropped(newest)):
                    if again is None:
                        return f"{what} was dropped ({why}); the run resumes from the snapshot before it"
                    again()
                    again = None
                    writer.settle(deadline.left_s)
                if nothing_owed and (why := self._why_refused()):
                    return f"{what} was refused ({why})"
                # Failing tiers are tried now.
                nothing_owed = writer.host is not None and not writer.host.flush(_POLL_S)
            except SpotError as error:
                return f"{what} is committed in memory; the memory node does not answer ({error})"
            if deadline.left_s == 0:
                break
            time.sleep(_POLL_S)
        return f"{what} is committed in memory, and safe nowhere else after {time.monotonic() - started_s:.1f} s{of}"

    def _lost(self, newest: Manifest, deadline: Deadline) -> str:
        """Where the newest snapshot was, if only a memory node had it that is not known to have it now; else ``""``."""
        across = self._writer.across
        if not across.at:
            return ""
        why = across.why_lost(newest.name, deadline.left_s / 2)  # the rest is for what this host has
        return f"{across.at}, which had it, {why}" if why else ""

    def _bring_older(self, deadline: Deadline, cut_short: Callable[[], bool]) -> str:
        """Wait until what this host has is safe: it is owed again when its node notices that the memory node is lost.

        Returns:
            what is safe, for people.
        """
        link, carrier = self._writer.link, nodes_of(self._writer.across.at)[0]
        give_up_s = time.monotonic() + _NOTICES_S
        owed = True
        while owed and deadline.left_s > 0 and not cut_short():
            now = link.ask(lambda host: host.carrier(), carrier).partition(" ")[0]
            noticed = now != carrier or time.monotonic() > give_up_s
            owed = bool(link.ask(lambda host: host.flush(_POLL_S), ["unknown"])) or not noticed
            time.sleep(_POLL_S)
        safe_step = link.ask(lambda host: host.safe_step(), None)
        if safe_step is None:
            return "no other snapshot of this attempt is known to be safe"
        return f"step {safe_step} is safe"

    def _why_dropped(self, newest: Manifest) -> str:
        """Why the newest snapshot was dropped instead of being brought anywhere; ``""`` if it was not."""
        nothing: dict[str, TierHealth] = {}
        tiers = self._writer.link.ask(lambda host: host.tiers(), nothing)
        return next((tier.dropped for tier in tiers.values() if newest.name in tier.dropped), "")

    def _why_refused(self) -> str:
        """Why a tier takes nothing of this attempt any more, for good; ``""`` if none does so."""
        nothing: dict[str, TierHealth] = {}
        tiers = self._writer.link.ask(lambda host: host.tiers(), nothing)
        return next((tier.refused for tier in tiers.values() if tier.refused), "")

    def _safe_step(self, from_memory: int | None) -> int:
        """Newest step that is safe outside this machine, -1 if none is.

        Args:
            from_memory: as the ring knows it, ``None`` if it knows none.
        """
        past = self._writer.past_memory
        return max(-1 if from_memory is None else from_memory, past.step if past is not None else -1)


def paces_of(tiers: Mapping[str, TierHealth], durable_every_s: float = 0.0) -> tuple[TierPace, ...]:
    """How fast each working tier takes snapshots; a memory node counts as fast until it has taken one.

    Args:
        tiers: how each is doing, by its URL.
        durable_every_s: least seconds between two snapshots brought to the durable tier.
    """
    working = [tier for tier in tiers.values() if not tier.error and not tier.carried]
    paces = [
        TierPace(drain_s=tier.drain_s, survives=Failure.MACHINE)
        if tier.kind == "node"
        else TierPace(drain_s=max(tier.drain_s, durable_every_s), survives=Failure.NODE)
        for tier in working
        if tier.flushed
    ]
    if any(tier.kind == "node" for tier in working) and all(pace.survives == Failure.NODE for pace in paces):
        paces.append(TierPace(drain_s=0.0, survives=Failure.MACHINE))
    return tuple(paces)
