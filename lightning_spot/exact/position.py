"""The position in the data: a loader that knows how far it got in this epoch, and can go there again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset

from lightning_spot.exact.indices import Indices, draws_at_once, is_known, is_stateful, replacing, sampler_name
from lightning_spot.exact.order import dealt, order_of
from lightning_spot.exact.own_state import OwnState
from lightning_spot.exact.randomness import State, capture_random, restore_random
from lightning_spot.exact.workers import LastingWorkers, lasts, why_not_asked

logger = logging.getLogger(__name__)

Rewind = Literal["auto", "replay", "skip"]
"""How a loader comes back to its position: ``"replay"`` loads the epoch's batches again and drops them, which is exact
even with random augmentation inside workers; ``"skip"`` draws their indices only; ``"auto"`` skips where there are no
workers (exact, too) and replays where there are."""

REWINDS = ("auto", "replay", "skip")


class FollowedLoader:
    """Stands in for a loader; in everything it *is* that loader, but that its own state can be had and set.

    Args:
        loader: a ``DataLoader`` or any other iterable.
        before: called with it just before an epoch begins.
    """

    def __init__(self, loader: Any, before: Callable[[FollowedLoader], None] | None = None) -> None:
        own = OwnState.of(loader)
        # Past __setattr__, which belongs to the loader.
        self.__dict__.update(_loader=loader, _before=before, _own=own, _epoch=None, _why=why_not_asked(loader))
        self.__dict__["_workers"] = LastingWorkers(loader, own) if lasts(loader) and self._why is None else None

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(loader, DataLoader) stays true
        return type(self.__dict__["_loader"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_loader"], name, value)

    def __len__(self) -> int:
        return len(self.__dict__["_loader"])

    def __iter__(self) -> Iterator[Any]:
        own = self.__dict__
        if own["_before"] is not None:
            own["_before"](self)
        return _begin_epoch(own["_loader"], own["_workers"])


class PositionedLoader(FollowedLoader):
    """Stands in for a training loader and counts what it yields.

    In a resumed epoch nothing is drawn before the first batch is asked for: only then are samplers at the right epoch.

    Args:
        loader: a ``DataLoader`` or any other iterable.
        resume: asked when an epoch begins: the position to begin it at, or ``None`` for its start.
        restore_step: called just before the first batch after a resume is fetched: sets all generators to what they
            were at the resumed step; ``False`` if there is nothing to set, as for all loaders but the first that asks.
        rewind: how to get to a position.
    """

    def __init__(
        self,
        loader: Any,
        resume: Callable[[PositionedLoader], State | None],
        restore_step: Callable[[], bool],
        rewind: Rewind = "auto",
    ) -> None:
        super().__init__(loader)
        self.__dict__.update(_resume=resume, _restore_step=restore_step, _rewind=rewind)

    def __iter__(self) -> Iterator[Any]:
        own = self.__dict__
        position = own["_resume"](self)
        parts = own["_loader"], own["_own"], own["_workers"]
        own["_epoch"] = (
            _Epoch(*parts)
            if position is None
            else _ResumedEpoch(*parts, position, own["_restore_step"], own["_rewind"])
        )
        return own["_epoch"]  # type: ignore[no-any-return]


def _begin_epoch(loader: Any, workers: LastingWorkers | None, indices: Indices | None = None) -> Iterator[Any]:
    if workers is not None:
        return workers.begin_epoch()
    if indices is None:
        return iter(loader)
    with replacing(loader, {sampler_name(loader): indices}):
        return iter(loader)


class _Epoch:
    """One pass over a loader, from its start."""

    def __init__(self, loader: Any, own: OwnState, workers: LastingWorkers | None) -> None:
        self.loader, self.own, self.workers = loader, own, workers
        self.yielded = 0
        self.exhausted = False
        self.at_iter = self._random()
        self.at_first: State | None = None
        # Lightning fetches one batch ahead of loaders without a length: where they were before it must be known.
        self._ahead: Callable[[], State] | None = None if _has_length(loader) else self._state
        self.before: State | None = None
        self.indices = _indices(loader, workers)
        self.dealt: State | None = None
        if self.indices is not None:
            self.indices.instead = None  # of an epoch before: workers that persist keep their indices
        self.inner = _begin_epoch(loader, workers, self.indices)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at_first is None:
            self.at_first = self._random()
        if self._ahead is not None:
            self.before = self._ahead()
        try:
            batch = next(self.inner)
        except StopIteration:
            self.exhausted = True
            raise
        self.yielded += 1
        return batch

    def position(self, ahead: int, *, epoch_done: bool = False) -> State:
        """See :func:`position_of`."""
        state = self.before if ahead and self.before is not None else self._state()
        done = state["exhausted"] or epoch_done
        workers = self.workers.saved(now=done) if self.workers is not None else None
        position = {"at_iter": self.at_iter, "at_first": self.at_first, "ahead": ahead, "workers": workers}
        along = self.indices is not None and self.indices.draws_along
        lost = self.workers is not None and self.workers.is_lost
        flags = {"exhausted": done, "draws_along": along, "workers_lost": lost}
        order = self.dealt or order_of(self.loader, self.at_iter, self.at_first)
        return {**state, **position, **flags, "order": order, "dealt": self.dealt is not None}

    def _state(self) -> State:
        state: State = {"yielded": self.yielded, "exhausted": self.exhausted, "own": self.own.capture()}
        if self._ahead is not None:
            state["random"] = capture_random()
        if is_stateful(self.loader):
            state["state"] = self.loader.state_dict()
        return state

    def _random(self) -> State:
        return {**capture_random(), "own": self.own.capture()}


class _ResumedEpoch(_Epoch):
    """The rest of a pass over a loader: the same draws for samplers and workers, and as many batches passed over."""

    def __init__(
        self,
        loader: Any,
        own: OwnState,
        workers: LastingWorkers | None,
        resume: State,
        restore_step: Callable[[], bool],
        rewind: Rewind,
    ) -> None:
        self.loader, self.own, self.workers = loader, own, workers
        self.indices = _indices(loader, workers)
        if self.indices is not None:
            self.indices.draws_along = resume.get("draws_along", False)
        if workers is not None:
            workers.resume(resume.get("workers"))
            workers.is_lost = resume.get("workers_lost", False)
        self.yielded = resume.get("yielded", 0)
        self.exhausted = resume.get("exhausted", False)
        self.at_iter, self.at_first = resume.get("at_iter", {}), resume.get("at_first")
        self._ahead = None if _has_length(loader) else self._state
        self.before = None
        self.resume: State | None = resume
        self._restore_step = restore_step
        self._rewind = rewind
        self._due_random = False
        self.dealt = resume["order"] if resume.get("dealt") else None
        if self.dealt is not None:
            self.indices = self.indices or Indices(getattr(loader, sampler_name(loader)))
            self.indices.instead = dealt(self.dealt, loader)

    def __next__(self) -> Any:
        if self.resume is not None:
            resume, self.resume = self.resume, None
            self._begin(resume)
        elif self._due_random:
            self._due_random = False
            self._restore_step()
        return super().__next__()

    def position(self, ahead: int, *, epoch_done: bool = False) -> State:
        """See :func:`position_of`."""
        if self.resume is None:
            return super().position(ahead, epoch_done=epoch_done)
        return {**self.resume, "exhausted": self.resume.get("exhausted", False) or epoch_done}

    def _begin(self, resume: State) -> None:
        present = capture_random()
        if "at_iter" not in resume:  # the end of an epoch: the next one begins as it would have
            if not self._restore_step():
                restore_random(present)
            self.own.restore(resume["own"])
            self.at_iter = self._random()
            self.inner = _begin_epoch(self.loader, self.workers, self.indices)
            return
        if "state" in resume and is_stateful(self.loader):
            self.loader.load_state_dict(resume["state"])
            # Of a loader that has come to its end already, the state is that of its next epoch.
            self.inner = iter(()) if self.exhausted else iter(self.loader)
        elif self.exhausted:
            self.inner = iter(())
        else:
            self._random_was(self.at_iter)
            self.inner = self._iter_from(resume["yielded"])
        self.own.restore(resume["own"])

        if resume["ahead"]:  # this batch was fetched before the step ended, the next one after it
            restore_random(resume["random"])
            self._due_random = True
        elif not self._restore_step():
            restore_random(present)

    def _iter_from(self, batches: int) -> Iterator[Any]:
        workers = getattr(self.loader, "num_workers", 0)
        if draws_at_once(self.loader) and (self._rewind == "skip" or (self._rewind == "auto" and workers == 0)):
            return self._iter_by_index(batches)
        inner = _begin_epoch(self.loader, self.workers, self.indices)
        if self.at_first is not None:
            self._random_was(self.at_first)
        for passed in range(batches):
            if next(inner, _END) is _END:
                logger.warning("lightning_spot: the data has only %d batches now; this epoch ends there", passed)
                break
        return inner

    def _iter_by_index(self, batches: int) -> Iterator[Any]:
        indices = self.indices or Indices(getattr(self.loader, sampler_name(self.loader)))
        indices.first = batches
        try:
            inner = _begin_epoch(self.loader, self.workers, indices)
            if self.at_first is not None and self.loader.num_workers == 0:
                self._random_was(self.at_first)
            indices.pass_over()  # now, where no worker has made it draw: with the generators as they were there
        finally:
            indices.first = 0
        return inner

    def _random_was(self, state: State) -> None:
        restore_random(state)
        self.own.restore(state["own"])


_END = object()


def position_of(loader: Any, ahead: int = 0, *, epoch_done: bool = False, at_end: bool = False) -> State | None:
    """Position of a :class:`PositionedLoader` that has begun an epoch, as plain values; ``None`` for other loaders.

    Args:
        loader: any loader.
        ahead: 1 if a batch was fetched ahead and not trained on yet.
        epoch_done: whether the epoch has no more batches; the loader itself may (``limit_train_batches``).
        at_end: whether the run is at its end, outside any epoch.
    """
    epoch = loader.__dict__["_epoch"] if type(loader) is PositionedLoader else None
    if epoch is None:
        return None
    if at_end:
        return state_of(loader)
    position: State = epoch.position(ahead, epoch_done=epoch_done)
    return position


def state_of(loader: Any) -> State | None:
    """State of a :class:`FollowedLoader` between two epochs, as plain values; ``None`` for other loaders."""
    if type(loader) not in (FollowedLoader, PositionedLoader):
        return None
    own, workers = loader.__dict__["_own"], loader.__dict__["_workers"]
    return {"own": own.capture(), "workers": workers.saved(now=True) if workers is not None else None}


def restore_state(loader: Any, state: State | None) -> None:
    """Set what :func:`state_of` returned."""
    if state is not None and type(loader) in (FollowedLoader, PositionedLoader):
        loader.__dict__["_own"].restore(state["own"])
        if loader.__dict__["_workers"] is not None:
            loader.__dict__["_workers"].resume(state["workers"])


def restore_owners(loader: Any) -> None:
    """Set the generators around a loader that is to be resumed: its epoch may have no batch left to ask it for."""
    epoch = loader.__dict__["_epoch"] if type(loader) is PositionedLoader else None
    if isinstance(epoch, _ResumedEpoch) and epoch.resume is not None:
        epoch.own.restore(epoch.resume["own"])


def batches_done(loader: Any) -> int | None:
    """Batches of its epoch that count as done in a loader which is to go on in its middle; ``None`` for others."""
    epoch = loader.__dict__["_epoch"] if type(loader) is PositionedLoader else None
    if not isinstance(epoch, _ResumedEpoch) or epoch.resume is None or "at_iter" not in epoch.resume:
        return None
    if not _has_length(loader) or (epoch.dealt is None and not epoch.exhausted):
        return int(epoch.yielded)
    left = len(dealt(epoch.dealt, epoch.loader)) - epoch.yielded if epoch.dealt is not None else 0
    return max(0, len(loader) - (0 if epoch.exhausted else left))


def loader_itself(loader: Any) -> Any:
    """The loader that a :class:`FollowedLoader` stands in for; others as they are."""
    return loader.__dict__["_loader"] if type(loader) in (FollowedLoader, PositionedLoader) else loader


def why_not_exact(loader: Any) -> Iterator[str]:
    """Why this training loader may not come back to its exact position, with what to do; nothing if it can."""
    followed = type(loader) in (FollowedLoader, PositionedLoader)
    inner = loader_itself(loader)
    if is_stateful(inner):
        return
    if isinstance(getattr(inner, "dataset", None), IterableDataset) or not isinstance(inner, DataLoader):
        yield (
            "the data position after a resume is not exact unless this stream yields the same samples each time: a"
            " resumed epoch begins it again and drops as many batches as were trained on. Use torchdata's"
            " StatefulDataLoader (any loader with state_dict and load_state_dict), or a map-style data set"
        )
    if getattr(inner, "num_workers", 0) > 0 and not getattr(inner, "in_order", True):
        yield "with in_order=False the order of batches is that of the workers' speed, which no resume can repeat"
    if followed and (reason := loader.__dict__["_why"]) is not None:
        yield (
            f"workers persist over epochs, and cannot be asked which random numbers they go on with, since {reason}:"
            " random augmentation in them is not exact. Set persistent_workers=False"
        )
    if followed and loader.__dict__["_workers"] is not None and loader.__dict__["_workers"].is_lost:
        yield (
            "workers persist over epochs, and the loader makes them in a way of its own, so that they cannot be asked"
            " which random numbers they go on with: random augmentation in them is not exact. Set"
            " persistent_workers=False"
        )
    epoch = loader.__dict__["_epoch"] if type(loader) is PositionedLoader else None
    if epoch is not None and epoch.indices is not None and epoch.indices.draws_along:
        yield (
            f"{_kind(epoch.loader)} draws from the random numbers of the process while training draws from them, too:"
            " the order of the rest of an epoch is not exact. Give it a generator of its own"
        )


def _kind(loader: Any) -> str:
    sampler = getattr(loader, sampler_name(loader))
    while type(sampler).__module__.startswith("torch.") and hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    return type(sampler).__name__


def _indices(loader: Any, workers: LastingWorkers | None) -> Indices | None:
    """What stands in for the loader's sampler; none where that is torch's."""
    if workers is not None:
        return workers.indices
    sampler = getattr(loader, sampler_name(loader)) if draws_at_once(loader) else None
    return None if sampler is None or is_known(sampler) else Indices(sampler)


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True
