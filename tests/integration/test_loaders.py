"""Loaders that keep their place themselves: wherever they are stopped, a resume equals an undisturbed run."""

from __future__ import annotations

import itertools
import random
import sqlite3
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from lightning_spot.errors import SettingsError
from lightning_spot.state.compare import differences
from tests.integration.test_exact import final
from tests.support import exact_models as m
from tests.support.exact_table import Case, train
from tests.support.trainer import Stop, StopAfter, StopAt, StopIn

pytestmark = pytest.mark.guarantee("G5")

SEEDED = 5


class Kept(DataLoader[Any]):
    """Keeps its place as torchdata's loader does: what it has yielded, and whether it was asked for one more."""

    begun: Any = None
    due: Any = None

    def __iter__(self) -> Any:
        due, self.due = self.due, None
        self.begun = _Pass(super().__iter__(), self.dataset, {"yielded": 0} if due is None or due["ended"] else due)
        return self.begun

    def state_dict(self) -> dict[str, Any]:
        if self.begun is None:
            iter(self)  # draws, as torchdata's does
        return self.begun.state()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun, self.due = None, state or None


class _Pass:
    def __init__(self, inner: Any, data: Any, state: dict[str, Any]) -> None:
        self.inner, self.data, self.yielded, self.ended = inner, data, state["yielded"], False
        if "data" in state:
            data.load_state_dict(state["data"])
        else:
            for _ in range(self.yielded):
                next(inner, None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self.inner)
        except StopIteration:
            self.ended = True
            raise
        self.yielded += 1
        return batch

    def state(self) -> dict[str, Any]:
        own = {"data": self.data.state_dict()} if hasattr(self.data, "state_dict") else {}
        return {"yielded": self.yielded, "ended": self.ended, **own}


class Sticky(IterableDataset[Any]):
    """Keeps its place as streams of Hugging Face do: in an epoch it begins where it was told to, each time."""

    def __init__(self) -> None:
        self._epoch = torch.tensor(0)
        self.start: Any = None
        self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        data, epoch = m.Rows(noise=False), int(self._epoch)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
        self.at = self.start["at"] if self.start is not None and self.start["epoch"] == epoch else 0
        for index in order[self.at :]:
            self.at += 1
            yield data[index]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": int(self._epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = dict(state)


class Epochs(m.Lean):
    """Tells a stream its epoch where an epoch begins, and counts what it is given."""

    def on_train_epoch_start(self) -> None:
        data = self.trainer.train_dataloader.dataset
        if hasattr(data, "set_epoch"):
            data.set_epoch(self.current_epoch)


def kept(**more: Any) -> Kept:
    data = m.Rows(noise=False)
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(SEEDED))
    return Kept(data, m.BATCH, sampler=sampler, **more)


def torchdata(**more: Any) -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(m.Rows(noise=False), m.BATCH, shuffle=True, **more)


class Lazy(Kept):
    """Begins an epoch where its first batch is asked for, as loaders do whose iteration is a generator function."""

    def __iter__(self) -> Any:
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return (
            super().state_dict()
            if self.begun is not None
            else {"yielded": 0, "ended": False, "data": {"at": 0, "epoch": 0}}
        )


