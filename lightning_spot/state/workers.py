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

from lightning_spot.say import say
from lightning_spot.state import compat
from lightning_spot.state.indices import Indices, draws_at_once, is_stateful, random_now, replacing, sampler_name
from lightning_spot.state.own_state import OwnState
from lightning_spot.state.randomness import State, capture_random, restore_random
from lightning_spot.trees import mapped


class LastingWorkers:
    """The workers of one loader with ``persistent_workers``, as this process knows them.

    Args:
        loader: that has them, or will.
        own: what the loader draws from of its own.

    Attributes:
        indices: stand in for its sampler.
    """

    def __init__(self, loader: DataLoader[Any], own: OwnState) -> None:
        self._loader, self._own = loader, own
        self._name = sampler_name(loader)
        self.indices = Indices(vars(loader)[self._name])
        self._watch = WorkerWatch(loader, answers=True)
        self._made: State | None = None
        self._saved: State | None = None
        self._is_known = False

    def resume(self, saved: State | None) -> None:
        """Have them made as they were when :meth:`saved` was called, where the next epoch begins."""
        self._saved, self._is_known = saved, saved is not None

    def lost(self) -> list[str]:
        """Names of what workers of the attempt before had changed in the data, and those to be made will not have."""
        states: list[State] = (self._saved or {}).get("workers") or []
        return [name for state in states for name in state["data"]]

    def saved(self, *, now: bool) -> State | None:
        """How to make them again, as plain values; ``None`` if they are to be made where an epoch begins.

        Args:
            now: as they are now, between epochs; otherwise as they were when this epoch began.
        """
        if now:
            self._ask()
        return self._saved

    def begin_epoch(self) -> Iterator[Any]:
        """``iter(loader)``, with workers as they are to be."""
        if are_made(self._loader):
            self._ask()
        elif self._saved is not None:
            self._make(self._saved)
        else:
            self._made = self._random()
            return self._make_iterator([])
        self._is_known = False
        return iter(self._loader)

    @classmethod
    def of(cls, loader: Any, own: OwnState) -> LastingWorkers | None:
        """The workers of ``loader``; ``None`` where they do not persist, or cannot be asked.

        Those at work already are known if we had them made: by a tuner's trial, which asks for the loader before
        training does, or by a validation with the loader that training has.
        """
        if not lasts(loader) or not _can_be_asked(loader):
            return None
        return _known(loader) or cls(loader, own)

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
        self._made = saved["made"]

    def _make_iterator(self, states: list[State] | None) -> Iterator[Any]:
        """``iter(loader)`` for the first time: its iterator keeps our sampler, and its workers our function."""
        self._watch.states = states or []
        with replacing(self._loader, {self._name: self.indices, **self._watch.values(self._loader)}):
            iterator = iter(self._loader)
        vars(compat.WORKERS_ITERATOR.of(self._loader))[_KNOWN] = self
        return iterator

    def _ask(self) -> None:
        """Learn their generators, between two epochs. Batches of the last epoch that are on their way are dropped."""
        if self._is_known or not are_made(self._loader) or self._made is None:
            return
        self._is_known = True
        states: list[State] | None = None
        self.indices.questions = self._loader.num_workers
        try:
            answers = list(DataLoader.__iter__(self._loader))
            states = [_own_copy(answer[_STATE]) for answer in sorted(answers, key=lambda item: item["worker"])]
        except Exception as error:
            text = (
                "the random numbers of persistent workers are unknown ({error}). With random augmentation in them, a"
                " resume is not exact. Set persistent_workers=False."
            )
            say(logging.WARNING, "workers-unknown", text, error=f"{type(error).__name__}: {error}")
        finally:
            self.indices.questions = 0
        self._saved = {"made": self._made, "workers": states}


