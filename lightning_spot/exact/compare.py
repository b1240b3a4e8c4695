"""Compares two checkpoints bit by bit and says where they differ: the judge of an exact resume."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

IGNORED = (
    "Timer",
    "GoodputMonitor",
    "lightning_spot.loggers",
    "lightning_spot.interval",
    "lightning_spot.lineage",
    "pytorch-lightning_version",
)
"""Parts of a path that mark what cannot be equal: clocks, and the versions of loggers."""


def differences(left: Any, right: Any, path: str = "") -> Iterator[str]:
    """Every entry in which two nested states differ, in the order of ``left``; none if they are equal bit by bit.

    Tensors must agree in dtype, shape and every bit (NaN equals NaN of the same bits). Strings that are paths are
    compared by their last part, since two runs write into two places, and without the number (``-v1``) that Lightning
    gives to a checkpoint whose name is taken, as it is where a killed attempt had written it already.
    """
    if any(part in path for part in IGNORED):
        return
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if (told := _tensors_differ(left, right)) is not None:
            yield f"{path}: {told}"
    elif isinstance(left, dict) and isinstance(right, dict):
        yield from _dicts_differ(left, right, path)
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            yield f"{path}: {len(left)} items and {len(right)}"
        for index, pair in enumerate(zip(left, right, strict=False)):
            yield from differences(*pair, f"{path}[{index}]")
    elif not _equal(left, right):
        yield f"{path}: {_short(left)} and {_short(right)}"


def _dicts_differ(left: dict[Any, Any], right: dict[Any, Any], path: str) -> Iterator[str]:
    left, right = ({_last_part(key): value for key, value in side.items()} for side in (left, right))
    for key in [*left, *(key for key in right if key not in left)]:
        where = f"{path}.{key}" if path else str(key)
        if key in left and key in right:
            yield from differences(left[key], right[key], where)
        elif not any(part in where for part in IGNORED):
            yield f"{where}: only in the {'first' if key in left else 'second'}"


def _tensors_differ(left: torch.Tensor, right: torch.Tensor) -> str | None:
    if left.dtype != right.dtype or left.shape != right.shape:
        return f"{left.dtype} {tuple(left.shape)} and {right.dtype} {tuple(right.shape)}"
    first, second = (_bits(side) for side in (left, right))
    if torch.equal(first, second):
        return None
    share = (left != right).double().mean().item() if left.numel() else 0.0
    most = (left.double() - right.double()).abs().max().item() if not left.is_complex() else float("nan")
    return f"{share:.1%} of {left.numel()} values differ, by at most {most:.3g}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (left != left and right != right)
    return type(left) is type(right) and bool(_last_part(left) == _last_part(right))


def _last_part(value: Any) -> Any:
    if not isinstance(value, str) or os.sep not in value:
        return value
    return re.sub(r"-v\d+(?=\.ckpt$)", "", os.path.basename(value.rstrip("/")))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def main(argv: list[str] | None = None) -> int:
    """Compare two checkpoint files and print the differences as a JSON list."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("first")
    parser.add_argument("second")
    arguments = parser.parse_args(argv)
    states = [torch.load(path, map_location="cpu", weights_only=True) for path in (arguments.first, arguments.second)]
    print(json.dumps(list(differences(*states))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
