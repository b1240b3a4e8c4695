"""Workers that persist: processes of a loader that go on from epoch to epoch, with the generators they hold.

Their seeds are drawn once, where the first epoch begins, and what they draw later nobody else sees. So they are asked
for it between epochs, by a batch of no samples, and made again after a resume with the same seeds and generators. What
they have changed in their copies of the data is asked for, too: it is named where it does not come back.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_spot.exact import private
from lightning_spot.exact.indices import Indices, is_stateful, random_now, replacing, sampler_name
from lightning_spot.exact.own_state import OwnState
from lightning_spot.exact.randomness import State, capture_random, restore_random
from lightning_spot.say import say
from lightning_spot.trees import mapped


class LastingWorkers:
    """The workers of one loader with ``persistent_workers``, as this process knows them.

    Args:
        loader: that has them, or will.
        own: what the loader draws from of its own.

    Attributes:
        indices: stand in for its sampler.
        is_lost: whether the loader makes them behind our back, when it is asked for a batch: none can answer then.
    """

    def __init__(self, loader: DataLoader[Any], own: OwnState) -> None:
        self._loader, self._own = loader, own
        self._name = sampler_name(loader)
        self.indices = Indices(vars(loader)[self._name])
        self._answering = _Answering(loader.collate_fn)
        self._made: State | None = None
        self._states: list[State] | None = None
        self.is_lost = False
        self._asked = False
        self._is_known = False
        self._pending: State | None = None

    def resume(self, saved: State | None) -> None:
        """Have them made as they were when :meth:`saved` was called, where the next epoch begins."""
        self._pending = saved

    def lost(self) -> list[str]:
        """Names of what workers of the attempt before had changed in the data, and those to be made will not have."""
        states: list[State] = (self._pending or {}).get("workers") or []
        return [name for state in states for name in self._own.differing_data(state["data"])]

    def saved(self, *, now: bool) -> State | None:
        """How to make them again, as plain values; ``None`` if they are to be made where an epoch begins.

        Args:
            now: as they are now, between epochs; otherwise as they were when this epoch began.
        """
        if self._pending is not None:
            return self._pending
        if now:
            self._ask()
        return {"made": self._made, "workers": self._states} if self._made is not None and self._asked else None

    def begin_epoch(self) -> Iterator[Any]:
        """``iter(loader)``, with workers as they are to be."""
        pending, self._pending = self._pending, None
        if self._is_made:
            self._ask()
        elif pending is not None:
            self._make(pending)
        else:
            made = self._random()
            iterator = self._make_iterator(None)
            self.is_lost = not self._is_made
            self._made = made if self._is_made else None
            return iterator
        self._is_known = False
        return iter(self._loader)

    @classmethod
    def of(cls, loader: Any, own: OwnState) -> LastingWorkers | None:
        """The workers of ``loader``; ``None`` where they do not persist, or cannot be asked (see `why_not_asked`).

        Those at work already are known if we had them made: by a tuner's trial, which asks for the loader before
        training does, or by a validation with the loader that training has.
        """
        if not lasts(loader) or why_not_asked(loader) is not None:
            return None
        return _known(loader) or cls(loader, own)

    @property
    def _is_made(self) -> bool:
        return private.WORKERS_ITERATOR.of(self._loader) is not None

    def _random(self) -> State:
        return {**capture_random(), "own": self._own.capture()}

    def _make(self, saved: State) -> None:
        """Make them without an epoch, from the numbers they were made from."""
        present = self._random()
        restore_random(saved["made"])
        self._own.restore(saved["made"]["own"])
        self.indices.rest = True
        try:
            self._make_iterator(saved["workers"])
        finally:
            self.indices.rest = False
            restore_random(present)
            self._own.restore(present["own"])
        if self._is_made:
            self._made, self._states, self._asked = saved["made"], saved["workers"], True

    def _make_iterator(self, states: list[State] | None) -> Iterator[Any]:
        """``iter(loader)`` for the first time: its iterator keeps our sampler, and its workers our function."""
        init = _Beginning(self._loader.worker_init_fn, states or [], self._answering)
        replaced = {self._name: self.indices, "collate_fn": self._answering, "worker_init_fn": init}
        with replacing(self._loader, replaced):
            iterator = iter(self._loader)
        if self._is_made:
            vars(private.WORKERS_ITERATOR.of(self._loader))[_KNOWN] = self
        return iterator

    def _ask(self) -> None:
        """Learn their generators, between two epochs. Batches of the last epoch that are on their way are dropped."""
        if self._is_known or not self._is_made or self._made is None:
            return
        self._asked = self._is_known = True
        self.indices.questions = self._loader.num_workers
        try:
            answers = list(DataLoader.__iter__(self._loader))
            self._states = [_own_copy(answer[_STATE]) for answer in sorted(answers, key=lambda item: item["worker"])]
        except Exception as error:
            self._states = None
            text = (
                "the random numbers of persistent workers are unknown ({error}). With random augmentation in them, a"
                " resume is not exact. Set persistent_workers=False."
            )
            say(logging.WARNING, "workers-unknown", text, error=f"{type(error).__name__}: {error}")
        finally:
            self.indices.questions = 0


class WorkerWatch:
    """What workers of a loader that keeps its state do, and no such state holds: they draw numbers, change their data.

    Stands in for its collate function, and by :meth:`begin` for its ``worker_init_fn``.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._collate, self._init = loader.collate_fn, loader.worker_init_fn
        self._draws: torch.Tensor = torch.zeros(1, dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]
        texts = torch.zeros(loader.num_workers, _MOST_TEXT, dtype=torch.uint8)
        self._changed: torch.Tensor = texts.share_memory_()  # type: ignore[no-untyped-call]
        self._at_first: Any = None
        self._own: OwnState | None = None
        self._batches = 0

    @property
    def draws(self) -> bool:
        """Whether one of them was seen to draw numbers."""
        return bool(self._draws)

    @property
    def changed(self) -> list[str]:
        """Names of attributes of the data that one of them was seen to change."""
        texts = [bytes(row.tolist()).rstrip(b"\0").decode() for row in self._changed]
        return [name for text in texts for name in text.split()]

    def begin(self, worker: int) -> None:
        """In a worker, before it loads anything."""
        if self._init is not None:
            self._init(worker)
        self._at_first = random_now()
        info = get_worker_info()
        self._own = OwnState({"dataset": info.dataset, "collate_fn": self._collate}, by_state=True) if info else None

    def __call__(self, samples: Any) -> Any:
        """Collate, and note what was done until now; what is changed, in fewer and fewer batches."""
        batch = self._collate(samples)
        info = get_worker_info()
        if info is None or self._own is None:
            return batch
        if not self._draws and random_now() != self._at_first:
            self._draws.fill_(True)
        self._batches += 1
        if self._batches & (self._batches - 1) == 0 and (changed := self._own.changed_data()):
            text = list("\n".join(changed).encode()[:_MOST_TEXT])
            self._changed[info.id, : len(text)] = torch.tensor(text, dtype=torch.uint8)
        return batch


