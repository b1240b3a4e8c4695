"""Attributes of data modules, a user's callbacks and optimizers that training changes and no ``state_dict`` holds.

They come back as the script makes them, with Lightning's checkpoints too. Which ones they are is noted beside each
snapshot, by name and without their values, so that a resumed run can say it before training goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from lightning_spot.exact import namespaces
from lightning_spot.exact.change_detector import ChangeDetector, is_value

if TYPE_CHECKING:
    import lightning.pytorch as pl

_MOST_ITEMS = 1000
"""Of a longer container only its length is looked at: each snapshot looks at all of them."""

_KEEPS_ITS_OWN = ("state_dict", "on_save_checkpoint")
_OF_OPTIMIZERS = ("defaults", "param_groups", "state")
_SHIPPED = ("lightning.", "pytorch_lightning.", "lightning_spot.")
_MOST_NAMED = 8


class UntrackedAttributes:
    """Knows how the attributes were when training began, and so which of them training has changed."""

    def __init__(self) -> None:
        self._stamps: dict[str, Any] = {}
        self._changed: set[str] = set()

    def begin(self, trainer: pl.Trainer, changed: Iterable[str]) -> None:
        """Note how they are, after all ``on_train_start``: a resumed run calls those, too.

        Args:
            trainer: that trains.
            changed: those that had changed when the snapshot was taken that this run goes on from.
        """
        self._stamps = dict(_attributes(trainer))
        self._changed = self._stamps.keys() & changed

    def names(self, trainer: pl.Trainer) -> list[str]:
        """Those that have changed by now, or had at an earlier snapshot, as ``Class.attribute``."""
        now = dict(_attributes(trainer, without=self._changed))
        self._changed |= {name for name in now.keys() | self._stamps.keys() if self._stamps.get(name) != now.get(name)}
        self._stamps = {name: stamp for name, stamp in self._stamps.items() if name not in self._changed}
        return sorted(self._changed)

    def begin_anew(self, lost: Iterable[str]) -> Iterator[str]:
        """One sentence on those that a resumed run does not get back, if there are any.

        Args:
            lost: more of them, of modules.
        """
        if names := sorted({*self._changed, *lost}):
            more = len(names) - _MOST_NAMED
            listed = ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
            yield (
                f"training had changed attributes that no state_dict holds, and they begin anew: {listed}. Give the"
                " class a state_dict and a load_state_dict (a module: get_extra_state and set_extra_state) if training"
                " depends on them"
            )


def _attributes(trainer: pl.Trainer, without: set[str] | frozenset[str] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Each that can be watched, with the stamp of its value; of two of a class, each has its number."""
    seen: dict[str, int] = {}
    detector = ChangeDetector(trainer.lightning_module.modules(), most_items=_MOST_ITEMS)
    owners: list[Any] = [trainer.datamodule, *trainer.callbacks]  # type: ignore[attr-defined] # Lightning's Trainer has them
    owners = [owner for owner in owners if owner is not None and _is_to_be_named(owner)]
    own_kinds = [each for each in trainer.optimizers if not type(each).__module__.startswith("torch.")]
    for owner, saved in chain(zip(owners, repeat(())), zip(own_kinds, repeat(_OF_OPTIMIZERS))):
        kind = type(owner).__qualname__.rpartition(".<locals>.")[2]
        number = seen[kind] = seen.get(kind, 0) + 1
        for attribute, value in vars(owner).items():
            name = f"{kind}.{attribute}" if number == 1 else f"{kind}#{number}.{attribute}"
            if name in without or attribute in saved:
                continue
            if is_value(value):
                yield name, detector.stamp(value)
    yield from ((name, value) for name, value in _put_together(trainer) if name not in without)


def _put_together(trainer: pl.Trainer) -> Iterator[tuple[str, list[Any]]]:
    """What hooks may have replaced in the Trainer; their states would be loaded into what the script makes."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined] # Lightning's Trainer has it
    yield "Trainer.callbacks", sorted(map(id, callbacks))
    yield "Trainer.optimizers", [type(each) for each in trainer.optimizers]
    if not any(isinstance(each, namespaces.classes("callbacks", "StochasticWeightAveraging")) for each in callbacks):
        configs = trainer.lr_scheduler_configs
        yield (
            "Trainer.lr_scheduler_configs",
            [[type(each.scheduler), each.interval, each.frequency] for each in configs],
        )


def _is_to_be_named(owner: Any) -> bool:
    """Whether a class is the user's own, and keeps no state of its own in the checkpoint."""
    bases = namespaces.classes("callbacks", "Callback") + namespaces.classes("", "LightningDataModule")
    for kind in type(owner).__mro__:
        if kind.__module__.startswith(_SHIPPED) and issubclass(kind, bases):
            # What Lightning's own callbacks change is theirs, also in a class that adds something.
            return kind in bases and not any(
                getattr(type(owner), hook, None) is not getattr(kind, hook, None) for hook in _KEEPS_ITS_OWN
            )
    return False
