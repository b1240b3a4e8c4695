"""The position in the data: a loader that knows how far it got in its epoch, and can go there again.

An epoch is one pass over a loader, or the rest of one that an earlier attempt has begun. What it was made of is written
down with the position, and compared where another process goes on with it.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, Literal

import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from lightning_spot.say import say
from lightning_spot.state import compat
from lightning_spot.state.change_detector import SCALARS, some_of
from lightning_spot.state.elastic import batch_of, dealt, order_of
from lightning_spot.state.own_state import OwnState, is_stateful
from lightning_spot.state.randomness import State, capture_random, restore_random
from lightning_spot.state.workers import (
    Indices,
    LastingWorkers,
    are_made,
    begin_watched,
    draws_at_once,
    iterates_itself,
    lasts,
    make_unnoticed,
    replacing,
    sampler_name,
    watch_of,
)
from lightning_spot.trees import walk


def say_not_exact(findings: Iterable[str]) -> None:
    """Log what is not exact, if there is anything, on rank 0.

    Args:
        findings: each a cause, what follows, and what to do.
    """
    if found := tuple(dict.fromkeys(findings)):
        text = "a resume is not exact in these points, of which each says what to do:{about}"
        lines = "".join(f"\n  - {each}" for each in found)
        say(logging.WARNING, "not-exact", text, about=lines, only_rank_zero=True, findings=found)


def made_of(loader: Any) -> State:
    """Length of the data set, batch size, workers, sampler and ``drop_last``; ``None`` for what a loader has not."""
    length = None
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        with suppress(TypeError, NotImplementedError):
            length = len(loader.dataset)  # type: ignore[arg-type]
    return {
        "length": length,
        "batch": batch_of(loader),
        "workers": getattr(loader, "num_workers", 0),
        "sampler": type(sampler).__name__ if (sampler := _sampler_of(loader)) is not None else None,
        "drop_last": getattr(loader, "drop_last", None),
    }


def _sampler_of(loader: Any) -> Any:
    """The sampler that decides on the order: one of batches is that of another, or is of the user's own."""
    batches = getattr(loader, "batch_sampler", None)
    return batches if batches is not None and not hasattr(batches, "sampler") else getattr(loader, "sampler", None)


def differences(position: State | None, loader: Any) -> Iterator[str]:
    """What has changed since an epoch began, and what that means, for a loader that goes on at a position."""
    if position is None:
        return
    was, now = position["made_of"], made_of(loader)
    changed = [f"{text} was {was[name]} and is {now[name]}" for name, text in _NAMES.items() if was[name] != now[name]]
    if not changed:
        return
    what = "epochs from here on are made of what there is now"
    if "at_iter" in position and not position["exhausted"] and position["yielded"]:
        what = (
            f"this epoch goes on after as many batches as were trained on ({position['yielded']}): some of its samples"
            " may be seen twice or not at all, and workers draw other random numbers. The next epoch is a whole one"
        )
    yield f"{', '.join(changed)}: {what}"


_NAMES = {
    "length": "the number of samples in the data set",
    "batch": "the batch size",
    "workers": "num_workers",
    "sampler": "the sampler",
    "drop_last": "drop_last",
}


DataResume = Literal["auto", "replay", "seek"]
"""How a loader comes back to its position: ``"replay"`` loads the epoch's batches again and drops them, which is exact
even with random augmentation inside workers; ``"seek"`` draws their indices only; ``"auto"`` seeks where there are no
workers (exact, too) and replays where there are. A loader with a state of its own goes on from that, but with
``"replay"``, and with ``"auto"`` where a shuffle buffer is in no state."""

DATA_RESUMES = ("auto", "replay", "seek")

_END = object()
_BUFFERS = ("buffer_size", "bufsize", "shuffle_buffer", "shuffle_buffer_size")


def begin_epoch(
    loader: Any, workers: LastingWorkers | None, indices: Indices | None = None, **passing: Any
) -> Iterator[Any]:
    """Have a loader begin an epoch: by its workers if they persist, else with ``indices`` in its sampler's place.

    Args:
        loader: any.
        workers: those that persist.
        indices: theirs, or some for the loader; ``None`` where its sampler is left alone.
        **passing: attributes of the indices for this pass.
    """
    if indices is None:
        return workers.begin_epoch() if workers is not None else begin_watched(loader)
    with replacing(indices, passing):
        if workers is not None:
            return workers.begin_epoch()
        with replacing(loader, indices.values(loader)):
            return iter(loader)


