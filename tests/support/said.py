"""Messages that a test has seen, by their keys."""

from __future__ import annotations

import logging
from typing import Any

import pytest


def said(caplog: pytest.LogCaptureFixture, key: str) -> list[dict[str, Any]]:
    """The facts of each warning or error with a key."""
    found = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record.spot_facts for record in found if getattr(record, "spot_key", "") == key]  # type: ignore[attr-defined]


def keys(caplog: pytest.LogCaptureFixture) -> set[str]:
    """The keys of all warnings and errors; ``""`` for those without."""
    found = [record for record in caplog.records if record.name.startswith("lightning_spot")]
    return {getattr(record, "spot_key", "") for record in found if record.levelno >= logging.WARNING}


def informed(caplog: pytest.LogCaptureFixture) -> dict[str, dict[str, Any]]:
    """The facts of all messages of level INFO, by their keys, in their order; of several with one key, the last."""
    found = [record for record in caplog.records if record.levelno == logging.INFO and hasattr(record, "spot_key")]
    return {record.spot_key: record.spot_facts for record in found}  # type: ignore[attr-defined]


def said_about(caplog: pytest.LogCaptureFixture, key: str) -> list[str]:
    """What the warnings and errors with a key were about."""
    return [str(facts["about"]) for facts in said(caplog, key)]
