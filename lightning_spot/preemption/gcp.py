"""Google Compute Engine: preemption (as little as 0 to 30 seconds ahead) and host maintenance.

https://cloud.google.com/compute/docs/instances/preemptible,
https://cloud.google.com/compute/docs/metadata/querying-metadata
"""

from __future__ import annotations

import time

from lightning_spot.config import read_environment
from lightning_spot.errors import NoticeUnavailableError
from lightning_spot.preemption.metadata_service import ASK_S, Answer, ask
from lightning_spot.preemption.notice import Notice

_FLAVOR = "metadata-flavor"


class GcpSource:
    """Asks the metadata server, which holds its answer back until something changes.

    Args:
        endpoint: of the server; default ``GCE_METADATA_HOST`` or ``metadata.google.internal``'s address.
        hold_s: how long it may hold an answer back.
    """

    name = "gcp"
    every_s = 1.0
    grace_period_s: float | None = 30.0

    def __init__(self, endpoint: str | None = None, hold_s: float = 10.0) -> None:
        host = read_environment().gcp_host
        self._endpoint = (endpoint or (f"http://{host}" if host else "http://169.254.169.254")).rstrip("/")
        self._hold_s = hold_s
        self._etag = ""

    def poll(self) -> Notice | None:
        """Ask for maintenance, then wait for a preemption."""
        maintenance = self._get("maintenance-event", "", ASK_S)
        if maintenance.text == "TERMINATE_ON_HOST_MAINTENANCE":
            text = "GCE host maintenance will terminate this instance"
            return Notice(source=self.name, kind="stop", text=text, seen_s=time.monotonic(), grace_period_s=60.0)
        query = f"?wait_for_change=true&timeout_sec={self._hold_s:.0f}&last_etag={self._etag}" if self._etag else ""
        preempted = self._get("preempted", query, self._hold_s + ASK_S)
        self._etag = preempted.headers.get("etag", "")
        if preempted.text not in ("TRUE", "FALSE"):
            raise NoticeUnavailableError(f"gcp: {preempted.text[:40]!r} is neither TRUE nor FALSE")
        if preempted.text == "FALSE":
            return None
        text = "GCE preempts this instance"
        return Notice(
            source=self.name, kind="stop", text=text, seen_s=time.monotonic(), grace_period_s=self.grace_period_s
        )

    def close(self) -> None:
        """See :meth:`NoticeSource.close`."""

    def _get(self, what: str, query: str, wait_s: float) -> Answer:
        path = f"/computeMetadata/v1/instance/{what}{query}"
        headers = {"Metadata-Flavor": "Google"}
        answer = ask(self._endpoint, path, source=self.name, headers=headers, wait_s=wait_s)
        if answer.status != 200 or answer.headers.get(_FLAVOR) != "Google":
            raise NoticeUnavailableError(
                f"gcp: what answers at {self._endpoint} ({answer.status}) is not Google's server"
            )
        return answer