class Epoch:
    """One pass over a loader, from its start, or the rest of one that an earlier attempt has begun.

    Such a rest has the same draws for samplers and workers, and passes over as many batches. Nothing of it is begun
    before its first batch is asked for.

    Args:
        follower: of the loader.
        resume: the position at which it goes on; ``None`` for a start.

    Attributes:
        is_rest: whether an earlier attempt has begun it.
        resume: its position, until its first batch is asked for.
    """

    def __init__(self, follower: Positioned, resume: State | None = None) -> None:
        self.loader, self.own, self.workers = follower.loader, follower.own, follower.workers
        self._restore_step, self._data_resume = follower.restore_step, follower.data_resume
        self.is_rest, self.resume = resume is not None, resume
        at = resume or {}
        self.yielded: int = at.get("yielded", 0)
        self.exhausted: bool = at.get("exhausted", False)
        is_seen = not has_workers(self.loader) or watch_of(self.loader) is not None
        begun = {
            "at_iter": {},
            "at_first": None,
            "made_of": made_of(self.loader),
            "begins_with": None,  # its first batch
            # Whether workers were seen to draw numbers or change the data; None if nobody looks.
            "workers_act": False if is_seen else None,
        }
        self.at: State = {name: at.get(name, value) for name, value in begun.items()}
        # Lightning fetches one batch ahead of loaders without a length: where they were before it must be known.
        self._is_fetched_ahead = not has_length(self.loader)
        self.before: State | None = None
        self.dealt: State | None = at["order"] if at.get("dealt") else None
        self.indices = follower.indices
        if self.indices is not None:
            self.indices.instead = dealt(self.dealt, self.loader) if self.dealt is not None else None
            self.indices.draws_along |= at.get("draws_along", False)
        self._lost: list[str] = [*at.get("data", ())]
        self._due_random = False
        self._ended: Any = None
        self._loaded: list[tuple[Any, str, Any, Any]] | None = None
        if not self.is_rest:
            self._begin_at_start()
        elif self.workers is not None:
            self.workers.resume(at.get("workers"))
            self._lost += self.workers.lost()

    def _begin_at_start(self) -> None:
        self.at["at_iter"] = self.own.capture_all()
        self.inner = begin_epoch(self.loader, self.workers, self.indices)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.resume is not None:
            resume, self.resume = self.resume, None
            self._begin(resume)
        elif self._due_random:
            self._due_random = False
            self._restore_step(True)
        if self.at["at_first"] is None:
            self.at["at_first"] = self.own.capture_all()
        if self._is_fetched_ahead:
            self.before = self._state()
        try:
            batch = next(self.inner)
        except StopIteration:
            self.exhausted = True
            raise
        if self.yielded == 0:
            self.at["begins_with"] = _digest_of(batch)
        self.yielded += 1
        return batch

    def at_end(self) -> State:
        """Where a loader that keeps its state is when the run has come to its end, outside any epoch."""
        state: State = {"made_of": made_of(self.loader)}
        if self.resume is None and is_stateful(self.loader):
            state |= {"state": self._loader_state(), "ended": self.exhausted, "yielded": self.yielded}
        elif self.resume is not None and "state" in self.resume:
            state |= {name: self.resume.get(name) for name in ("state", "ended", "yielded")}
        return state

    def position(self, ahead: int, *, epoch_done: bool = False) -> State:
        """See :meth:`Positioned.position`."""
        if self.resume is not None:
            return {**self.resume, "exhausted": self.exhausted or epoch_done}
        state = self.before if ahead and self.before is not None else self._state()
        done = state["exhausted"] or epoch_done
        watch = watch_of(self.loader)
        return {
            **state,
            **self.at,
            "ahead": ahead,
            "workers": self.workers.saved(now=done) if self.workers is not None else None,
            "exhausted": done,
            "ended": state["exhausted"],
            "draws_along": self.indices is not None and self.indices.draws_along,
            "order": self.dealt or order_of(self.loader, self.at["at_iter"], self.at["at_first"]),
            "dealt": self.dealt is not None,
            "data": self.own.changed_data(),
            "workers_act": True if watch is not None and watch.acts else self.at["workers_act"],
        }

    def _state(self) -> State:
        state: State = {"yielded": self.yielded, "exhausted": self.exhausted, "own": self.own.capture()}
        if self._is_fetched_ahead:
            state["random"] = capture_random()
        if is_stateful(self.loader):
            state["state"] = self._loader_state()
        return state

    @property
    def state_to_come(self) -> Any:
        """The loader's state, while it has not begun: torchdata's would begin an epoch for it, and draw numbers."""
        return self.resume.get("state") if self.resume is not None else self._ended

    def _loader_state(self) -> Any:
        return self.loader.state_dict() if self._ended is None else self._ended

    def leave(self) -> None:
        """Keep what loading a state has left behind out of the next epoch, which begins at its start.

        A stream may begin each epoch from the state that it was given, until it is given another one. So what iterating
        has not changed since is as it was before; and workers, which have a copy of it, are made again.
        """
        if self.resume is not None and self._goes_by_state(self.resume):  # Lightning asked for none of its batches
            present = self.own.capture_all()
            self._come_to_end(self.resume)
            self.own.restore_all(present)
        for item, name, before, loaded in self._loaded or ():
            if vars(item).get(name) is loaded:
                vars(item)[name] = before
        if self._loaded is not None and are_made(self.loader):
            self.inner = iter(())
            compat.WORKERS_ITERATOR.set(self.loader, None)
            make_unnoticed(self.loader)
        elif self.is_rest and self.exhausted and self.workers is None:  # it may have gone to its end without them
            make_unnoticed(self.loader)
        self._loaded = None

    def _begin(self, resume: State) -> None:
        present, by_state = capture_random(), self._goes_by_state(resume)
        if "at_iter" not in resume:  # the end of an epoch: the next one begins as it would have
            self._restore_step(True)
            self.own.restore(resume["own"], values=False)  # these came before hooks began this epoch
            if by_state:
                self._come_to_end(resume)
                self.own.restore(resume["own"], values=False)
                self.leave()
            self.say_what_differs()
            self._begin_at_start()
            return
        if by_state or not self.exhausted:  # streams have to be told their epoch first, and samplers draw again
            self.own.restore_all(self.at["at_iter"])
        if self.exhausted and by_state:
            self._come_to_end(resume)
        if self.exhausted:
            self.inner, self._ended = iter(()), None if by_state else resume.get("state")
        elif by_state:
            self.inner = self._load(resume["state"])
        else:
            self.inner = self._iter_from(resume["yielded"])
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
        are_there = has_workers(self.loader) and self.at["made_of"]["workers"] == self.loader.num_workers
        return are_there and self._data_resume == "seek" and self.indices is not None and self.is_within

    @property
    def is_within(self) -> bool:
        """Whether the epoch goes on after some of its batches."""
        return self.yielded > 0 and not self.exhausted

    def say_what_differs(self) -> None:
        """Warn of what an attempt before had changed in the data, and that does not come back. Once."""
        names, self._lost = self._lost, []
        say_changed(names)

    def _goes_by_state(self, resume: State) -> bool:
        """Whether its own state brings the loader to its place: one of as many workers."""
        if "state" not in resume or not is_stateful(self.loader) or self._data_resume == "replay":
            return False
        loses_buffer = self._data_resume == "auto" and any(shuffle_buffers(self.own))
        return not loses_buffer and self.at["made_of"]["workers"] == getattr(self.loader, "num_workers", 0)

    def _load(self, state: State) -> Iterator[Any]:
        """Have a loader go on from its own state."""
        before = [(item, dict(vars(item))) for _, item in self.own.items() if _can_load(item)]
        self.loader.load_state_dict(state)
        inner = begin_watched(self.loader, apart=True)
        self._loaded = [
            (item, name, attributes[name], value)
            for item, attributes in before
            for name, value in vars(item).items()
            # A loader counts on from its state; that one was loaded is a flag, as litdata's is.
            if (item is not self.loader or type(value) is bool) and attributes.get(name, value) is not value
        ]
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
        workers, had_workers = has_workers(self.loader), self.at["made_of"]["workers"]
        # With workers, a sampler draws its order where the epoch begins; without, where its first batch is asked for.
        at_first = self.at["at_first"] if workers or not had_workers else None
        sought = self.indices if self._data_resume == "seek" or (self._data_resume == "auto" and not workers) else None
        passing: State = {"first": batches} if sought is not None and workers else {}
        if workers and not had_workers and at_first is not None:
            passing["at_start"] = lambda: self.own.restore_all(at_first)
        inner = begin_epoch(self.loader, self.workers, self.indices, **passing)
        if at_first is not None and "first" not in passing:
            self.own.restore_all(at_first)
        if sought is None:
            self._load_again(inner, batches)
        elif not workers:  # no worker makes it draw: it does now, with the generators as they were there
            deque(islice(sought.draws, batches), 0)
        return inner

    def _load_again(self, inner: Iterator[Any], batches: int) -> None:
        """Drop the batches that were trained on. The first of them is compared with that of the attempt before."""
        for passed in range(batches):
            if (batch := next(inner, _END)) is _END:
                text = "the data has only {batches} batches now. This epoch ends there. Resume with the data of before."
                say(logging.WARNING, "data-shorter", text, batches=passed)
                break
            is_other = passed == 0 and self.at["begins_with"] not in (None, _digest_of(batch))
            if is_other and not self._lost and made_of(self.loader) == self.at["made_of"]:
                why = (
                    f"the first batch of this epoch, loaded again, differs: {type(self.loader).__name__} does not yield"
                    " the same twice, and the rest of this epoch is not exact. Give it a state_dict and a"
                    " load_state_dict"
                )
                say_not_exact([why])


