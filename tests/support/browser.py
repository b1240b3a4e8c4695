"""A headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.waiting import DEADLINE_S, until

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")


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
        until(lambda: found.is_file() and "\n" in found.read_text(), "the browser to listen", 60.0)
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
