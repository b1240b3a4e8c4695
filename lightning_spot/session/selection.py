"""The snapshot that a ``fit`` goes on from: selected by rank 0, opened once on each host, and read on all ranks.

Rank 0 goes through the snapshots as a single rank would; each try is announced, so that all hosts read at the same
time. Where one rank cannot use it, all turn to the next one.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import torch

from lightning_spot.client.stores import open_tier
from lightning_spot.errors import CorruptSnapshotError, SettingsError, SnapshotNotFoundError, SpotError, TierError
from lightning_spot.goodput.records import read_records
from lightning_spot.protocol.process import this_host
from lightning_spot.run.choice import open_newest
from lightning_spot.run.identity import starts_between
from lightning_spot.run.location import Location
from lightning_spot.run.reading import Exported, OpenSnapshot
from lightning_spot.run.sources import MemorySource, ScatteredSource, Source, StoreSource
from lightning_spot.run.survey import Survey, look_again
from lightning_spot.say import say
from lightning_spot.session.collectives import Agreement, Failed
from lightning_spot.sharded.metadata import REST_FILE
from lightning_spot.sharded.plan import EXTRA
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.snapshot.shards import Image
from lightning_spot.state.dump import KEY, read_checkpoint, states_in_files, with_ranks
from lightning_spot.state.loadability import check_resumable
from lightning_spot.state.sharded import is_sharded, put_back
from lightning_spot.store.store import Progress
from lightning_spot.trees import leaves

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)

Checkpoint = dict[str, Any]

_SMALL_BYTES = 1024 * 1024

_STARTS_EACH = 2
"""With ``"older"``, so many starts go on from each snapshot: one may have ended for another reason."""


@dataclass(frozen=True, slots=True)
class ResumedFrom:
    """The snapshot a run was resumed from.

    Attributes:
        name: of the snapshot.
        step: its ``global_step``.
        epoch: its ``current_epoch``.
        attempt: that took it.
        created_unix_s: when that was, seconds since 1970.
        tier: ``"host"``, ``"storage"`` or the URL of a snapshot server.
        url: where exactly.
        complete: whether the run had reached its end.
        exact: whether it has the very bits of its step.
    """

    name: str
    step: int
    epoch: int
    attempt: int
    created_unix_s: float
    tier: str
    url: str
    complete: bool
    exact: bool = True

    @classmethod
    def of(cls, snapshot: OpenSnapshot) -> ResumedFrom:
        """What is known of a snapshot that was read."""
        manifest = snapshot.manifest
        return cls(
            name=manifest.name,
            step=manifest.step,
            epoch=manifest.epoch,
            attempt=manifest.attempt,
            created_unix_s=manifest.created_unix_s,
            tier=snapshot.tier,
            url=snapshot.url,
            complete=manifest.complete,
            exact=manifest.exact,
        )


def choose(
    ranks: Agreement,
    location: Location,
    look: Callable[[], Survey],
    load: Callable[[OpenSnapshot], Checkpoint],
) -> tuple[ResumedFrom, Checkpoint] | None:
    """Read the newest snapshot that is whole, on all ranks; see :func:`open_newest`. Every rank calls it.

    Args:
        ranks: all of them.
        location: of the run.
        look: what the tiers have; on rank 0.
        load: reads a snapshot, see :func:`load_snapshot`.

    Returns:
        the snapshot and its checkpoint; ``None`` if there is none.
    """
    restore = Restore(ranks, location, load)
    if ranks.rank != 0:
        return restore.follow()
    try:
        opened = _newest(look(), restore)
    except Exception as error:
        ranks.tell(Failed.of(error))
        raise
    chosen = (ResumedFrom.of(opened[0]), opened[1]) if opened is not None else None
    ranks.tell(chosen[0] if chosen is not None else None)
    return chosen


def _newest(found: Survey, restore: Restore) -> tuple[OpenSnapshot, Checkpoint] | None:
    try:
        return open_newest(found, restore.use, stays=False, open_at=partial(restore.announce, found))
    except (CorruptSnapshotError, SnapshotNotFoundError) as error:
        again = look_again(found)
        if isinstance(error, CorruptSnapshotError) and [item[0] for item in again.candidates] == [
            item[0] for item in found.candidates
        ]:
            raise
        # A write that was under way when the run was claimed took their place, or what left a snapshot server is
        # durable.
        return open_newest(again, restore.use, open_at=partial(restore.announce, again))


# -- opened once on each host -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Try:
    """What all ranks are to try.

    Attributes:
        manifest: of the snapshot.
        holders: URL and tier of the stores that have it, nearest first, or a shard of it; and the manifest of that.
    """

    manifest: Manifest
    holders: tuple[tuple[str, str, Manifest], ...]


class Restore:
    """Reads a snapshot on all ranks: the first rank of each host opens it for the others there.

    Args:
        ranks: all of them; every rank makes this at the same time.
        location: of the run.
        load: makes of an open snapshot what is wanted; on each rank.
    """

    def __init__(self, ranks: Agreement, location: Location, load: Callable[[OpenSnapshot], Checkpoint]) -> None:
        self._ranks, self._location, self._load = ranks, location, load
        hosts = ranks.gather(this_host())
        own = hosts[ranks.rank]
        self._leader, self._is_shared = hosts.index(own), hosts.count(own) > 1

    def announce(
        self, found: Survey, source: Source, manifest: Manifest, progress: Progress | None = None
    ) -> OpenSnapshot:
        """On rank 0: open a snapshot on all ranks, which are told of it.

        Args:
            found: what the tiers hold.
            source: where rank 0 has found it.
            manifest: of the snapshot.
            progress: called with the number of bytes just checked.
        """
        tried = Try(manifest, tuple(_holders(found, manifest, source)))
        self._ranks.tell(tried)
        return self.open(tried, source, progress)

    def use(self, snapshot: OpenSnapshot) -> Checkpoint:
        """Load it on every rank."""
        return self._ranks.together(lambda: self._load(snapshot))

    def follow(self) -> tuple[ResumedFrom, Checkpoint] | None:
        """On the other ranks: do what rank 0 announces, until it says what came of it; that, and what was loaded."""
        loaded: Checkpoint | None = None
        while isinstance(said := self._ranks.tell(), Try):
            try:
                with contextlib.closing(self.open(said)) as snapshot:
                    loaded = self.use(snapshot)
            except Exception as error:  # rank 0 knows, and decides
                logger.debug("a snapshot could not be used on all ranks: %r", error)
        if isinstance(said, Failed):
            raise said.error()
        return None if said is None or loaded is None else (said, loaded)

    def open(self, tried: Try, source: Source | None = None, progress: Progress | None = None) -> OpenSnapshot:
        """Open a snapshot on each host, then on each rank.

        Args:
            tried: what it is.
            source: where rank 0 has found it; other hosts look for themselves.
            progress: called with the number of bytes just checked.
        """
        manifest, mine = tried.manifest, list[OpenSnapshot]()
        with contextlib.ExitStack() as opened:  # closed where another rank could not

            def keep(snapshot: OpenSnapshot) -> None:
                mine.append(opened.enter_context(contextlib.closing(snapshot)))

            def lead() -> Exported | None:
                if self._leader != self._ranks.rank:
                    return None
                keep(self._open(tried, source, progress, shared=self._is_shared))
                return Exported.of(mine[0])

            def follow() -> None:
                if said is not None and not mine:
                    try:
                        keep(said.open(manifest))
                    except TierError as error:
                        text = "{error}; this rank reads the snapshot itself"
                        say(logging.WARNING, "not-imported", text, about=manifest.name, error=error)
                        keep(self._open(tried, None, None, shared=False))

            said = self._ranks.everyones(lead)[self._leader]
            self._ranks.together(follow)
            opened.pop_all()
        return mine[0]

    def _open(self, tried: Try, source: Source | None, progress: Progress | None, *, shared: bool) -> OpenSnapshot:
        manifest = tried.manifest
        if source is not None:
            return source.open(manifest, progress, shared=shared)
        reasons = []
        for place in self._places(tried):
            try:
                return place.open(manifest, shared=shared)
            except SpotError as error:
                reasons.append(str(error))
        raise TierError(f"{manifest.name} cannot be read on the host of rank {self._ranks.rank}: {'; '.join(reasons)}")

    def _places(self, tried: Try) -> Iterator[Source]:
        """Where a snapshot may be read on another host than rank 0's: its memory, the stores, or both together."""
        manifest = tried.manifest
        memory = MemorySource(self._location.url, f"{manifest.run}@{manifest.run_id}")
        yield memory
        stores = {url: StoreSource(open_tier(url), tier) for url, tier, _ in tried.holders}
        yield from (stores[url] for url, _, what in tried.holders if what == manifest)
        shards: list[tuple[MemorySource | StoreSource, Manifest]]
        shards = [(stores[url], what) for url, _, what in tried.holders if what != manifest]
        if shards:
            with contextlib.suppress(SpotError):
                shards = [*((memory, shard) for shard in memory.survey().shards), *shards]
            yield ScatteredSource(shards)