def say_changed(names: list[str]) -> None:
    """Warn of what an attempt before had changed in the data, and that does not come back, if there is anything."""
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


def _digest_of(batch: Any) -> str:
    """What is in a batch, as far as it is tensors, arrays, numbers and text that show it."""
    digest = xxhash.xxh3_64()
    for _, item in walk(batch):
        with suppress(Exception):  # nested and masked tensors, arrays of another byte order, classes of the user's
            digest.update(_bytes_of(item))
    return digest.hexdigest()


def _bytes_of(item: Any) -> bytes:
    if getattr(getattr(item, "dtype", None), "kind", "") in (*"biufc",):
        item = torch.as_tensor(item)
    if isinstance(item, torch.Tensor):
        return f"{item.dtype}{tuple(item.shape)}".encode() + some_of(item)
    return repr(item).encode() if type(item) in SCALARS else b""


def has_workers(loader: Any) -> bool:
    """Whether a loader has its batches loaded by other processes."""
    return bool(getattr(loader, "num_workers", 0) > 0)


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


class Follower:
    """What is known of one loader.

    Args:
        loader: a ``DataLoader`` or any other iterable.
        before: called with this just before an epoch begins.
    """

    def __init__(self, loader: Any, before: Callable[[Follower], None] | None = None) -> None:
        self.loader, self._before = loader, before
        self.own = OwnState.of(loader)
        self.workers = LastingWorkers.of(loader, self.own)
        self._were_made = False
        self.epoch: Epoch | None = None

    def begin_epoch(self) -> Iterator[Any]:
        """What iterating over the loader returns."""
        if self._before is not None:
            self._before(self)
        if self._were_made:
            self._were_made = False
            make_unnoticed(self.loader)
        return begin_epoch(self.loader, self.workers)

    def state(self) -> State:
        """The loader's state between two epochs, as plain values."""
        were_made = self._were_made or (self.workers is None and are_made(self.loader))
        saved = self.workers.saved(now=True) if self.workers is not None else None
        own, data = self.own.capture(), self.own.changed_data()
        return {"own": own, "workers": saved, "were_made": were_made, "data": data}

    def restore(self, state: State, but: Collection[int] = ()) -> None:
        """Set what :meth:`state` returned, but in objects of these identities: training has gone on with them."""
        self.own.restore(state["own"], but=but)
        if self.workers is not None:
            self.workers.resume(state["workers"])
        say_changed([*state["data"], *(self.workers.lost() if self.workers is not None else ())])
        self._were_made = state["were_made"]


