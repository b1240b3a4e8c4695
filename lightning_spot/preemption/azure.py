"""Azure: Scheduled Events, which announce a preemption 30 seconds ahead, and may be withdrawn.

https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import json
import time
from typing import Any

from lightning_spot.errors import NoticeUnavailableError
from lightning_spot.preemption.metadata_service import Answer, ask, seconds_until
from lightning_spot.preemption.notice import Notice

_HEADERS = {"Metadata": "true"}
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_FATAL = ("Preempt", "Terminate", "Reboot", "Redeploy")
_FIRST_ANSWER_S = 130.0
"""Scheduled Events are switched on by the first question, which may take two minutes."""


class AzureSource:
    """Asks the instance metadata service.

    Args:
        endpoint: of the service; default the link-local address.
        vm: name of this VM; default what the service says. Events list the VMs that they concern.
        approve: whether to tell Azure that it need not wait. That goes for all VMs of the event, so it is off.
    """

    name = "azure"
    every_s = 1.0
    grace_period_s: float | None = 30.0

    def __init__(
        self, endpoint: str = "http://169.254.169.254", vm: str | None = None, *, approve: bool = False
    ) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._vm = vm
        self._approve = approve
        self._answered = False

    def poll(self) -> Notice | None:
        """Ask for events that concern this VM. ``None`` after a notice means that the event was withdrawn."""
        if self._vm is None:
            self._vm = self._ask(_NAME, 10.0).text
        answer = self._ask(_EVENTS, 10.0 if self._answered else _FIRST_ANSWER_S)
        self._answered = True
        events = answer.json(self.name).get("Events")
        if not isinstance(events, list):
            raise NoticeUnavailableError(f"azure: this is no list of events: {answer.text[:80]!r}")
        for event in events:
            if event.get("EventType") in _FATAL and self._vm in event.get("Resources", ()):
                return self._notice(event)
        return None

    def close(self) -> None:
        """See :meth:`NoticeSource.close`."""

    def _notice(self, event: dict[str, Any]) -> Notice:
        kind, at = event["EventType"], event.get("NotBefore") or ""
        if self._approve and event.get("EventId"):
            body = json.dumps({"StartRequests": [{"EventId": event["EventId"]}]})
            ask(self._endpoint, _EVENTS, source=self.name, headers=_HEADERS, method="POST", body=body)
        # Once an event has started there is no time in it any more.
        grace_period_s = (
            seconds_until(at) if at else (0.0 if event.get("EventStatus") == "Started" else self.grace_period_s)
        )
        text = f"Azure scheduled event: {kind} of {self._vm}" + (f" at {at}" if at else "")
        return Notice(source=self.name, kind="stop", text=text, seen_s=time.monotonic(), grace_period_s=grace_period_s)

    def _ask(self, path: str, wait_s: float) -> Answer:
        answer = ask(self._endpoint, path, source=self.name, headers=_HEADERS, wait_s=wait_s)
        if answer.status != 200:
            raise NoticeUnavailableError(f"azure: the metadata service answers {answer.status} for {path}")
        return answer
