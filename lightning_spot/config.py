"""Settings that several rooms share, and the one place where the environment is read.

Not for the arguments of callbacks or commands: those belong to them.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lightning_spot.errors import SettingsError

PROTOCOL_VERSION = 2
"""Version of the HTTP protocol between trainers and nodes; both ends must agree."""

MANIFEST_VERSION = 2
"""Version of ``manifest.json``."""

PART_BYTES = 8 * 1024 * 1024
"""Bytes of one part: the unit that is checksummed and transferred."""

SEND_BYTES = 1024 * 1024
"""Most bytes handed to one socket send; larger ones were measured a third slower on loopback."""

DRILL_VARIABLE = "LIGHTNING_SPOT_DRILL"
"""Names the directory in which a drill's training keeps its snapshots, instead of where it would."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,127}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What lightning_spot reads from the process environment.

    Attributes:
        token: shared secret that requests to a node must carry, or ``None``.
        runtime_dir: directory (mode 0700) for records and sockets of the nodes on this host.
        shm_dir: tmpfs in which slots are created, or ``None`` for memory files only.
    """

    token: str | None
    runtime_dir: Path
    shm_dir: Path | None


def read_environment() -> Environment:
    """Read ``LIGHTNING_SPOT_TOKEN``, ``…_TOKEN_FILE``, ``…_RUNTIME_DIR`` and ``…_SHM_DIR``.

    Raises:
        SettingsError: if the token file is named but cannot be read.
    """
    token = os.environ.get("LIGHTNING_SPOT_TOKEN") or None
    token_file = os.environ.get("LIGHTNING_SPOT_TOKEN_FILE")
    if token is None and token_file:
        try:
            token = Path(token_file).read_text(encoding="utf-8").strip() or None
        except OSError as error:
            raise SettingsError(
                f"LIGHTNING_SPOT_TOKEN_FILE={token_file!r} cannot be read ({error.strerror}); fix or unset it"
            ) from error
    default_runtime = Path(tempfile.gettempdir()) / f"lightning-spot-{os.getuid()}"
    runtime_dir = Path(os.environ.get("LIGHTNING_SPOT_RUNTIME_DIR") or default_runtime)
    shm = os.environ.get("LIGHTNING_SPOT_SHM_DIR", "/dev/shm")
    shm_dir = Path(shm) if shm and os.path.isdir(shm) and os.access(shm, os.W_OK) else None
    return Environment(token=token, runtime_dir=runtime_dir, shm_dir=shm_dir)


def parse_bytes(text: str | int) -> int:
    """Turn ``"8GiB"``, ``"512MB"`` or a plain number into bytes.

    Raises:
        SettingsError: if the text is no positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text), re.IGNORECASE)
    value = int(float(match[1]) * _UNITS[match[2].lower()]) if match and match[2].lower() in _UNITS else 0
    if value <= 0:
        raise SettingsError(f"{text!r} is no size; write it like 8GiB, 512MB or 1073741824")
    return value


def format_bytes(nbytes: float) -> str:
    """Write a size for people: ``1.26 GB``."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{int(nbytes)} B"


def format_seconds(seconds: float) -> str:
    """Write a duration for people: ``8.3 s``, ``12.5 min``, ``3.20 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.2f} h"


def check_run_name(run: str) -> str:
    """Return ``run`` if it can name a run in a URL and a directory.

    Raises:
        SettingsError: otherwise.
    """
    if not _RUN_NAME.fullmatch(run):
        raise SettingsError(
            f"run name {run!r} is not usable: it must start with a letter or digit and hold only letters, digits"
            " and '._=+-' (at most 128); pass run='…'"
        )
    return run


def run_key(url: str) -> str:
    """Short stable key of a run's durable URL, used to name its embedded node's record and memory area."""
    return hashlib.sha256(f"{os.getuid()}:{url}".encode()).hexdigest()[:16]
