"""The position in the data: a loader that knows how far it got in this epoch, and can go there again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_spot.exact.epochs import (
    DataResume,
    Epoch,
    ResumedEpoch,
    begin_epoch,
    has_length,
    say_changed,
    shuffle_buffers,
)
from lightning_spot.exact.indices import is_known, is_stateful, iterates_itself, sampler_name
from lightning_spot.exact.order import batch_of, dealt
from lightning_spot.exact.own_state import OwnState
from lightning_spot.exact.randomness import State
from lightning_spot.exact.workers import LastingWorkers, are_made, make_unnoticed, watch_of, why_not_asked


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
        self.__dict__["_were_made"] = False
        self.__dict__["_workers"] = LastingWorkers.of(loader, own)

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
        if own["_were_made"]:
            own["_were_made"] = False
            make_unnoticed(own["_loader"])
        return begin_epoch(own["_loader"], own["_workers"])


class PositionedLoader(FollowedLoader):
    """Stands in for a training loader and counts what it yields.

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
        resume: Callable[[PositionedLoader], State | None],
        restore_step: Callable[[bool], bool],
        data_resume: DataResume = "auto",
    ) -> None:
        watch_of(loader, seeks=data_resume == "seek")
        super().__init__(loader)
        self.__dict__.update(_resume=resume, _restore_step=restore_step, _data_resume=data_resume)

    def __getattr__(self, name: str) -> Any:
        """Of the loader; its state, while it is still to go to its place, is that of its place."""
        epoch = self.__dict__["_epoch"]
        state = epoch.state_to_come if name == "state_dict" and isinstance(epoch, ResumedEpoch) else None
        return super().__getattr__(name) if state is None else lambda: state

    def __iter__(self) -> Iterator[Any]:
        own = self.__dict__
        before = own["_epoch"]
        if before is not None:
            before.leave()
        position = own["_resume"](self)
        parts = own["_loader"], own["_own"], own["_workers"]
        own["_epoch"] = (
            Epoch(*parts)
            if position is None
            else ResumedEpoch(*parts, position, own["_restore_step"], own["_data_resume"])
        )
        if before is not None:
            own["_epoch"].follow(before)
        return own["_epoch"]  # type: ignore[no-any-return]


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
        return {**(state_of(loader) or {}), **epoch.at_end()}
    position: State = epoch.position(ahead, epoch_done=epoch_done)
    return position


def state_of(loader: Any) -> State | None:
    """State of a :class:`FollowedLoader` between two epochs, as plain values; ``None`` for other loaders."""
    if type(loader) not in (FollowedLoader, PositionedLoader):
        return None
    own, workers = loader.__dict__["_own"], loader.__dict__["_workers"]
    were_made = loader.__dict__["_were_made"] or (workers is None and are_made(loader.__dict__["_loader"]))
    saved = workers.saved(now=True) if workers is not None else None
    return {"own": own.capture(), "workers": saved, "were_made": were_made, "data": own.changed_data()}


def restore_state(loader: Any, state: State | None, but: Collection[int] = ()) -> None:
    """Set what :func:`state_of` returned, but in objects of these identities: training has gone on with them."""
    if state is not None and type(loader) in (FollowedLoader, PositionedLoader):
        own, workers = loader.__dict__["_own"], loader.__dict__["_workers"]
        own.restore(state["own"], but=but)
        names = own.differing_data(state["data"])
        if workers is not None:
            workers.resume(state["workers"])
            names += workers.lost()
        say_changed(names)
        loader.__dict__["_were_made"] = state["were_made"]


def restore_owners(loader: Any) -> None:
    """Set what a loader that is to be resumed draws from: its epoch may have no batch left to ask it for."""
    epoch = loader.__dict__["_epoch"] if type(loader) is PositionedLoader else None
    if isinstance(epoch, ResumedEpoch) and epoch.resume is not None:
        epoch.own.restore(epoch.resume["own"], values="at_iter" in epoch.resume)
        epoch.say_what_differs()


def restore_values(loader: Any) -> None:
    """When training begins with a new epoch: set the values that a loader had, before hooks set those of the epoch."""
    epoch = loader.__dict__["_epoch"] if type(loader) is PositionedLoader else None
    if isinstance(epoch, ResumedEpoch) and epoch.resume is not None and "at_iter" not in epoch.resume:
        epoch.own.restore(epoch.resume["own"])


def identities_in(loader: Any) -> set[int]:
    """Identities of the objects within reach of a loader."""
    own = loader.__dict__["_own"] if type(loader) in (FollowedLoader, PositionedLoader) else OwnState({"": loader})
    return {id(item) for _, item in own.items()}


def batches_done(loader: Any) -> int | None:
    """Batches of its epoch that count as done in a loader which is to go on in its middle; ``None`` for others."""
    epoch = loader.__dict__["_epoch"] if type(loader) is PositionedLoader else None
    if not isinstance(epoch, ResumedEpoch) or epoch.resume is None or "at_iter" not in epoch.resume:
        return None
    if not has_length(loader) or (epoch.dealt is None and not epoch.exhausted):
        return int(epoch.yielded)
    left = len(dealt(epoch.dealt, epoch.loader)) - epoch.yielded if epoch.dealt is not None else 0
    return max(0, len(loader) - (0 if epoch.exhausted else left))


