"""Messages that a test has seen, by their keys."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


@contextmanager
def listening() -> Iterator[list[logging.LogRecord]]:
    """Warnings and errors that are logged meanwhile."""
    logged: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = logged.append  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_spot")
    logger.addHandler(handler)
    try:
        yield logged
    finally:
        logger.removeHandler(handler)


def points(records: Iterable[logging.LogRecord]) -> list[str]:
    """What each message says; of what is not exact, each finding."""
    texts: list[str] = []
    for record in records:
        facts = getattr(record, "spot_facts", {})
        texts += facts.get("findings", [record.getMessage().partition("] ")[2]])
    return texts
