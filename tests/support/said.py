"""Messages that a test has seen, by their keys."""

from __future__ import annotations

import logging
from typing import Any

import pytest


def said(caplog: pytest.LogCaptureFixture, key: str) -> list[dict[str, Any]]:
    """The facts of each warning or error with a key."""
    found = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record.spot_facts for record in found if getattr(record, "spot_key", "") == key]  # type: ignore[attr-defined]


def said_about(caplog: pytest.LogCaptureFixture, key: str) -> list[str]:
    """What the warnings and errors with a key were about."""
    return [str(facts["about"]) for facts in said(caplog, key)]
