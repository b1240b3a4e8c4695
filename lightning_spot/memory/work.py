"""What each tier below still has to be done: which snapshot it takes next, what is to be deleted, what has failed."""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_spot.image.coming import Coming
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.sealing import Sealing
from lightning_spot.memory import later
from lightning_spot.memory.backoff import BackOff
from lightning_spot.memory.later import Later
from lightning_spot.memory.ring import Ring
from lightning_spot.memory.runs import RunInfo, key_of
from lightning_spot.memory.slots import Slot

FOLLOWED_S = 5.0
"""A snapshot counts as followed if another one is to come within so many seconds, and for no longer than that."""

MOST_APART_S = 30.0
"""The durable tier takes one of the snapshots that follow each other in moments at least so often, if it is as fast."""

LEFT_S = 35.0
"""A run counts as left by its trainer if its host has not asked for so long how this node is: it does every 10 s."""

_APART = 40  # times as long as it takes one: so much less does it cost training


class Kind(enum.Enum):
    """What is to be done at a tier."""

    DELETE = "delete"
    RETAIN = "retain"
    PUT = "put"


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to do at a tier.

    Attributes:
        kind: what.
        run: key of the run.
        manifest: of the snapshot it is about.
        slot: that holds it, to be put.
        coming: if it is not committed yet, but its parts may go already.
        sequence: of the commit that is put.
    """

    kind: Kind
    run: str
    manifest: Manifest
    slot: Slot | None = None
    coming: Coming | None = None
    sequence: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        """What failures are counted under."""
        return (self.kind.value, self.run, "" if self.kind is Kind.RETAIN else self.manifest.name)


@dataclass(eq=False, slots=True)
class _Deletion:
    """Something to be deleted at a tier.

    Attributes:
        manifest: what.
        behind: what of its run was owed there when this was asked for, name and commit: it is put first.
    """

    manifest: Manifest
    behind: dict[str, int]


class Work:
    """The work of all tiers. Every method is called under the ring's lock.

    Args:
        ring: what is committed, and owed where.
        run: what is known of a run, by its key.

    Attributes:
        leaves_s: since when this node is about to end (monotonic), ``None`` if it is not. What it has of snapshots that
            are not known to be whole is waited for, too: nobody may be left to say so.
    """

    def __init__(self, ring: Ring, run: Callable[[str], RunInfo | None]) -> None:
        self.leaves_s: float | None = None
        self._ring = ring
        self._run = run
        self._deletions: dict[str, list[_Deletion]] = {}
        self._retentions: dict[str, dict[str, Manifest]] = {}
        self._backoffs: dict[str, BackOff] = {}
        self._errors: dict[str, dict[tuple[str, str, str], str]] = {}
        self._begun: dict[tuple[str, str], float] = {}  # when a tier last took a snapshot of a run
        self._took_s: dict[tuple[str, str], float] = {}  # and for how long it was busy with it
        self._later = Later()
        self._waited_for: Counter[str | None] = Counter()  # runs (None: all) that somebody waits for

    def urls(self) -> set[str]:
        """Tiers that this node has something to do at."""
        owed = {url for slot in self._ring.slots if slot.dirty or slot.coming is not None for url in self._own(slot)}
        deleting = {url for url, deletions in self._deletions.items() if any(self._deletable(url, deletions))}
        return owed | deleting | {url for url, manifests in self._retentions.items() if manifests}

    def owed(self, run: str | None) -> set[str]:
        """Tiers that are waited for, of a run (``None``: of any): no retention that fails, and no spare replica."""
        slots = [slot for slot in self._ring.slots if run in (None, slot.run)]
        found = {
            url for slot in slots for url in slot.dirty if not (self._is_spare(slot, url) or self._is_idle(slot, url))
        }
        for url, deletions in self._deletions.items():
            if any(run in (None, key_of(each.manifest)) for each in deletions):
                found.add(url)
        for url, by_run in self._retentions.items():
            if any(run in (None, key) and ("retain", key, "") not in self._errors.get(url, {}) for key in by_run):
                found.add(url)
        return found

    def next(self, url: str, now_s: float) -> tuple[Job | None, float | None]:
        """The next job of a tier, or when there will be one (monotonic); both ``None`` if there is none."""
        backoff, soonest, wanted = self.backoff(url), None, set()
        for job in self._jobs(url):
            wanted.add(job.key)
            due_s = max(backoff.due_s(job.key), self._paced_s(url, job), self._later.due_s((url, job.key)))
            if due_s <= now_s:
                if job.kind is Kind.PUT and (url, job.key) not in self._later:  # else it has begun before
                    self._begun[url, job.run] = now_s
                return job, None
            soonest = due_s if soonest is None else min(soonest, due_s)
        # Nothing is due: what failed and is not wanted any more (superseded, dropped) is forgotten.
        backoff.forget(set(wanted))
        self._later.forget(url, set(wanted))
        self._errors[url] = {key: text for key, text in self._errors.get(url, {}).items() if key in wanted}
        return None, soonest

    def delete(self, url: str, manifest: Manifest) -> None:
        """Have a snapshot deleted at a tier, once it has what is owed there now of the same run.

        What replaces it may be on its way: if the machine went between the two, neither would be there.
        """
        self._deletions.setdefault(url, []).append(_Deletion(manifest, self._owed_of(key_of(manifest), url)))

    def keep(self, run: str, name: str) -> None:
        """Delete nothing of that name any more."""
        for waiting in self._deletions.values():
            waiting[:] = [each for each in waiting if key_of(each.manifest) != run or each.manifest.name != name]

    def deletions(self, run: str) -> tuple[tuple[str, Manifest], ...]:
        """What is still to be deleted of a run, and where."""
        found = ((url, each.manifest) for url, waiting in self._deletions.items() for each in waiting)
        return tuple((url, manifest) for url, manifest in found if key_of(manifest) == run)

    def retain(self, url: str, run: str, current: Manifest) -> None:
        """Have old snapshots deleted at a tier, now that ``current`` is committed there."""
        self._retentions.setdefault(url, {})[run] = current

    def done(self, url: str, job: Job) -> None:
        """A job was done, or is not to be tried again."""
        self.backoff(url).succeeded(job.key)
        self._errors.get(url, {}).pop(job.key, None)
        waiting = self._deletions.get(url, [])
        if job.kind is Kind.DELETE:
            waiting[:] = [each for each in waiting if each.manifest is not job.manifest]
        if job.kind is Kind.PUT:
            for each in (each for each in waiting if key_of(each.manifest) == job.run):
                if each.behind.get(job.manifest.name, job.sequence + 1) <= job.sequence:
                    del each.behind[job.manifest.name]
        if job.kind is Kind.RETAIN and self._retentions.get(url, {}).get(job.run) is job.manifest:
            del self._retentions[url][job.run]

    def took(self, url: str, run: str, seconds: float) -> None:
        """A tier was busy with a snapshot of a run for so long."""
        self._took_s[url, run] = seconds

    def rests_s(self, run: str, now_s: float) -> float:
        """How long the durable tier of a run is still to be left alone, see :attr:`RunInfo.durable_every_s`."""
        info = self._run(run)
        if info is None or not info.durable_every_s:
            return 0.0
        begun_s = [begun_s for (url, of), begun_s in self._begun.items() if of == run and not url.startswith("spot:")]
        return max(0.0, max(begun_s, default=float("-inf")) + info.durable_every_s - now_s)

    def failed(self, url: str, job: Job, text: str) -> None:
        """A job failed. A put that did is not counted as taken: it is tried again with back-off, not at its pace."""
        if job.kind is Kind.PUT:
            self._begun.pop((url, job.run), None)
        now_s = time.monotonic()
        self.backoff(url).failed(job.key, now_s)
        self._errors.setdefault(url, {})[job.key] = text
        self._later.failed((url, job.key), now_s)

    def later(self, url: str, job: Job, now_s: float, there: int, *, is_surpassed: bool = False) -> bool:
        """A put waits for what other nodes put there; whether it has for so long that nobody will. The tier works.

        Args:
            url: of the tier.
            job: the put.
            now_s: the time (monotonic).
            there: files that are there now, of all nodes.
            is_surpassed: whether something newer is.
        """
        self.backoff(url).succeeded(job.key)
        self._errors.get(url, {}).pop(job.key, None)
        since_s = self._later.wait((url, job.key), now_s, there)
        most_s = later.SURPASSED_S if is_surpassed else later.FORSAKEN_S
        return now_s - max(since_s, self._left_s(job.run)) >= most_s

    def dropped(self, url: str, job: Job) -> None:
        """A put came to nothing, because there was nothing to put after all: it does not count as taken."""
        self._begun.pop((url, job.run), None)

    def rest(self, url: str) -> None:
        """Nothing is to be done at a tier: what it is to be given time for is past."""
        self._backoffs.pop(url, None)
        self._errors.pop(url, None)
        self._begun = {key: begun_s for key, begun_s in self._begun.items() if key[0] != url or self._paced(key[1])}
        self._took_s = {key: seconds for key, seconds in self._took_s.items() if key in self._begun}

    def error(self, url: str) -> str:
        """What fails at a tier at present, for people."""
        return "; ".join(list(self._errors.get(url, {}).values())[-3:])

    def backoff(self, url: str) -> BackOff:
        """Failures at a tier."""
        return self._backoffs.setdefault(url, BackOff())

    def urge(self, run: str | None) -> None:
        """Somebody waits for a run: nothing of it is put off, what fails is tried soon. Ends with :meth:`relax`."""
        self._waited_for[run] += 1
        for backoff in self._backoffs.values():
            backoff.shorten()

    def is_urgent(self, run: str) -> bool:
        """Whether somebody waits for a run, see :meth:`urge`."""
        return bool(self._waited_for[run] or self._waited_for[None])

    def relax(self, run: str | None) -> None:
        """Nobody waits any more."""
        self._waited_for[run] -= 1

    def _is_spare(self, slot: Slot, url: str) -> bool:
        """Whether a snapshot is owed to a node as a further replica only: it is durable, and nobody waits for that."""
        info = self._run(slot.run)
        return url.startswith("spot://") and info is not None and info.replicas > 1 and info.durable_url in slot.safe

    def _is_idle(self, slot: Slot, url: str) -> bool:
        """Whether nobody waits for a portion: it is not known to be of a whole snapshot.

        A node that is about to end waits until it is there as far as this node has it: who has the rest commits it.
        """
        if slot.manifest is None or not _is_unsure(slot):
            return False
        return self.leaves_s is None or (url, Job(Kind.PUT, slot.run, slot.manifest).key) in self._later

    def _own(self, slot: Slot) -> list[str]:
        """Tiers that this node must bring a slot to by itself."""
        tiers = self._ring.tiers(slot.run)
        if slot.coming is not None and slot.manifest is None:
            # What is sealed here is whole in a moment, and stores take it then, many parts at once.
            own = [url for url in tiers.own if url.startswith("spot://") or not isinstance(slot.coming, Sealing)]
            return own if not slot.coming.given_up else []
        return [
            url
            for url in slot.dirty
            if (slot.places is not None or url not in tiers.carried)
            and (url not in slot.inexact_at or self.must_be_exact(slot.run, slot.manifest))
        ]

    def must_be_exact(self, run: str, manifest: Manifest | None) -> bool:
        """Whether a snapshot is to be at nodes exactly: where somebody waits for it, or nothing newer will come."""
        info = self._run(run)
        is_last = manifest is None or manifest.complete or manifest.is_file
        if is_last or info is None or not info.session or info.compression != "topk" or self.is_urgent(run):
            return True
        return self._ring.is_stuck

    def _jobs(self, url: str) -> Iterator[Job]:
        """Everything to do at a tier, in the order in which it should be."""
        for manifest in self._deletable(url, self._deletions.get(url, [])):
            yield Job(Kind.DELETE, key_of(manifest), manifest)
        for run, manifest in self._retentions.get(url, {}).items():
            yield Job(Kind.RETAIN, run, manifest)
        slots = [
            slot
            for slot in self._ring.slots  # of hundreds, most are other runs', and owe this tier nothing
            if (url in slot.dirty or slot.coming is not None) and url in self._own(slot)
        ]
        coming = [slot for slot in slots if slot.manifest is None]
        soon_old = {slot.run for slot in coming if isinstance(slot.coming, Sealing)}
        for slot in sorted(slots, key=lambda slot: slot.sequence):
            if slot.manifest is not None and (
                slot.run not in soon_old or slot.manifest.complete or slot.manifest.is_file
            ):
                yield Job(Kind.PUT, slot.run, slot.manifest, slot, sequence=slot.sequence)
        for slot in coming:
            if slot.coming is not None:
                yield Job(Kind.PUT, slot.run, slot.coming.manifest, slot, slot.coming)

    def _owed_of(self, run: str, url: str) -> dict[str, int]:
        """Name and commit of everything of a run that is owed at a tier."""
        slots = [slot for slot in self._ring.slots if slot.run == run and url in slot.dirty]
        return {slot.manifest.name: slot.sequence for slot in slots if slot.manifest is not None}

    def _deletable(self, url: str, deletions: list[_Deletion]) -> Iterator[Manifest]:
        """What may be deleted now. What is put anew before it ever was put is waited for all the same."""
        for each in deletions:
            if not each.behind or each.behind.keys().isdisjoint(self._owed_of(key_of(each.manifest), url)):
                yield each.manifest

    def _paced(self, run: str) -> bool:
        """Whether a run's snapshots are to be some time apart at its durable tier."""
        info = self._run(run)
        return info is not None and info.durable_every_s != 0.0

    def _paced_s(self, url: str, job: Job) -> float:
        """When a tier may take a snapshot at the soonest, so that two are far enough apart; 0 for at once."""
        if job.kind is not Kind.PUT or job.slot is None or job.manifest.is_file:
            return 0.0
        if job.manifest.portion is not None:
            is_wanted = job.slot.brings or self._waited_for[job.run]  # of a drain of this node, others do not know
            is_wanted = is_wanted or job.manifest.complete
            return 0.0 if is_wanted and not _is_unsure(job.slot) else self._left_s(job.run)
        if job.manifest.complete:
            return 0.0
        return self._free_s(url, job.slot)

    def is_left(self, run: str, now_s: float) -> bool:
        """Whether a run counts as left by its trainer, see :data:`LEFT_S`."""
        return now_s >= self._left_s(run)

    def _left_s(self, run: str) -> float:
        """When a run counts as left by its trainer: then each node brings down what it has of the newest snapshots.

        Until then its trainer says which one they bring, since all must bring the same one. Then nobody is there to say
        which of them are whole: the durable tier shows it, when all nodes have brought theirs. A node that is about to
        end leaves its trainer as much time.
        """
        asked_s = self._ring.opened_s.get(run, self._ring.begun_s)
        return min(asked_s, self.leaves_s if self.leaves_s is not None else asked_s) + LEFT_S

    def _free_s(self, url: str, slot: Slot) -> float:
        """When a tier may take the snapshot of a slot at the soonest, 0 for at once."""
        key = url, slot.run
        info, begun_s = self._run(slot.run), self._begun.get(key)
        if info is None or begun_s is None or url.startswith("spot://") or self.is_urgent(slot.run):
            return 0.0
        if info.durable_every_s is not None:
            return begun_s + info.durable_every_s
        # With memory for one, the next one waits until it is safe.
        if not slot.followed or not info.session or self._ring.is_stuck:
            return 0.0
        apart_s = min(self._took_s.get(key, 0.0) * _APART, MOST_APART_S)
        return min(begun_s + apart_s, slot.committed_s + FOLLOWED_S)


def _is_unsure(slot: Slot) -> bool:
    """Whether a slot holds one host's portion of a snapshot of which nobody has said here that it is whole."""
    return slot.of_host is not None and not slot.whole
