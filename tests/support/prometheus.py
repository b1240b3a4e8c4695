"""Prometheus' checks of rules and metrics, where they are installed (Debian's ``prometheus``)."""

from __future__ import annotations

import shutil
import subprocess

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")


def promtool(*arguments: str, stdin: str = "") -> str:
    """What it complains of."""
    done = subprocess.run([PROMTOOL, *arguments], input=stdin, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode or arguments[:2] == ("check", "metrics") else ""
