"""zstd, where this Python has it: with it deltas can be compressed, see :mod:`~lightning_spot.snapshot.delta`."""

from __future__ import annotations

import importlib
import logging
from typing import Any, Literal

from lightning_spot.config import check_choice
from lightning_spot.errors import SettingsError

logger = logging.getLogger(__name__)

Compression = Literal["auto", "always", "off", "topk"]
"""How what changed is sent: packed on slow links, always packed, as it is, or not exactly."""


def _find() -> Any:
    for name in ("compression.zstd", "backports.zstd"):  # the first comes with Python 3.14
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    logger.debug("this Python has no zstd: what changed goes to snapshot servers as it is")
    return None


zstd: Any = _find()


def can_pack() -> bool:
    """Whether deltas can be compressed, and read, here."""
    return zstd is not None


def chosen_compression(compression: Literal["auto", "always", "off"], lossy: Literal["topk"] | None) -> Compression:
    """What the settings ``compression`` and ``lossy`` ask for.

    Raises:
        SettingsError: if it is none, or needs what is missing here.
    """
    check_choice("compression", compression, ("auto", "always", "off"))
    check_choice("lossy", lossy, (None, "topk"))
    if compression == "always" and not can_pack():
        raise SettingsError(
            "compression='always' needs zstd, which this Python lacks: pip install backports.zstd, or use"
            " compression='auto', which does without"
        )
    return "topk" if lossy is not None else compression