class Positioned(Follower):
    """What is known of a training loader, which goes on at a position.

    In a resumed epoch nothing is drawn before the first batch is asked for: only then are samplers at the right epoch.

    Args:
        loader: a ``DataLoader`` or any other iterable.
        resume: asked when an epoch begins: the position to begin it at, or ``None`` for its start.
        restore_step: called just before the first batch after a resume is fetched: sets all generators to what they
            were at the resumed step; ``False`` if there is nothing to set now, as for all loaders but the first that
            asks. Told whether that batch is there at all: the epoch may have been at its end.
        data_resume: how to get to a position.
    """

    def __init__(
        self,
        loader: Any,
        resume: Callable[[Positioned], State | None],
        restore_step: Callable[[bool], bool],
        data_resume: DataResume = "auto",
    ) -> None:
        super().__init__(loader)
        self._resume, self.restore_step, self.data_resume = resume, restore_step, data_resume
        self.indices: Indices | None = None  # one for all epochs: workers that persist go on with it
        if draws_at_once(loader):
            self.indices = self.workers.indices if self.workers is not None else Indices()

    def begin_epoch(self) -> Iterator[Any]:
        """See :meth:`Follower.begin_epoch`."""
        if self.epoch is not None:
            self.epoch.leave()
        self.epoch = Epoch(self, self._resume(self))
        return self.epoch

    def position(self, ahead: int = 0, *, epoch_done: bool = False, at_end: bool = False) -> State | None:
        """Where the loader is, as plain values; ``None`` if it has begun no epoch.

        Args:
            ahead: 1 if a batch was fetched ahead and not trained on yet.
            epoch_done: whether the epoch has no more batches; the loader itself may (``limit_train_batches``).
            at_end: whether the run is at its end, outside any epoch.
        """
        if self.epoch is None:
            return None
        if at_end:
            return {**self.state(), **self.epoch.at_end()}
        return self.epoch.position(ahead, epoch_done=epoch_done)

    @property
    def rest(self) -> Epoch | None:
        """The epoch of an earlier attempt that the loader is in, or to go on in."""
        return self.epoch if self.epoch is not None and self.epoch.is_rest else None

    def restore_own(self, *, begins: bool) -> None:
        """Set what a loader that is to be resumed has of its own: its epoch may have no batch left to ask it for.

        Args:
            begins: whether training begins. Then values of a loader in front of a new epoch are set, before hooks set
                those of the epoch; all else is set in front of the first step.
        """
        epoch = self.rest
        if epoch is None or epoch.resume is None:
            return
        is_new = "at_iter" not in epoch.resume
        if not begins:
            epoch.own.restore(epoch.resume["own"], values=not is_new)
            epoch.say_what_differs()
        elif is_new:
            epoch.own.restore(epoch.resume["own"])

    def batches_done(self) -> int | None:
        """Batches of its epoch that count as done, if it is to go on in its middle; ``None`` otherwise."""
        epoch = self.rest
        if epoch is None or epoch.resume is None or "at_iter" not in epoch.resume:
            return None
        if not has_length(self.loader) or (epoch.dealt is None and not epoch.exhausted):
            return epoch.yielded
        left = len(dealt(epoch.dealt, self.loader)) - epoch.yielded if epoch.dealt is not None else 0
        return max(0, len(self.loader) - (0 if epoch.exhausted else left))


