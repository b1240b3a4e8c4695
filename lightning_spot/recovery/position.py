"""The position in the data: a loader that knows how far it got in this epoch, and can go there again."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset

from lightning_spot.recovery.randomness import State, capture_own, capture_random, restore_own, restore_random

logger = logging.getLogger(__name__)

Rewind = Literal["auto", "replay", "skip"]
"""How a loader comes back to its position: ``"replay"`` loads the epoch's batches again and drops them, which is exact
even with random augmentation inside workers; ``"skip"`` draws their indices only; ``"auto"`` skips where there are no
workers (exact, too) and replays where there are."""

REWINDS = ("auto", "replay", "skip")


class PositionedLoader:
    """Stands in for a training loader and counts what it yields; in everything else it *is* that loader.

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
        # Past __setattr__, which belongs to the loader.
        self.__dict__.update(_loader=loader, _resume=resume, _restore_step=restore_step, _rewind=rewind, _epoch=None)

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
        position = own["_resume"](self)
        own["_epoch"] = (
            _Epoch(own["_loader"])
            if position is None
            else _ResumedEpoch(own["_loader"], position, own["_restore_step"], own["_rewind"])
        )
        return own["_epoch"]  # type: ignore[no-any-return]


class _Epoch:
    """One pass over a loader, from its start."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.owners = owners_of(loader)
        self.yielded = 0
        self.exhausted = False
        self.at_iter = self._random()
        self.at_first: State | None = None
        # Lightning fetches one batch ahead of loaders without a length: where they were before it must be known.
        self._ahead: Callable[[], State] | None = None if _has_length(loader) else self._state
        self.before: State | None = None
        self.inner = iter(loader)

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

    def position(self, ahead: int) -> State:
        """See :func:`position_of`."""
        state = self.before if ahead and self.before is not None else self._state()
        return {**state, "at_iter": self.at_iter, "at_first": self.at_first, "ahead": ahead}

    def _state(self) -> State:
        state: State = {"yielded": self.yielded, "exhausted": self.exhausted, "own": capture_own(self.owners)}
        if self._ahead is not None:
            state["random"] = capture_random()
        if is_stateful(self.loader):
            state["state"] = self.loader.state_dict()
        return state

    def _random(self) -> State:
        return {**capture_random(), "own": capture_own(self.owners)}


class _ResumedEpoch(_Epoch):
    """The rest of a pass over a loader: the same draws for samplers and workers, and as many batches passed over."""

    def __init__(self, loader: Any, resume: State, restore_step: Callable[[], bool], rewind: Rewind) -> None:
        self.loader = loader
        self.owners = owners_of(loader)
        self.yielded = resume.get("yielded", 0)
        self.exhausted = resume.get("exhausted", False)
        self.at_iter, self.at_first = resume.get("at_iter", {}), resume.get("at_first")
        self._ahead = None if _has_length(loader) else self._state
        self.before = None
        self.resume: State | None = resume
        self._restore_step = restore_step
        self._rewind = rewind
        self._due_random = False

    def __next__(self) -> Any:
        if self.resume is not None:
            resume, self.resume = self.resume, None
            self._begin(resume)
        elif self._due_random:
            self._due_random = False
            self._restore_step()
        return super().__next__()

    def position(self, ahead: int) -> State:
        """See :func:`position_of`."""
        return self.resume if self.resume is not None else super().position(ahead)

    def _begin(self, resume: State) -> None:
        present = capture_random()
        if "at_iter" not in resume:  # the end of an epoch: the next one begins as it would have
            if not self._restore_step():
                restore_random(present)
            restore_own(resume["own"], self.owners)
            self.at_iter = self._random()
            self.inner = iter(self.loader)
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
        restore_own(resume["own"], self.owners)

        if resume["ahead"]:  # this batch was fetched before the step ended, the next one after it
            restore_random(resume["random"])
            self._due_random = True
        elif not self._restore_step():
            restore_random(present)

    def _iter_from(self, batches: int) -> Iterator[Any]:
        workers = getattr(self.loader, "num_workers", 0)
        if is_map_style(self.loader) and (self._rewind == "skip" or (self._rewind == "auto" and workers == 0)):
            return self._iter_by_index(batches)
        inner: Iterator[Any] = iter(self.loader)
        if self.at_first is not None:
            self._random_was(self.at_first)
        for passed in range(batches):
            if next(inner, _END) is _END:
                logger.warning("lightning_spot: the data has only %d batches now; this epoch ends there", passed)
                break
        return inner

    def _iter_by_index(self, batches: int) -> Iterator[Any]:
        loader = self.loader
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        sampler = loader.__dict__[name]
        rest = _Rest(sampler, batches)
        loader.__dict__[name] = rest  # past DataLoader.__setattr__, which forbids it; an iterator keeps what is there
        try:
            inner: Iterator[Any] = iter(loader)
        finally:
            loader.__dict__[name] = sampler
        if self.at_first is not None:
            self._random_was(self.at_first)
        rest.pass_over()  # now, since samplers draw their seed where they begin
        return inner

    def _random_was(self, state: State) -> None:
        restore_random(state)
        restore_own(state["own"], self.owners)


_END = object()


class _Rest:
    """What a sampler draws after its first draws. Those are drawn when it is first asked, or told to be drawn."""

    def __init__(self, sampler: Any, first: int) -> None:
        self._sampler = sampler
        self._first = first
        self._draws: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.pass_over())

    def pass_over(self) -> Iterator[Any]:
        """Draw the first draws, once."""
        if self._draws is None:
            self._draws = iter(self._sampler)
            for _ in itertools.islice(self._draws, self._first):
                pass
        return self._draws


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
        return {"own": capture_own(epoch.owners)}
    position: State = epoch.position(ahead)
    return {**position, "exhausted": position["exhausted"] or epoch_done}


def restore_owners(loader: Any) -> None:
    """Set the generators around a loader that is to be resumed: its epoch may have no batch left to ask it for."""
    epoch = loader.__dict__["_epoch"] if type(loader) is PositionedLoader else None
    if isinstance(epoch, _ResumedEpoch) and epoch.resume is not None:
        restore_own(epoch.resume["own"], epoch.owners)


def why_not_exact(loader: Any) -> str | None:
    """Why this loader may not come back to its exact position, with what to do; ``None`` if it can."""
    inner = loader.__dict__["_loader"] if type(loader) is PositionedLoader else loader
    if is_stateful(inner):
        return None
    if isinstance(getattr(inner, "dataset", None), IterableDataset) or not isinstance(inner, DataLoader):
        return (
            "the data position after a resume is not exact unless this stream yields the same samples each time: a"
            " resumed epoch begins it again and drops as many batches as were trained on. Use torchdata's"
            " StatefulDataLoader (any loader with state_dict and load_state_dict), or a map-style data set"
        )
    if inner.num_workers > 0 and inner.persistent_workers:
        return (
            "workers persist over epochs, so random augmentation inside them goes on from draws that a resumed run"
            " cannot repeat. Set persistent_workers=False if samples are augmented at random"
        )
    return None


def is_map_style(loader: Any) -> bool:
    """Whether a loader draws indices into a data set."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def is_stateful(loader: Any) -> bool:
    """Whether a loader keeps its position itself, as torchdata's ``StatefulDataLoader`` does."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def owners_of(loader: Any) -> list[Any]:
    """The objects around a loader that may have generators of their own."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    ]
    return [owner for owner in found if owner is not None]


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True
