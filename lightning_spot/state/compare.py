"""Compares two checkpoints bit by bit and says where they differ: the judge of an exact resume."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from lightning_spot.capture.tensors import shape_of
from lightning_spot.sharded.file_plan import state_file
from lightning_spot.sharded.metadata import REST_FILE
from lightning_spot.sharded.reader import ImageReader, load_all, read_folder
from lightning_spot.snapshot.files import MODEL_FILE
from lightning_spot.snapshot.safe_load import SHORT, Placeholder, kind_of, parts_of
from lightning_spot.state.dump import KEY, read_checkpoint, with_ranks

IGNORED = (
    "GoodputMonitor",
    "lightning_spot.loggers",
    "lightning_spot.lost",
    "lightning_spot.untracked",
    "lightning_spot.interval",
    "lightning_spot.lineage",
    "lightning_spot.run_id",
    "pytorch-lightning_version",
)
"""Parts of a path that mark what may differ in runs that are exact: what this package measures, versions of loggers,
and names of attributes that it does not keep, of which a run without a sanity check may see others change."""

_CLOCKS = frozenset(
    ["clock", "date", "datetime", "duration", "elapsed", "seconds", "secs", "started", "time", "timer", "timestamp"]
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_MOMENT = re.compile(r"\d{4}-?\d\d-?\d\d([T_ /-]?\d\d[-:_]?\d\d([-:_]?\d\d(\.\d+)?)?)?")
"""A time; with a slash in it, as Hydra names its folders."""
_RECENT_S = 30 * 86400.0
_MOST_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Difference:
    """An entry in which two states differ.

    Attributes:
        path: of the entry.
        text: what is there on either side.
        of_the_run: whether it is a path or a time of the run itself, which differs in two runs that are exact.
    """

    path: str
    text: str
    of_the_run: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


def differences(left: Any, right: Any) -> list[str]:
    """The entries that make two states unequal, see :func:`compare`; none if they are equal bit by bit."""
    states = [with_ranks(state) for state in (left, right)]  # torch alone reads some of it as bytes
    return [str(found) for found in compare(*states) if not found.of_the_run]


def compare(left: Any, right: Any, path: str = "", seen: dict[Any, Any] | None = None) -> Iterator[Difference]:
    """Every entry in which two nested states differ, in the order of ``left``.

    Tensors must agree in dtype, shape and every bit (NaN equals NaN of the same bits). Strings that are paths are
    compared by their last part, since two runs write into two places, and without the number (``-v1``) that Lightning
    gives to a checkpoint whose name is taken, as it is where a killed attempt had written it already. Objects that were
    not loaded (:class:`Placeholder`) are compared by what the file has of them.

    Args:
        left: one state.
        right: the other.
        path: of both, within what is compared.
        seen: what was compared already: the same two objects again, such as around these, are passed over.
    """
    seen = seen if seen is not None else {}
    if any(part in path for part in IGNORED):
        return
    if _are_alike(left, right) and left.dtype.hasobject:  # its bytes are addresses
        left, right = left.tolist(), right.tolist()
    if isinstance(left, (Placeholder, dict, list, tuple)):
        both = (id(left), id(right), "Timer" in path, _is_of_a_clock(path))
        if both in seen:
            return
        seen[both] = (left, right)  # kept: the number of what is gone is another one's
    if isinstance(left, Placeholder) and isinstance(right, Placeholder):
        if kind_of(left) != kind_of(right):
            yield Difference(path, f"{kind_of(left)} and {kind_of(right)}")
        yield from compare(_content(left), _content(right), path, seen)
    elif isinstance(left, dict) and isinstance(right, dict):
        yield from _compare_dicts(left, right, path, seen)
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            yield Difference(path, f"{len(left)} items and {len(right)}")
        for index, pair in enumerate(zip(left, right, strict=False)):
            yield from compare(*pair, f"{path}[{index}]", seen)
    elif (text := _difference(left, right)) is not None:
        yield Difference(path, text, _is_of_the_run(path, left, right))


def _are_alike(left: Any, right: Any) -> bool:
    """Whether they are two arrays of one form."""
    are_arrays = isinstance(left, np.ndarray) and isinstance(right, np.ndarray)
    return are_arrays and left.dtype == right.dtype and left.shape == right.shape


def _difference(left: Any, right: Any) -> str | None:
    """How two values without parts differ; ``None`` if they are equal."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _tensors_differ(left, right)
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        is_equal = _are_alike(left, right) and left.tobytes() == right.tobytes()
        return None if is_equal else f"arrays of {left.dtype} {left.shape} and {right.dtype} {right.shape} differ"
    return None if _equal(left, right) else f"{shown(left)} and {shown(right)}"


def _compare_dicts(
    left: dict[Any, Any], right: dict[Any, Any], path: str, seen: dict[Any, Any]
) -> Iterator[Difference]:
    left, right = ({_name(key): value for key, value in side.items()} for side in (left, right))
    for key in [*left, *(key for key in right if key not in left)]:
        name = key if isinstance(key, str) else shown(key)
        where = f"{path}.{name}" if path else name
        if key in left and key in right:
            yield from compare(left[key], right[key], where, seen)
        elif not any(part in where for part in IGNORED):
            yield Difference(where, f"only in the {'first' if key in left else 'second'}")


def _name(key: Any) -> Any:
    return repr(key) if isinstance(key, Placeholder) else _last_part(key)


