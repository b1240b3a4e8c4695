"""Settings that several rooms share, and the one place where the environment is read.

Not for the arguments of callbacks or commands: those belong to them.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Integral, Real
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_spot.errors import SettingsError
from lightning_spot.renamed import refuse_old

PROTOCOL_VERSION = 13
"""Version of the HTTP protocol between trainers and servers; both ends must agree."""

MANIFEST_VERSION = 5
"""Version of ``manifest.json`` that is written, and the newest that is understood."""

PART_BYTES = 8 * 1024 * 1024
"""Bytes of one part: the unit that is checksummed and transferred."""

MOST_PART_BYTES = 64 * 1024 * 1024
"""Of another size, parts that go to a server have no more bytes: some of them are made up in its memory."""

SEND_BYTES = 1024 * 1024
"""Most bytes handed to one socket send; larger ones were measured a third slower on loopback."""

KEEP = 2
"""Snapshots that a tier keeps, unless the user says otherwise."""

SERVER_IDLE_TIMEOUT_S = 900.0
"""The server on a trainer's host ends when no trainer came for so long."""

UPLOAD_TIMEOUT_S = 300.0
"""How long the end of a training, or of a server, waits until what is owed is durable."""

SERVER_CALL_TIMEOUT_S = 5.0
"""How long a call to the server on the trainer's host may keep the training thread."""

DEVICE_BUFFER = "64MiB"
"""Memory on each GPU through which the last bytes of a snapshot leave while the optimizer steps."""

RUN_VARIABLE = "LIGHTNING_SPOT"
"""Names the run of a training whose program says nothing of it."""

DRILL_VARIABLE = "LIGHTNING_SPOT_DRILL"
"""Names the directory in which a drill's training keeps its snapshots, instead of where it would."""

NOTICE_FILE_VARIABLE = "LIGHTNING_SPOT_NOTICE_FILE"
"""Names a file whose appearance is a notice."""

RESTARTER_VARIABLE = "LIGHTNING_SPOT_RESTARTER_PID"
"""Names the process that starts the training again."""

MOST_SERVERS = 64
"""Snapshot servers that one run may have."""

HIGHEST_ATTEMPT = 10**9 - 1
"""Names of claims and snapshots hold nine digits of it."""

LARGEST = 10**9
"""Most that a user may set as a number, such as seconds (30 years): Python waits for no longer than ten times that."""

LONGEST_TOKEN = 512
"""Characters of a token: a server bounds the headers of those who may not have it."""

SHORTEST_TOKEN = 16
"""One with fewer characters works, with a warning."""

_MOST_SECRETS = 2
_CREDENTIAL_FILES = ("LIGHTNING_SPOT_TOKEN_FILE", "LIGHTNING_SPOT_CA", "LIGHTNING_SPOT_CLIENT_CERT")
_OF_THE_PROCESS = ("LIGHTNING_SPOT_", "PYTHON", "LD_", "PATH", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_")
"""How the names of variables begin that a process keeps as it was started with them."""

_MOST_BYTES = 2**63
_LEAST_WITHOUT_A_UNIT = 2**20
_MOST_NAMED = 8
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
BUCKET_SCHEMES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}
"""Of object stores, whose libraries have an object appear whole or not at all. Other file systems are refused."""
_AZURE = frozenset({"az", "abfs", "abfss"})
_DIRECTORIES = frozenset({"file", "local"})
SERVER_SCHEMES = ("spot", "spots")
"""Of snapshot servers, in clear and by TLS."""
_SCHEMES = {"s3a": "s3", "gcs": "gs"}
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[^}]*\})")
_AZURES_OWN = re.compile(r"^(?:az|abfss?)://\$(?:web|root|logs)(?=[@/]|$)", re.IGNORECASE)
"""Containers that Azure has named itself."""
_PASSWORD = re.compile(
    r"(?<=://)(?<!spot://)(?<!spots://)[^/@]*:.*(?=@)|(?:(?<=spot://)|(?<=spots://))(?![^/@]*:\d+/)[^/@]*:.*(?=@)"
)
"""Up to the last @: who writes no %40 for one in a password has it as it is. A run of a server has an @ of its own."""
_BARE_PASSWORD = re.compile(r"^[^/@]*:.*(?=@)")
"""Of what lacks its scheme, as somebody may write the address of a server."""
_USER = re.compile(r"(?<=://)[^/@]*(?=@)")
_SECRET = re.compile(r"(?<=\?)(?=.*(?:credential|key|passw|secret|sig|token)[\w.-]*=).*", re.IGNORECASE)
"""Of a URL that somebody has signed."""
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,127}")


