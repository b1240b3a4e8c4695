"""Events of a run, for the program and for chats: a function is called with them, and webhooks are sent them.

That something is degraded, and recovered, is taken from the messages that are logged, see :mod:`lightning_spot.say`.
"""

from __future__ import annotations

import html
import json
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from lightning_spot._version import __version__
from lightning_spot.config import host_of_webhook
from lightning_spot.retry import growing, retried
from lightning_spot.say import listen, recovered, say
from lightning_spot.threads import InBackground
from lightning_spot.untrusted import plain

CLOSE_S = 5.0
"""How long the end of a ``fit``, or of a server, waits for events to be sent."""

_DEGRADED = frozenset(
    {
        *("upload-failing", "server-lost", "local-server-lost", "snapshot-failed", "claim-failing"),
        *("no-snapshot", "attempt-refused", "fenced"),  # of which no end is logged
    }
)
"""Keys of messages after which a run loses more than usual if its machine is taken away now."""
_ANSWER_S = 5.0
_TRIES, _FIRST_PAUSE_S = 5, 1.0
_MOST_WAITING = 64
_LONGEST_TEXT = 1000
_LATER = (408, 429)  # statuses that ask for another try, as those of 500 and above do

EventKind = Literal["preempted", "resumed", "degraded", "recovered", "finished"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened to a run, or at a snapshot server.

    Attributes:
        kind: ``"resumed"`` when training continues from a snapshot; ``"preempted"`` when a notice has ended the
            process; ``"degraded"`` when snapshots, a server or the storage begin to fail, and ``"recovered"`` when they
            work again; ``"finished"`` when the run has come to its end.
        run: name of the run; ``""`` at a snapshot server, and without callbacks that know a run.
        attempt: number of the attempt, from 1; 0 if it is not known.
        step: Lightning's ``global_step``.
        time_unix_s: when it was noticed, in seconds since 1970.
        host: name of the machine.
        detail: plain values. Always there is ``message``, one line for people.
    """

    kind: EventKind
    run: str
    attempt: int
    step: int
    time_unix_s: float
    host: str
    detail: dict[str, Any]

    @property
    def text(self) -> str:
        """The event as one line for people."""
        where = f" at step {self.step} of attempt {self.attempt}" if self.attempt else ""
        return f"{self.run or 'lightning_spot'} {self.kind}{where} on {self.host}: {self.detail['message']}"


OnEvent = Callable[[Event], object]


class Events:
    """Tells a function and a webhook what happens. Methods may be called from any thread.

    Args:
        on_event: function to call, if any.
        webhook: URL to send to, if any.
        now: run, attempt and step at present.
    """

    def __init__(
        self,
        on_event: OnEvent | None = None,
        webhook: str | None = None,
        now: Callable[[], tuple[str, int, int]] = lambda: ("", 0, 0),
    ) -> None:
        self._on_event, self._now = on_event, now
        self._webhook = Webhook(webhook) if webhook else None
        self._later = InBackground(self._call, "spot-on-event", _MOST_WAITING)
        self._stop_listening = listen(self._heard) if on_event or webhook else lambda: None

    def emit(self, kind: EventKind, message: str, **detail: Any) -> None:
        """Tell an event: the function is called at once, and its error is logged.

        Args:
            kind: of the event.
            message: one line for people.
            detail: further plain values.
        """
        self._call(self._post(kind, message, detail))

    def close(self, wait_s: float) -> None:
        """Wait so many seconds at most until all is told, and tell nothing more. A second call does nothing."""
        self._stop_listening()
        deadline_s = time.monotonic() + wait_s
        for each in filter(None, (self._later, self._webhook)):
            each.close(max(0.0, deadline_s - time.monotonic()))

    def _heard(self, key: str, about: str, line: str, is_over: bool) -> None:
        """A message was logged, under whatever locks: the function is called on another thread."""
        if key in _DEGRADED:
            self._later.add(self._post("recovered" if is_over else "degraded", line, {"cause": key, "about": about}))

    def _post(self, kind: EventKind, message: str, detail: dict[str, Any]) -> Event:
        """Make an event, and have it sent to the webhook."""
        run, attempt, step = self._now()
        event = Event(
            kind=kind,
            run=run,
            attempt=attempt,
            step=step,
            time_unix_s=time.time(),
            host=socket.gethostname(),
            detail={"message": message, **detail},
        )
        if self._webhook is not None:
            self._webhook.add(event)
        return event

    def _call(self, event: Event) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception as error:
            text = "on_event raised {error} when the run was {about}. Training continues. Fix the function."
            why = f"{type(error).__name__}: {error}"
            say(logging.WARNING, "on-event-failed", text, about=event.kind, error=why)


class Webhook(InBackground[Event]):
    """Sends events to a URL.

    Args:
        url: of http or https; it is a secret, and logs have its host only.
    """

    def __init__(self, url: str) -> None:
        super().__init__(self._send, "spot-webhook", _MOST_WAITING)
        self._url, self._host = url, host_of_webhook(url)
        self._open = build_opener(_NoRedirects).open  # by the proxies of the environment

    def close(self, wait_s: float) -> bool:
        """See :meth:`InBackground.close`."""
        if not (is_done := super().close(wait_s)):
            self._say_failed("no answer in time")
        return is_done

    def _send(self, event: Event) -> None:
        text = html.escape(event.text[:_LONGEST_TEXT], quote=False)  # as Slack asks for: no mentions, no links
        body = json.dumps({"text": text, **asdict(event)}, default=str).encode()
        try:
            pauses_s = islice(growing(_FIRST_PAUSE_S), _TRIES - 1)
            retried(lambda: self._post(body), pauses_s, lambda error: not self._is_closed and _may_pass(error))
            recovered("webhook-failing", "webhook {about} takes events again", about=self._host)
        except Exception as error:
            if not self._is_closed:
                self._say_failed(_why(error))

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": f"lightning_spot/{__version__}"}
        try:
            self._open(Request(self._url, body, headers), timeout=_ANSWER_S).close()
        except HTTPError as error:
            error.close()
            raise

    def _say_failed(self, why: str) -> None:
        text = "webhook {about} does not take an event: {why}. Training continues. Check the webhook."
        say(logging.WARNING, "webhook-failing", text, about=self._host, why=why)


class _NoRedirects(HTTPRedirectHandler):
    """What is posted goes where the user says, and nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _may_pass(error: Exception) -> bool:
    return not isinstance(error, HTTPError) or error.code in _LATER or error.code >= 500


def _why(error: Exception) -> str:
    """Why an event was not taken; never with the URL, nor with what the other side wrote."""
    if isinstance(error, HTTPError):
        return f"HTTP status {error.code}"
    return plain(error.reason) if isinstance(error, URLError) else type(error).__name__