def _holders(found: Survey, manifest: Manifest, source: Source) -> Iterator[tuple[str, str, Manifest]]:
    """The stores that hold this very snapshot, first the one it was found at, or shards of it where no tier has all."""
    holders = [(other, manifest) for each, other in found.candidates if each == manifest]
    holders.sort(key=lambda each: each[0] is not source)
    for holder, what in [*holders, *(source.held(manifest) if isinstance(source, ScatteredSource) else ())]:
        if isinstance(holder, StoreSource):
            yield holder.store.url, holder.tier, what


# -- read on each rank ----------------------------------------------------------------------------------------------


def load_snapshot(trainer: pl.Trainer, snapshot: OpenSnapshot, *, trusts: bool) -> Checkpoint:
    """Read a snapshot on this rank; one of a sharded model into the model and its optimizers.

    Args:
        trainer: that goes on from it.
        snapshot: which.
        trusts: whether to load objects of any class; else nothing in it runs code.

    Returns:
        the checkpoint; of a sharded model, the rest of it.

    Raises:
        SpotError: if it can't be read or used, see :func:`load_shards`.
    """
    manifest = snapshot.manifest
    if manifest.is_sharded:
        with snapshot.image() as image:
            return load_shards(trainer, image, manifest, trusts=trusts)
    checkpoint = _load(snapshot, trusts=trusts)
    shared = checkpoint.get(KEY)
    if shared is not None and manifest.files:
        with snapshot.image() as image:
            shared["ranks"] = states_in_files(trainer, shared, lambda name: _file(image, manifest, name))
    return checkpoint