def _variable(
    name: str, read: Callable[[str], object] = lambda text: text or None, *, unset: str = "", repr: bool = True
) -> Any:
    """A field with what the environment has under a name, which is read when the dataclass is made."""
    return field(default_factory=lambda: read(os.environ.get(name, unset)), repr=repr)


def _separated(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


def _webhook(text: str) -> str | None:
    return check_webhook("LIGHTNING_SPOT_WEBHOOK", text or None)


def _runtime_dir(text: str) -> Path:
    return Path(text or Path(tempfile.gettempdir()) / f"lightning-spot-{os.getuid()}")


def _metrics(text: str) -> tuple[str, int] | None:
    return parse_listen("LIGHTNING_SPOT_METRICS", text, has_token=bool(read_secrets())) if text else None


def _shm_dir(text: str) -> Path | None:
    return Path(text) if text and os.path.isdir(text) and os.access(text, os.W_OK) else None


def _slurm_job(text: str) -> str | None:
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}" if array else text or None


def _grace_period_s(text: str) -> float | None:
    if not text:
        return None
    with contextlib.suppress(ValueError):
        if (grace_period_s := float(text)) > 0:
            return grace_period_s
    raise SettingsError(f"LIGHTNING_SPOT_GRACE_PERIOD_S={text!r} is no number of seconds above 0; fix or unset it")