def _content(placeholder: Placeholder) -> Any:
    """What the file has of an object: its attributes if that is all, which makes for short paths."""
    parts = [part for part in parts_of(placeholder) if not (isinstance(part, tuple) and part == ())]
    return parts[0] if len(parts) == 1 and isinstance(parts[0], dict) else parts


def _is_of_the_run(path: str, left: Any, right: Any) -> bool:
    """Whether two values that differ are paths or times of the runs themselves."""
    if "Timer" in path or (isinstance(left, date) and isinstance(right, date)):
        return True
    left, right = (str(side) if isinstance(side, PurePath) else side for side in (left, right))
    if isinstance(left, str) and isinstance(right, str):
        return without_moments(left) == without_moments(right) or (_is_folder(left) and _is_folder(right))
    if all(isinstance(side, (float, timedelta)) for side in (left, right)):
        return _is_of_a_clock(path) or all(_is_recent(side) for side in (left, right))
    return False


def _is_of_a_clock(path: str) -> bool:
    return not _CLOCKS.isdisjoint(word.lower() for word in _WORD.findall(path.rpartition(".")[2]))


def _is_folder(text: str) -> bool:
    """Whether a string is a path, but of no checkpoint: the name of a checkpoint tells of the training."""
    return os.sep in text and not text.endswith(".ckpt")


def without_moments(text: str) -> str:
    """A string without the times in it, and of a path the last part."""
    return str(_last_part(_MOMENT.sub("", text).rstrip(os.sep)))


def _is_recent(value: Any) -> bool:
    """Whether a number is a time since 1970 of these days; integers are more likely seeds."""
    return isinstance(value, float) and abs(value - time.time()) < _RECENT_S


def _tensors_differ(left: torch.Tensor, right: torch.Tensor) -> str | None:
    left_shape, right_shape = shape_of(left), shape_of(right)
    if left.dtype != right.dtype or left_shape != right_shape:
        return f"{left.dtype} {tuple(left_shape)} and {right.dtype} {tuple(right_shape)}"
    if left.layout != right.layout:
        return f"{left.layout} and {right.layout}"
    numel = left.numel()
    for dim in range(left.ndim) if numel and _is_expanded(left) and _is_expanded(right) else ():
        if left.stride(dim) == right.stride(dim) == 0:  # one row stands for all
            left, right = left.narrow(dim, 0, 1), right.narrow(dim, 0, 1)
    if _is_expanded(left) and _is_expanded(right):  # by a forged file, to more than there is memory for
        same_view = (left.stride(), left.storage_offset()) == (right.stride(), right.storage_offset())
        first, second = (torch.empty(0, dtype=torch.uint8).set_(side.untyped_storage()) for side in (left, right))
        return None if same_view and torch.equal(first, second) else f"some of {numel} values differ"
    first, second = (_bits(side) for side in (left, right))
    if torch.equal(first, second):
        return None
    try:
        left, right = (side.detach().cpu().to_dense() for side in (left, right))
        share = (left != right).double().mean().item() if numel else 0.0
        most = (left.double() - right.double()).abs().max().item() if not left.is_complex() else float("nan")
    except (NotImplementedError, RuntimeError):  # torch does not calculate with every kind of numbers
        return f"some of {numel} values of {left.dtype} differ"
    return f"{share:.1%} of {numel} values differ, by at most {most:.3g}"


def _is_expanded(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return is_plain and tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:  # made of several tensors
        written = io.BytesIO()
        torch.save(tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor, written)
        return torch.frombuffer(written.getbuffer(), dtype=torch.uint8)
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    # One element counts as contiguous with any stride, and is viewed with that of 1 only.
    return (flat.clone(memory_format=torch.contiguous_format) if flat.numel() == 1 else flat).view(torch.uint8)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (left != left and right != right)
    return type(left) is type(right) and bool(left == right or _last_part(left) == _last_part(right))


def _last_part(value: Any) -> Any:
    if not isinstance(value, str) or os.sep not in value:
        return value
    return re.sub(r"-v\d+(?=\.ckpt$)", "", os.path.basename(value.rstrip("/")))


def shown(value: Any) -> str:
    """A value for people, on one line of at most 80 characters; what tensors and arrays hold is left out."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of {value.dtype} {tuple(shape_of(value))}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {value.shape}"
    text = " ".join(SHORT.repr(value).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def _read(path: Path) -> Any:
    """A checkpoint with what each rank knew; of one in shards, which is a directory, all shards put together."""
    folder, model = (path, path / MODEL_FILE) if path.is_dir() else (path.parent, path)
    if model.exists():
        checkpoint = read_checkpoint(str(model))
    else:
        image, manifest = read_folder(folder)
        checkpoint = {**load_all(ImageReader(image, manifest)), **read_checkpoint(str(folder / REST_FILE))}
    exact = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
    if isinstance(exact, dict) and isinstance(ranks := exact.get("ranks"), list):
        beside = (folder / state_file(rank) for rank in range(len(ranks), int(exact["world_size"])))
        ranks += map(read_checkpoint, map(str, itertools.takewhile(Path.exists, beside)))  # each at its rank's place
    return checkpoint


def main(argv: list[str] | None = None) -> int:
    """Compare two checkpoints, files or directories, and print how they and their runs differ, as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("first")
    parser.add_argument("second")
    arguments = parser.parse_args(argv)
    found = list(compare(_read(Path(arguments.first)), _read(Path(arguments.second))))
    different, of_the_run = (
        [(each.path, each.text) for each in found if each.of_the_run is side] for side in (False, True)
    )
    print(json.dumps({"different": different, "of_the_run": of_the_run}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
