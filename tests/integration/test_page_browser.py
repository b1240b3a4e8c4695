"""The status page in a real browser: it shows a training, and nothing that anybody says does anything."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import lightning.pytorch as pl
import pytest

from lightning_spot import EverySteps, SpotCheckpoint
from lightning_spot.cli.status import link
from lightning_spot.say import Said, recent
from tests.support.server import RUN_ID, Bench, named_run, served, snapshot_server
from tests.support.trainer import Net, data, trainer
from tests.support.waiting import DEADLINE_S, until

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")


class Tab:
    """A tab of a browser. Calls block, and may come from any thread.

    Attributes:
        asked: addresses of all requests.
        errors: what it logged as an error: of scripts, of the network, of the content security policy.
    """

    def __init__(self, address: str) -> None:
        self.asked: list[str] = []
        self.errors: list[str] = []
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._connect(address))
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """A call of the protocol."""
        return self._run(self._call(method, given))

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

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

    def tree(self) -> list[tuple[str, str]]:
        """Role and name of what a screen reader is given."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def screenshot(self, path: Path, *, quality: int = 80) -> None:
        """Write what is shown as WebP."""
        taken = self.call("Page.captureScreenshot", format="webp", quality=quality)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        self._run(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    async def _connect(self, address: str) -> None:
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(address, max_msg_size=2**26)
        self._reading = asyncio.create_task(self._read())

    async def _call(self, method: str, given: dict[str, Any]) -> dict[str, Any]:
        self._count += 1
        number = self._count
        self._answers[number] = self._loop.create_future()
        await self._socket.send_json({"id": number, "method": method, "params": given})
        answer = await self._answers[number]
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            else:
                self._note(said["method"], said["params"])

    def _note(self, method: str, said: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.asked.append(said["request"]["url"])
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(said["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(said["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(str(said["args"]))


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
        tab = Tab(asyncio.run(_first_tab(int(found.read_text().split("\n")[0]))))
        try:
            yield tab
        finally:
            tab.close()
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


async def _first_tab(port: int) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/json/list") as answer:
        return str(next(each for each in await answer.json() if each["type"] == "page")["webSocketDebuggerUrl"])


HOSTILE = "<img src=x onerror=document.title='taken'>\u202e<script>document.title='taken'</script>"


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with chromium(tmp_path / "profile") as tab:
        yield tab


def opened(tab: Tab, url: str) -> None:
    tab.go(link(url))
    tab.until("location.pathname === '/' && document.getElementById('live')?.textContent === 'Live'")


class AtStep(pl.Callback):
    def __init__(self, step: int, does: Callable[[], None]) -> None:
        self.step, self.does = step, does

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.does()


def test_a_training_shows_up_and_moves(tab: Tab, tmp_path: Path) -> None:
    with snapshot_server(tmp_path) as (_, url):
        opened(tab, url)
        assert "No run is known here" in tab.text

        def shows(step: int) -> Callable[[], None]:
            cell = f"document.querySelector('article table td')?.textContent === '{step}'"
            return lambda: tab.until(f"{cell} && document.querySelector('article h3').textContent === 'run-1'")

        spot = SpotCheckpoint(str(tmp_path / "run-1"), servers=url, interval=EverySteps(5), on_full="wait")
        looks = [AtStep(step + 2, shows(step)) for step in (5, 20)]
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
    bench.server.lease(
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
        tab.resize(375, 812)
        opened(tab, f"spot://127.0.0.1:{port}")
        assert tab.value("document.documentElement.scrollWidth") <= 375
        tree = tab.tree()
        roles = {role for role, _ in tree}
        assert {
            "banner",
            "main",
            "region",
            "article",
            "heading",
            "table",
            "columnheader",
            "status",
            "progressbar",
        } <= roles
        unnamed = [
            role for role, name in tree if role in {"region", "article", "heading", "table", "progressbar"} and not name
        ]
        assert unnamed == []
        assert ("article", "run") in tree
        assert sum(role == "heading" for role, _ in tree) >= 6
        assert not contrast_below(tab, 4.5)


def contrast_below(tab: Tab, least: float) -> list[str]:
    """Texts that are hard to read, in both color schemes."""
    found = []
    for scheme in ("light", "dark"):
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        found += tab.value(_CONTRAST.replace("LEAST", str(least)))
    return found


_CONTRAST = """(() => {
  const light = (color) => {
    const [r, g, b] = color.match(/[0-9.]+/g).map((each) => each / 255)
      .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return color === 'rgba(0, 0, 0, 0)' ? back(element.parentElement) : color;
  };
  const texts = [...document.querySelectorAll('body *')].filter((each) => each.checkVisibility()
    && [...each.childNodes].some((server) => server.serverType === 3 && server.textContent.trim()));
  return texts.filter((each) => {
    const [low, high] = [light(getComputedStyle(each).color), light(back(each))].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05) < LEAST;
  }).map((each) => each.outerHTML);
})()"""


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


def test_a_hidden_page_asks_nothing(tab: Tab, make_bench: Callable[..., Bench]) -> None:
    with served(make_bench().server) as port:
        opened(tab, f"spot://127.0.0.1:{port}")
        tab.value(
            "Object.defineProperty(document, 'hidden', {get: () => globalThis.away ?? false, configurable: true})"
        )
        tab.value("globalThis.away = true; document.dispatchEvent(new Event('visibilitychange'))")
        tab.value("document.getElementById('updated').textContent = 'before'; poll()")
        assert tab.value("document.getElementById('updated').textContent") == "before"
        tab.value("globalThis.away = false; document.dispatchEvent(new Event('visibilitychange'))")
        tab.until("document.getElementById('updated').textContent !== 'before'")
