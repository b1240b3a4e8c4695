"""What each tier below still has to be done: which snapshot it takes next, what is to be deleted, what has failed.

What failed is tried again with back-off: each thing on its own, and a tier as a whole once several of its things fail.
What waits for what others do is looked at again, less and less often, until nothing has come for long.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_spot.errors import SpotError
from lightning_spot.image.coming import Coming, Sealing
from lightning_spot.image.manifest import Manifest
from lightning_spot.image.shards import Status
from lightning_spot.memory.ring import Held, Ring
from lightning_spot.memory.runs import LEFT_S, RunInfo, key_of
from lightning_spot.memory.slots import Slot
from lightning_spot.retry import pause_after

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0


@dataclass(slots=True)
class _Failure:
    count: int = 0
    last_s: float = 0.0

    @property
    def due_s(self) -> float:
        return self.last_s + pause_after(self.count, FIRST_RETRY_S, LAST_RETRY_S)


class BackOff:
    """Failures at one tier. Times are monotonic seconds. Not thread-safe."""

    def __init__(self) -> None:
        self._items: dict[Hashable, _Failure] = {}
        self._tier = _Failure()
        self._since_success: set[Hashable] = set()

    @property
    def failing(self) -> bool:
        """Whether nothing succeeded since the last failure."""
        return bool(self._since_success)

    def due_s(self, item: Hashable) -> float:
        """When an item may be tried, 0 for at once: one that did not fail waits only if the whole tier fails."""
        own = self._items[item].due_s if item in self._items else 0.0
        others = self._since_success - {item}
        return max(own, self._tier.due_s if others and self._tier.count else 0.0)

    def failed(self, item: Hashable, now_s: float) -> None:
        """An item failed."""
        failure = self._items.setdefault(item, _Failure())
        failure.count, failure.last_s = failure.count + 1, now_s
        self._since_success.add(item)
        if len(self._since_success) > 1:
            self._tier.count, self._tier.last_s = self._tier.count + 1, now_s

    def succeeded(self, item: Hashable) -> None:
        """An item succeeded."""
        self._items.pop(item, None)
        self._since_success.clear()
        self._tier = _Failure()

    def forget(self, items: set[Hashable]) -> None:
        """Forget all items but these: the others are not wanted any more."""
        for item in [item for item in self._items if item not in items]:
            del self._items[item]

    def shorten(self) -> None:
        """Let everything be tried again soon, but not at once: who hurries may do so many times a second."""
        for failure in [*self._items.values(), self._tier]:
            failure.count = min(failure.count, 1)


FOLLOWED_S = 5.0
"""A snapshot counts as followed if another one is to come within so many seconds, and for no longer than that."""

SURPASSED_S = 30.0
"""A shard at storage gives way so soon where something newer of its run is: who has the others brings them at once."""

_FIRST_S, _LAST_S = 0.25, 30.0


class PutOff(SpotError):
    """A put waits for what others do; its tier works.

    Attributes:
        there: files of the snapshot that are there, of all places.
    """

    def __init__(self, why: str, there: int = 0) -> None:
        super().__init__(why)
        self.there = there


@dataclass(frozen=True, slots=True)
class _Wait:
    """A put that waits.

    Attributes:
        since_s: since when nothing more has come there, and nothing failed (monotonic).
        due_s: when it is looked at again.
        there: files that were there then.
    """

    since_s: float
    due_s: float
    there: int


class Later:
    """The puts of all tiers that wait, each by the URL of its tier and its own key. Not thread-safe."""

    def __init__(self) -> None:
        self._waits: dict[tuple[str, Hashable], _Wait] = {}

    def __contains__(self, at: tuple[str, Hashable]) -> bool:
        """Whether a put waits."""
        return at in self._waits

    def due_s(self, at: tuple[str, Hashable]) -> float:
        """When a put is looked at again (monotonic), 0 for at once."""
        return wait.due_s if (wait := self._waits.get(at)) is not None else 0.0

    def wait(self, at: tuple[str, Hashable], now_s: float, there: int) -> float:
        """Look at a put again soon, and less and less often; since when nothing more has come.

        Args:
            at: the put.
            now_s: the time (monotonic).
            there: files that are there now, of all places.
        """
        known = self._waits.get(at)
        since_s = known.since_s if known is not None and known.there == there else now_s
        pause_s = min(_LAST_S, max(_FIRST_S, (now_s - since_s) / 4))
        self._waits[at] = _Wait(since_s, now_s + pause_s, there)
        return since_s

    def failed(self, at: tuple[str, Hashable], now_s: float) -> None:
        """A look failed: other servers may not reach the tier either."""
        if (known := self._waits.get(at)) is not None:
            self._waits[at] = replace(known, since_s=now_s)

    def forget(self, url: str, wanted: set[Hashable]) -> None:
        """Forget all puts of a tier but these: the others are not wanted any more."""
        self._waits = {at: wait for at, wait in self._waits.items() if at[0] != url or at[1] in wanted}


MOST_APART_S = 30.0
"""Storage takes one of the snapshots that follow each other in moments at least so often, if it is as fast."""

_TOGETHER_S = 0.5  # so much later than another rank of a host, one may have its shard
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
        manifest: of the snapshot it is about, or of the first of its shards.
        held: what is to be put: a snapshot or file, or shards of a snapshot.
        is_whole: whether that is all of the snapshot.
        state: what has become of the snapshot, as far as is known here.
        coming: if it is not committed yet, but its parts may go already.
        sequence: of the commit that is put.
    """

    kind: Kind
    run: str
    manifest: Manifest
    held: Held | None = None
    is_whole: bool = True
    state: Status = Status.COMMITTED
    coming: Coming | None = None
    sequence: int = 0

    @property
    def name(self) -> str:
        """Of the snapshot, or of the shard that is coming."""
        return self.manifest.name if self.coming is not None else self.manifest.snapshot

    @property
    def slots(self) -> tuple[Slot, ...]:
        """That hold what is to be put."""
        return self.held.slots if self.held is not None else ()

    @property
    def key(self) -> tuple[str, str, str]:
        """What failures are counted under."""
        return (self.kind.value, self.run, "" if self.kind is Kind.RETAIN else self.name)


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
        leaves_s: since when this server is about to end (monotonic), ``None`` if it is not. What it has of snapshots
            that are not complete here is waited for, too.
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
        """Tiers that this server has something to do at."""
        owed = {url for slot in self._ring.slots if slot.dirty or slot.coming is not None for url in self._own(slot)}
        deleting = {url for url, deletions in self._deletions.items() if any(self._deletable(url, deletions))}
        return owed | deleting | {url for url, manifests in self._retentions.items() if manifests}

    def owed(self, run: str | None) -> set[str]:
        """Tiers that are waited for, of a run (``None``: of any): no retention that fails, and no spare replica."""
        slots = [slot for slot in self._ring.slots if run in (None, slot.run)]
        pending = {slot for group in self._ring.groups(run) if group.state is Status.PENDING for slot in group.slots}
        found = {
            url
            for slot in slots
            for url in slot.dirty
            if not (self._is_spare(slot, url) or self._is_idle(slot, url, is_pending=slot in pending))
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
                if each.behind.get(job.name, job.sequence + 1) <= job.sequence:
                    del each.behind[job.name]
        if job.kind is Kind.RETAIN and self._retentions.get(url, {}).get(job.run) is job.manifest:
            del self._retentions[url][job.run]

    def took(self, url: str, run: str, seconds: float) -> None:
        """A tier was busy with a snapshot of a run for so long."""
        self._took_s[url, run] = seconds

    def failed(self, url: str, job: Job, text: str) -> None:
        """A job failed. A put that did is not counted as taken: it is tried again with back-off, not at its pace."""
        if job.kind is Kind.PUT:
            self._begun.pop((url, job.run), None)
        now_s = time.monotonic()
        self.backoff(url).failed(job.key, now_s)
        self._errors.setdefault(url, {})[job.key] = text
        self._later.failed((url, job.key), now_s)

    def later(self, url: str, job: Job, now_s: float, there: int) -> float:
        """A put waits for what others put there; for how long it has in vain, in a run that its trainer has left.

        Args:
            url: of the tier, which works.
            job: the put.
            now_s: the time (monotonic).
            there: files that are there now, of all places.
        """
        self.backoff(url).succeeded(job.key)
        self._errors.get(url, {}).pop(job.key, None)
        since_s = self._later.wait((url, job.key), now_s, there)
        return now_s - max(since_s, self._left_s(job.run))

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
        """Whether a snapshot is owed to a server as another replica only: it is durable, and nothing waits for that."""
        info = self._run(slot.run)
        return url.startswith("spot://") and info is not None and info.replicas > 1 and info.durable_url in slot.safe

    def _is_idle(self, slot: Slot, url: str, *, is_pending: bool) -> bool:
        """Whether nobody waits for a shard at storage: its snapshot is not meant to be there.

        Where its snapshot is not complete, no more comes of its trainer, or this server is about to end, it is waited
        for until storage has what this server has of its snapshot: who has the rest commits it.
        """
        if slot.manifest is None or slot.shard is None or url.startswith("spot://"):
            return False
        info = self._run(slot.run)
        if url in self._ring.tiers(slot.run).carried and (is_pending or not slot.shard.persist):
            return True  # another server brings it there, if anybody does
        if is_pending and info is not None and info.hosts == 1:
            return True  # it never is there without the rest, which is to come here
        if is_pending or self.leaves_s is not None or info is None or not info.session:
            return (url, Job(Kind.PUT, slot.run, slot.manifest).key) in self._later
        return not slot.shard.persist or bool(slot.shard.failed)

    def _own(self, slot: Slot) -> list[str]:
        """Tiers that this server must bring a slot to by itself."""
        tiers = self._ring.tiers(slot.run)
        if slot.coming is not None and slot.manifest is None:
            if slot.coming.manifest.shard is not None:
                is_exact = self.must_be_exact(slot.run, slot.coming.manifest)
                return [url for url in tiers.own if is_exact and url.startswith("spot://")]
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
        """Whether a snapshot is to be at servers exactly: where somebody waits for it, or nothing newer will come."""
        info = self._run(run)
        is_last = manifest is None or manifest.complete or manifest.is_file
        if is_last or info is None or not info.session or info.compression != "topk" or self.is_urgent(run):
            return True
        return self._ring.is_stuck(run)

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
        soon_old = {slot.run for slot in coming if isinstance(slot.coming, Sealing) and not slot.coming.manifest.shard}
        for job in sorted(self._puts(url, slots), key=lambda job: job.sequence):
            if job.run not in soon_old or job.manifest.complete or job.manifest.is_file:
                yield job
        for slot in coming:
            if slot.coming is not None:
                held = Held((slot,), (slot.coming.manifest,))
                yield Job(Kind.PUT, slot.run, slot.coming.manifest, held, coming=slot.coming)

    def _puts(self, url: str, slots: list[Slot]) -> list[Job]:
        """What is to be put at a tier of what is committed here, each snapshot as one."""
        dirty = {slot for slot in slots if slot.manifest is not None}
        found = [_put([slot], is_whole=True) for slot in dirty if slot.shard is None]
        if len(found) == len(dirty):
            return found
        whole: set[str] = set()
        several: list[Job] = []
        for group in self._ring.groups():
            owed = [slot for slot in group.slots if slot in dirty and slot.shard is not None]
            if owed:
                # A server has each shard by itself, and may have some of them.
                slots = owed if url.startswith("spot://") else list(group.slots)
                several.append(replace(_put(slots, is_whole=group.is_here), state=group.state))
                if group.is_here:
                    whole.add(group.slots[0].run)
        # Of a run of which something whole is to be put, what is not complete yet waits: it would never be over.
        is_server = url.startswith("spot://")
        return found + [job for job in several if job.is_whole or not (is_server and job.run in whole)]

    def _owed_of(self, run: str, url: str) -> dict[str, int]:
        """Name and commit of everything of a run that is owed at a tier."""
        slots = [slot for slot in self._ring.slots if slot.run == run and url in slot.dirty]
        return {slot.manifest.snapshot: slot.sequence for slot in slots if slot.manifest is not None}

    def _deletable(self, url: str, deletions: list[_Deletion]) -> Iterator[Manifest]:
        """What may be deleted now. What is put again before it ever was put is waited for all the same."""
        for each in deletions:
            if not each.behind or each.behind.keys().isdisjoint(self._owed_of(key_of(each.manifest), url)):
                yield each.manifest

    def _paced(self, run: str) -> bool:
        """Whether a run's snapshots are to be some time apart at its storage."""
        info = self._run(run)
        return info is not None and info.min_upload_interval_s != 0.0

    def _paced_s(self, url: str, job: Job) -> float:
        """When a tier may take a snapshot at the soonest, so that two are far enough apart; 0 for at once."""
        if job.kind is not Kind.PUT or not job.slots or job.manifest.is_file or url.startswith("spot://"):
            return 0.0
        if not job.is_whole:
            return self._apart_s(job)
        shard = job.manifest.shard
        if shard is not None and not shard.persist and not self.is_urgent(job.run):
            return self._left_s(job.run)
        return 0.0 if job.manifest.complete else self._free_s(url, job.slots[0])

    def _apart_s(self, job: Job) -> float:
        """When storage may take shards of a snapshot not all of which is here, 0 for at once.

        Where others are to come here, these are waited for. A host of several, whose rings never have all, does not
        wait, but for its own ranks; a server does, until it is known that other servers have the others.
        """
        info, shard = self._run(job.run), job.manifest.shard
        is_wanted = (shard is not None and shard.persist) or self.is_urgent(job.run)
        if info is not None and info.hosts > 1 and not info.session and self.is_urgent(job.run):
            return 0.0  # no more comes of its trainer, and others have what is missing here
        if info is not None and info.session and info.hosts > 1 and is_wanted:
            return max(slot.committed_s for slot in job.slots) + _TOGETHER_S
        is_known = job.state is not Status.PENDING and (info is None or info.hosts > 1)
        return 0.0 if is_wanted and is_known else self._left_s(job.run)

    def is_left(self, run: str, now_s: float) -> bool:
        """Whether a run counts as left by its trainer, see :data:`LEFT_S`."""
        return now_s >= self._left_s(run)

    def _left_s(self, run: str) -> float:
        """When a run counts as left by its trainer: then each place brings down what it has of the newest snapshots.

        Until then its trainer says which ones these are, since all places must bring the same. A server that is about
        to end leaves its trainer as much time.
        """
        info, asked_s = self._run(run), self._ring.opened_s.get(run, self._ring.begun_s)
        if info is not None and info.session:
            asked_s = float("inf")
        return min(asked_s, self.leaves_s if self.leaves_s is not None else asked_s) + LEFT_S

    def _free_s(self, url: str, slot: Slot) -> float:
        """When a tier may take the snapshot of a slot at the soonest, 0 for at once."""
        key = url, slot.run
        info, begun_s = self._run(slot.run), self._begun.get(key)
        if info is None or begun_s is None or self.is_urgent(slot.run):
            return 0.0
        if info.min_upload_interval_s is not None:
            return begun_s + info.min_upload_interval_s
        # With memory for one, the next one waits until it is safe.
        if not slot.followed or not info.session or self._ring.is_stuck(slot.run, slot.writer):
            return 0.0
        apart_s = min(self._took_s.get(key, 0.0) * _APART, MOST_APART_S)
        return min(begun_s + apart_s, slot.committed_s + FOLLOWED_S)


def _put(slots: Sequence[Slot], *, is_whole: bool) -> Job:
    """Put what slots hold, as one."""
    manifests = [slot.manifest for slot in slots if slot.manifest is not None]
    held, sequence = Held(tuple(slots), tuple(manifests)), max(slot.sequence for slot in slots)
    return Job(Kind.PUT, slots[0].run, manifests[0], held, is_whole, sequence=sequence)