def _restarter_pid(text: str) -> int | None:
    if text and not (text.isdecimal() and int(text) > 1):
        raise SettingsError(f"{RESTARTER_VARIABLE}={text!r} is no number of a process; fix or unset it")
    return int(text) if text else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What lightning_spot reads from the process environment.

    Attributes:
        dirpath: ``LIGHTNING_SPOT``: directory or URL of a run. Each Trainer gets a ``SpotCheckpoint`` for it, unless
            the program has one.
        servers: ``LIGHTNING_SPOT_SERVERS``: snapshot servers of that run, separated by commas.
        secrets: ``LIGHTNING_SPOT_TOKEN`` or ``LIGHTNING_SPOT_TOKEN_FILE``: the secret that snapshot servers ask for, or
            a file that holds it; 16 to 512 printable ASCII characters without blanks. The file may hold two, one a
            line: the first is sent, a server accepts both. It is read again when it changes. A trainer may have a
            scoped token instead, made by ``lightning-spot token``.
        ca_file: ``LIGHTNING_SPOT_CA``: PEM file with the certificates that ``spots://`` servers are verified by.
            Default: those of the system.
        client_cert: ``LIGHTNING_SPOT_CLIENT_CERT``: PEM file with the certificate and the key to show to servers that
            ask for one (``--client-ca``).
        webhook: ``LIGHTNING_SPOT_WEBHOOK``: URL to which trainers, and ``lightning-spot serve``, send events.
        runtime_dir: ``LIGHTNING_SPOT_RUNTIME_DIR``: directory (mode 0700) for sockets, records and logs of this host's
            servers. Default ``/tmp/lightning-spot-UID``.
        metrics: ``LIGHTNING_SPOT_METRICS``: ``host:port`` at which a local server that is started now answers
            ``GET /metrics``; beyond this host only with a token.
        shm_dir: ``LIGHTNING_SPOT_SHM_DIR``: tmpfs that holds snapshots in memory. Default ``/dev/shm``.
        drill_dir: ``LIGHTNING_SPOT_DRILL``: set by ``lightning-spot drill``; replaces every ``dirpath``.
        notice_file: ``LIGHTNING_SPOT_NOTICE_FILE``: file that announces a preemption when it appears.
        grace_period_s: ``LIGHTNING_SPOT_GRACE_PERIOD_S``: seconds between SIGTERM and the end of the process.
        cloud: ``LIGHTNING_SPOT_CLOUD``: ``aws``, ``gcp``, ``azure``, ``alibaba`` or ``none``. Default: by the firmware.
        aws_endpoint: ``AWS_EC2_METADATA_SERVICE_ENDPOINT``: address of Amazon's instance metadata service.
        aws_checksums: ``AWS_REQUEST_CHECKSUM_CALCULATION``: when S3 uploads carry a trailing checksum.
        gcp_host: ``GCE_METADATA_HOST``: address of Google's metadata server.
        slurm_job: ``SLURM_JOB_ID``, ``SLURM_ARRAY_JOB_ID``, ``SLURM_ARRAY_TASK_ID``: the job to requeue.
        restarter_pid: ``LIGHTNING_SPOT_RESTARTER_PID``: process that restarts the training on this machine; it receives
            SIGTERM when ranks have stopped because the cloud takes the machine away.
    """

    dirpath: str = _variable(RUN_VARIABLE, str.strip)
    servers: tuple[str, ...] = _variable("LIGHTNING_SPOT_SERVERS", _separated)
    secrets: tuple[str, ...] = field(default_factory=lambda: read_secrets(), repr=False)
    ca_file: str | None = _variable("LIGHTNING_SPOT_CA")
    client_cert: str | None = _variable("LIGHTNING_SPOT_CLIENT_CERT")
    webhook: str | None = _variable("LIGHTNING_SPOT_WEBHOOK", _webhook, repr=False)
    runtime_dir: Path = _variable("LIGHTNING_SPOT_RUNTIME_DIR", _runtime_dir)  # noqa: RUF009 # a field
    metrics: tuple[str, int] | None = _variable("LIGHTNING_SPOT_METRICS", _metrics)
    shm_dir: Path | None = _variable("LIGHTNING_SPOT_SHM_DIR", _shm_dir, unset="/dev/shm")  # noqa: RUF009 # a field
    drill_dir: str | None = _variable(DRILL_VARIABLE)
    notice_file: str | None = _variable(NOTICE_FILE_VARIABLE)
    grace_period_s: float | None = _variable("LIGHTNING_SPOT_GRACE_PERIOD_S", _grace_period_s)
    cloud: str | None = _variable("LIGHTNING_SPOT_CLOUD")
    aws_endpoint: str | None = _variable("AWS_EC2_METADATA_SERVICE_ENDPOINT")
    aws_checksums: str | None = _variable("AWS_REQUEST_CHECKSUM_CALCULATION")
    gcp_host: str | None = _variable("GCE_METADATA_HOST")
    slurm_job: str | None = _variable("SLURM_JOB_ID", _slurm_job)
    restarter_pid: int | None = _variable(RESTARTER_VARIABLE, _restarter_pid)

    @property
    def token(self) -> str | None:
        """The secret that is sent; ``None`` without one."""
        return self.secrets[0] if self.secrets else None


def read_environment() -> Environment:
    """Read all that is read from the environment.

    Raises:
        SettingsError: if a value cannot be used; it names the variable.
    """
    refuse_old(*(name for name in os.environ if name.startswith("LIGHTNING_SPOT_")))
    return Environment()


def parse_listen(setting: str, text: str, *, has_token: bool) -> tuple[str, int]:
    """Host and port that a server is to listen at.

    Args:
        setting: its name, for the error.
        text: what the user gave.
        has_token: whether requests need one.

    Raises:
        SettingsError: if it is no address, or one beyond this host without a token.
    """
    host, _, digits = text.rpartition(":")
    try:
        host.encode("idna")  # no label of it is empty or too long
        port = int(digits) if digits.isdecimal() else -1
    except ValueError:
        port = -1
    if not host or not 0 <= port <= 65535:
        raise SettingsError(f"{setting} is not written like 127.0.0.1:7070: {text!r}")
    host = host.strip("[]")
    if not (has_token or is_loopback(host)):
        raise SettingsError(
            f"{setting} {text}: a server listens beyond this host only with a token. Set LIGHTNING_SPOT_TOKEN (or"
            " LIGHTNING_SPOT_TOKEN_FILE) here and for its clients, or listen on 127.0.0.1"
        )
    return host, port


def is_loopback(host: str) -> bool:
    """Whether a name or address means this host, whatever a name server says."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def requested_run() -> tuple[str, list[str] | None] | None:
    """``dirpath`` and ``servers`` that the environment asks for; ``None`` if it asks for no run.

    Raises:
        SettingsError: if it does, and a value cannot be used.
    """
    if not os.environ.get(RUN_VARIABLE, "").strip():
        return None
    environment = read_environment()
    return environment.dirpath, list(environment.servers) or None