class Flagged(Kept):
    """Goes on from its state until one of its epochs is over, as litdata's does; Lightning asks for no batch more."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.restore, self.epoch_number = False, 0

    def __iter__(self) -> Any:
        if not self.restore:
            self.due, self.epoch_number = None, self.epoch_number + 1
        self.begun = _Flagged(self, self.due or {"yielded": 0})
        return self.begun

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epoch_number": self.epoch_number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restore, self.due, self.epoch_number = True, state, state["epoch_number"]


class _Flagged(_Pass):
    def __init__(self, loader: Flagged, state: dict[str, Any]) -> None:
        order = torch.randperm(m.SAMPLES, generator=torch.Generator().manual_seed(loader.epoch_number))
        batches = [loader.collate_fn([loader.dataset[int(i)] for i in part]) for part in order.split(m.BATCH)]
        super().__init__(iter(batches), None, state)
        self.loader = loader

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            self.loader.restore = False
            raise


LOADERS: dict[str, Callable[..., Any]] = {
    "torchdata": torchdata,
    "plain": lambda **more: m.rows(**more),
    "kept": kept,
    "lazy": lambda **more: Lazy(Sticky(), m.BATCH, **more),
    "stream": lambda **more: Kept(Sticky(), m.BATCH, **more),
    "buffered": lambda **more: Kept(Buffered(), m.BATCH, **more),
    "flagged": lambda **more: Flagged(m.Rows(noise=False), m.BATCH, **more),
}

WORKERS: dict[str, dict[str, Any]] = {
    "0": {},
    "2": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}

STOPS: dict[str, list[Callable[[], pl.Callback]]] = {
    "mid-epoch": [lambda: StopAfter(8)],
    "end of epoch": [lambda: StopIn("on_train_batch_start", 6)],
    "before validation": [lambda: StopIn("on_validation_start", 1)],
    "in validation": [lambda: StopAfter(1, in_validation=True)],
    "twice in one epoch": [lambda: StopAfter(8), lambda: StopAfter(2)],
}


def cells() -> Iterator[Any]:
    for name in LOADERS:
        for workers in WORKERS if name in ("torchdata", "plain", "kept") else ("0",):
            for stop in STOPS:
                often = workers != "2" and not (name == "plain" and workers == "0") and name != "torchdata"
                yield pytest.param(
                    name, workers, stop, id=f"{name}-{workers}-{stop}", marks=[] if often else pytest.mark.soak
                )


@pytest.mark.parametrize(("name", "workers", "stop"), cells())
def test_equal_wherever_it_is_stopped(name: str, workers: str, stop: str, tmp_path: Path) -> None:
    case = Case(model=Epochs, loaders=lambda: LOADERS[name](**WORKERS[workers]))
    for attempt, make in enumerate(STOPS[stop]):
        with pytest.raises(Stop):
            train(case, tmp_path / "broken", make(), seed=11 + attempt, every=1)
    assert train(case, tmp_path / "broken", seed=200, every=1000) == []
    train(case, tmp_path / "twin", seed=11, every=1000)
    assert final(tmp_path / "broken")["global_step"] == 3 * -(-m.SAMPLES // m.BATCH)
    found = differences(final(tmp_path / "twin"), final(tmp_path / "broken"))
    assert [text for text in found if "_base_seed" not in text] == []  # of workers that are made anew


def test_a_finished_run_that_is_given_more_epochs_has_whole_ones(tmp_path: Path) -> None:
    for epochs in (1, 3):
        train(Case(model=Epochs, loaders=kept, settings={"max_epochs": epochs}), tmp_path, seed=epochs, every=1)
    assert final(tmp_path)["global_step"] == 3 * -(-m.SAMPLES // m.BATCH)


class Curriculum(m.Rows):
    """Has labels and a difficulty that training changes."""

    def __init__(self) -> None:
        super().__init__(noise=False)
        self.difficulty, self.pool = 1.0, [0.5, 1.5]

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * self.difficulty, y * self.pool[index % 2]


class Tallied(Curriculum):
    """Counts in the middle of a long list."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = [0] * 4000

    def __getitem__(self, index: int) -> Any:
        self.tally[2000] += 1
        x, y = super().__getitem__(index)
        return x + self.tally[2000] / 100, y


