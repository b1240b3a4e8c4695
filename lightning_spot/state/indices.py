"""Indices in a sampler's place: a loader draws them, and some are passed over, held back, or watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_spot.state.randomness import capture_random, stamp_of

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

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.draws: Iterator[Any] = iter(())
        self.first = 0
        self.rest = False
        self.questions = 0
        self.at_start: Callable[[], None] | None = None
        self.instead: list[Any] | None = None
        self.draws_along = False

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


_END = object()


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
def replacing(loader: DataLoader[Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Attributes of a loader have other values meanwhile. An iterator that is made in there keeps them."""
    attributes = vars(loader)
    before = {name: attributes[name] for name in values}
    attributes.update(values)  # past DataLoader.__setattr__, which forbids it
    try:
        yield
    finally:
        attributes.update(before)


def draws_at_once(loader: Any) -> bool:
    """Whether a loader draws indices into a data set, from the sampler that it has when ``iter`` is called."""
    return _draws_indices(loader) and type(loader).__iter__ is DataLoader.__iter__


def iterates_itself(loader: Any) -> bool:
    """Whether a loader draws indices into a data set in an iteration of its own, around torch's maybe."""
    return _draws_indices(loader) and type(loader).__iter__ is not DataLoader.__iter__


def _draws_indices(loader: Any) -> bool:
    is_mapped = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return is_mapped and not is_stateful(loader)


def is_stateful(loader: Any) -> bool:
    """Whether a loader keeps its position itself, as torchdata's ``StatefulDataLoader`` does."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