def environment_to_hand_over() -> dict[str, str]:
    """What a local server takes over of a trainer's environment: credentials, endpoints, proxies, and the like.

    Not what the process itself, or the way to it, depends on.
    """
    return {name: value for name, value in _from_anywhere().items() if _is_handed_over(name)}


def _is_handed_over(name: str) -> bool:
    credentials = ("LIGHTNING_SPOT_TOKEN", *_CREDENTIAL_FILES)
    return name in credentials or not name.startswith(_OF_THE_PROCESS)


def _from_anywhere() -> dict[str, str]:
    """The environment as a process reads it that runs in another directory."""
    files = {name: os.path.abspath(value) for name in _CREDENTIAL_FILES if (value := os.environ.get(name))}
    return {**os.environ, **files}


def take_environment(given: Mapping[str, str]) -> bool:
    """Make a trainer's environment that of this process, see :func:`environment_to_hand_over`; whether it differed."""
    known = environment_to_hand_over()
    changed = {name: value for name, value in given.items() if known.get(name) != value}
    changed = {name: value for name, value in changed.items() if _is_handed_over(name)}
    gone = known.keys() - given.keys()
    for name in gone:  # such as the session token of keys that have none now
        del os.environ[name]
    os.environ.update(changed)
    return bool(changed or gone)


def environment_of_server() -> tuple[dict[str, str], str]:
    """The environment to start a local server with, and the token, which is handed over apart."""
    environment = _from_anywhere()
    return environment, environment.pop("LIGHTNING_SPOT_TOKEN", "")


def take_token(given: str) -> None:
    """Use the token that was handed over, see :func:`environment_of_server`."""
    if given:
        os.environ["LIGHTNING_SPOT_TOKEN"] = given


def token_file() -> str | None:
    """The file that holds the secrets, if they are in one."""
    return None if os.environ.get("LIGHTNING_SPOT_TOKEN") else os.environ.get("LIGHTNING_SPOT_TOKEN_FILE") or None


def read_secrets() -> tuple[str, ...]:
    """The secrets that snapshot servers ask for: the first is sent and signs, a server accepts all; empty without any.

    Raises:
        SettingsError: if there are none where they should be; no error quotes one.
    """
    if text := os.environ.get("LIGHTNING_SPOT_TOKEN"):
        return (check_token("LIGHTNING_SPOT_TOKEN", text),)
    if (path := token_file()) is None:
        return ()
    name = f"LIGHTNING_SPOT_TOKEN_FILE={path!r}"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="ascii", errors="replace") as file:
            text = file.read(4 * LONGEST_TOKEN)  # a pipe that nobody writes to is empty
    except OSError as error:
        raise SettingsError(f"{name} cannot be read ({error.strerror}); fix or unset it") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > _MOST_SECRETS:
        raise SettingsError(f"{name} has {len(lines)} lines: it holds one secret, or two while they are changed")
    return tuple(check_token(name, line) for line in lines or [""])


