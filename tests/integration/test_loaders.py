"""Loaders that keep their place themselves: wherever they are stopped, a resume equals an undisturbed run."""

from __future__ import annotations

import functools
import itertools
import random
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from lightning_spot.errors import SettingsError
from lightning_spot.state.compare import differences
from lightning_spot.state.dataloader import Positioned
from lightning_spot.state.own_state import OwnState
from tests.integration.test_exact import final
from tests.support import exact_models as m
from tests.support.exact_cases import Estimated
from tests.support.exact_table import Case, equal_or_named, train
from tests.support.trainer import Stop, StopAfter, StopAt, StopIn

pytestmark = pytest.mark.guarantee("G5")

SEEDED = 5


class Kept(DataLoader[Any]):
    """Keeps its place as torchdata's loader does: what it has yielded, and whether it was asked for one more."""

    begun, ended, yielded, due = False, False, 0, None

    def __iter__(self) -> Any:
        due, self.due = self.due, None
        inner, at = super().__iter__(), {"yielded": 0} if due is None or due["ended"] else due
        if "data" in at:
            self.dataset.load_state_dict(at["data"])
        else:
            deque(islice(inner, at["yielded"]), 0)
        return self.go_on(inner, at["yielded"])

    def go_on(self, inner: Iterator[Any], yielded: int) -> Iterator[Any]:
        self.begun, self.ended, self.yielded = True, False, yielded
        return self.batches(inner)

    def batches(self, inner: Iterator[Any]) -> Iterator[Any]:
        for batch in inner:
            self.yielded += 1
            yield batch
        self.ended = True

    def state_dict(self) -> dict[str, Any]:
        if not self.begun:
            iter(self)  # draws, as torchdata's does
        own = {"data": self.dataset.state_dict()} if hasattr(self.dataset, "state_dict") else {}
        return {"yielded": self.yielded, "ended": self.ended, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun, self.due = False, state or None


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
        at_start = {"yielded": 0, "ended": False, "data": {"at": 0, "epoch": 0}}
        return super().state_dict() if self.begun else at_start


class Flagged(Kept):
    """Goes on from its state until one of its epochs is over, as litdata's does; Lightning asks for no batch more."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.restore, self.epoch_number = False, 0

    def __iter__(self) -> Any:
        if not self.restore:
            self.due, self.epoch_number = None, self.epoch_number + 1
        order = torch.randperm(m.SAMPLES, generator=torch.Generator().manual_seed(self.epoch_number))
        batches = [self.collate_fn([self.dataset[int(i)] for i in part]) for part in order.split(m.BATCH)]
        yielded = self.due["yielded"] if self.due else 0
        return self.go_on(iter(batches[yielded:]), yielded)

    def batches(self, inner: Iterator[Any]) -> Iterator[Any]:
        yield from super().batches(inner)
        self.restore = False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epoch_number": self.epoch_number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restore, self.due, self.epoch_number = True, state, state["epoch_number"]


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


def check_resume(case: Case, stops: list[Callable[[], pl.Callback]], folder: Path) -> None:
    """Stopped and resumed: warned of once by what the case says, or, if that is empty, equal to a twin and silent."""
    said = equal_or_named(case, folder, [stop() for stop in stops])
    assert [case.says in text for text in said] == [True] * bool(case.says)


def cells() -> Iterator[Any]:
    for name in LOADERS:
        for workers in WORKERS if name in ("torchdata", "plain", "kept") else ("0",):
            for stop in STOPS:
                often = workers != "2" and not (name == "plain" and workers == "0") and name != "torchdata"
                yield pytest.param(
                    name, workers, stop, id=f"{name}-{workers}-{stop}", marks=[] if often else pytest.mark.soak
                )


@functools.cache
def loaded(name: str, workers: str) -> Case:
    return Case(model=Epochs, loaders=lambda: LOADERS[name](**WORKERS[workers]))


@pytest.mark.parametrize(("name", "workers", "stop"), cells())
def test_equal_wherever_it_is_stopped(name: str, workers: str, stop: str, tmp_path: Path) -> None:
    check_resume(loaded(name, workers), STOPS[stop], tmp_path)


class Guarded(DataLoader[Any]):
    """Its sampler is a property, of which ``vars`` knows nothing."""

    @property  # type: ignore[override]
    def batch_sampler(self) -> Any:
        return self.__dict__["guarded"]

    @batch_sampler.setter
    def batch_sampler(self, sampler: Any) -> None:
        self.__dict__["guarded"] = sampler


@pytest.mark.parametrize("kind", [DataLoader, Guarded])
def test_a_sampler_is_the_one_that_the_loader_has(kind: type[DataLoader[Any]]) -> None:
    """Programs give a loader another one between epochs, past what torch forbids."""
    loader = kind(range(4), batch_size=2)  # type: ignore[arg-type]
    follower = Positioned(loader, lambda _: None, lambda _: True)
    assert [batch.tolist() for batch in follower.begin_epoch()] == [[0, 1], [2, 3]]
    object.__setattr__(loader, "batch_sampler", BatchSampler(range(3, -1, -1), 2, drop_last=False))
    assert [batch.tolist() for batch in follower.begin_epoch()] == [[3, 2], [1, 0]]


class Labelled(torch.Tensor):
    """Refuses another shape, as tensors with a label for each column do."""

    def reshape(self, *shape: Any) -> Any:
        raise ValueError(shape)


class Refusing(torch.Tensor):
    """Takes part in no operation of torch's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(func)


BATCHES: dict[str, Callable[[], Any]] = {
    "a tensor that refuses another shape": lambda: torch.ones(2, 3).as_subclass(Labelled),
    "a tensor that refuses operations": lambda: torch.ones(2).as_subclass(Refusing),
    "a conjugate view": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "an array of negative stride": lambda: np.arange(3)[::-1],
    "an array of another byte order": lambda: np.arange(3, dtype=">f4"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_of_any_kind_is_passed_on(name: str) -> None:
    batch = BATCHES[name]()
    follower = Positioned(DataLoader([0], collate_fn=lambda _: batch), lambda _: None, lambda _: True)  # type: ignore[arg-type]
    (passed_on,) = follower.begin_epoch()
    assert passed_on is batch


class OwnTrainer(pl.Trainer):
    """A Trainer of a class of the user's."""


class Collating(pl.LightningDataModule):
    """Its loader knows it, and so the Trainer that it has."""

    def collate(self, items: list[Any]) -> Any:
        return torch.tensor(items)


def test_a_trainer_is_no_part_of_the_data() -> None:
    data = Collating()
    data.trainer = OwnTrainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    own = OwnState.of(DataLoader([0], collate_fn=data.collate))  # type: ignore[arg-type]
    data.trainer.should_stop = True
    data.trainer.callbacks.append(pl.Callback())
    assert own.changed_data() == []
    assert own.capture()["values"] == {}


def test_a_finished_run_that_is_given_more_epochs_has_whole_ones(tmp_path: Path) -> None:
    for epochs in (1, 3):
        train(Case(model=Epochs, loaders=kept, settings={"max_epochs": epochs}), tmp_path, seed=epochs, every=1)
    assert final(tmp_path)["global_step"] == 3 * -(-m.SAMPLES // m.BATCH)


# -- what training or reading changes ----------------------------------------------------------------------------------


class Data(m.Rows):
    """Samples to which a number is added, which depends on attributes; reading it may change these."""

    def __init__(self, number: Callable[[Any, int], float], **attributes: Any) -> None:
        super().__init__(noise=False)
        self.number = number
        vars(self).update(attributes)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + self.number(self, index), y


class Transform:
    """A plain object of the data, which holds another one."""

    def __init__(self) -> None:
        self.strength, self.groups, self.row = 1.0, {"noise": [1.0]}, np.ones(2)
        self.count, self.inner, self.first = itertools.count(), Slotted(), None

    def number(self) -> float:
        return self.strength * self.groups["noise"][0] * float(self.row[1]) + 0.1 * self.inner.read


class Slotted:
    """Has no dictionary of its attributes."""

    __slots__ = ("read",)

    def __init__(self) -> None:
        self.read = 0


def count(holder: Any, name: str) -> int:
    """Add one to an attribute."""
    setattr(holder, name, getattr(holder, name) + 1)
    return getattr(holder, name)  # type: ignore[no-any-return]


def curriculum() -> Data:
    return Data(lambda data, index: data.level + data.pool[index % 2], level=1.0, pool=[0.5, 1.5])


def transformed() -> Data:
    return Data(lambda data, _: data.transform.number(), transform=Transform())


def counted() -> Data:
    """Counts in an object of an object what is read."""
    return Data(lambda data, _: count(data.transform.inner, "read") * data.transform.number(), transform=Transform())


def iterated() -> Data:
    """Counts with an iterator that was made with the data."""
    return Data(lambda data, _: 0.1 * next(data.transform.count), transform=Transform())


def opaque() -> Data:
    """Counts with an iterator that is made where a sample is read first."""
    return Data(lambda data, _: 0.1 * next(vars(data).setdefault("source", itertools.count())))


def cycled() -> Data:
    """Counts beside an iterator that does not show its place, as torchio's queue does."""
    source = itertools.cycle((0.1, 0.2, 0.3))
    return Data(lambda data, _: count(data, "read") * next(data.source), source=source, read=0)


def tallied() -> Data:
    """Counts in the middle of a long list."""

    def read(data: Any, _: int) -> float:
        data.tally[2000] += 1
        return data.tally[2000] / 100  # type: ignore[no-any-return]

    return Data(read, tally=[0] * 4000)


def ordered() -> Data:
    """Has more numbers than are compared one by one."""
    return Data(lambda data, index: data.order[index] / 5000, order=list(range(5000)))


def worn(numbers: Any) -> Data:
    """Holds more tensors, or arrays, than are compared one by one, and writes to one in place."""

    def read(data: Any, _: int) -> float:
        data.numbers[1] *= 0.9
        return data.numbers[1].item()  # type: ignore[no-any-return]

    return Data(read, numbers=numbers)


class Shown(Data):
    """Has an attribute that nobody else sets."""

    level = property(lambda self: vars(self)["level"])


def leveled() -> Data:
    data = Shown(lambda data, _: data.level)
    vars(data)["level"] = 1.0
    return data


def level_past_its_class(loader: Any) -> None:
    vars(loader.dataset)["level"] *= 1.1


def locked() -> Data:
    """Has numbers that nobody may write to."""
    return Data(lambda data, _: float(data.numbers[1]), numbers=np.frombuffer(bytes(16)))


def unlock(loader: Any) -> None:
    loader.dataset.numbers = loader.dataset.numbers + 0.1


def augmented() -> Data:
    """Reads through a module without weights."""
    transform = torch.nn.Sequential(torch.nn.Threshold(-9.0, 0.5))
    return Data(lambda data, _: -data.transform[0].threshold, transform=transform)


def queued() -> Data:
    """Reads from a queue that reading changes, as torchio's does."""

    def read(data: Any, _: int) -> float:
        if not data.queue:
            data.filled += 1
            data.queue = [float(data.filled + number) for number in range(3)]
        return data.queue.pop()  # type: ignore[no-any-return]

    return Data(read, queue=[], filled=0)


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


def nothing(loader: Any) -> None:
    """Leaves the loader as it is."""


def harder(loader: Any) -> None:
    loader.dataset.level *= 1.1


def relabel(loader: Any) -> None:
    loader.dataset.x = loader.dataset.x * 0.9


def in_place(loader: Any) -> None:
    loader.dataset.x.mul_(0.9)
    loader.dataset.pool[1] += 0.1


def stronger(loader: Any) -> None:
    transform = loader.dataset.transform
    transform.strength *= 1.1
    transform.groups["noise"][0] += 0.1
    transform.row[1] += 0.1


def stronger_with_an_object(loader: Any) -> None:
    loader.dataset.transform.strength *= 1.1
    loader.dataset.transform.first = loader


def higher(loader: Any) -> None:
    loader.dataset.transform[0].threshold -= 0.1


def weigh(loader: Any) -> None:
    loader.sampler.weights = loader.sampler.weights + torch.arange(float(len(loader.sampler.weights)))
    loader.sampler.temperature *= 0.9


def regroup(loader: Any) -> None:
    loader.sampler.groups["first"] += 1.0
    loader.sampler.weights[0] += 1.0


EPOCH, BATCH_END, START = "on_train_epoch_end", "on_train_batch_end", "on_train_epoch_start"
OF_TRANSFORM = "had changed dataset.transform.first, dataset.transform.strength"
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None], str, str]] = {
    "a number": (curriculum, harder, EPOCH, ""),
    "a number in each step": (curriculum, harder, BATCH_END, ""),
    "a number as epochs begin": (curriculum, harder, START, ""),
    "a new tensor": (curriculum, relabel, EPOCH, ""),
    "a tensor and a list in place": (curriculum, in_place, EPOCH, ""),
    "an object": (transformed, stronger, BATCH_END, ""),
    "an object that holds another": (transformed, stronger_with_an_object, EPOCH, OF_TRANSFORM),
    "an object with slots": (counted, nothing, EPOCH, ""),
    "an iterator of an object": (iterated, nothing, EPOCH, "had changed dataset.transform.count"),
    "beside an iterator": (cycled, nothing, EPOCH, "had changed dataset.read"),
    "a module": (augmented, higher, BATCH_END, ""),
    "a long list": (tallied, nothing, EPOCH, ""),
    "a longer list": (ordered, lambda loader: loader.dataset.order.reverse(), EPOCH, ""),
    "tensors of a longer list": (lambda: worn([torch.ones(()) for _ in range(5000)]), nothing, EPOCH, ""),
    "arrays of a longer list": (lambda: worn([np.ones(1) for _ in range(5000)]), nothing, EPOCH, "dataset.numbers"),
    "a property": (leveled, level_past_its_class, EPOCH, ""),
    "an array that is read only": (locked, unlock, EPOCH, ""),
    "a queue": (queued, nothing, EPOCH, ""),
    "an iterator": (opaque, nothing, EPOCH, "dataset.source"),
    "a sampler": (curriculum, weigh, EPOCH, ""),
    "a sampler in place": (curriculum, regroup, EPOCH, ""),
}


@functools.cache
def changing(name: str) -> Case:
    data, change, hook, says = CHANGES[name]

    def loaders() -> Any:
        made = data()
        return DataLoader(made, m.BATCH, sampler=Weights(made))

    changes = LambdaCallback(**{hook: lambda trainer, *_: change(trainer.train_dataloader)})
    return alone(loaders, says, callbacks=lambda: [changes])


@pytest.mark.parametrize("end", ["mid-epoch", "end of epoch"])
@pytest.mark.parametrize("name", CHANGES)
def test_changed_data_are_kept_or_named(name: str, end: str, tmp_path: Path) -> None:
    stop = AFTER if end == "mid-epoch" else lambda: StopIn("on_train_batch_start", 11)
    check_resume(changing(name), [stop], tmp_path)


@pytest.mark.parametrize("reads", ["training", "validation"])
def test_an_object_that_two_loaders_share_is_as_training_left_it(reads: str, tmp_path: Path) -> None:
    """The loader for validation is asked for again long after training has gone on."""
    shared: list[Any] = []

    def loader() -> Any:
        shared[:] = shared or [transformed()]
        return DataLoader(shared[0], m.BATCH)

    def model() -> Any:
        shared.clear()  # a process begins
        return m.Lean()

    changes = LambdaCallback(on_train_batch_end=lambda trainer, *_: stronger(trainer.train_dataloader))
    settings = {"num_sanity_val_steps": 0}
    case = Case(model=model, loaders=loader, val=loader, settings=settings, callbacks=lambda: [changes])
    check_resume(case, [lambda: StopAt(3 if reads == "training" else 8)], tmp_path)


class Handled(m.Rows):
    """Opens what it reads from where a sample is read first, as sets on HDF5 or LMDB do."""

    file: Any = None

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or sqlite3.connect(":memory:")
        return super().__getitem__(index)


class Unseeded(m.Order):
    """Draws another order each time it is asked, whatever the seed."""

    def __iter__(self) -> Iterator[int]:
        yield from random.SystemRandom().sample(range(m.SAMPLES), m.SAMPLES)


class Endless(Sampler[list[int]]):
    """A batch sampler that does not say how many batches it has."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from torch.randperm(m.SAMPLES).split(m.BATCH)


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


def alone(loaders: Callable[[], Any], says: str = "", **more: Any) -> Case:
    """A case without validation."""
    return Case(loaders=loaders, says=says, val=None, settings={"limit_val_batches": 0}, **more)


def loading(data: Callable[[], Any], workers: str, kind: Any = DataLoader, **more: Any) -> Callable[[], Any]:
    if "sampler" not in more and kind is not Kept:
        more["shuffle"] = True
    return lambda: kind(data(), m.BATCH, **WORKERS[workers], **more)


def validated(data: Callable[[], Any], workers: str, says: str) -> Case:
    return Case(loaders=m.rows, val=lambda: DataLoader(data(), m.BATCH, **WORKERS[workers]), says=says)


FIRST, LATER, AT_END = (lambda: StopAt(3)), (lambda: StopAt(8)), (lambda: StopIn("on_train_batch_start", 6))
AFTER = lambda: StopAfter(8)  # noqa: E731 # as those above
SOURCE = "had changed dataset.source"
KEPT_ACT = "workers of Kept draw random numbers or change the data"
MAY_ACT = "workers of DataLoader may draw random numbers or change the data"
SEEK, REPLAY = {"spot": {"data_resume": "seek"}}, {"spot": {"data_resume": "replay"}}


def quiet_file() -> Any:
    return Handled(noise=False)


RESUMES: dict[str, tuple[Case, Callable[[], pl.Callback]]] = {
    "queue in workers that persist, first epoch": (alone(loading(queued, "persistent")), FIRST),
    "queue in workers that persist": (alone(loading(queued, "persistent")), LATER),
    "queue in workers that persist, end of epoch": (alone(loading(queued, "persistent")), AT_END),
    "iterator in workers that persist": (alone(loading(opaque, "persistent"), SOURCE), LATER),
    "iterator in workers that persist, end of epoch": (alone(loading(opaque, "persistent"), SOURCE), AT_END),
    "file in workers that persist": (alone(loading(Handled, "persistent")), LATER),
    "queue in workers, by a state": (alone(loading(queued, "persistent", Kept), KEPT_ACT), LATER),
    "file in workers, by a state": (alone(loading(quiet_file, "persistent", Kept)), LATER),
    "noise in workers, by a state": (alone(loading(m.Rows, "2", Kept), KEPT_ACT), AFTER),
    "noise in workers, by a state, end of epoch": (alone(loading(m.Rows, "2", Kept)), AT_END),
    "noise in workers of a generator, by a state": (alone(loading(m.Noisy, "2", Kept), KEPT_ACT), AFTER),
    "noise in workers that persist, by a state": (alone(loading(m.Rows, "persistent", Kept), KEPT_ACT), AT_END),
    "noise in workers, by a state, replayed": (alone(loading(m.Rows, "2", Kept), **REPLAY), AFTER),
    "workers, sought": (alone(loading(m.Rows, "2"), MAY_ACT, **SEEK), LATER),
    "workers, sought, end of epoch": (alone(loading(queued, "2"), **SEEK), AT_END),
    "workers, sought, own sampler": (alone(loading(queued, "2", sampler=Weights(range(20))), MAY_ACT, **SEEK), LATER),
    "workers that persist, sought, first epoch": (alone(loading(queued, "persistent"), MAY_ACT, **SEEK), FIRST),
    "workers that persist, sought": (alone(loading(m.Rows, "persistent"), MAY_ACT, **SEEK), LATER),
    "queue of validation": (validated(queued, "0", ""), LATER),
    "queue of validation, workers that persist": (validated(queued, "persistent", ""), LATER),
    "iterator of validation": (validated(opaque, "0", SOURCE), LATER),
    "iterator of validation, workers that persist": (validated(opaque, "persistent", SOURCE), LATER),
    "other samples": (alone(loading(m.Rows, "2", sampler=Unseeded()), "first batch of this epoch"), LATER),
    "no length": (alone(lambda: DataLoader(m.Rows(), batch_sampler=Endless())), LATER),
    "no position": (alone(loading(m.Silent, "0", Kept), "Silent has no state_dict"), AFTER),
    "shuffle buffer, sought": (
        alone(loading(Claims, "0", Kept), "buffer of Claims (dataset.buffer_size=8)", **SEEK),
        AFTER,
    ),
    "workers that persist, replayed before validation": (  # they draw no seed in between
        Case(model=Epochs, loaders=lambda: kept(**WORKERS["persistent"]), **REPLAY),
        STOPS["before validation"][0],
    ),
}


@pytest.mark.parametrize("name", RESUMES)
def test_a_resume_is_exact_or_says_why_not(name: str, tmp_path: Path) -> None:
    case, stop = RESUMES[name]
    check_resume(case, [stop], tmp_path)


# -- what has changed between two starts -------------------------------------------------------------------------------


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

    before, after = alone(other(**first)), alone(other(**then))
    with pytest.raises(Stop):
        train(before, tmp_path / "broken", StopAfter(3), seed=11, every=1)
    (said,) = (text for text in train(after, tmp_path / "broken", seed=200, every=1000) if " was " in text)
    assert says in said
    if equal:
        train(before, tmp_path / "twin", seed=11, every=1000)
        broken, twin = final(tmp_path / "broken"), final(tmp_path / "twin")
        assert [text for text in differences(twin["state_dict"], broken["state_dict"]) if "workers" not in text] == []


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
        ends = partial(OneCycleLR, max_lr=0.1, total_steps=steps)
        model = partial(m.Scheduled, ends, interval="step") if steps is not None else Estimated
        return Case(model=model, settings={"max_epochs": epochs, "num_sanity_val_steps": 0})

    with pytest.raises(Stop):
        train(case(3), tmp_path, StopAfter(8), seed=11, every=1)
    batches = StopAfter(2)
    with pytest.raises(SettingsError if says else Stop) as raised:
        train(case(epochs), tmp_path, batches, seed=12, every=1)
    assert says in str(raised.value)
    assert batches.left == (2 if says else -1)
