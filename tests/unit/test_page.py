"""The status page: who may open it, for how long, what it is shown, and that it does nothing that it is not to do."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from lightning_spot.cli.status import link
from lightning_spot.client.server_client import ServerClient
from lightning_spot.errors import ServerRefusedError, SpotError
from lightning_spot.goodput.ledger import AttemptRecord, account_after
from lightning_spot.goodput.records import write_record
from lightning_spot.http import page
from lightning_spot.http.page import LINK_S, SESSION_S, Page
from lightning_spot.http.routes import Service
from lightning_spot.protocol.wire import Address
from lightning_spot.say import Messages
from lightning_spot.server.slots import Mark, Resident
from lightning_spot.store.local import LocalStore
from tests.support.server import MIB, RUN_ID, Bench, manifest_of, named_run, served
from tests.support.shards import shard_manifest
from tests.support.waiting import until

pytestmark = pytest.mark.guarantee("G30")

TOKEN = "0123456789abcdef"
HTML = "text/html,application/xhtml+xml"


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


class Browser:
    """What a browser asks a server, and the cookie that it has."""

    def __init__(self, port: int, token: str | None = TOKEN) -> None:
        self.port, self.token, self.cookie = port, token, ""

    def ask(self, path: str, method: str = "GET", accept: str = HTML, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            sent = {"Accept": accept, **({"Cookie": self.cookie} if self.cookie else {}), **headers}
            connection.request(method, path, headers=sent)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def link(self) -> str:
        client = ServerClient(Address("127.0.0.1", self.port), self.token)
        return str(client.call("POST", "/v1/links")["path"])

    def open(self, path: str) -> Answer:
        """Open a link, and keep the cookie."""
        answer = self.ask(path)
        self.cookie = (answer.headers["Set-Cookie"] or "").partition(";")[0]
        return answer

    def enter(self) -> Browser:
        self.open(self.link())
        return self

    def document(self) -> dict[str, Any]:
        answer = self.ask("/v1/page", accept="*/*")
        assert answer.status == 200, answer
        return dict(json.loads(answer.body))


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now_s=0.0)


@pytest.fixture
def browser(bench: Bench, clock: SimpleNamespace) -> Iterator[Browser]:
    with served(bench.server, secrets=(TOKEN,), clock=lambda: clock.now_s) as port:
        yield Browser(port)


def test_a_link_opens_the_page_once(browser: Browser) -> None:
    path = browser.link()
    opened = browser.open(path)
    assert opened.status == 200
    assert opened.headers["Refresh"] == "0; url=/"
    assert b"<script>" in browser.ask("/").body
    assert browser.document()["runs"] == []
    again = Browser(browser.port).open(path)
    assert again.status == 401
    assert again.headers["Set-Cookie"] is None


def test_what_was_not_given_opens_nothing(browser: Browser) -> None:
    browser.link()
    assert browser.ask("/open/x").status == 401
    assert browser.ask("/open/x", accept="*/*").status == 401
    assert browser.ask("/open/x", Authorization=f"Bearer {TOKEN}").status == 404
    browser.cookie = "spot-page-00000000=x; a=b"
    for path, method in (("/", "GET"), ("/v1/page", "GET"), ("/v1/links", "POST")):
        assert browser.ask(path, method, accept="*/*").status == 401


def test_links_and_sessions_end(browser: Browser, clock: SimpleNamespace) -> None:
    late, path = browser.link(), browser.link()
    clock.now_s = LINK_S - 1
    assert browser.open(path).status == 200
    clock.now_s = LINK_S
    assert Browser(browser.port).open(late).status == 401
    clock.now_s = LINK_S - 1 + SESSION_S - 1
    assert browser.document()
    clock.now_s = LINK_S - 1 + SESSION_S
    assert browser.ask("/v1/page", accept="*/*").status == 401
    assert browser.ask("/").status == 401


def test_there_are_few_links_and_sessions(browser: Browser) -> None:
    first, *others = [browser.link() for _ in range(65)]
    assert browser.open(first).status == 401
    browser.open(others[0])
    for _ in range(64):
        Browser(browser.port).enter()
    assert browser.ask("/").status == 401


def test_the_cookie_is_for_this_server_and_no_script(browser: Browser) -> None:
    cookie = browser.open(browser.link()).headers["Set-Cookie"]
    fields = set(cookie.split("; ")[1:])
    assert fields == {"HttpOnly", f"Max-Age={int(SESSION_S)}", "Path=/", "SameSite=Strict"}
    assert re.fullmatch(r"spot-page-[0-9a-f]{8}=[\w-]{43}", cookie.split("; ")[0])


async def _opened(shown: Page, **more: Any) -> web.Response:
    made = json.loads((await shown.link(make_mocked_request("POST", "/v1/links"))).text or "")["path"]
    return await shown.open(make_mocked_request("GET", made, match_info={"link": made.removeprefix("/open/")}, **more))


def test_over_tls_the_cookie_never_goes_in_clear(bench: Bench) -> None:
    async def cookie(**more: Any) -> str:
        return (await _opened(Page(bench.server), **more)).cookies.output()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    assert "Secure" in asyncio.run(cookie(sslcontext=context))
    assert "Secure" not in asyncio.run(cookie())


def test_the_cookie_is_for_the_page_only(bench: Bench, browser: Browser) -> None:
    """A new endpoint is not forgotten: this goes by the table of all of them."""
    bench.open()
    bench.save(1)
    browser.enter()
    got = {}
    for route in Service(bench.server, TOKEN).application().router.routes():
        path = re.sub(r"{path[^}]*}", "step-000000001-attempt-0001/model.ckpt", route.resource.canonical)
        path = path.replace("{run}", "run").replace("{upload}", "0" * 32).replace("{id}", "0" * 32)
        got[route.method, path] = browser.ask(path.replace("{link}", "x"), route.method, accept="*/*").status
    open_to_all = {("GET", "/"), ("GET", "/v1/page"), *((method, "/healthz") for method in ("GET", "HEAD"))}
    ready = {("GET", "/readyz"), ("HEAD", "/readyz")}
    assert {asked for asked, status in got.items() if status != 401} - ready == open_to_all
    assert {got[asked] for asked in open_to_all} == {200}
    for method in ("HEAD", "POST", "PUT", "DELETE", "OPTIONS"):
        assert browser.ask("/", method).status == 401
        assert browser.ask("/v1/page", method).status == 401
    assert bench.committed() == [1]


def test_without_a_token_the_page_is_for_this_host_only(bench: Bench) -> None:
    with served(bench.server) as port:
        browser = Browser(port, token=None)
        assert browser.ask("/v1/links", "POST", accept="*/*").status == 403
        browser.enter()
        assert browser.document()["runs"] == []
        assert browser.ask("/", Host=f"localhost:{port}").status == 200
        for path in ("/", "/v1/page", browser.link()):
            assert browser.ask(path, Host="evil.example").status == 403
            assert browser.ask(path, Origin=f"http://127.0.0.1:{port}").status == 403
        browser.cookie = ""
        assert browser.ask("/").status == 401
        assert browser.ask("/v1/page", accept="*/*").status == 403


def test_pages_of_others_cannot_use_the_cookie(browser: Browser) -> None:
    browser.enter()
    assert browser.ask("/v1/page", accept="*/*", Origin="http://evil.example").status == 403
    assert browser.document()


def test_the_policy_allows_the_page_and_nothing_else(browser: Browser) -> None:
    refused, opened, document = browser.ask("/"), browser.open(browser.link()), browser.ask("/v1/page")
    shown = browser.ask("/")
    for answer in (refused, opened, document, shown):
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        policy = dict(part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; "))
        closed = ("default-src", "base-uri", "form-action", "frame-ancestors")
        assert {policy.pop(name) for name in closed} == {"'none'"}
        assert not policy or answer is shown
    text = shown.body.decode()
    assert policy.pop("connect-src") == "'self'"
    assert policy.pop("img-src") == "data:"
    for kind in ("script", "style"):
        (inline,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert policy.pop(f"{kind}-src") == f"'sha256-{digest}'"
    assert policy == {"require-trusted-types-for": "'script'", "trusted-types": "'none'"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\son\w+=|\sstyle=", text)
    assert set(re.findall(r"https?://[^'\"\s]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, which nobody asks


def test_the_document_says_what_there_is(bench: Bench, browser: Browser) -> None:
    bench.open(attempt=2)
    tier = bench.tier()
    bench.save(1, attempt=2, nbytes=1000, created_unix_s=time.time())
    assert bench.flush() == []
    tier.open.clear()
    bench.save(2, attempt=2, nbytes=2000, created_unix_s=time.time())
    coming = manifest_of(3, 2, 4000)
    bench.server.uploads.lease(f"run@{RUN_ID}", 2, 4000, manifest=coming)
    shown = browser.enter().document()
    (run,) = shown["runs"]
    assert (run["name"], run["attempt"], run["state"]) == ("run", 2, "training")
    states = [(each["step"], each["nbytes"], each["state"]) for each in run["snapshots"]]
    assert states == [(2, 2000, "uploading"), (1, 1000, "persisted")]
    assert shown["uploads"] == [{"run": "run", "name": coming.name, "nbytes": 4000, "received_bytes": 0}]
    assert shown["memory_bytes"] == 64 * MIB
    assert sorted(slot["state"] for slot in shown["slots"]) == ["filling", "held", "held"]
    (place,) = shown["tiers"]
    assert (place["error"], place["flushed"], place["flushed_bytes"]) == ("", 1, 1000)
    assert place["flush_s"] > 0
    tier.open.set()


def test_a_snapshot_is_persisted_once_all_of_it_is(bench: Bench, browser: Browser) -> None:
    """A server that has one of two shards, and stored that, knows nothing of the other one."""
    bench.open()
    one = shard_manifest(1, writer=0)
    upload = bench.server.uploads.lease(f"run@{RUN_ID}", 1, one.nbytes)
    bench.server.uploads.seal(upload.id, one)

    def shown() -> tuple[str, list[int]]:
        (snapshot,) = browser.document()["runs"][0]["snapshots"]
        return snapshot["state"], snapshot["shards"]

    browser.enter()
    assert shown() == ("incomplete", [1, 2])
    (slot,) = bench.server.ring.contents(RUN_ID)
    bench.server.ring.mark(Resident.of([slot]), str(bench.root / f"tier-{RUN_ID}"), Mark.SAFE)
    bench.server.ring.mark_committed(RUN_ID, one.lineage, one.order)
    until(lambda: shown() == ("replicated", [1, 2]), "the page to show it")
    bench.server.ring.mark_persisted(RUN_ID, one.lineage, one.order)
    until(lambda: shown() == ("persisted", [1, 2]), "the page to show it")


def test_secrets_in_urls_are_not_shown(bench: Bench, browser: Browser) -> None:
    bench.server.open_run(named_run("run", "s3://key:hush@bucket/run"))
    bench.server.open_run(named_run("another", "s3://key:hush@bucket/another run"))
    answer = browser.enter().ask("/v1/page", accept="*/*")
    assert b"bucket/run" in answer.body
    assert b"bucket/another run" in answer.body
    assert b"hush" not in answer.body


def test_goodput_and_the_last_preemption_come_from_storage(bench: Bench, browser: Browser) -> None:
    bench.open()
    url = str(bench.root / f"tier-{RUN_ID}")
    first = AttemptRecord(attempt=1, begun_unix_s=1000.0, trained_unix_s=1000.0, step=50, unix_s=1100.0, end="killed")
    second = AttemptRecord(
        attempt=2, begun_unix_s=1200.0, trained_unix_s=1200.0, from_step=50, step=99, unix_s=1300.0,
        earlier=account_after(first),
    )  # fmt: skip
    write_record(url, second)
    browser.enter()

    def known() -> dict[str, Any]:
        figures: dict[str, Any] = browser.document()["runs"][0]["figures"]
        return figures

    figures = until(known, "figures of the run")
    assert figures["preempted_unix_s"] == 1100.0
    assert figures["goodput"] == [[1100.0, pytest.approx(0.5)], [1300.0, pytest.approx(2 / 3)]]


def test_storage_that_hangs_is_not_waited_for(bench: Bench, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.open()
    asked, goes_on = threading.Semaphore(0), threading.Event()

    def hang(*_: Any) -> dict[str, Any]:
        asked.release()
        assert goes_on.wait(30)
        return {"goodput": [[1.0, 0.5]]}

    monkeypatch.setattr(page, "figures", hang)
    monkeypatch.setattr(page, "FIGURES_S", 0.0)
    browser.enter()
    try:
        for _ in range(3):
            assert browser.document()["runs"][0]["figures"] == {}
        assert asked.acquire(timeout=30)
        assert not asked.acquire(blocking=False), "one thread asks"
    finally:
        goes_on.set()
    until(lambda: browser.document()["runs"][0]["figures"], "figures once it answers")


def test_nothing_is_read_where_the_attempt_may_not(tmp_path: Path, make_bench: Callable[..., Bench]) -> None:
    """Who may open runs at a server could else have it read what only the server can."""
    bench, url = make_bench(allow=[str(tmp_path)]), str(tmp_path / f"tier-{RUN_ID}")
    of_another = replace(named_run("run", url), id=RUN_ID, token="of-another")
    LocalStore(url).claim(of_another.claim())
    bench.open()
    record = AttemptRecord(attempt=1, begun_unix_s=1000.0, trained_unix_s=1000.0, step=50, unix_s=1100.0)
    write_record(url, record)
    info = bench.server.registry.info(RUN_ID)
    with pytest.raises(SpotError):
        bench.server.storage(info)


def test_only_the_latest_messages_are_kept() -> None:
    messages = Messages(lambda: 0.0)
    for index in range(300):
        messages.say(30, f"key-{index}", "{about}", about="x" * 5000)
    assert [said.key for said in messages.recent] == [f"key-{index}" for index in range(200, 300)]
    assert max(len(said.text) for said in messages.recent) == 1000


def test_a_server_gives_a_link_to_itself_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", TOKEN)
    with served(bench.server, secrets=(TOKEN,)) as port:
        made = link(f"spot://127.0.0.1:{port}")
        assert re.fullmatch(rf"http://127\.0\.0\.1:{port}/open/[\w-]{{43}}", made)
        assert Browser(port).open(made.removeprefix(f"http://127.0.0.1:{port}")).status == 200


@pytest.mark.parametrize("path", ["@evil.example/", "/open/../x", "/open/", "/open/a\n", "//evil.example/open/a"])
def test_an_impostor_leads_nowhere(
    path: str, monkeypatch: pytest.MonkeyPatch, make_bench: Callable[..., Bench]
) -> None:
    async def lie(_page: Page, _request: web.Request) -> web.Response:
        return web.json_response({"path": path})

    monkeypatch.setattr(Page, "link", lie)
    with served(make_bench().server) as port, pytest.raises(ServerRefusedError):
        link(f"spot://127.0.0.1:{port}")
