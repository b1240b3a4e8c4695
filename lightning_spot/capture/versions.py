"""The versions of what writes a snapshot."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

import torch

from lightning_spot._version import __version__


@functools.cache  # read from files, and the training thread asks
def versions() -> dict[str, str]:
    """Of what writes a snapshot: this package, torch and Lightning."""
    present = {"lightning_spot": __version__, "torch": str(torch.__version__)}
    for name in ("lightning", "pytorch-lightning"):  # the same by two names, and one may be there alone
        try:
            return {"lightning": version(name), **present}
        except PackageNotFoundError:
            continue
    return present