class WorkerWatch:
    """Stands in for a loader's collate function, and by :meth:`begin` for its ``worker_init_fn``.

    Args:
        loader: whose workers are made with :meth:`values`.
        answers: whether a batch of no samples is a question for what a worker has by now. Otherwise it is noted what no
            state holds: that workers draw numbers, or change their copies of the data.

    Attributes:
        states: that new workers go on with, each in place of the worker of its number.
    """

    def __init__(self, loader: DataLoader[Any], *, answers: bool = False) -> None:
        self._collate, self._init = loader.collate_fn, loader.worker_init_fn
        self._by_state = is_stateful(loader)
        self._answers = answers
        self.states: list[State] = []
        self._acts = torch.zeros(1, dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]
        self._own: OwnState | None = None
        self._random: Any = None
        self._batches = 0

    @property
    def acts(self) -> bool:
        """Whether a worker was seen to draw numbers or to change attributes of the data."""
        return bool(self._acts)

    def values(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """What the loader's attributes are while it makes workers."""
        self._collate, self._init = loader.collate_fn, loader.worker_init_fn
        return {"collate_fn": self, "worker_init_fn": self.begin}

    def begin(self, worker: int) -> None:
        """In a worker, before it loads anything."""
        if self._init is not None:
            self._init(worker)
        if (info := get_worker_info()) is None:
            return
        self._own = OwnState({"dataset": info.dataset, "collate_fn": self._collate}, by_state=self._by_state)
        if worker < len(self.states):
            restore_random(self.states[worker])
            self._own.restore(self.states[worker]["own"])
        self._random = random_now()

    def __call__(self, samples: Any) -> Any:
        """Collate, and note what was done until now; or answer."""
        info = get_worker_info()
        if info is None or self._own is None:
            return self._collate(samples)
        if self._answers and isinstance(samples, list) and not samples:
            state = {**capture_random(), "own": self._own.capture(), "data": self._own.changed_data()}
            return {"worker": info.id, _STATE: state}
        batch = self._collate(samples)
        self._batches += 1
        looks = self._batches & (self._batches - 1) == 0  # into the data, in fewer and fewer batches
        if not (self._answers or self._acts) and (random_now() != self._random or (looks and self._own.has_changed())):
            self._acts.fill_(True)
        return batch


_WATCHES: WeakKeyDictionary[Any, WorkerWatch] = WeakKeyDictionary()
_MADE_LATE: WeakSet[Any] = WeakSet()
"""Loaders whose workers an earlier attempt had by now, and which make theirs where the first batch is asked for."""


def watch_of(loader: Any) -> WorkerWatch | None:
    """The watch over the workers of a loader that goes on by its state; ``None`` of others."""
    if not (isinstance(loader, DataLoader) and loader.num_workers > 0 and is_stateful(loader)):
        return None
    if loader not in _WATCHES:
        _WATCHES[loader] = WorkerWatch(loader)
    return _WATCHES[loader]


def begin_watched(loader: Any, *, apart: bool = False) -> Iterator[Any]:
    """``iter(loader)``, with its workers watched where what these draw has to be known.

    Args:
        loader: any.
        apart: whether one that begins only where its first batch is asked for draws the seed of workers apart from what
            training draws from: an epoch that was begun before had it already.
    """
    watch, apart = watch_of(loader), apart or loader in _MADE_LATE
    values = watch.values(loader) if watch is not None else {}
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


def _own_copy(state: Any) -> Any:
    """Tensors from another process lie in memory that it shares by a descriptor."""
    return mapped(lambda item: item.clone() if isinstance(item, torch.Tensor) else item, state)


def lasts(loader: Any) -> bool:
    """Whether the loader's workers persist over epochs."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.persistent_workers


def are_made(loader: Any) -> bool:
    """Whether workers that persist are at work for this loader."""
    return lasts(loader) and compat.WORKERS_ITERATOR.of(loader) is not None


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
    before = own.capture()
    begin_watched(loader)
    restore_random(present)
    own.restore(before)


def _known(loader: Any) -> LastingWorkers | None:
    """Who had the workers made that are at work for this loader; ``None`` if nobody of ours did."""
    known: LastingWorkers | None = getattr(compat.WORKERS_ITERATOR.of(loader), _KNOWN, None)
    return known


def _can_be_asked(loader: DataLoader[Any]) -> bool:
    """Whether workers that persist can be asked: they load batches of indices, and are not at work for others yet."""
    if not draws_at_once(loader):
        return False
    return loader.batch_sampler is not None and (not are_made(loader) or _known(loader) is not None)