class Queued(Curriculum):
    """Reads from a queue that reading changes, as torchio's does."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[float] = []
        self.filled = 0

    def __getitem__(self, index: int) -> Any:
        if not self.queue:
            self.filled += 1
            self.queue = [float(self.filled + number) for number in range(3)]
        x, y = super().__getitem__(index)
        return x + self.queue.pop(), y


class Opaque(Curriculum):
    """Reads from an object of which nothing is seen but its class."""

    def __init__(self) -> None:
        super().__init__()
        self.source: Any = None

    def __getitem__(self, index: int) -> Any:
        self.source = self.source or itertools.count()
        x, y = super().__getitem__(index)
        return x + 0.1 * next(self.source), y


class Transform:
    """A plain object of the data, which holds another one."""

    def __init__(self) -> None:
        self.strength, self.groups, self.row = 1.0, {"noise": [1.0]}, np.ones(2)
        self.count, self.inner, self.first = itertools.count(), Slotted(), None

    def __call__(self, x: Any) -> Any:
        return x * self.strength * self.groups["noise"][0] * float(self.row[1]) + 0.1 * self.inner.read


class Slotted:
    """Has no dictionary of its attributes."""

    __slots__ = ("read",)

    def __init__(self) -> None:
        self.read = 0


class Transformed(Curriculum):
    """Reads through a plain object, whose attributes training or reading change."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = Transform()

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return self.transform(x), y


class Counted(Transformed):
    """Counts in a plain object what is read."""

    def __getitem__(self, index: int) -> Any:
        self.transform.inner.read += 1
        return super().__getitem__(index)


class Iterated(Transformed):
    """Counts with an iterator that was made with the data."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * next(self.transform.count), y


class Sealed(Transform):
    """Lets nobody set its attributes."""

    def __setattr__(self, name: str, value: Any) -> None:
        if "first" in vars(self):
            raise AttributeError(name)
        super().__setattr__(name, value)


class Guarded(Transformed):
    """Reads through an object that is sealed."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = Sealed()


class Cycled(Curriculum):
    """Counts beside an iterator that does not show its place, as torchio's queue does."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.read = itertools.cycle((0.1, 0.2, 0.3)), 0

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        x, y = super().__getitem__(index)
        return x + next(self.source), y


class Augmented(Curriculum):
    """Reads through a module without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = torch.nn.Sequential(torch.nn.Threshold(-9.0, 0.5))

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return self.transform(x - self.transform[0].threshold), y


