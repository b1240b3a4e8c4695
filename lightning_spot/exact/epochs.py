"""One pass over a loader that knows how far it got, and the rest of one that an earlier attempt has begun."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

from lightning_spot.exact import private
from lightning_spot.exact.change_detector import digest_of
from lightning_spot.exact.findings import say_not_exact
from lightning_spot.exact.indices import (
    Indices,
    draws_at_once,
    is_known,
    is_stateful,
    iterates_itself,
    replacing,
    sampler_name,
)
from lightning_spot.exact.made_of import made_of
from lightning_spot.exact.order import batch_of, dealt, order_of
from lightning_spot.exact.own_state import OwnState
from lightning_spot.exact.randomness import State, capture_random, restore_random
from lightning_spot.exact.workers import (
    LastingWorkers,
    are_made,
    begin_watched,
    lasts,
    make_unnoticed,
    watch_of,
    watching,
)
from lightning_spot.say import say

DataResume = Literal["auto", "replay", "seek"]
"""How a loader comes back to its position: ``"replay"`` loads the epoch's batches again and drops them, which is exact
even with random augmentation inside workers; ``"seek"`` draws their indices only; ``"auto"`` seeks where there are no
workers (exact, too) and replays where there are. A loader with a state of its own goes on from that, but with
``"replay"``, and with ``"auto"`` where a shuffle buffer is in no state."""

DATA_RESUMES = ("auto", "replay", "seek")

_END = object()
_BUFFERS = ("buffer_size", "bufsize", "shuffle_buffer", "shuffle_buffer_size")


def begin_epoch(loader: Any, workers: LastingWorkers | None, indices: Indices | None = None) -> Iterator[Any]:
    """Have a loader begin an epoch: by its workers if they persist, else with ``indices`` in its sampler's place."""
    if workers is not None:
        return workers.begin_epoch()
    if indices is None or iterates_itself(loader):
        return begin_watched(loader, indices=indices)
    with replacing(loader, {sampler_name(loader): indices, **watching(loader)}):
        return iter(loader)


class Epoch:
    """One pass over a loader, from its start."""

    def __init__(self, loader: Any, own: OwnState, workers: LastingWorkers | None) -> None:
        self.loader, self.own, self.workers = loader, own, workers
        self.yielded = 0
        self.exhausted = False
        self.at_iter = self._random()
        self.data_at_iter = own.changed_data()
        self.made_of = made_of(loader)
        self.workers_draw = self._draws_at_start()
        self.workers_changed: list[str] = []
        self.expected: int | None = None
        self.is_checked = False
        self.at_first: State | None = None
        self.first_batch: str | None = None
        # Lightning fetches one batch ahead of loaders without a length: where they were before it must be known.
        self._ahead: Callable[[], State] | None = None if has_length(loader) else self._state
        self.before: State | None = None
        self.indices = _indices(loader, workers)
        self.dealt: State | None = None
        if self.indices is not None:
            self.indices.instead = None  # of an epoch before: workers that persist keep their indices
        self.inner = begin_epoch(loader, workers, self.indices)

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
            self._say_if_short()
            self.exhausted = True
            raise
        if self.yielded == 0:
            self.first_batch = digest_of(batch)
        self.yielded += 1
        return batch

    def follow(self, before: Epoch) -> None:
        """Expect as many batches as the epoch before had; to have less is an error in a run that was resumed only."""
        self.is_checked |= before.is_checked
        if self.expected is None:
            self.expected = before.whole

    @property
    def whole(self) -> int | None:
        """So many batches an epoch has: by the loader's length, or else as many as the last one that ended."""
        if has_length(self.loader):
            return len(self.loader)
        return self.yielded if self.exhausted else self.expected

    def _say_if_short(self) -> None:
        is_short = self.expected is not None and self.yielded < self.expected
        if is_short and self.is_checked and not (self.exhausted or self.dealt):
            why = (
                f"an epoch ended after {self.yielded} of {self.expected} batches: {type(self.loader).__name__} is not"
                ' back at its place. Set data_resume="replay": batches are loaded again in place of its state'
            )
            say_not_exact([why])

    def leave(self) -> None:
        """Before the loader begins another epoch."""

    def at_end(self) -> State:
        """Where a loader that keeps its state is when the run has come to its end, outside any epoch."""
        data = {"data": self.own.changed_data(), "made_of": made_of(self.loader)}
        if not is_stateful(self.loader):
            return data
        return {**data, "state": self._loader_state(), "ended": self.exhausted, "yielded": self.yielded}

    def position(self, ahead: int, *, epoch_done: bool = False) -> State:
        """See :func:`~lightning_spot.exact.position.position_of`."""
        state = self.before if ahead and self.before is not None else self._state()
        done = state["exhausted"] or epoch_done
        workers = self.workers.saved(now=done) if self.workers is not None else None
        position = {"at_iter": self.at_iter, "at_first": self.at_first, "ahead": ahead, "workers": workers}
        data: State = {"data": self.own.changed_data(), "data_at_iter": self.data_at_iter}
        watch = watch_of(self.loader)
        data |= {"made_of": self.made_of, "whole": self.whole, "first_batch": self.first_batch}
        data |= {"workers_draw": True if watch is not None and watch.draws else self.workers_draw}
        changed = [*self.workers_changed, *(watch.changed if watch is not None else ())]
        data |= {"workers_changed": sorted(set(changed))}
        along = self.indices is not None and self.indices.draws_along
        lost = self.workers is not None and self.workers.is_lost
        flags = {"exhausted": done, "ended": state["exhausted"], "draws_along": along, "workers_lost": lost}
        order = self.dealt or order_of(self.loader, self.at_iter, self.at_first)
        dealing = {"order": order, "dealt": self.dealt is not None, "batch": batch_of(self.loader)}
        return {**state, **position, **flags, **dealing, **data}

    def _state(self) -> State:
        state: State = {"yielded": self.yielded, "exhausted": self.exhausted, "own": self.own.capture()}
        if self._ahead is not None:
            state["random"] = capture_random()
        if is_stateful(self.loader):
            state["state"] = self._loader_state()
        return state

    def _loader_state(self) -> Any:
        return self.loader.state_dict()

    def _random(self) -> State:
        return {**capture_random(), "own": self.own.capture()}

    def _draws_at_start(self) -> bool | None:
        """Whether workers have been seen to draw numbers when an epoch begins; ``None`` if nobody looks."""
        has_workers = getattr(self.loader, "num_workers", 0) > 0
        return None if has_workers and watch_of(self.loader) is None else False


