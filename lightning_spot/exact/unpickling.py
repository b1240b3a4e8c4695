"""Reads a checkpoint of which torch's safe types come back, and everything else as an inert placeholder.

``torch.load(weights_only=True)`` refuses a file for one object of a class it does not know, such as a hyperparameter
that nobody reads on a resume. Here such an object becomes a :class:`Placeholder`: its class is not imported, and
nothing of it is called. What is safe, torch says (its own list, and the user's ``add_safe_globals``).
"""

from __future__ import annotations

from collections.abc import Callable
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import IO, Any

import torch

from lightning_spot.errors import NotSerialisable
from lightning_spot.exact.dump import KEY
from lightning_spot.exact.machine import Machine
from lightning_spot.exact.placeholder import ADVICE, remember_places
from lightning_spot.exact.rank_states import unpacked

_INERT = frozenset(
    [
        *(f"builtins.{name}" for name in ("bool", "bytes", "dict", "float", "frozenset", "int", "list")),
        *(f"builtins.{name}" for name in ("range", "slice", "str", "tuple")),
        "collections.defaultdict",
        "collections.deque",
        "datetime.date",
        "datetime.datetime",
        "datetime.timedelta",
        "decimal.Decimal",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib._local.PosixPath",
        "pathlib._local.PurePosixPath",
        "numpy.dtype",
        "numpy.ndarray",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy.core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
    ]
)
"""Values of python and numpy that run nothing when they are made, and that torch does not know."""


def read_checkpoint(file: IO[bytes] | str, map_location: str = "cpu") -> Any:
    """Read a checkpoint without running anything of a class that torch does not deem safe.

    Args:
        file: as ``torch.save`` wrote it; seekable. Of a path, tensors look at the mapped file, privately: a page is
            copied when it is written to.
        map_location: where tensors go; ``"meta"`` reads none of their bytes.

    Returns:
        what was saved, with a :class:`Placeholder` for each object of another class. Each knows its place.

    Raises:
        NotSerialisable: if it cannot be read that way.
    """
    is_path = isinstance(file, str)
    try:
        # Asked first: a load that is refused in its middle would have read half of the tensors for nothing.
        unsafe = frozenset(torch.serialization.get_unsafe_globals_in_checkpoint(file))
        _rewind(file)
        if not unsafe:
            try:
                checkpoint = torch.load(file, map_location=map_location, weights_only=True, mmap=is_path)
                return with_ranks(checkpoint, read_checkpoint)
            except UnpicklingError:
                _rewind(file)
        module = _pickle_module(unsafe - _INERT)
        checkpoint = torch.load(file, map_location=map_location, weights_only=False, pickle_module=module, mmap=is_path)
    except UnpicklingError as error:
        raise NotSerialisable(f"the snapshot holds objects that cannot be read safely ({error}). {ADVICE}") from error
    with_ranks(checkpoint, read_checkpoint)
    remember_places(checkpoint)
    return checkpoint


def with_ranks(checkpoint: Any, read: Callable[[IO[bytes]], Any]) -> Any:
    """The same checkpoint with the exact states of all ranks as values, if it has any.

    Args:
        checkpoint: changed in place.
        read: reads the state of a rank.
    """
    exact = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
    if isinstance(exact, dict) and isinstance(exact.get("ranks"), list):
        exact["ranks"] = unpacked(exact["ranks"], read)
    return checkpoint


def _rewind(file: IO[bytes] | str) -> None:
    if not isinstance(file, str):
        file.seek(0)


def _pickle_module(unsafe: frozenset[str]) -> Any:
    """What ``torch.load`` takes as a ``pickle`` module: it derives its unpickler from the one found there."""

    class Unpickler(Machine):
        def __init__(self, file: IO[bytes], **_: Any) -> None:
            super().__init__(file, unsafe)

    return SimpleNamespace(__name__="lightning_spot.exact.unpickling", Unpickler=Unpickler)