class Weights(RandomSampler):
    """Draws by weights that training changes."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.weights = torch.ones(len(data))
        self.temperature = 1.0
        self.groups = {"first": 1.0}

    def __iter__(self) -> Iterator[int]:
        count = len(self.weights)
        yield from torch.multinomial(self.weights**self.temperature * self.groups["first"], count).tolist()


class Changing(m.Lean):
    """Changes attributes of what is in a loader where epochs begin or end, or in each step."""

    def __init__(self, change: Callable[[Any], None], hook: str) -> None:
        super().__init__()
        self.change, self.hook = change, hook

    def on_train_epoch_start(self) -> None:
        if self.hook == "epoch start":
            self.change(self.trainer.train_dataloader)

    def on_train_epoch_end(self) -> None:
        if self.hook == "epoch":
            self.change(self.trainer.train_dataloader)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.hook == "batch":
            self.change(self.trainer.train_dataloader)


def nothing(loader: Any) -> None:
    """Leaves the loader as it is."""


def harder(loader: Any) -> None:
    loader.dataset.difficulty *= 1.1


def relabel(loader: Any) -> None:
    loader.dataset.x = loader.dataset.x * 0.9


def in_place(loader: Any) -> None:
    loader.dataset.x.mul_(0.9)


def pooled(loader: Any) -> None:
    loader.dataset.pool[1] += 0.1


def stronger(loader: Any) -> None:
    transform = loader.dataset.transform
    transform.strength *= 1.1
    transform.groups["noise"][0] += 0.1
    transform.row[1] += 0.1


def stronger_with_an_object(loader: Any) -> None:
    loader.dataset.transform.strength *= 1.1
    loader.dataset.transform.first = loader


def stronger_past_its_class(loader: Any) -> None:
    vars(loader.dataset.transform)["strength"] *= 1.1


def higher(loader: Any) -> None:
    loader.dataset.transform[0].threshold -= 0.1


def weigh(loader: Any) -> None:
    loader.sampler.weights = loader.sampler.weights + torch.arange(float(len(loader.sampler.weights)))
    loader.sampler.temperature *= 0.9


def regroup(loader: Any) -> None:
    loader.sampler.groups["first"] += 1.0
    loader.sampler.weights[0] += 1.0


OF_TRANSFORM = "had changed dataset.transform.first, dataset.transform.strength"
CHANGES = [
    (Curriculum, harder, "epoch", ""),
    (Curriculum, harder, "batch", ""),
    (Curriculum, harder, "epoch start", ""),
    (Curriculum, relabel, "epoch", ""),
    (Curriculum, in_place, "epoch", ""),
    (Curriculum, pooled, "epoch", ""),
    (Transformed, stronger, "batch", ""),
    (Transformed, stronger, "epoch start", ""),
    (Transformed, stronger_with_an_object, "epoch", OF_TRANSFORM),
    (Guarded, stronger_past_its_class, "epoch", ""),
    (Counted, nothing, "epoch", ""),
    (Iterated, nothing, "epoch", "had changed dataset.transform.count"),
    (Cycled, nothing, "epoch", "had changed dataset.read"),
    (Augmented, higher, "batch", ""),
    (Tallied, nothing, "epoch", ""),
    (Queued, nothing, "first epoch", ""),
    (Queued, nothing, "epoch", ""),
    (Opaque, nothing, "first epoch", "dataset.source"),
    (Opaque, nothing, "epoch", "dataset.source"),
    (Curriculum, nothing, "epoch", ""),
    (Curriculum, weigh, "epoch", ""),
    (Curriculum, regroup, "epoch", ""),
]


def check_resume(case: Case, stop: pl.Callback, says: str, folder: Path) -> None:
    """Stopped and resumed: warned of once by a text, or, if that is empty, equal to a twin and not warned of."""
    with pytest.raises(Stop):
        train(case, folder / "broken", stop, seed=11, every=1)
    said = train(case, folder / "broken", seed=200, every=1000)
    assert len(said) == bool(says)
    assert all(says in text for text in said)
    if not says:
        train(case, folder / "twin", seed=11, every=1000)
        assert list(differences(final(folder / "twin"), final(folder / "broken"))) == []


@pytest.mark.parametrize(("data", "change", "hook", "says"), CHANGES)
@pytest.mark.parametrize("ends", [False, True], ids=["mid-epoch", "end of epoch"])
def test_data_that_training_or_reading_changes_is_kept_or_named(
    data: Any, change: Any, hook: str, says: str, ends: bool, tmp_path: Path
) -> None:
    def loaders() -> Any:
        made = data()
        return DataLoader(made, m.BATCH, sampler=Weights(made))

    case = Case(model=lambda: Changing(change, hook), loaders=loaders, val=None, settings={"limit_val_batches": 0})
    at = 3 if hook == "first epoch" else 8
    stop = StopIn("on_train_batch_start", 6 if hook == "first epoch" else 11) if ends else StopAfter(at)
    check_resume(case, stop, says, tmp_path)


class Handled(m.Rows):
    """Opens what it reads from where a sample is read first, as sets on HDF5 or LMDB do."""

    file: Any = None

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or sqlite3.connect(":memory:")
        return super().__getitem__(index)


def buffer_of(data: Any) -> Any:
    return Kept(data, m.BATCH, **WORKERS["persistent"])


def lasting(data: Any) -> Any:
    return DataLoader(data, m.BATCH, shuffle=True, **WORKERS["persistent"])


COPIES = {
    "first epoch": (Queued, lasting, StopAt(3), ""),
    "later epoch": (Queued, lasting, StopAt(8), ""),
    "end of epoch": (Queued, lasting, StopIn("on_train_batch_start", 6), ""),
    "later epoch, of an object": (Opaque, lasting, StopAt(8), "had changed dataset.source"),
    "end of epoch, of an object": (
        Opaque,
        lasting,
        StopIn("on_train_batch_start", 6),
        "had changed dataset.source",
    ),
    "an open file": (Handled, lasting, StopAt(8), ""),
    "by its state": (Queued, buffer_of, StopAt(8), "workers of Kept draw random numbers or change the data"),
    "an open file, by its state": (lambda: Handled(noise=False), buffer_of, StopAt(8), ""),
}


@pytest.mark.parametrize("name", COPIES)
def test_changes_in_copies_of_workers_are_kept_or_named(name: str, tmp_path: Path) -> None:
    data, make, stop, says = COPIES[name]
    case = Case(loaders=lambda: make(data()), val=None, settings={"limit_val_batches": 0})
    check_resume(case, stop, says, tmp_path)


class Drawing(m.Rows):
    """Draws its noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(noise=False)
        self.rng = np.random.default_rng(1)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + float(self.rng.random()), y


