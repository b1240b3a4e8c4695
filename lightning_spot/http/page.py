"""The status page: what a browser is shown without the token, for how long, and what the page polls.

Who has the token makes a link (``POST /v1/links``). Opened once, within a minute, it gives the browser a cookie, which
gets the page and its document for half a day, and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import logging
import math
import re
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import hdrs, web

from lightning_spot.config import without_password
from lightning_spot.errors import SnapshotNotFoundError
from lightning_spot.goodput.ledger import spent, total
from lightning_spot.goodput.records import newest_in
from lightning_spot.http.metrics import not_ready
from lightning_spot.say import recent
from lightning_spot.server.runs import RunInfo
from lightning_spot.server.slots import Group, Reached, View
from lightning_spot.server.snapshot_server import SnapshotServer
from lightning_spot.server.tier import state_in_memory
from lightning_spot.snapshot.shards import Status
from lightning_spot.store.fences import ATTEMPTS_DIR
from lightning_spot.threads import in_background
from lightning_spot.trees import mapped
from lightning_spot.untrusted import plain

logger = logging.getLogger(__name__)

LINK_S = 60.0
SESSION_S = 12 * 3600.0
_MOST_PASSES = 64
_MOST_SNAPSHOTS = 20  # of a run
_LONGEST_TEXT = 1000
DOCUMENT_S = 1.0  # however many browsers poll
FIGURES_S = 5.0  # storage is asked for them

_CLOSED = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    hdrs.CACHE_CONTROL: "no-store",
    "Content-Security-Policy": _CLOSED,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Of everything that a browser may show."""

_OPENED = '<!DOCTYPE html><html lang="en"><title>Snapshot server</title><a href="/">Status page</a></html>\n'


class Passes:
    """Random secrets, each of which is good for a while; beyond so many, the oldest one is not. Used on one thread.

    Args:
        lasts_s: how long one is good.
        clock: gives seconds.
    """

    def __init__(self, lasts_s: float, clock: Callable[[], float]) -> None:
        self._lasts_s, self._clock = lasts_s, clock
        self._until_s: dict[bytes, float] = {}  # by digest: how long a look-up takes says nothing of a secret

    def new(self) -> str:
        """One more, which a URL and a cookie can hold."""
        while len(self._until_s) >= _MOST_PASSES:
            del self._until_s[next(iter(self._until_s))]
        secret = secrets.token_urlsafe(32)
        self._until_s[_digest(secret)] = self._clock() + self._lasts_s
        return secret

    def is_good(self, secret: str) -> bool:
        """Whether it is one that is good."""
        return self._clock() < self._until_s.get(_digest(secret), -math.inf)

    def use(self, secret: str) -> None:
        """It is good no longer."""
        self._until_s.pop(_digest(secret), None)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()