def check_token(name: str, text: str) -> str:
    """Return a token without the blanks and line ends around it, as a Kubernetes secret has one.

    Args:
        name: where it was given.
        text: what was given; no error ever quotes it.

    Raises:
        SettingsError: if no header of HTTP can hold it.
    """
    token = text.strip()
    if not (0 < len(token) <= LONGEST_TOKEN and token.isascii() and token.isprintable() and " " not in token):
        raise SettingsError(
            f"{name} holds no token. A token has 1 to {LONGEST_TOKEN} printable ASCII characters, no blanks. Make one"
            " with: openssl rand -hex 16"
        )
    return token


def check_webhook(name: str, url: object) -> str | None:
    """Return the URL of a webhook, which may be ``None``.

    Args:
        name: where it was given.
        url: what was given; no error ever quotes it.

    Raises:
        SettingsError: if events cannot be sent there.
    """
    if url is None or (isinstance(url, str) and host_of_webhook(url)):
        return url
    raise SettingsError(
        f"{name} is no URL of a webhook (it is not shown, since it is a secret). Give https://host/path or http://, in"
        " ASCII, without user, password and blanks"
    )


def host_of_webhook(url: str) -> str:
    """Scheme and host of a webhook, as they may be shown; ``""`` if nothing can be sent to the URL."""
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # it would show a part of it
        return ""
    is_plain = url.isascii() and url.isprintable() and " " not in url and "@" not in parts.netloc
    return f"{parts.scheme}://{parts.netloc}" if has_host and is_plain and parts.scheme in ("http", "https") else ""


def why_weak(token: str | None) -> str:
    """Why strangers might guess a token; ``""`` if they cannot, or if there is none."""
    if token is None or len(token) >= SHORTEST_TOKEN:
        return ""
    return (
        f"the token for snapshot servers has fewer than {SHORTEST_TOKEN} characters: strangers may guess it. Make one"
        " with: openssl rand -hex 16"
    )


def check_number(name: str, value: object, least: float, *, above: bool = False, whole: bool = False) -> None:
    """Check a number that the user gave. None is infinite, nor so large that no clock could wait for as many seconds.

    Numpy's numbers pass, too: who keeps one makes it a plain one, which servers and snapshots can be told.

    Args:
        name: what it is called.
        value: what was given.
        least: the smallest that is allowed.
        above: whether ``least`` itself is not.
        whole: whether it must be a whole number.

    Raises:
        SettingsError: if it is no such number.
    """
    if isinstance(value, timedelta):
        raise SettingsError(f"{name}={value!r}: it is a number; of a timedelta, give its total_seconds()")
    is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if not (is_number and (value > least if above else value >= least)):  # type: ignore[operator] # a number
        bound = "more than" if above else "at least"
        raise SettingsError(f"{name}={value!r}: it is a {'whole ' if whole else ''}number, {bound} {least:g}")
    if value > LARGEST:  # type: ignore[operator] # a number
        raise SettingsError(f"{name}={value!r}: it is at most {LARGEST:,}")