def fleeting(data: Any) -> Any:
    return DataLoader(data, m.BATCH, shuffle=True, **WORKERS["2"])


def own_sampler(data: Any) -> Any:
    return DataLoader(data, m.BATCH, sampler=Weights(data), **WORKERS["2"])


MAY_ACT = "workers of DataLoader may draw random numbers or change the data, which"
SOUGHT: dict[str, tuple[Callable[[], Any], Callable[[], pl.Callback], str]] = {
    "mid-epoch": (lambda: fleeting(m.Rows()), lambda: StopAt(8), MAY_ACT),
    "end of epoch": (lambda: fleeting(Queued()), lambda: StopIn("on_train_batch_start", 6), ""),
    "a sampler of its own": (lambda: own_sampler(Queued()), lambda: StopAt(8), MAY_ACT),
    "workers that persist": (lambda: lasting(Queued()), lambda: StopAt(3), MAY_ACT),
    "workers that persist, later": (lambda: lasting(m.Rows()), lambda: StopAt(8), MAY_ACT),
}


@pytest.mark.parametrize("name", SOUGHT)
def test_what_workers_did_in_batches_not_loaded_again_is_named(name: str, tmp_path: Path) -> None:
    make, stop, says = SOUGHT[name]
    spot = {"data_resume": "seek"}
    case = Case(loaders=make, val=None, settings={"limit_val_batches": 0}, spot=spot)
    check_resume(case, stop(), says, tmp_path)


@pytest.mark.parametrize("workers", ["0", "persistent"])
@pytest.mark.parametrize(("data", "says"), [(Queued, ""), (Opaque, "had changed dataset.source")])
def test_changes_in_validation_data_are_kept_or_named(data: Any, says: str, workers: str, tmp_path: Path) -> None:
    case = Case(loaders=m.rows, val=lambda: DataLoader(data(), m.BATCH, **WORKERS[workers]))
    told: list[str] = []
    with pytest.raises(Stop):
        train(case, tmp_path / "broken", StopAt(8), seed=11, every=1, told=told)
    train(case, tmp_path / "broken", seed=200, every=1000, told=told)
    assert [says in text for text in told] == [True] * bool(says)
    if not says:
        train(case, tmp_path / "twin", seed=11, every=1000)
        assert list(differences(final(tmp_path / "twin"), final(tmp_path / "broken"))) == []


@pytest.mark.parametrize("reads", ["training", "validation"])
def test_an_object_that_two_loaders_share_is_as_training_left_it(reads: str, tmp_path: Path) -> None:
    """The loader for validation is asked for again long after training has gone on."""
    shared: list[Any] = []

    def loader() -> Any:
        shared[:] = shared or [Transformed()]
        return DataLoader(shared[0], m.BATCH)

    def case() -> Case:
        shared.clear()
        settings = {"num_sanity_val_steps": 0, "max_epochs": 3}
        return Case(model=lambda: Changing(stronger, "batch"), loaders=loader, val=loader, settings=settings)

    with pytest.raises(Stop):
        train(case(), tmp_path / "broken", StopAt(3 if reads == "training" else 8), seed=11, every=1)
    assert train(case(), tmp_path / "broken", seed=200, every=1000) == []
    train(case(), tmp_path / "twin", seed=11, every=1000)
    assert list(differences(final(tmp_path / "twin"), final(tmp_path / "broken"))) == []


