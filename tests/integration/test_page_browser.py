"""The status page in a real browser: it shows a training, and nothing that anybody says does anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.cli.status import link
from lightning_spot.say import Said, recent
from tests.support.server import RUN_ID, Bench, named_run, served, snapshot_server
from tests.support.trainer import At, Net, data, trainer
from tests.support.waiting import DEADLINE_S, until

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")


class Tab:
    """A tab of a browser.

    Attributes:
        asked: addresses of all requests.
        errors: what it logged as an error: of scripts, of the network, of the content security policy.
    """

    def __init__(self, address: str) -> None:
        self.asked, self.errors, self._count = list[str](), list[str](), 0
        self._loop = asyncio.new_event_loop()
        self._session, self._socket = self._run(self._connected(address))
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """A call of the protocol; what the browser has said until its answer is noted."""
        self._count += 1
        found: dict[str, Any] = self._run(self._answer(self._count, method, given))
        return found

    def value(self, script: str) -> Any:
        """What an expression is, in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true."""
        return until(lambda: self.value(script), script)

    @property
    def text(self) -> str:
        """What the page shows."""
        return str(self.value("document.body.innerText"))

    def close(self) -> None:
        self._run(self._session.close())
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, DEADLINE_S))

    async def _connected(self, address: str) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
        session = aiohttp.ClientSession()
        return session, await session.ws_connect(address, max_msg_size=2**26)

    async def _answer(self, number: int, method: str, given: dict[str, Any]) -> dict[str, Any]:
        await self._socket.send_json({"id": number, "method": method, "params": given})
        while True:
            said = await self._socket.receive_json()
            if said.get("id") == number:
                assert "error" not in said, (method, said)
                return dict(said["result"])
            self._note(said["method"], said["params"])

    def _note(self, method: str, said: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.asked.append(said["request"]["url"])
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(said["entry"]["text"])
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.errors.append(str(said))


@contextmanager
def chromium(folder: Path) -> Iterator[Tab]:
    """A browser with one tab and nothing else of its own; its profile lies in ``folder``."""
    assert PROGRAM is not None
    quiet = ["--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
    command = [PROGRAM, "--headless", "--no-sandbox", *quiet, "--remote-debugging-port=0", f"--user-data-dir={folder}"]
    process = subprocess.Popen([*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found = folder / "DevToolsActivePort"
        until(lambda: found.is_file() and "\n" in found.read_text(), "the browser to listen")
        tab = Tab(_first_tab(int(found.read_text().split("\n")[0])))
        try:
            yield tab
        finally:
            tab.close()
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def _first_tab(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=DEADLINE_S) as answer:
        return str(next(each for each in json.load(answer) if each["type"] == "page")["webSocketDebuggerUrl"])


HOSTILE = "<img src=x onerror=document.title='taken'>\u202e<script>document.title='taken'</script>"


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with chromium(tmp_path / "profile") as tab:
        yield tab


def opened(tab: Tab, url: str) -> None:
    tab.call("Page.navigate", url=link(url))
    tab.until("location.pathname === '/' && document.getElementById('live')?.textContent === 'Live'")


def test_a_training_shows_up_and_moves(tab: Tab, tmp_path: Path) -> None:
    with snapshot_server(tmp_path) as (_, url):
        opened(tab, url)
        assert "No run is known here" in tab.text

        def shows(step: int) -> Callable[[], None]:
            cell = f"document.querySelector('article table td')?.textContent === '{step}'"
            return lambda: tab.until(f"{cell} && document.querySelector('article h3').textContent === 'run-1'")

        spot = SpotCheckpoint(str(tmp_path / "run-1"), servers=url, interval=EverySteps(5), on_full="wait")
        looks = [At(step + 2, shows(step)) for step in (5, 20)]
        trainer(spot, *looks).fit(Net(), data())
        tab.until("document.querySelector('article > p').textContent === 'complete'")
        tab.until("document.querySelector('article dl').textContent.includes('Goodput')")
        assert tab.errors == []
        assert {urlsplit(each).netloc for each in tab.asked if not each.startswith("data:")} == {url[7:]}


def filled(make_bench: Callable[..., Bench]) -> Bench:
    """A server of which each section of the page has something to show."""
    bench = make_bench()
    bench.open(host=HOSTILE)
    bench.save(1)
    assert bench.flush() == []
    bench.save(2)
    bench.server.open_run(replace(named_run("a-long-name-" * 8, "s3://" + "bucket-" * 12), host="h" * 200))
    coming = bench.save(3, wait_s=1.0)
    bench.server.uploads.lease(
        f"run@{RUN_ID}", 1, 1000, manifest=replace(coming, checksums=(), name="step-000000004-attempt-0001", step=4)
    )
    return bench


def test_what_others_say_does_nothing(
    tab: Tab, make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", "0123456789abcdef")
    bench = filled(make_bench)
    recent.append(Said(1e9, logging.WARNING, "key", HOSTILE))
    with served(bench.server, secrets=("0123456789abcdef",)) as port:
        opened(tab, f"spot://127.0.0.1:{port}")
        assert "<img src=x" in tab.text
        assert tab.value("document.title").startswith("Snapshot server")
        assert tab.value("document.querySelectorAll('img, article script').length") == 0
        assert tab.errors == []


def test_a_phone_and_a_screen_reader_can_read_it(tab: Tab, make_bench: Callable[..., Bench]) -> None:
    with served(filled(make_bench).server) as port:
        size = {"width": 375, "height": 812, "deviceScaleFactor": 1}
        tab.call("Emulation.setDeviceMetricsOverride", **size, mobile=True)
        opened(tab, f"spot://127.0.0.1:{port}")
        assert tab.value("document.documentElement.scrollWidth") <= 375
        nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
        tree = [(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes if not node["ignored"]]
        named = {"region", "article", "heading", "table", "progressbar"}
        assert {role for role, _ in tree} >= named | {"banner", "main", "columnheader", "status"}
        assert [role for role, name in tree if role in named and not name] == []


def test_it_says_since_when_nothing_answers_and_goes_on(tab: Tab, make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    with contextlib.ExitStack() as serving:
        port = serving.enter_context(served(bench.server))
        opened(tab, f"spot://127.0.0.1:{port}")
        serving.close()
        tab.until("document.getElementById('live').textContent.startsWith('Disconnected since ')")
    with served(make_bench().server, port):
        tab.until("document.getElementById('live').textContent.includes('lightning-spot status --open')")
        asked = len(tab.asked)
        threading.Event().wait(0.1)
        tab.value("document.dispatchEvent(new Event('visibilitychange'))")
        assert len(tab.asked) == asked, "it asks no more"