def _load(snapshot: OpenSnapshot, *, trusts: bool) -> Checkpoint:
    """Read the checkpoint of a snapshot. What could not be read raises as such."""
    mapped = f"/proc/self/fd/{snapshot.fds[0]}" if snapshot.sealed and not trusts else ""
    with snapshot.reader() as reader:
        try:
            checkpoint = _read(reader.as_file(), snapshot.manifest, mapped, trusts=trusts)
        except Exception:
            if reader.problem is not None:  # torch may have made something else of it
                raise reader.problem from None
            raise
    return own_small(checkpoint) if mapped else checkpoint


def _read(file: IO[bytes], manifest: Manifest, mapped: str, *, trusts: bool) -> Checkpoint:
    """Read a checkpoint whose tensors look at the file that is ``mapped``, if there is one."""
    if trusts:
        return cast(Checkpoint, with_ranks(_read_trusted(file), _read_trusted))
    checkpoint = read_checkpoint(file, mapped=mapped)
    if not isinstance(checkpoint, dict):
        raise CorruptSnapshotError(f"{manifest.name} was committed so, and is no checkpoint of Lightning's")
    return checkpoint


def _read_trusted(file: IO[bytes]) -> Any:
    return torch.load(file, map_location="cpu", weights_only=False)


# -- how it is loaded -------------------------------------------------------------------------------------------------