class Shuffling(DataLoader[Any]):
    """Yields its batches from a buffer, in an order drawn from the numbers of the process."""

    def __iter__(self) -> Any:
        buffer: list[Any] = []
        for batch in super().__iter__():
            buffer.append(batch)
            if len(buffer) == 3:
                yield buffer.pop(random.randrange(3))
        yield from buffer


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_loader_that_iterates_in_its_own_way_is_named(workers: str, tmp_path: Path) -> None:
    """Between two batches it may draw from the random numbers of the process, as training does."""
    case = Case(
        loaders=lambda: Shuffling(m.Rows(), m.BATCH, shuffle=True, **WORKERS[workers]),
        val=None,
        settings={"limit_val_batches": 0},
    )
    check_resume(case, StopAt(8), "Shuffling iterates in a way of its own", tmp_path)


class Unseeded(Sampler[int]):
    """Draws another order each time it is asked, whatever the seed."""

    def __iter__(self) -> Iterator[int]:
        yield from random.SystemRandom().sample(range(m.SAMPLES), m.SAMPLES)

    def __len__(self) -> int:
        return m.SAMPLES


def test_an_epoch_that_begins_with_other_samples_is_named(tmp_path: Path) -> None:
    loader = partial(DataLoader, m.Rows(), m.BATCH, sampler=Unseeded(), num_workers=2)
    case = Case(loaders=loader, val=None, settings={"limit_val_batches": 0})
    with pytest.raises(Stop):
        train(case, tmp_path, StopAt(8), seed=11, every=1)
    (said,) = train(case, tmp_path, seed=200, every=1000)
    assert "first batch of this epoch" in said


def other(samples: int = 20, sampler: Any = None, **more: Any) -> Callable[[], Any]:
    data = m.Rows(noise=False, samples=samples)
    return lambda: DataLoader(data, m.BATCH, sampler=sampler(data) if sampler else RandomSampler(data), **more)


DIFFERENCES = [
    ({"num_workers": 2}, {}, True, "num_workers was 2 and is 0"),
    ({}, {"num_workers": 2}, True, "num_workers was 0 and is 2"),
    ({"num_workers": 2}, {"num_workers": 1}, True, "num_workers was 2 and is 1"),
    (
        {},
        {"samples": 28},
        False,
        "data set was 20 and is 28: this epoch goes on after as many batches",
    ),
    ({}, {"samples": 16}, False, "data set was 20 and is 16"),
    ({}, {"sampler": SequentialSampler}, False, "the sampler was RandomSampler and is SequentialSampler"),
    ({}, {"drop_last": True}, True, "drop_last was False and is True"),
]


@pytest.mark.parametrize(("first", "then", "equal", "says"), DIFFERENCES)
def test_what_an_epoch_was_made_of_is_compared(first: Any, then: Any, equal: bool, says: str, tmp_path: Path) -> None:
    """The order of samples stays as it is where it can, and what differs is named before training."""

    def case(**options: Any) -> Case:
        return Case(loaders=other(**options), val=None, settings={"limit_val_batches": 0})

    with pytest.raises(Stop):
        train(case(**first), tmp_path / "broken", StopAfter(3), seed=11, every=1)
    (said,) = (text for text in train(case(**then), tmp_path / "broken", seed=200, every=1000) if " was " in text)
    assert says in said
    if equal:
        train(case(**first), tmp_path / "twin", seed=11, every=1000)
        broken, twin = final(tmp_path / "broken"), final(tmp_path / "twin")
        assert [text for text in differences(twin["state_dict"], broken["state_dict"]) if "workers" not in text] == []


class Cycle(m.Lean):
    """Has a scheduler for as many steps as the run takes, or for a number of its own."""

    def __init__(self, steps: int | None) -> None:
        super().__init__()
        self.steps = steps

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        steps = self.steps or int(self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.1, total_steps=steps), "interval": "step"}]


SCHEDULERS = [
    (None, 4, "OneCycleLR is restored with total_steps=15, and this run takes 20"),
    (None, 3, ""),
    (12, 4, ""),  # as in a run that is never stopped: that may end sooner by itself
]


