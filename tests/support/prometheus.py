"""A real Prometheus, and its checks of rules and metrics, where they are installed (Debian's ``prometheus``)."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.waiting import until

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yaml"


def promtool(*arguments: str, stdin: str = "") -> str:
    """What it complains of."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], input=stdin, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode or arguments[:2] == ("check", "metrics") else ""


@contextlib.contextmanager
def prometheus(root: Path, port: int, target: str) -> Iterator[Callable[..., Any]]:
    """Scrape a server once a second, with our rules; gives what asks Prometheus' API."""
    assert PROMETHEUS is not None
    scrape = {"job_name": "lightning-spot", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    whole = {"global": {"evaluation_interval": "1s"}, "rule_files": [str(RULES)], "scrape_configs": [scrape]}
    (root / "prometheus.json").write_text(json.dumps(whole))  # YAML, too
    flags = [f"--config.file={root / 'prometheus.json'}", f"--storage.tsdb.path={root / 'tsdb'}"]
    flags += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = subprocess.Popen([PROMETHEUS, *flags])

    def ask(path: str, **arguments: str) -> Any:
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url) as response:
            return json.load(response)["data"]

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return bool(ask("targets"))
        return False

    try:
        until(answers, "Prometheus to answer")
        yield ask
    finally:
        process.terminate()
        process.wait(120)
