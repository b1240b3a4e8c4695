"""The indices that a loader draws, and the workers that load them, as far as others have to know or to steer them.

Indices stand in a sampler's place: some are passed over, held back, or watched. Workers that persist are processes that
go on from epoch to epoch, with the generators they hold. Their seeds are drawn once, where the first epoch begins, and
what they draw later nobody else sees. So they are asked for it between epochs, by a batch of no samples, and made again
after a resume with the same seeds and generators. What they have changed in their copies of the data is asked for, too:
it is named where it does not come back.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_spot.say import say
from lightning_spot.state import compat
from lightning_spot.state.own_state import OwnState, is_stateful
from lightning_spot.state.randomness import State, capture_random, stamp_of
from lightning_spot.trees import mapped

_WATCHED = 4


class Indices:
    """Stands in for a loader's (batch) sampler, and can yield less than it, or questions to the workers.

    Attributes:
        first: draws of the next pass that are passed over, each where the first one that is not is asked for.
        draws: those of the last pass, as the sampler draws them.
        rest: whether a pass yields nothing.
        questions: to yield instead of indices.
        at_start: called just before a pass draws.
        instead: what passes draw in place of the sampler's indices; ``None`` for those.
        draws_along: whether the sampler was seen to draw from the generators of the process after its first draw: then
            the order depends on what else is drawn meanwhile, and cannot be drawn again.
    """

    def __init__(self) -> None:
        self._sampler: Any = None
        self.draws: Iterator[Any] = iter(())
        self.first = 0
        self.rest = False
        self.questions = 0
        self.at_start: Callable[[], None] | None = None
        self.instead: list[Any] | None = None
        self.draws_along = False

    def values(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """What the loader's attribute is while an epoch begins; it may have another sampler than in the one before."""
        name = sampler_name(loader)
        self._sampler = vars(loader)[name]
        return {name: self}

    def __iter__(self) -> Iterator[Any]:
        if self.questions:
            return iter([[] for _ in range(self.questions)])
        if self.at_start is not None:
            self.at_start()
        self.draws = iter(self._sampler)  # also where nothing is yielded: samplers may draw here
        if self.rest:
            return iter(())
        if self.instead is not None:
            self.draws = iter(self.instead)
        if self.first:
            return islice(self.draws, self.first, None)
        is_plain = self.instead is not None or self.draws_along or is_known(self._sampler)
        return self.draws if is_plain else self._watched(self.draws)

    def _watched(self, draws: Iterator[Any]) -> Iterator[Any]:
        for number in range(_WATCHED):
            before = random_now() if number else None
            drawn = next(draws, _END)
            if drawn is _END:
                return
            self.draws_along |= before is not None and before != random_now()
            yield drawn
        yield from draws

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_sampler"], name)


def random_now() -> Any:
    """Where the generators of this process are."""
    return stamp_of(capture_random())


def is_known(sampler: Any) -> bool:
    """Whether a sampler, and the one in it, is of torch, which draws where a pass begins."""
    inner = getattr(sampler, "sampler", None)
    return type(sampler).__module__.startswith("torch.") and (inner is None or is_known(inner))


def sampler_name(loader: DataLoader[Any]) -> str:
    """Name of the attribute that a loader draws its indices from."""
    return "batch_sampler" if loader.batch_sampler is not None else "sampler"


@contextmanager
def replacing(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Attributes of a loader, or of indices, are others meanwhile. An iterator that is made in there keeps them."""
    attributes = vars(owner)
    before = {name: attributes[name] for name in values}
    attributes.update(values)  # past DataLoader.__setattr__, which forbids it
    try:
        yield
    finally:
        attributes.update(before)


def draws_at_once(loader: Any) -> bool:
    """Whether a loader draws indices into a data set, from its attribute that is a sampler when ``iter`` is called."""
    is_torchs = _draws_indices(loader) and type(loader).__iter__ is DataLoader.__iter__
    return is_torchs and sampler_name(loader) in vars(loader)


def iterates_itself(loader: Any) -> bool:
    """Whether a loader draws indices into a data set in an iteration of its own, around torch's maybe."""
    return _draws_indices(loader) and type(loader).__iter__ is not DataLoader.__iter__


def _draws_indices(loader: Any) -> bool:
    is_mapped = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return is_mapped and not is_stateful(loader)


# -- workers that persist ----------------------------------------------------------------------------------------------


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
        self.indices = Indices()
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
            self._made = self._own.capture_all()
            return self._make_iterator([])
        self._is_known = False
        return iter(self._loader)

    @classmethod
    def of(cls, loader: Any, own: OwnState) -> LastingWorkers | None:
        """The workers of ``loader``; ``None`` where they do not persist, or cannot be asked.

        Those at work already are known if we had them made: by a tuner's trial, which asks for the loader before
        training does, or by a validation with the loader that training has.
        """
        if not (lasts(loader) and draws_at_once(loader)) or loader.batch_sampler is None:  # no batches of indices
            return None
        known: LastingWorkers | None = getattr(compat.WORKERS_ITERATOR.of(loader), _KNOWN, None)
        return cls(loader, own) if known is None and not are_made(loader) else known

    def _make(self, saved: State) -> None:
        """Make them without an epoch, from the numbers they were made from."""
        present, self._made = self._own.capture_all(), saved["made"]
        self._own.restore_all(saved["made"])
        with replacing(self.indices, {"rest": True}):
            self._make_iterator(saved["workers"])
        self._own.restore_all(present)

    def _make_iterator(self, states: list[State] | None) -> Iterator[Any]:
        """``iter(loader)`` for the first time: its iterator keeps our sampler, and its workers our function."""
        self._watch.states = states or []
        with replacing(self._loader, {**self.indices.values(self._loader), **self._watch.values(self._loader)}):
            iterator = iter(self._loader)
        vars(compat.WORKERS_ITERATOR.of(self._loader))[_KNOWN] = self
        return iterator

    def _ask(self) -> None:
        """Learn their generators, between two epochs. Batches of the last epoch that are on their way are dropped."""
        if self._is_known or not are_made(self._loader) or self._made is None:
            return
        self._is_known = True
        states: list[State] | None = None
        try:
            with replacing(self.indices, {"questions": self._loader.num_workers}):
                answers = list(DataLoader.__iter__(self._loader))
            states = [_own_copy(answer[_STATE]) for answer in sorted(answers, key=lambda item: item["worker"])]
        except Exception as error:
            text = (
                "the random numbers of persistent workers are unknown ({error}). With random augmentation in them, a"
                " resume is not exact. Set persistent_workers=False."
            )
            say(logging.WARNING, "workers-unknown", text, error=f"{type(error).__name__}: {error}")
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
            self._own.restore_all(self.states[worker])
        self._random = random_now()

    def __call__(self, samples: Any) -> Any:
        """Collate, and note what was done until now; or answer."""
        info = get_worker_info()
        if info is None or self._own is None:
            return self._collate(samples)
        if self._answers and isinstance(samples, list) and not samples:
            return {"worker": info.id, _STATE: {**self._own.capture_all(), "data": self._own.changed_data()}}
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
    own = OwnState.of(loader)
    before = own.capture_all()
    begin_watched(loader)
    own.restore_all(before)
