"""The HTTP client for the metadata services of clouds: link-local, without proxies, never waiting long.."""

from __future__ import annotations

import contextlib
import datetime
import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from lightning_spot.errors import MalformedError, NoticeUnavailableError
from lightning_spot.untrusted import plain, read_object

ASK_S = 2.0
_MOST_BYTES = 1024 * 1024


def seconds_until(text: str) -> float:
    """Seconds from now until a time such as ``2026-01-01T12:00:00Z`` or ``Mon, 19 Sep 2026 18:29:47 GMT``; at least 0.

    Raises:
        NoticeUnavailableError: if it is no time.
    """
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        try:
            when = parsedate_to_datetime(text)
        except (TypeError, ValueError) as error:
            raise NoticeUnavailableError(f"{text!r} is no time") from error
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    return max(0.0, (when - datetime.datetime.now(datetime.UTC)).total_seconds())


@dataclass(frozen=True, slots=True)
class Answer:
    """What a metadata service said.

    Attributes:
        status: of HTTP.
        text: body, without surrounding blanks.
        headers: by lower-case name.
    """

    status: int
    text: str
    headers: Mapping[str, str]

    def json(self, source: str) -> dict[str, Any]:
        """The body as a JSON object.

        Raises:
            NoticeUnavailableError: if it is none.
        """
        try:
            return read_object(self.text)
        except MalformedError as error:
            raise NoticeUnavailableError(
                f"{source} answered with something else than JSON: {plain(self.text, 80)}"
            ) from error


def ask(
    endpoint: str,
    path: str,
    *,
    source: str,
    headers: Mapping[str, str],
    method: str = "GET",
    body: str | None = None,
    wait_s: float = ASK_S,
) -> Answer:
    """Ask a metadata service once.

    ``http.client`` is used because it knows nothing of proxies: those of the environment must not see these addresses.

    Args:
        endpoint: such as ``http://169.254.169.254``.
        path: with its query.
        source: who is asked, for messages.
        headers: to send.
        method: of HTTP.
        body: to send.
        wait_s: for each step of the exchange.

    Raises:
        NoticeUnavailableError: if there is no answer in time, or the service itself failed.
    """
    parts = urlsplit(endpoint)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=wait_s)
    try:
        with contextlib.closing(connection):
            connection.request(method, path, body=body, headers=dict(headers))
            response = connection.getresponse()
            text = response.read(_MOST_BYTES).decode(errors="replace").strip()
            found = {name.lower(): value for name, value in response.getheaders()}
    except (OSError, http.client.HTTPException) as error:
        raise NoticeUnavailableError(
            f"{source} does not answer at {endpoint} ({error or type(error).__name__})"
        ) from error
    if response.status >= 500 or response.status == 429:
        raise NoticeUnavailableError(f"{source} answers {response.status} at {endpoint}{path}")
    return Answer(response.status, text, found)
