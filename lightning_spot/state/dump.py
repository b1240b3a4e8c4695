"""A checkpoint of Lightning with the exact state beside it: what becomes a snapshot, and how it is read.

Rank 0's exact state is in the checkpoint as values, others' are in files of their own. A checkpoint in one file that no
snapshot holds (a user's, or one of an earlier version) has the others' as bytes: a tensor with a file of
``torch.save``. Whoever reads it gets values in place of them.
"""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any

import torch

from lightning_spot.capture.tensors import Noted, tensors_in
from lightning_spot.capture.unexpected import as_failure
from lightning_spot.errors import FailureReason, SnapshotFailedError, SpotError
from lightning_spot.sharded.file_plan import load_state, state_file
from lightning_spot.snapshot.safe_load import safe_load

if TYPE_CHECKING:
    import lightning.pytorch as pl

State = dict[str, Any]

KEY = "lightning_spot"
"""Key of the exact state in a checkpoint."""

VERSION = 6
"""Of the exact state's form; that of the version before is read, too, see :func:`in_present_form`."""

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Lightning's checkpoint of a step with the exact state of this rank; its tensors are still those of training.

    Attributes:
        checkpoint: of Lightning, the same on all ranks as far as rank 0's counts.
        state: of this rank.
        shared: what the exact state has besides those of ranks, on rank 0.
        noted: how the checkpoint's tensors were; ``None`` if that was not noted.
    """

    checkpoint: dict[str, Any]
    state: State
    shared: State
    noted: Noted | None = None

    def kept(self) -> Dump:
        """The same to be held while training goes on; later it is known whether it :attr:`is_unchanged`.

        Its tensors are still those of training. Its containers are its own: callbacks give theirs as they are, and fill
        them on.
        """
        noted = Noted(tensors_in([value for key, value in self.checkpoint.items() if key != KEY]))
        return replace(self, checkpoint=_with_own_containers(self.checkpoint, {}), noted=noted)

    @property
    def is_unchanged(self) -> bool:
        """Whether no tensor was written to since it was :meth:`kept`, as weight averaging does around a validation."""
        return self.noted is not None and self.noted.are_unchanged

    def complete(self, ranks: list[Any]) -> dict[str, Any]:
        """The checkpoint with the exact states of ranks in it.

        Args:
            ranks: those of all ranks, see :func:`gather`; or as far as they are not kept in files of their own.
        """
        self.checkpoint[KEY] = {**self.shared, "ranks": ranks}
        return self.checkpoint


def in_present_form(shared: State) -> State:
    """The exact state of a checkpoint as this version writes it; of a form that is not known, as it is.

    Version 5 noted what shares memory in another way: that is not compared. It had the batch size beside what an epoch
    was made of, changed data by digests, and what workers had changed by name.

    Args:
        shared: what a checkpoint has at :data:`KEY`.
    """
    if shared["version"] in (5, VERSION):
        shared = {**shared, "lost": sorted({*shared["lost"], *_drop_what_fits_made_data(shared["ranks"])})}
    if shared["version"] != 5:
        return shared
    for rank in filter(None, shared["ranks"]):  # those that this one needs
        if (hooked := rank["hooked"]) is not None:  # else that part was off
            before = hooked["before"]
            hooked["shared"] = hooked["untrained"] = None
            hooked["before"] = [
                *(("trains", name) for name in before["trains"]),
                *(("attributes", module, name) for module, names in before["attributes"].items() for name in names),
                *(("settings", name) for name in before["settings"]),
            ]
        for position in filter(None, rank["loaders"] or ()):
            position["made_of"]["batch"] = position.get("batch")
            position["workers_act"] = True if position.get("workers_changed") else position.get("workers_draw")
    return {**shared, "version": VERSION}


def _drop_what_fits_made_data(ranks: Any) -> Iterator[str]:
    """Names of what was kept beside data that training had wrapped, and was put back where an epoch ended; it goes."""
    for rank in filter(None, ranks):
        hooked = rank["hooked"] or {}
        for owner in hooked.pop("made_data", None) or ():
            for name, own in hooked["attributes"].items():
                if not owner or name == owner or name.startswith(f"{owner}."):
                    gone = own.keys() - {"training"}
                    yield from (f"{name}.{each}" if name else each for each in gone)
                    hooked["attributes"][name] = {each: own[each] for each in own.keys() - gone}


def _with_own_containers(value: Any, made: dict[int, Any]) -> Any:
    """The same value; containers in it are copies, what else is in them is not: ``copy.deepcopy`` would copy tensors.

    Args:
        value: any value.
        made: copies so far, by the identity of what they are of: a container may hold itself.
    """
    if id(value) in made:
        return made[id(value)]
    if type(value) is tuple:
        return tuple(_with_own_containers(item, made) for item in value)
    if not isinstance(value, (dict, list, set, deque, bytearray)):
        return value
    try:
        own = copy.copy(value)  # with its attributes, such as those of a ``state_dict``
    except Exception:  # of a class of the user's
        own = value
    made[id(value)] = own
    if own is value:
        return value
    if isinstance(own, dict):
        for key, item in [*dict.items(own)]:
            dict.__setitem__(own, key, _with_own_containers(item, made))
    elif isinstance(own, list):
        list.__setitem__(own, slice(None), [_with_own_containers(item, made) for item in own])
    return own


def gather(trainer: pl.Trainer, state: State | SpotError) -> list[Any]:
    """The states of all ranks, on rank 0; those of others are packed. Every rank calls this at the same place.

    Args:
        trainer: whose ranks they are.
        state: of this one, or why it is not known.

    Raises:
        SpotError: of this rank; on rank 0 also that of another one.
    """
    if trainer.world_size == 1:
        if isinstance(state, SpotError):
            raise state
        return [state]
    mine = _told(state, trainer)
    states: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
    torch.distributed.gather_object(str(mine) if isinstance(mine, SpotError) else mine, states)
    if isinstance(mine, SpotError):
        raise mine
    for rank, told in enumerate(states or ()):
        if isinstance(told, str):
            raise SnapshotFailedError(f"rank {rank}: {told}", reason=FailureReason.UNEXPECTED)
    return [state, *(states or ())[1:]]


def _told(state: State | SpotError, trainer: pl.Trainer) -> torch.Tensor | SpotError | None:
    """What a rank tells rank 0, which waits for it whatever fails here."""
    if isinstance(state, SpotError):
        return state
    try:
        return None if trainer.is_global_zero else packed(state)
    except Exception as error:  # of values of ours: no code of the user's is at work
        return as_failure(error)


def read_checkpoint(file: IO[bytes] | str, map_location: str = "cpu", *, mapped: str = "") -> Any:
    """Read a checkpoint, and the states of ranks in it, as :func:`safe_load` does; see there."""
    return with_ranks(safe_load(file, map_location, mapped=mapped))


def with_ranks(checkpoint: Any, read: Callable[[IO[bytes]], Any] = safe_load) -> Any:
    """The same checkpoint with the exact states of all ranks as values, if it has any; what is none of ours stays.

    Args:
        checkpoint: changed in place.
        read: reads the state of a rank, a file of ``torch.save``.
    """
    exact = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
    if isinstance(exact, dict) and isinstance(exact.get("ranks"), list):
        exact["ranks"] = [read(_content(state)) if _is_packed(state) else state for state in exact["ranks"]]
    return checkpoint


# -- the states of ranks: of rank 0 as values in the checkpoint, of others in files of their own, or as bytes in it ---


def packed(state: State) -> torch.Tensor:
    """A rank's state as bytes, for a checkpoint in one file."""
    buffer = io.BytesIO()
    buffer.write(bytes(_LENGTH_BYTES))
    torch.save(state, buffer)
    data = buffer.getbuffer()
    data[:_LENGTH_BYTES] = (len(data) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _is_packed(state: Any) -> bool:
    return isinstance(state, torch.Tensor) and state.dtype == torch.uint8 and state.device.type == "cpu"


def _content(state: torch.Tensor) -> IO[bytes]:
    data = state.numpy().tobytes()
    nbytes = int.from_bytes(data[:_LENGTH_BYTES], "little")
    return io.BytesIO(data[_LENGTH_BYTES : _LENGTH_BYTES + nbytes])


def states_in_files(trainer: pl.Trainer, shared: State, read: Callable[[str], memoryview]) -> list[State]:
    """The states of the ranks of a snapshot, as far as this rank needs them; others are empty.

    Args:
        trainer: that goes on.
        shared: what the snapshot has for all ranks; those of some may be in it.
        read: a file of the snapshot, by its name.
    """
    known, size = shared.get("ranks") or [], shared["world_size"]
    wanted = (0, trainer.global_rank) if are_these(shared, trainer) else range(size)
    return [*known, *(load_state(read(state_file(rank))) if rank in wanted else {} for rank in range(len(known), size))]


# -- shares of the data: as many as ranks, or fewer, where ranks of tensor parallelism see the same batches ------------


def share_of(trainer: pl.Trainer) -> tuple[int, int]:
    """Which share of the data this rank has, and of how many: ranks of tensor parallelism have the same."""
    data = None
    with suppress(RuntimeError):  # before it is set up, a strategy raises this
        data = getattr(trainer.strategy, "distributed_sampler_kwargs", None)  # a single device has none
    return (data["rank"], data["num_replicas"]) if data else (trainer.global_rank, trainer.world_size)


def are_these(shared: dict[str, Any], trainer: pl.Trainer) -> bool:
    """Whether the ranks of a snapshot are those of a trainer: as many, with as many shares of the data.

    Args:
        shared: the exact state of the snapshot.
        trainer: that goes on from it.
    """
    shares = share_of(trainer)[1]
    return bool(shared["world_size"] == trainer.world_size and shared.get("shares", shares) == shares)