class ResumedEpoch(Epoch):
    """The rest of a pass over a loader: the same draws for samplers and workers, and as many batches passed over."""

    def __init__(
        self,
        loader: Any,
        own: OwnState,
        workers: LastingWorkers | None,
        resume: State,
        restore_step: Callable[[bool], bool],
        data_resume: DataResume,
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
        self.data_at_iter = resume.get("data_at_iter", {})
        self.workers_draw = resume["workers_draw"] if "at_iter" in resume else self._draws_at_start()
        self.workers_changed = resume.get("workers_changed", [])
        self.expected = len(loader) if has_length(loader) else resume.get("whole")
        self.is_checked = True
        self.made_of = resume["made_of"]
        has_same_batches = resume.get("batch") in (None, batch_of(self.loader))
        self.first_batch = resume.get("first_batch") if has_same_batches else None
        self._ahead = None if has_length(loader) else self._state
        self.before = None
        self.resume: State | None = resume
        self._restore_step = restore_step
        self._data_resume = data_resume
        self._by_state = data_resume == "seek" or (data_resume == "auto" and not any(shuffle_buffers(own)))
        self._due_random = False
        self._data: dict[str, str] = resume.get("data", {})
        named = self.workers_changed if self.has_other_workers else []
        self._lost = [name for name in (workers.lost() if workers is not None else []) if name not in named]
        self._begins_otherwise = False
        self._ended: Any = None
        self._loaded: list[tuple[Any, str, Any, Any]] = []
        self._has_loaded = False
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
            self._restore_step(True)
        return super().__next__()

    def position(self, ahead: int, *, epoch_done: bool = False) -> State:
        """See :func:`~lightning_spot.exact.position.position_of`."""
        if self.resume is None:
            return super().position(ahead, epoch_done=epoch_done)
        return {**self.resume, "exhausted": self.resume.get("exhausted", False) or epoch_done}

    def at_end(self) -> State:
        """See :meth:`Epoch.at_end`."""
        if self.resume is None:
            return super().at_end()
        resume = self.resume
        kept: State = {name: resume.get(name) for name in ("state", "ended", "yielded")} if "state" in resume else {}
        return {"data": self.own.changed_data(), "made_of": made_of(self.loader), **kept}

    @property
    def state_to_come(self) -> Any:
        """The loader's state, while it has not begun: torchdata's would begin an epoch for it, and draw numbers."""
        return self.resume.get("state") if self.resume is not None else self._ended

    def _loader_state(self) -> Any:
        return super()._loader_state() if self._ended is None else self._ended

    def leave(self) -> None:
        """Keep what loading a state has left behind out of the next epoch, which begins at its start.

        A stream may begin each epoch from the state that it was given, until it is given another one. So what iterating
        has not changed since is as it was before; and workers, which have a copy of it, are made again.
        """
        if self.resume is not None and self._goes_by_state(self.resume):  # Lightning asked for none of its batches
            present, own = capture_random(), self.own.capture()
            self._come_to_end(self.resume)
            restore_random(present)
            self.own.restore(own)
        for item, name, before, loaded in self._loaded:
            if vars(item).get(name) is loaded:
                vars(item)[name] = before
        if self._has_loaded and are_made(self.loader):
            self.inner = iter(())
            private.WORKERS_ITERATOR.set(self.loader, None)
            make_unnoticed(self.loader)
        elif self.exhausted and self.workers is None:  # it may have gone to its end without them
            make_unnoticed(self.loader)
        self._loaded, self._has_loaded = [], False

    def _begin(self, resume: State) -> None:
        present = capture_random()
        self._lost += self._lost_before()
        by_state = self._goes_by_state(resume)
        if "at_iter" not in resume:  # the end of an epoch: the next one begins as it would have
            if not self._restore_step(True):
                restore_random(present)
            self.own.restore(resume["own"], values=False)  # these came before hooks began this epoch
            if by_state:
                self._come_to_end(resume)
                self.own.restore(resume["own"], values=False)
                self.leave()
            self.at_iter = self._random()
            self.say_what_differs()
            self.inner = begin_epoch(self.loader, self.workers, self.indices)
            return
        if by_state:  # streams have to be told their epoch first, and samplers without a state draw again
            self._random_was(self.at_iter)
            if self.exhausted:
                self._come_to_end(resume)
            else:
                self.inner = self._load(resume["state"])
        elif not self.exhausted:
            self._random_was(self.at_iter)
            self.inner = self._iter_from(resume["yielded"])
            if self.indices is not None:
                self.indices.at_start = None
        if self.exhausted:
            self.inner = iter(())
            self._ended = None if by_state else resume.get("state")
        self.own.restore(resume["own"])
        self.say_what_differs()

        if resume["ahead"]:  # this batch was fetched before the step ended, the next one after it
            restore_random(resume["random"])
            self._due_random = True
        elif not self._restore_step(not self.exhausted):
            restore_random(present)

    @property
    def has_other_workers(self) -> bool:
        """Whether workers go on with other random numbers and data than those of the attempt before would have."""
        resume = self.resume or {}
        if "state" in resume:
            return (self._goes_by_state(resume) and not self.exhausted) or lasts(self.loader)
        are_there = 0 < self.made_of["workers"] == getattr(self.loader, "num_workers", 0)
        return are_there and self._seeks and self.yielded > 0 and not self.exhausted

    @property
    def _seeks(self) -> bool:
        """Whether the loader goes to its place by indices, whatever that leaves out."""
        return self._data_resume == "seek" and draws_at_once(self.loader)

    def say_what_differs(self) -> None:
        """Warn of what an attempt before had changed in the data, and that is not so now. Once."""
        names = [*self._lost, *self.own.differing_data(self._data)]
        self._data, self._lost = {}, []
        say_changed(names)
        if self._begins_otherwise and not names and made_of(self.loader) == self.made_of:
            why = (
                f"the first batch of this epoch, loaded again, differs: {type(self.loader).__name__} does not yield the"
                " same twice, and the rest of this epoch is not exact. Give it a state_dict and a load_state_dict"
            )
            say_not_exact([why])
        self._begins_otherwise = False

    def _lost_before(self) -> list[str]:
        """What earlier epochs had changed in the data, and this process has neither so nor as it was at the snapshot.

        Objects look alike when the batches are loaded again, however they began.
        """
        changed = {name: told for name, told in self.data_at_iter.items() if name in self._data}
        present = self.own.differing_data(self._data)
        return [name for name in self.own.differing_data(changed) if name in present]

    def _goes_by_state(self, resume: State) -> bool:
        """Whether its own state brings the loader to its place: one of as many workers."""
        workers = self.made_of["workers"] == getattr(self.loader, "num_workers", 0)
        return "state" in resume and is_stateful(self.loader) and self._by_state and workers

    def _load(self, state: State) -> Iterator[Any]:
        """Have a loader go on from its own state."""
        before = [(item, dict(vars(item))) for _, item in self.own.items() if _can_load(item)]
        self.loader.load_state_dict(state)
        inner = begin_watched(self.loader, apart=True)
        for item, attributes in before:
            for name, value in vars(item).items():
                # A loader counts on from its state; that one was loaded is a flag, as litdata's is.
                is_left = item is not self.loader or type(value) is bool
                if is_left and name in attributes and value is not attributes[name]:
                    self._loaded.append((item, name, attributes[name], value))
        self._has_loaded = True
        return inner

    def _come_to_end(self, resume: State) -> None:
        """Bring a loader that keeps its state to the end of its epoch, where the next one begins at the start.

        Whether its state is one of the end depends on whether it was asked for one batch more than there are, which
        Lightning does not do where it knows how many there are.
        """
        inner = self._load(resume["state"])
        is_asked = not resume.get("ended") and has_length(self.loader) and resume["yielded"] >= len(self.loader)
        if is_asked and next(inner, _END) is not _END:  # litdata's has gone on to the next epoch by itself
            self.loader.load_state_dict(resume["state"])

    def _iter_from(self, batches: int) -> Iterator[Any]:
        workers = getattr(self.loader, "num_workers", 0)
        # With workers, a sampler draws its order where the epoch begins; without, where its first batch is asked for.
        at_first = self.at_first if workers or not self.made_of["workers"] else None
        if workers and not self.made_of["workers"] and at_first is not None and draws_at_once(self.loader):
            self.indices = self.indices or Indices(getattr(self.loader, sampler_name(self.loader)))
            self.indices.at_start = lambda: self._random_was(at_first)
        loads = workers or self._data != self.data_at_iter  # what reading changes in the data happens again
        if self._seeks or (self._data_resume == "auto" and not loads and draws_at_once(self.loader)):
            return self._iter_by_index(batches, at_first)
        inner = begin_epoch(self.loader, self.workers, self.indices)
        if at_first is not None:
            self._random_was(at_first)
        for passed in range(batches):
            batch = next(inner, _END)
            if passed == 0:
                self._begins_otherwise = self.first_batch not in (None, digest_of(batch))
            if batch is _END:
                text = "the data has only {batches} batches now. This epoch ends there. Resume with the data of before."
                say(logging.WARNING, "data-shorter", text, batches=passed)
                break
        return inner

    def _iter_by_index(self, batches: int, at_first: State | None) -> Iterator[Any]:
        indices = self.indices or Indices(getattr(self.loader, sampler_name(self.loader)))
        indices.first = batches
        try:
            inner = begin_epoch(self.loader, self.workers, indices)
            if at_first is not None and self.loader.num_workers == 0:
                self._random_was(at_first)
            indices.pass_over()  # now, where no worker has made it draw: with the generators as they were there
        finally:
            indices.first = 0
        return inner

    def _random_was(self, state: State) -> None:
        restore_random(state)
        self.own.restore(state["own"])


def say_changed(names: list[str]) -> None:
    """Warn of what an attempt before had changed in the data, and that is not so now, if there is anything."""
    if names:
        why = (
            f"training or reading had changed {', '.join(sorted(set(names)))}, which no snapshot holds: the data begin"
            " as the program makes them. Keep such values in the state_dict of a data module, and set them when it is"
            " loaded"
        )
        say_not_exact([why])


def shuffle_buffers(own: OwnState) -> Iterator[str]:
    """Shuffle buffers in a loader's data, of which no state holds the samples: the names of their sizes, and these."""
    for path, item in own.items():
        for name in _BUFFERS if path.startswith("dataset") else ():
            size = getattr(item, "__dict__", {}).get(name)
            if type(size) is int and size > 1:
                yield f"{path}.{name}={size}"


def _indices(loader: Any, workers: LastingWorkers | None) -> Indices | None:
    """What stands in for the loader's sampler; none where that is torch's, and its iteration, too."""
    if workers is not None:
        return workers.indices
    if iterates_itself(loader):
        return Indices(getattr(loader, sampler_name(loader)))
    sampler = getattr(loader, sampler_name(loader)) if draws_at_once(loader) else None
    return None if sampler is None or is_known(sampler) else Indices(sampler)


def has_length(loader: Any) -> bool:
    """Whether a loader knows how many batches an epoch has."""
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True


def _can_load(item: Any) -> bool:
    """Whether a loader's state may be given on to this object."""
    return callable(getattr(item, "load_state_dict", None)) and isinstance(getattr(item, "__dict__", None), dict)
