"""Whether a resume could read what a snapshot holds: checked on a resume, and tried on the first snapshot.

A checkpoint that the user named, ``fit(ckpt_path=)``, is read as a resume reads a snapshot, foreign objects and all.
Hyperparameters are in one as far as they can be pickled.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pickle import UnpicklingError
from typing import IO, TYPE_CHECKING, Any

import fsspec
import torch

from lightning_spot.config import format_names
from lightning_spot.errors import NotSerializableError, SettingsError
from lightning_spot.patches import Patches
from lightning_spot.say import say
from lightning_spot.snapshot.layout import Layout
from lightning_spot.snapshot.safe_load import ADVICE, Placeholder, kind_of, placeholders_in, safe_load
from lightning_spot.state import namespaces
from lightning_spot.state.dump import KEY, read_checkpoint, states_in_files
from lightning_spot.store.fsspec_client import forget_listings
from lightning_spot.trees import at, leaves, walk

if TYPE_CHECKING:
    import lightning.pytorch as pl

logger = logging.getLogger(__name__)

_ALWAYS = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "epoch", "global_step", KEY)
_BASES = ("Callback", "LightningDataModule", "Precision")  # theirs does nothing
_GLOBAL = re.compile(rb"c([\w.]+)\n([\w.]+)\n")
_LONGEST_OUTLINE_BYTES = 64 * 1024 * 1024  # longer ones are looked at once: the look is to cost nothing


def check_resumable(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    """Refuse a checkpoint where an object was not loaded that a resume needs.

    Hyperparameters are not needed, nor is what callbacks saved that are gone or do not load a state.

    Args:
        trainer: that is to go on from it.
        checkpoint: as :func:`read_checkpoint` gave it.

    Raises:
        NotSerializableError: naming the entries.
    """
    lacking = [
        f"{where} is a {kind_of(placeholder)}"
        for key, value in _needed(trainer, checkpoint)
        for where, placeholder in placeholders_in(value, key)
    ]
    if lacking:
        raise NotSerializableError(
            f"a resume needs objects that torch does not load with weights_only=True: {format_names(lacking)}. {ADVICE}"
        )


def put_in_own_objects(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    """Give hooks the objects that this process has, in place of those that were not loaded.

    Models save objects in ``on_save_checkpoint`` (a loss, an encoder) and take them back in ``on_load_checkpoint``.
    What the model would save now has the same kinds of objects at the same places.

    Args:
        trainer: that is to go on from the checkpoint.
        checkpoint: as :func:`read_checkpoint` gave it; changed in place.
    """
    module = trainer.lightning_module
    if next(placeholders_in(checkpoint), None) is None:
        return
    own: dict[str, Any] = {OF_MODEL: as_saved(module.hparams)}
    if (data := trainer.datamodule) is not None:  # type: ignore[attr-defined] # it has one
        own[OF_DATA] = as_saved(data.hparams)
    try:
        module.on_save_checkpoint(own)
    except Exception as error:  # it may want more of a checkpoint than this
        logger.debug("lightning_spot: what the model would save is not known: %s", error)
        return
    if names := list(_put_in(checkpoint, own)):
        text = "objects that this process made are used instead of those in the snapshot: {about}"
        say(logging.INFO, "objects-remade", text, about=format_names(names), only_rank_zero=True)


def _put_in(saved: Any, own: Any) -> Iterator[str]:
    """Replace placeholders in containers by what is at the same place, if it is of the same kind; at which places."""
    for path, item in list(walk(saved)):
        if isinstance(item, Placeholder):
            holder, live = at(saved, path[:-1]), at(own, path)
            if isinstance(holder, (dict, list)) and kind_of(item) in (_name(type(live)), _name(live)):
                holder[path[-1]] = live
                yield ".".join(map(str, path))


def _name(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}"


def _needed(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> list[tuple[str, Any]]:
    """The entries that Lightning, or this package, puts back."""
    owners = [trainer.precision_plugin, getattr(trainer, "datamodule", None)]
    keys = [*_ALWAYS, *(type(owner).__qualname__ for owner in owners if _loads_state(owner))]
    states = checkpoint.get("callbacks") or {}
    callbacks = list(trainer.callbacks)  # type: ignore[attr-defined] # Lightning's Trainer has it
    loaded = [callback.state_key for callback in callbacks if _loads_state(callback)]
    return [
        *((key, checkpoint[key]) for key in keys if key in checkpoint),
        *((f"callbacks.{key}", states[key]) for key in loaded if key in states),
    ]


def _loads_state(owner: Any) -> bool:
    """Whether ``load_state_dict`` of a callback, a datamodule or a plugin does anything."""
    method = getattr(type(owner), "load_state_dict", None)
    return method is not None and method.__qualname__.partition(".")[0] not in _BASES


class Trial:
    """Reads the outlines of snapshots back, without their tensors, to find out at once what no resume will read.

    The first one is read, and each whose set of classes is new.

    Args:
        trainer: whose snapshots they are.
        trusts: whether a resume would load any object, as with ``fit(weights_only=False)``.
    """

    def __init__(self, trainer: pl.Trainer, trusts: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._trusts = trusts
        self._known_at_start = torch.serialization.get_safe_globals()
        self._seen: set[frozenset[tuple[bytes, bytes]]] = set()

    def __call__(self, layout: Layout) -> str | None:
        """Try the outline of a snapshot; why no resume will read it, for people. On the thread that wrote it."""
        if self._trusts():
            return None
        kinds = _kinds_in(layout)
        if kinds in self._seen:
            return None
        self._seen.add(kinds)
        # Most strategies read a snapshot before configure_optimizers, which may import what makes a class safe.
        known = None if self._trainer.strategy.restore_checkpoint_after_setup else self._known_at_start
        try:
            with outline(layout) as file:
                check_resumable(self._trainer, safe_load(file, "meta", known=known))
        except NotSerializableError as error:
            return f"snapshots are taken, but NO RESUME from them will be possible: {error}"
        except Exception as error:  # the trial is no reason to lose the thread that writes snapshots
            text = (
                "snapshots are taken, but whether a resume can read them is unknown ({about}). Stop and resume this"
                " training once to find out."
            )
            say(logging.WARNING, "resume-untried", text, about=f"{type(error).__name__}: {error}")
        return None


def _kinds_in(layout: Layout) -> frozenset[tuple[bytes, bytes]]:
    """The names of classes in an outline, found fast: some may be none."""
    if sum(len(data) for _, data in layout.frame) > _LONGEST_OUTLINE_BYTES:
        return frozenset()
    return frozenset(names for _, data in layout.frame for names in _GLOBAL.findall(data))


def outline(layout: Layout) -> IO[bytes]:
    """A checkpoint file without its tensors' bytes, which take no room on a disk and read as zeros."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 # the caller closes it
    file.truncate(layout.nbytes)
    for offset, data in layout.frame:
        file.seek(offset)
        file.write(data)
    return file