def other_batches(loader: Any, position: State | None) -> Iterator[str]:
    """What to say where a loader goes on in the middle of its epoch with larger or smaller batches than before."""
    if position is None or "at_iter" not in position or position["exhausted"]:
        return
    was, now = position.get("batch"), batch_of(loader_itself(loader))
    passed = position["yielded"]
    if was is None or now is None or was == now or not passed or "state" in position:
        return
    what = "passed over" if now > was else "seen twice"
    yield (
        f"the batch size was {was} when the snapshot was taken and is {now} now: this epoch goes on after as many"
        f" batches as were trained on ({passed}), and {passed * abs(now - was)} of its samples are {what}, on each"
        " rank. The next epoch is a whole one"
    )


def loader_itself(loader: Any) -> Any:
    """The loader that a :class:`FollowedLoader` stands in for; others as they are."""
    return loader.__dict__["_loader"] if type(loader) in (FollowedLoader, PositionedLoader) else loader


def why_not_exact(loader: Any) -> Iterator[str]:
    """Why this training loader may not come back to its exact position, with what to do; nothing if it can."""
    inner = loader_itself(loader)
    if is_stateful(inner):
        yield from _why_its_state_is_not_exact(loader, inner)
        return
    if isinstance(getattr(inner, "dataset", None), IterableDataset) or not isinstance(inner, DataLoader):
        yield (
            f"{_BEGINS_AGAIN} Use torchdata's"
            " StatefulDataLoader (any loader with state_dict and load_state_dict), or a map-style data set"
        )
    if getattr(inner, "num_workers", 0) > 0 and not getattr(inner, "in_order", True):
        yield "with in_order=False the order of batches is that of the workers' speed, which no resume can repeat"
    yield from why_workers_are_not_exact(loader)
    epoch = loader.__dict__["_epoch"] if type(loader) is PositionedLoader else None
    yield from _what_workers_lack(epoch, 'data_resume="seek" does not load again', 'Leave data_resume="seek" out')
    if epoch is not None and epoch.indices is not None and epoch.indices.draws_along:
        yield (
            f"{_kind(epoch.loader)} draws from the random numbers of the process while training draws from them, too:"
            " the rest of an epoch may not be exact. Give it a generator of its own"
        )


_BEGINS_AGAIN = (
    "the data position after a resume is not exact unless this stream yields the same samples each time: a resumed"
    " epoch begins it again and drops as many batches as were trained on."
)


def _why_its_state_is_not_exact(loader: Any, inner: Any) -> Iterator[str]:
    """Why a loader's own state may not bring it back; nothing if it does, as far as is known."""
    data = getattr(inner, "dataset", None)
    epoch = loader.__dict__["_epoch"] if type(loader) is PositionedLoader else None
    kind = type(data).__iter__ if isinstance(data, IterableDataset) else None
    if inspect.isgeneratorfunction(kind) and not hasattr(data, "state_dict"):
        yield f"{_BEGINS_AGAIN} {type(data).__name__} has no state_dict: give it one"
    for buffer in shuffle_buffers(OwnState({"dataset": data})) if loader.__dict__.get("_data_resume") == "seek" else ():
        yield (
            f"the shuffle buffer of {type(data).__name__} ({buffer}) may be in no state: a resume in mid-epoch may lose"
            ' or repeat samples. Leave data_resume="seek" out: batches are loaded again'
        )
    yield from _what_workers_lack(
        epoch, "its state does not hold", 'Set data_resume="replay", and persistent_workers=False'
    )


def _what_workers_lack(epoch: Epoch | None, why: str, do: str) -> Iterator[str]:
    """What the workers of the attempt before had done in an epoch, and those that go on in it have not."""
    if not isinstance(epoch, ResumedEpoch) or not epoch.has_other_workers:
        return
    what = ["draw random numbers"] if epoch.workers_draw else []
    what += [f"change {', '.join(epoch.workers_changed)}"] if epoch.workers_changed else []
    if epoch.workers_draw is None:
        what = ["may draw random numbers or change the data"]
    if what:
        yield (
            f"workers of {type(epoch.loader).__name__} {' and '.join(what)}, which {why}: what they load is not exact"
            f" after this resume. {do}"
        )


def why_workers_are_not_exact(loader: Any) -> Iterator[str]:
    """Why the workers of this loader, for training or validation, may not come back as they were; what to do."""
    if type(loader) not in (FollowedLoader, PositionedLoader):
        return
    reason, workers = loader.__dict__["_why"], loader.__dict__["_workers"]
    if reason is None and workers is not None and workers.is_lost:
        reason = "the loader makes them in a way of its own"
    if reason is not None:
        yield (
            f"workers persist over epochs, and cannot be asked which random numbers they go on with, since {reason}:"
            " random augmentation in them is not exact. Set persistent_workers=False"
        )


def _kind(loader: Any) -> str:
    """Class of what draws: of the sampler, or of the loader if that is torch's."""
    sampler = getattr(loader, sampler_name(loader))
    while type(sampler).__module__.startswith("torch.") and hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    return type(loader if is_known(sampler) and iterates_itself(loader) else sampler).__name__