_MOST_TEXT = 2**12
_WATCHES: WeakKeyDictionary[Any, WorkerWatch] = WeakKeyDictionary()
_MADE_LATE: WeakSet[Any] = WeakSet()
"""Loaders whose workers an earlier attempt had by now, and which make theirs where the first batch is asked for."""


def watch_of(loader: Any) -> WorkerWatch | None:
    """What is known of a loader's workers; ``None`` for loaders that keep no state of theirs."""
    if not (isinstance(loader, DataLoader) and is_stateful(loader) and loader.num_workers > 0):
        return None
    return _WATCHES.setdefault(loader, WorkerWatch(loader))


def begin_watched(loader: Any, *, apart: bool = False, indices: Indices | None = None) -> Iterator[Any]:
    """``iter(loader)``, with its workers and its own iteration watched where what these draw has to be known.

    Args:
        loader: any.
        apart: whether one that begins only where its first batch is asked for draws the seed of workers apart from what
            training draws from: an epoch that was begun before had it already.
        indices: stand in for the sampler of one that iterates in a way of its own.
    """
    if indices is not None:
        return indices.watched(loader, lambda values: _begun(loader, values, apart=apart))
    watch = watch_of(loader)
    return _begun(
        loader, {"collate_fn": watch, "worker_init_fn": watch.begin} if watch is not None else {}, apart=apart
    )


