"""Times of day as clouds write them."""

from __future__ import annotations

import datetime
from email.utils import parsedate_to_datetime

from lightning_spot.errors import NoticeUnavailable


def seconds_until(text: str) -> float:
    """Seconds from now until a time such as ``2026-01-01T12:00:00Z`` or ``Mon, 19 Sep 2026 18:29:47 GMT``; at least 0.

    Raises:
        NoticeUnavailable: if it is no time.
    """
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        try:
            when = parsedate_to_datetime(text)
        except (TypeError, ValueError) as error:
            raise NoticeUnavailable(f"{text!r} is no time") from error
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    return max(0.0, (when - datetime.datetime.now(datetime.UTC)).total_seconds())