def own_small(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Copy the storages below 1 MiB of a checkpoint that looks at mapped memory.

    That memory is kept for as long as one tensor looks at it.
    Weights and moments are copied into the model and the optimizer, but a callback may keep a score for the whole run.
    Tensors that share a storage share it still.

    Returns:
        the same checkpoint.
    """
    copies: dict[int, torch.UntypedStorage] = {}
    for tensor in leaves(checkpoint, torch.Tensor):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or tensor.is_quantized or not 0 < storage.nbytes() < _SMALL_BYTES:
            continue
        copy = copies.get(storage.data_ptr())
        if copy is None:
            copy = storage.clone()  # type: ignore[no-untyped-call]
            copies[storage.data_ptr()] = copies[copy.data_ptr()] = copy  # the same tensor may come once more
        with torch.no_grad():
            tensor.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())
    return checkpoint


def load_shards(trainer: pl.Trainer, image: Image, manifest: Manifest, *, trusts: bool) -> dict[str, Any]:
    """Load a sharded snapshot on this rank.

    Args:
        trainer: whose model and optimizers are set up.
        image: of the snapshot, checked.
        manifest: of the snapshot.
        trusts: whether to load objects of any class.

    Returns:
        the checkpoint without the states of the model and its optimizers.

    Raises:
        SettingsError: if the strategy of this trainer has no shards.
        ModelChangedError: if it is the snapshot of another model.
        NotSerializableError: if a module's extra state was not loaded.
    """
    if not is_sharded(trainer):
        raise SettingsError(
            f"snapshot {manifest.name} is sharded, and {type(trainer.strategy).__name__} is not: make one plain file of"
            " it (`lightning-spot cp DIRPATH --consolidate FILE`) for fit(ckpt_path=FILE), or go on with"
            " ModelParallelStrategy"
        )
    data = io.BytesIO(_file(image, manifest, REST_FILE))
    rest: dict[str, Any] = torch.load(data, "cpu", weights_only=False) if trusts else read_checkpoint(data)
    shared = rest.get(KEY)
    extra = shared.get(EXTRA, {}) if shared is not None else {}
    check_resumable(trainer, {KEY: {EXTRA: extra}})  # the rest, once hooks have their own objects
    put_back(trainer, image, manifest, extra)
    if shared is not None:
        shared["ranks"] = states_in_files(trainer, shared, lambda name: _file(image, manifest, name))
    return rest


def _file(image: Image, manifest: Manifest, name: str) -> memoryview:
    span = manifest.span_of(name)
    return image[span.offset : span.stop]


OnResumeFailure = Literal["error", "older"]


def without_failed(found: Survey, attempt: int, on_failure: OnResumeFailure) -> Survey:
    """Leave the snapshots out from which resumes have failed, if older ones are to be tried, and say what is done.

    Args:
        found: what the tiers hold.
        attempt: that begins; 0 if it is not known.
        on_failure: what the user wants.
    """
    names = list(dict.fromkeys(manifest.name for manifest, _ in found.candidates))
    failed = _failed_since(found, found.candidates[0][0], attempt) if names else 0
    if not failed:
        return found
    gone = min(failed // _STARTS_EACH, len(names) - 1) if on_failure == "older" else 0
    starts = "1 start of this run has" if failed == 1 else f"{failed} starts of this run have"
    way_on = "pass resume=False to start afresh"
    if on_failure == "error" and len(names) > 1:
        way_on += ", or on_resume_failure='older' to try the one before"
    text = "{starts} ended without a snapshot since {about}. This one resumes from {again}. If it fails, too, {way_on}"
    facts: dict[str, Any] = {"starts": starts, "again": names[gone] if gone else "it again", "way_on": way_on}
    say(logging.WARNING, "resumes-failing", text, about=names[0], only_rank_zero=True, **facts)
    left_out = set(names[:gone])
    answers = [
        (source, replace(holdings, manifests=[each for each in holdings.manifests if each.name not in left_out]))
        for source, holdings in found.answers
    ]
    return replace(found, answers=answers)


def _failed_since(found: Survey, newest: Manifest, attempt: int) -> int:
    """How many attempts have ended since a snapshot was taken, and had none: not those that a notice ended."""
    rewinds = found.durable.rewinds if found.durable is not None else ()
    since = max([newest.attempt, *(rewind.after for rewind in rewinds)])
    count = starts_between(since, attempt) - 1
    if count < 1:
        return 0
    try:
        records = read_records(found.location.url)
    except SpotError as error:  # a record is no condition of a resume
        logger.debug("records of attempts cannot be read: %s", error)
        return count
    others = [
        record
        for record in records
        if since < record.attempt < attempt and (record.end in ("preempted", "complete") or record.snapshots)
    ]
    return max(0, count - len(others))