# -- a checkpoint that the user named --------------------------------------------------------------------------------


def load_named(load: Callable[..., Any], path: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
    """Load a checkpoint as Lightning does; if torch refuses, with placeholders for what it does not know.

    Args:
        load: Lightning's way.
        path: of the file.
        *arguments: more for ``load``.
        **named: likewise.
    """
    forget_listings(str(path))
    try:
        checkpoint: dict[str, Any] = load(path, *arguments, **named)
    except UnpicklingError:
        if False in (*arguments, named.get("weights_only")):  # nothing was refused: the file is broken
            raise
        with fsspec.open(str(path), "rb") as file:
            checkpoint = read_checkpoint(file)
    return checkpoint


def _with_own_states(trainer: pl.Trainer, checkpoint: dict[str, Any], path: Any) -> None:
    """Complete what Lightning has loaded of a snapshot that several ranks wrote: states of ranks are files beside it.

    Raises:
        SettingsError: if they are not there.
    """
    shared = checkpoint.get(KEY)
    is_folder = os.path.isdir(path)
    if shared is None or len(shared["ranks"]) >= shared["world_size"] or not (is_folder or shared["ranks"]):
        return
    folder = str(path) if is_folder else str(path).rpartition("/")[0] or "."

    def read(name: str) -> memoryview:
        with fsspec.open(f"{folder}/{name}", "rb") as file:
            return memoryview(file.read())

    try:
        shared["ranks"] = states_in_files(trainer, shared, read)
    except OSError as error:
        raise SettingsError(
            f"ckpt_path={str(path)!r} has no states of ranks 1 to {shared['world_size'] - 1} beside it: {error}. Name"
            " the directory of the snapshot, or copy its rank-*.pt files into the folder of the checkpoint"
        ) from error


def follow_named(trainer: pl.Trainer, patches: Patches) -> None:
    """Have a ``fit`` read the checkpoint that the user names in the way of a resume."""

    def load_checkpoint(original: Callable[..., Any], path: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
        checkpoint = load_named(original, path, *arguments, **named)
        _with_own_states(trainer, checkpoint, path)
        put_in_own_objects(trainer, checkpoint)
        check_resumable(trainer, checkpoint)
        return checkpoint

    patches.wrap(trainer.strategy, "load_checkpoint", partial(partial, load_checkpoint))


# -- hyperparameters: a dictionary, or omegaconf's configuration, which may leave values open ------------------------

OF_MODEL, OF_DATA = "hyper_parameters", "datamodule_hyper_parameters"
"""Their names in a checkpoint."""


def leave_out_callbacks(checkpoint: dict[str, Any]) -> None:
    """Take hyperparameters out that hold a callback: it holds the trainer, and nothing of that can be pickled."""
    kinds = (*namespaces.classes("callbacks", "Callback"), *namespaces.classes("", "Trainer"))
    names: list[str] = []
    for key in (OF_MODEL, OF_DATA):
        values = dict(held(checkpoint.get(key) or {}))
        left_out = [name for name, value in values.items() if next(leaves(value, kinds), None) is not None]
        if left_out:
            checkpoint[key] = {name: value for name, value in values.items() if name not in left_out}
            names += left_out
    if names:
        text = (
            "hyperparameters that hold callbacks are not in snapshots: {about}. No resume needs them. Leave them"
            " out with save_hyperparameters(ignore=[...])."
        )
        say(logging.WARNING, "hyperparameters-left-out", text, about=", ".join(names), only_rank_zero=True)


def held(value: Mapping[Any, Any] | Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Each key or index with its value, ``None`` for one that cannot be had: a configuration may leave some open."""
    for key in value if isinstance(value, Mapping) else range(len(value)):
        try:
            item = value[key]
        except Exception:  # of omegaconf, or a class of the user's
            item = None
        yield key, item


def as_saved(hyperparameters: Any) -> Any:
    """What Lightning puts into a checkpoint for them: its own kind of dictionary as a plain one, others as they are."""
    return dict(hyperparameters) if isinstance(hyperparameters, dict) else hyperparameters