class Page:
    """Handlers of the status page.

    Args:
        server: whose.
        clock: gives seconds.
    """

    def __init__(self, server: SnapshotServer, clock: Callable[[], float] = time.monotonic) -> None:
        self._links, self._sessions = Passes(LINK_S, clock), Passes(SESSION_S, clock)
        self._cookie = f"spot-page-{secrets.token_hex(4)}"  # other servers at this host are sent it, too
        self._server = server
        self._figures: dict[str, dict[str, Any]] = {}  # of the goodput of runs, by their keys
        self._asking: Future[None] | None = None
        self._asked_s = -math.inf
        self._made, self._made_s, self._making = "", -math.inf, asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """Where they are asked."""
        return [
            web.post("/v1/links", self.link),
            web.get("/open/{link}", self.open, allow_head=False),
            web.get("/", self.page, allow_head=False),
            web.get("/v1/page", self.document, allow_head=False),
        ]

    def admits(self, request: web.Request) -> bool:
        """Whether a request needs no token: it opens a link, or shows the cookie for what that is for."""
        asked = request.match_info.handler
        if asked == self.open:
            return self._links.is_good(request.match_info["link"])
        return asked in (self.page, self.document) and self._sessions.is_good(request.cookies.get(self._cookie, ""))

    async def link(self, _request: web.Request) -> web.Response:
        """Make a path that a browser may open once."""
        return web.json_response({"path": f"/open/{self._links.new()}"})

    async def open(self, request: web.Request) -> web.Response:
        """Give the browser a cookie, and send it to the page.

        Not by a redirect: where a link is followed from another site, such as a terminal in a browser, the cookie
        would not be shown after one.
        """
        if not self._links.is_good(link := request.match_info["link"]):
            raise SnapshotNotFoundError("this link was used, or has expired")
        self._links.use(link)
        response = web.Response(text=_OPENED, content_type="text/html", headers={**HEADERS, "Refresh": "0; url=/"})
        response.set_cookie(
            self._cookie,
            self._sessions.new(),
            max_age=int(SESSION_S),
            secure=request.secure,
            httponly=True,
            samesite="Strict",
        )
        return response

    async def page(self, _request: web.Request) -> web.Response:
        """The page."""
        text, policy = _page()
        headers = {**HEADERS, "Content-Security-Policy": policy}
        return web.Response(text=text, content_type="text/html", headers=headers)

    async def document(self, _request: web.Request) -> web.Response:
        """What the page shows."""
        async with self._making:
            if time.monotonic() - self._made_s > DOCUMENT_S:
                document = await asyncio.to_thread(self._document)
                self._made, self._made_s = web.json_response(document).text or "", time.monotonic()
        return web.Response(text=self._made, content_type="application/json", headers=HEADERS)

    def _document(self) -> dict[str, Any]:
        server = self._server
        is_free = self._asking is None or self._asking.done()
        if is_free and time.monotonic() - self._asked_s > FIGURES_S:
            self._asking = in_background(self._ask, "spot-figures")
        document = {
            "host": socket.gethostname(),
            "not_ready": not_ready(server),
            "unix_s": time.time(),
            **server.ring.status(),
            "tiers": [{"url": url, **asdict(health)} for url, health in server.tiers().items()],
            "runs": [{**run, **self._known_of(run["id"] or run["name"])} for run in server.listed()],
            "uploads": server.uploads.status(),
            "messages": [asdict(said) for said in [*recent][::-1]],
        }
        return dict(mapped(_shown, document))

    def _known_of(self, run: str) -> dict[str, Any]:
        with self._server.ring.changed:
            view = self._server.ring.view(run)
            newest = sorted(view.groups, key=lambda group: group.manifest.order, reverse=True)[:_MOST_SNAPSHOTS]
            snapshots = [_snapshot(group, view) for group in newest]
        return {"key": run, "snapshots": snapshots, "figures": self._figures.get(run, {})}

    def _ask(self) -> None:
        """Ask storage for the goodput of runs: on a thread of its own, and only while a browser polls."""
        with self._server.registry.lock:
            runs = [run.info for run in self._server.registry.runs.values()]
        for info in runs:
            try:
                self._figures[info.key] = figures(self._server, info)
            except Exception as error:  # a tier that fails, of which its uploader tells, or what a writer forged
                logger.debug("%s", error)
        self._figures = {info.key: self._figures.get(info.key, {}) for info in runs}
        self._asked_s = time.monotonic()


@functools.cache
def _page() -> tuple[str, str]:
    """The page, and its content security policy: that script and that style, and requests to this server only."""
    text = Path(__file__).with_name("page.html").read_text()

    def source(kind: str) -> str:
        (inline,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        return f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"

    allowed = [source("script"), source("style"), "connect-src 'self'", "img-src data:"]
    return text, "; ".join([_CLOSED, *allowed, "require-trusted-types-for 'script'", "trusted-types 'none'"])


def _shown(value: Any) -> Any:
    """A value as a browser may show it: a text as one line, a URL (no blank is before its host) without password."""
    if not isinstance(value, str):
        return value
    is_url = "://" in value and " " not in value.partition("@")[0]
    return plain(without_password(value) if is_url else value, _LONGEST_TEXT)


def _snapshot(group: Group, view: View) -> dict[str, Any]:
    manifest, shard = group.manifest, group.manifest.shard
    return {
        "step": manifest.step,
        "attempt": manifest.attempt,
        "unix_s": manifest.created_unix_s,
        "nbytes": sum(slot.content.nbytes for slot in group.slots),
        "state": _state(group, view),
        "shards": [len(group.slots), shard.writers] if shard is not None else None,
    }


def _state(group: Group, view: View) -> str:
    if group.state is not Status.COMMITTED:
        return "failed" if group.state is Status.ABORTED else "incomplete"
    if group.reached is Reached.PERSISTED:
        return "persisted"
    return state_in_memory((slot in view.owed, slot.is_safe) for slot in group.slots)


def figures(server: SnapshotServer, info: RunInfo) -> dict[str, Any]:
    """Goodput of a run, as times and shares, and when it was preempted last; empty where neither is known.

    Raises:
        SpotError: if its storage fails.
    """
    storage = server.storage(info)
    if storage is None or (record := newest_in(storage.folder(ATTEMPTS_DIR, attempt=0, run_id=info.id))) is None:
        return {}
    attempts, sum_, goodput = record.known, record.before.closed, []
    for attempt, part in zip(attempts, spent(attempts), strict=True):
        sum_ = total([sum_, part])
        goodput.append([max(attempt.unix_s, attempt.begun_unix_s), sum_.goodput])
    preempted = [attempt.unix_s for attempt in attempts if attempt.end in ("preempted", "killed")]
    return {"goodput": goodput, "preempted_unix_s": preempted[-1] if preempted else None}