def check_flag(name: str, value: object) -> None:
    """Check ``True`` or ``False``, also numpy's: a text such as ``"no"`` would be taken for ``True``.

    Raises:
        SettingsError: if it is neither.
    """
    if not (isinstance(value, bool) or (getattr(value, "dtype", None) == "bool" and getattr(value, "ndim", None) == 0)):
        raise SettingsError(f"{name}={value!r}: it is True or False")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Check one of a few values that the user gave.

    Args:
        name: what it is called.
        value: what was given.
        choices: what there is.

    Raises:
        SettingsError: if it is none of them.
    """
    refuse_old(f"{name}={value!r}")
    if value not in choices:
        raise SettingsError(f"{name}={value!r}: it is one of {', '.join(map(repr, choices))}")


def parse_bytes(text: str | float, setting: str = "", *, none: str = "") -> int:
    """Turn ``"8GiB"``, ``"512MB"`` or a plain whole number (``64e9``) into bytes.

    Args:
        text: what the user gave.
        setting: its name, for the error.
        none: what ``None`` stands for there, for the error; ``""`` where it cannot be given.

    Raises:
        SettingsError: if the text is no positive size.
    """
    if isinstance(text, float) and text.is_integer():
        text = int(text)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text), re.IGNORECASE)
    unit = _UNITS.get(match[2].lower(), 0) if match and not isinstance(text, float) else 0
    value = float(match[1]) * unit if match else 0.0
    if not 0 < value < _MOST_BYTES or (unit == 1 and not value.is_integer()):  # half a byte is a unit forgotten
        name = f"{setting}=" if setting else ""
        instead = f", or None for {none}" if none else ""
        raise SettingsError(f"{name}{text!r} is no size; write it like 8GiB, 512MB or 1073741824{instead}")
    return int(value)


def parse_flag_bytes(text: str, flag: str = "") -> int:
    """The same of what was typed at a command: a number as small as ``--memory-limit 8`` has lost its unit.

    Args:
        text: what was typed.
        flag: where, for the error.

    Raises:
        SettingsError: if it is no positive size, or so small that a unit is asked for.
    """
    nbytes = parse_bytes(text, flag)
    if nbytes < _LEAST_WITHOUT_A_UNIT and not any(map(str.isalpha, text)):
        number, where = text.strip(), f"{flag} " if flag else ""
        raise SettingsError(
            f"{where}{number}: that is {number} bytes. Give a unit, such as {number}MB or {number}GiB, or {number}B if"
            " bytes are meant"
        )
    return nbytes


def parse_seconds(text: str, setting: str = "") -> float:
    """Turn ``"90s"``, ``"10min"``, ``"2h"`` or ``"3d"`` into seconds; only 0 does without a unit.

    Args:
        text: what the user gave.
        setting: its name, for the error.

    Raises:
        SettingsError: if it is no duration.
    """
    match = re.fullmatch(r"([0-9.]+)\s*(s|min|h|d)", text.strip())
    try:
        value = float(match[1]) * _SECONDS[match[2]] if match else float(text)
    except ValueError:
        value = math.inf
    if not math.isfinite(value):
        raise SettingsError(f"{setting}{text!r} is no duration such as 90s, 10min, 2h or 3d")
    if match is None and value:
        raise SettingsError(f"{setting}{text!r} has no unit; write it like {text}s, {text}min, {text}h or {text}d")
    return value


def format_bytes(nbytes: float) -> str:
    """Write a size for people: ``1.26 GB``."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{int(nbytes)} B"


def format_count(count: int, one: str) -> str:
    """Write a number of things for people: ``1 snapshot``, ``2 snapshots``."""
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def format_seconds(seconds: float) -> str:
    """Write a duration for people: ``8.3 s``, ``12.5 min``, ``3.20 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.2f} h"


def format_names(names: Sequence[str]) -> str:
    """Write names for people: the first of many, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def check_run_name(run: str) -> str:
    """Return ``run`` if it can name a run in a URL and a directory.

    Raises:
        SettingsError: otherwise.
    """
    if not (isinstance(run, str) and _RUN_NAME.fullmatch(run)):
        raise SettingsError(
            f"run name {run!r} is not usable: it must start with a letter or digit and hold only letters, digits"
            " and '._=+-' (at most 128)"
        )
    return run