def _begun(loader: Any, values: dict[str, Any], *, apart: bool) -> Iterator[Any]:
    apart = apart or loader in _MADE_LATE
    with replacing(loader, values) if values else nullcontext():
        inner: Iterator[Any] = iter(loader)
    if not (isinstance(loader, DataLoader) and inspect.isgenerator(inner)):
        return inner
    _MADE_LATE.discard(loader)
    return _begun_late(loader, inner, {**values, **({"generator": torch.Generator()} if apart else {})})


def _begun_late(loader: DataLoader[Any], inner: Iterator[Any], values: dict[str, Any]) -> Iterator[Any]:
    with replacing(loader, values):
        first = next(inner, _END)
    if first is not _END:
        yield first
        yield from inner


_END = object()
_STATE = "lightning_spot.worker"
_KNOWN = "_lightning_spot_workers"


class _Answering:
    """Stands in for a collate function, in workers: a batch of no samples is a question for what they have by now."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate
        self._own: OwnState | None = None

    def begin(self, dataset: Any) -> OwnState:
        """In a worker, before it loads anything: what its copies draw from, and how they are."""
        self._own = OwnState({"dataset": dataset, "collate_fn": self.collate})
        return self._own

    def __call__(self, samples: Any) -> Any:
        info = get_worker_info()
        if info is None or self._own is None or not isinstance(samples, list) or samples:
            return self.collate(samples)
        state = {**capture_random(), "own": self._own.capture(), "data": self._own.changed_data()}
        return {"worker": info.id, _STATE: state}


class _Beginning:
    """Stands in for a ``worker_init_fn``: a new worker may go on with the generators that its predecessor had."""

    def __init__(self, init: Any, states: list[State], answering: _Answering) -> None:
        self.init, self.states, self.answering = init, states, answering

    def __call__(self, worker: int) -> None:
        if self.init is not None:
            self.init(worker)
        info = get_worker_info()
        if info is None:
            return
        own = self.answering.begin(info.dataset)
        if worker < len(self.states):
            restore_random(self.states[worker])
            own.restore(self.states[worker]["own"])


def _own_copy(state: Any) -> Any:
    """Tensors from another process lie in memory that it shares by a descriptor."""
    return mapped(lambda item: item.clone() if isinstance(item, torch.Tensor) else item, state)


def lasts(loader: Any) -> bool:
    """Whether the loader's workers persist over epochs."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


def are_made(loader: Any) -> bool:
    """Whether workers that persist are at work for this loader."""
    return lasts(loader) and private.WORKERS_ITERATOR.of(loader) is not None


def make_unnoticed(loader: Any) -> None:
    """Make workers that persist and cannot be asked, if they are not made yet: an earlier attempt had them by now.

    Their seed is drawn from the numbers that training goes on with, and the undisturbed run drew it long before.
    """
    if not lasts(loader) or are_made(loader):
        return
    if inspect.isgeneratorfunction(type(loader).__iter__):
        _MADE_LATE.add(loader)
        return
    present, own = capture_random(), OwnState.of(loader)
    generators = own.capture()
    begin_watched(loader)
    restore_random(present)
    own.restore(generators)


def _known(loader: Any) -> LastingWorkers | None:
    """Who had the workers made that are at work for this loader; ``None`` if nobody of ours did."""
    known: LastingWorkers | None = getattr(private.WORKERS_ITERATOR.of(loader), _KNOWN, None)
    return known


def why_not_asked(loader: Any) -> str | None:
    """Why workers that persist cannot be asked for their generators; ``None`` if they can, or do not persist."""
    if not lasts(loader):
        return None
    if is_stateful(loader):
        return "the loader keeps its state itself"
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return "they read a stream"
    if loader.batch_sampler is None:
        return "they load without batch_size"
    is_made = private.WORKERS_ITERATOR.of(loader) is not None
    return "they were at work before the training" if is_made and _known(loader) is None else None
