"""The states of Lightning's loops, as it would save them, in a fourth of the time.

It copies each of a hundred counters as if anything might be in it. Here only what is no plain value is left to it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning_spot.exact import private

if TYPE_CHECKING:
    import lightning.pytorch as pl

State = dict[str, Any]

_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
_PLAIN = frozenset((bool, int, float, str, type(None)))


@contextmanager
def told_quickly(trainer: pl.Trainer, run: Callable[[str, Callable[[], Any]], Any]) -> Iterator[None]:
    """Have a checkpoint of Lightning's get the states of its loops from here.

    Args:
        trainer: whose checkpoint is made.
        run: does something of a part of :mod:`~lightning_spot.exact.private`; ``None`` if that is off, or fails.
    """
    if (connector := run(private.LOOPS, lambda: _free_connector(trainer))) is None:
        yield
        return

    def make() -> State:
        own: State | None = run(private.LOOPS, lambda: states_of(trainer))
        return own if own is not None else original()

    original = private.LOOP_STATES.of(connector)
    private.LOOP_STATES.set(connector, make)
    try:
        yield
    finally:
        vars(connector).pop(private.LOOP_STATES.name, None)


def _free_connector(trainer: pl.Trainer) -> Any:
    """What makes checkpoints; ``None`` if somebody else has it get the states in another way."""
    _kinds_of(trainer)
    connector = private.LOOPS_CONNECTOR.of(trainer)
    if private.LOOP_STATES.name in vars(connector):
        return None
    if not _asks_all(private.LOOP_STATES.of(type(connector))):
        raise AttributeError("a checkpoint has the states of other loops")
    return connector


class _Namesakes:
    """Stands for a trainer whose loops give their names."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(state_dict=lambda: name)


@functools.lru_cache(maxsize=8)
def _asks_all(way: Callable[[Any], Any]) -> bool:
    """Whether a checkpoint has the states of those loops by their names, and nothing else."""
    found: Any = way(SimpleNamespace(trainer=_Namesakes()))
    return list(found) == list(_LOOPS) and list(found.values()) == list(_LOOPS)


def states_of(trainer: pl.Trainer) -> State:
    """What Lightning's own way gives of a trainer.

    Raises:
        AttributeError: if this Lightning saves loops in a way that is not known here.
    """
    kinds = _kinds_of(trainer)
    return {name: _state_of(getattr(trainer, name), kinds) for name in _LOOPS}


def _kinds_of(trainer: pl.Trainer) -> State:
    """The base classes of loops and of their counters."""
    home = private.loops_of(trainer)
    loop, progress = private.LOOP.of(home), private.PROGRESS_OF_LOOP.of(home)
    if not _are_known(loop, progress, loop.state_dict, progress.state_dict):
        raise AttributeError("loops are saved in another way")
    return {"loop": loop, "progress": progress}


def _state_of(loop: Any, kinds: State) -> State:
    found: State = {}
    if _is_own_way(loop, kinds["loop"]):
        _add(found, "", loop, kinds)
    else:
        found = loop.state_dict()
    return found


def _add(found: State, prefix: str, loop: Any, kinds: State) -> None:
    """Add the states of a loop and of those in it."""
    found[f"{prefix}state_dict"] = loop.on_save_checkpoint()
    for name, value in vars(loop).items():
        if isinstance(value, kinds["progress"]):
            state = _counted(value) if _is_own_way(value, kinds["progress"]) else None
            found[prefix + name] = state if state is not None else value.state_dict()
        elif isinstance(value, kinds["loop"]):
            if _is_own_way(value, kinds["loop"]):
                _add(found, f"{prefix}{name}.", value, kinds)
            else:
                value.state_dict(found, f"{prefix}{name}.")


def _is_own_way(owner: Any, base: Any) -> bool:
    """Whether what saves an object is Lightning's."""
    return type(owner).state_dict is base.state_dict and "state_dict" not in vars(owner)


def _counted(progress: Any) -> State | None:
    """What ``dataclasses.asdict`` gives of counters; ``None`` where there is anything else among them."""
    found: State = {}
    kind: Any = type(progress)
    for name in _fields_of(kind):
        value: Any = getattr(progress, name)
        if type(value) not in _PLAIN:
            value = _counted(value) if dataclasses.is_dataclass(type(value)) else None
            if value is None:
                return None
        found[name] = value
    return found


@functools.lru_cache(maxsize=64)
def _fields_of(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@functools.lru_cache(maxsize=8)
def _are_known(loop: Any, progress: Any, *_ways: Any) -> bool:
    """Whether the base classes save what they have as it is done here: tried on a loop that belongs to nobody.

    Args:
        loop: base class of loops.
        progress: of their counters.
        _ways: how both save; tried anew if that changes.
    """

    @dataclasses.dataclass
    class Inner(progress):  # type: ignore[misc] # known at run time
        count: int = 3

    @dataclasses.dataclass
    class Counters(progress):  # type: ignore[misc]
        inner: Inner = dataclasses.field(default_factory=Inner)
        count: int = 5

    class Sample(loop):  # type: ignore[misc]
        def __init__(self, inner: Any) -> None:
            self.number, self.progress, self.within = 7, Counters(), inner

        def on_save_checkpoint(self) -> State:
            return {"number": self.number}

    sample = Sample(Sample(None))
    found: State = {}
    _add(found, "", sample, {"loop": loop, "progress": progress})
    return bool(found == sample.state_dict() and list(found) == list(sample.state_dict()))