def why_no_place(url: str) -> str:
    """Why something names no directory, and no URL, ``""`` if it may."""
    if not url.strip():
        return "it is empty; give a directory or URL, such as checkpoints/run-1"
    if url.encode(errors="replace").decode() != url:
        return "it is not UTF-8; give a directory whose name is"
    if lost := re.match(r"([a-z][a-z0-9+.-]+):/(?!/)", url):  # it would be a directory on a disk that dies
        return f"a URL has two slashes, {lost[1]}://{url[lost.end() :]}; for a directory write ./{url}"
    if "://" in url and (_PASSWORD.search(url) or _SECRET.search(url)):
        return "a URL with a password ends in logs: configure it for fsspec, or in the environment, and leave it out"
    if why := _why_no_store(url) or _why_no_bucket(url):
        return why
    # The runs of all users and machines would be in one place of that name.
    if variable := _VARIABLE.search(_AZURES_OWN.sub("", url)):
        expanded = os.path.expandvars(url)
        way_on = f"give {expanded!r}" if expanded != url else "it is not set here"
        return f"{variable[0]} is not expanded, as a shell does it: {way_on}"
    return ""


def _why_no_store(url: str) -> str:
    """Why the file system of a URL cannot keep snapshots, ``""`` if it may."""
    scheme, separator, _ = url.partition("://")
    first, *others = scheme.lower().split("::")
    if separator and first not in (*BUCKET_SCHEMES, *_DIRECTORIES, *SERVER_SCHEMES):
        return (
            f"{first}{'::' if others else '://'} cannot keep snapshots. Give a directory, of a mount too, or a bucket:"
            " gs://, az:// or s3://, which is for other stores that speak S3, too (set AWS_ENDPOINT_URL)"
        )
    if separator and "::" in url:
        return "'::' makes fsspec take it for several file systems, one upon the other: give the URL of one"
    return ""


def _why_no_bucket(url: str) -> str:
    """Why the URL of an object store names no place in it, ``""`` if it may, or is that of another file system."""
    scheme, separator, below = url.partition("://")
    bucket, _, path = below.partition("/")
    if not separator or scheme.lower() not in BUCKET_SCHEMES:
        return ""
    named = bucket + (path.partition("/")[0] if scheme.lower() in _AZURE else "")  # adlfs takes both for a host
    if "\\" in below or "[" in named or "]" in named:
        return "some libraries take \\, [ and ] there for something else than names: leave them out"
    if not bucket:
        return f"it names no bucket, as {scheme}://bucket/run-1 does: is a variable in it empty?"
    return ""


def without_password(url: str) -> str:
    """A URL as it may be shown: where it has a user, a token may stand there, too."""
    shown = _SECRET.sub("…", (_PASSWORD if "://" in url else _BARE_PASSWORD).sub("…", url))
    return shown if scheme_of(url) in BUCKET_SCHEMES else _USER.sub("…", shown)


def names_server(url: str) -> bool:
    """Whether a URL is that of a snapshot server, or of a run at one."""
    return url.startswith(("spot:", "spots:"))


def scheme_of(url: str) -> str:
    """The scheme of a URL in its one spelling; ``""`` of a directory, which may be given as ``file://``."""
    scheme, separator, _ = url.partition("://")
    return "" if not separator or scheme.lower() in _DIRECTORIES else plain_scheme(scheme)


def directory_of(url: str) -> str:
    """The path of a directory, which may be given as ``file://`` or ``local://``."""
    scheme, separator, below = url.partition("://")
    return below if separator and scheme.lower() in _DIRECTORIES else url


def plain_url(url: str) -> str:
    """A durable URL in the one spelling that names its place: ``s3a://bucket//run/`` is ``s3://bucket/run``."""
    scheme, separator, below = url.partition("://")
    if not separator or "::" in scheme:
        return url.rstrip("/") or url
    host, _, path = below.partition("/")
    names = "/".join(name for name in path.split("/") if name)
    return f"{plain_scheme(scheme)}://{host}" + (f"/{names}" if names else "")


def plain_scheme(scheme: str) -> str:
    """The one name of a URL's scheme that has several."""
    return _SCHEMES.get(scheme.lower(), scheme.lower())


def run_key(url: str) -> str:
    """Short stable key of a run's durable URL, used to name its local server's record and memory area."""
    return hashlib.sha256(f"{os.getuid()}:{url}".encode()).hexdigest()[:16]