@pytest.mark.parametrize(("steps", "epochs", "says"), SCHEDULERS)
def test_a_scheduler_that_ends_before_the_run_is_refused(
    steps: int | None, epochs: int, says: str, tmp_path: Path
) -> None:
    def case(epochs: int) -> Case:
        return Case(model=lambda: Cycle(steps), settings={"max_epochs": epochs, "num_sanity_val_steps": 0})

    with pytest.raises(Stop):
        train(case(3), tmp_path, StopAfter(8), seed=11, every=1)
    batches = StopAfter(2)
    with pytest.raises(SettingsError if says else Stop) as raised:
        train(case(epochs), tmp_path, batches, seed=12, every=1)
    assert says in str(raised.value)
    assert batches.left == (2 if says else -1)


class Forgetful(IterableDataset[Any]):
    """A stream with no position of its own."""

    def __iter__(self) -> Iterator[Any]:
        data = m.Rows(noise=False)
        yield from (data[index] for index in range(len(data)))


class Claims(Sticky):
    """A stream that says that it has a shuffle buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer_size = 8


class Buffered(Claims):
    """A stream that keeps the place of what it reads, and yields it from a shuffle buffer that no state holds."""

    def __iter__(self) -> Iterator[Any]:
        generator, buffer = torch.Generator().manual_seed(int(self._epoch)), []
        for row in super().__iter__():
            buffer.append(row)
            if len(buffer) == self.buffer_size:
                yield buffer.pop(int(torch.randint(len(buffer), (), generator=generator)))
        yield from buffer


def noisy(**more: Any) -> Kept:
    return Kept(m.Rows(), m.BATCH, num_workers=2, **more)


WARNED: dict[str, tuple[Callable[[], Any], str, int]] = {
    "no position": (lambda: Kept(Forgetful(), m.BATCH), "Forgetful has no state_dict", 8),
    "shuffle buffer, skipped to": (lambda: Kept(Claims(), m.BATCH), "buffer of Claims (dataset.buffer_size=8)", 8),
    "augmentation in workers": (noisy, "workers of Kept draw random numbers", 8),
    "augmentation in workers, end of epoch": (noisy, "", 4),
    "augmentation in workers from a generator of its own": (
        lambda: Kept(Drawing(), m.BATCH, num_workers=2),
        "workers of Kept draw random numbers",
        8,
    ),
    "augmentation in workers that persist": (lambda: noisy(persistent_workers=True), "workers of Kept draw", 4),
}


@pytest.mark.parametrize("name", WARNED)
def test_what_a_state_does_not_hold_is_named(name: str, tmp_path: Path) -> None:
    make, says, at = WARNED[name]
    spot = {"data_resume": "seek"} if "skipped" in name else {}
    case = Case(loaders=make, val=None, settings={"limit_val_batches": 0}, spot=spot)
    stop = StopAfter(at) if at == 8 else StopIn("on_train_batch_start", 6)
    with pytest.raises(Stop):
        train(case, tmp_path, stop, seed=11, every=1)
    said = train(case, tmp_path, seed=200, every=1000)
    assert len(said) == bool(says)
    assert all(says in text for text in said)


def test_replay_is_exact_if_workers_of_a_stateful_loader_augment(tmp_path: Path) -> None:
    case = Case(loaders=noisy, val=None, settings={"limit_val_batches": 0}, spot={"data_resume": "replay"})
    with pytest.raises(Stop):
        train(case, tmp_path / "broken", StopAfter(8), seed=11, every=1)
    assert train(case, tmp_path / "broken", seed=200, every=1000) == []
    train(case, tmp_path / "twin", seed=11, every=1000)
    assert list(differences(final(tmp_path / "twin"), final(tmp_path / "broken"))) == []


def test_persistent_workers_with_replay_draw_no_seed_in_between(tmp_path: Path) -> None:
    """They were there before the validation that the resumed run begins with."""
    case = Case(model=Epochs, loaders=lambda: kept(**WORKERS["persistent"]), spot={"data_resume": "replay"})
    (stop,) = STOPS["before validation"]
    check_resume(case, stop(), "", tmp_path)
