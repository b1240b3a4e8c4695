"""Writes down how far a trainer of this host got that was killed: it cannot do so any more. Not for its snapshots."""

from __future__ import annotations

import logging
from dataclasses import replace

from lightning_spot.errors import TierError
from lightning_spot.goodput.reached import forget_reached, read_reached
from lightning_spot.goodput.records import newest_record, write_record
from lightning_spot.memory.runs import RunInfo

logger = logging.getLogger(__name__)


def note_killed(info: RunInfo) -> None:
    """Write the record of an attempt to the durable tier, if its trainer was killed.

    Where that fails, what is left on this host stays, and the next attempt writes it.

    Args:
        info: of a run whose trainer has gone without leaving it.
    """
    if info.durable_url is None:
        return
    record = read_reached(info.durable_url, info.attempt)
    if record is None or record.end != "killed":
        return  # it measured nothing, or is about to write its own end
    try:
        written = newest_record(info.durable_url, before=info.attempt + 1)
        if written is None or written.attempt != info.attempt:
            return  # which alone knows the attempts before
        write_record(info.durable_url, info.attempt, replace(record, earlier=written.earlier).as_dict())
    except TierError as error:
        logger.warning("how far attempt %d of %s got was not written: %s", info.attempt, info.text, error)
    else:
        forget_reached(info.durable_url, info.attempt)