class FollowedLoader:
    """Stands in for a loader; in everything it *is* that loader, but that its epochs are begun by a follower."""

    def __init__(self, follower: Follower) -> None:
        self.__dict__["_follower"] = follower  # past __setattr__, which belongs to the loader

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # isinstance(loader, DataLoader) stays true
        return type(self.__dict__["_follower"].loader)

    def __getattr__(self, name: str) -> Any:
        """Of the loader; its state, while it is still to go to its place, is that of its place."""
        follower: Follower = self.__dict__["_follower"]
        epoch = follower.epoch if name == "state_dict" else None
        if epoch is not None and (state := epoch.state_to_come) is not None:
            return lambda: state
        return getattr(follower.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_follower"].loader, name, value)

    def __len__(self) -> int:
        return len(self.__dict__["_follower"].loader)

    def __iter__(self) -> Iterator[Any]:
        return self.__dict__["_follower"].begin_epoch()  # type: ignore[no-any-return]


def follower_of(loader: Any) -> Follower | None:
    """The follower of a :class:`FollowedLoader`; ``None`` of other loaders."""
    return loader.__dict__["_follower"] if type(loader) is FollowedLoader else None


def loader_itself(loader: Any) -> Any:
    """The loader that a :class:`FollowedLoader` stands in for; others as they are."""
    return follower.loader if (follower := follower_of(loader)) is not None else loader


def why_not_exact(follower: Positioned) -> Iterator[str]:
    """Why a training loader may not come back to its exact position, with what to do; nothing if it can."""
    inner, epoch, rest = follower.loader, follower.epoch, follower.rest
    if is_stateful(inner):
        data = getattr(inner, "dataset", None)
        kind = type(data).__iter__ if isinstance(data, IterableDataset) else None
        if inspect.isgeneratorfunction(kind) and not hasattr(data, "state_dict"):
            yield f"{_BEGINS_AGAIN} {type(data).__name__} has no state_dict: give it one"
        for buffer in shuffle_buffers(follower.own) if follower.data_resume == "seek" else ():
            yield (
                f"the shuffle buffer of {type(data).__name__} ({buffer}) may be in no state: a resume in mid-epoch may"
                ' lose or repeat samples. Leave data_resume="seek" out: batches are loaded again'
            )
        do = 'Set data_resume="replay", and persistent_workers=False'
        yield from _what_workers_lack(rest, "its state does not hold", do)
        return
    if isinstance(getattr(inner, "dataset", None), IterableDataset) or not isinstance(inner, DataLoader):
        yield (
            f"{_BEGINS_AGAIN} Use torchdata's"
            " StatefulDataLoader (any loader with state_dict and load_state_dict), or a map-style data set"
        )
    if has_workers(inner) and not getattr(inner, "in_order", True):
        yield "with in_order=False the order of batches is that of the workers' speed, which no resume can repeat"
    yield from why_workers_are_not_exact(follower)
    yield from _what_workers_lack(rest, 'data_resume="seek" does not load again', 'Leave data_resume="seek" out')
    if rest is not None and rest.is_within and iterates_itself(inner):
        yield (
            f"{type(inner).__name__} iterates in a way of its own, and its batches are loaded again: the rest of this"
            " epoch is exact unless it draws from the random numbers of the process. Give it a state_dict"
        )
    if epoch is not None and epoch.indices is not None and epoch.indices.draws_along:
        yield (
            f"{_kind(epoch.loader)} draws from the random numbers of the process while training draws from them, too:"
            " the rest of an epoch may not be exact. Give it a generator of its own"
        )


_BEGINS_AGAIN = (
    "the data position after a resume is not exact unless this stream yields the same samples each time: a resumed"
    " epoch begins it again and drops as many batches as were trained on."
)


def _what_workers_lack(epoch: Epoch | None, why: str, do: str) -> Iterator[str]:
    """What the workers of the attempt before had done in an epoch, and those that go on in it have not."""
    if epoch is not None and epoch.has_other_workers and epoch.at["workers_act"] is not False:
        yield (
            f"workers of {type(epoch.loader).__name__} {'' if epoch.at['workers_act'] else 'may '}draw random numbers"
            f" or change the data, which {why}: what they load is not exact after this resume. {do}"
        )


def why_workers_are_not_exact(follower: Follower) -> Iterator[str]:
    """Why the workers of a loader, for training or validation, may not come back as they were; what to do."""
    if follower.workers is None and lasts(follower.loader):
        yield (
            "workers persist over epochs, and cannot be asked which random numbers they go on with: random augmentation"
            " in them is not exact. Set persistent_workers=False"
        )


def _kind(loader: Any) -> str:
    """Class of the sampler that draws."""
    sampler = getattr(loader, sampler_name(loader))
    while type(sampler).__module__.startswith("torch.") and hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    return type(sampler).__name__
