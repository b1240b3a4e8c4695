"""The fsspec file system of a URL, and what all uses of one share: its event loop, connections and errors.

Buckets are never made. A connection on which no byte moves is given up: the libraries' own time-outs do not suffice.
gcsfs has none, none of them notices a store that takes no bytes, and what is tried again may get the next dead
connection of a pool. All of them connect through asyncio, so one bound holds there for every library: it sees the
connection lost, and sends the request again on a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import logging
import os
import random
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import fsspec
import fsspec.config
from fsspec.asyn import AsyncFileSystem

from lightning_spot.config import BUCKET_SCHEMES, read_environment, why_no_place, without_password
from lightning_spot.errors import SettingsError, SnapshotNotFoundError, SpotError, TierError, TierReason
from lightning_spot.say import say
from lightning_spot.threads import in_background, in_turn

logger = logging.getLogger(__name__)

_EXTRAS = {
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "gcs")),
    **dict.fromkeys(("az", "abfs", "abfss"), ("adlfs", "azure")),
}
"""Of schemes whose file system is not installed with this package: which it is, and the extra that installs it."""

_TRIAL = ".lightning-spot-trial"

_NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"})
"""Botocore's and Google's names for it; where neither is installed, none of theirs is raised."""


def _credentials(url: str) -> str:
    """What to set where credentials are missing."""
    if url.startswith("s3"):
        return "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if url.startswith("g"):
        return "Set GOOGLE_APPLICATION_CREDENTIALS"
    return "Set those of its file system"


def open_filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL, without a cache of listings, and the path in it.

    Raises:
        SettingsError: if the URL is malformed or its file system is not installed.
        TierError: if its file system connects at once, and that fails.
    """
    if why := why_no_place(url):
        raise SettingsError(f"{without_password(url)!r} cannot be used as a tier: {why}")
    with tier_errors(url):
        try:
            files, path = fsspec.core.url_to_fs(url.rstrip("/"), use_listings_cache=False, **_options(url))
        except (ImportError, ValueError) as error:
            raise SettingsError(
                f"{without_password(url)!r} cannot be used as a tier: {_why_not_opened(url, error)}"
            ) from error
    _draw_apart()
    return files, path.rstrip("/")


def forget_listings(url: str) -> None:
    """Have this thread's plain file system of a URL list anew: other processes, such as servers, write there, too.

    Lightning, and whoever opens a URL, gets that one: a file that its listing does not have is not found. Other kinds
    of file systems may connect when they are made, and keep no listings.
    """
    if url.partition("://")[0].lower() in BUCKET_SCHEMES:
        fsspec.core.url_to_fs(url)[0].invalidate_cache()


def _why_not_opened(url: str, error: Exception) -> str:
    """Why a URL has no file system here, and what to do."""
    package, extra = _EXTRAS.get(url.partition("://")[0], ("", ""))
    if package and isinstance(error, ImportError) and importlib.util.find_spec(package) is None:
        return f"{package} is not installed: pip install 'lightning_spot[{extra}]'"
    return f"{error}. Give a directory, or a URL such as s3://bucket/run whose file system is installed"


_CREDENTIALS = re.compile(
    r"expired|credential|token|signature|access ?key|unauthori[sz]ed|forbidden|denied|40[13]", re.I
)
"""In the class or text of an error: what was read of credentials, when a session began, may have been renewed since."""


def forget_sessions() -> None:
    """Have the next file system of each URL begin a session of its own: credentials are read again, from files too."""
    fsspec.config.set_conf_env(fsspec.config.conf)
    for kind in list(fsspec.registry.values()):
        kind.clear_instance_cache()


_DRAWS = (
    "aiohttp.connector",
    "botocore.retries.standard",
    "botocore.retryhandler",
    "botocore.utils",
    "gcsfs.retry",
    "google.api_core.retry.retry_base",
    "google.auth._exponential_backoff",
)
"""Modules that draw how long a request waits before it is tried again, and the like."""

_APART = random.Random()


def _draw_apart() -> None:
    """Have the libraries draw from a generator of their own.

    From that of the process, the random numbers of a training would depend on how often a request has failed.
    """
    for module in filter(None, map(sys.modules.get, _DRAWS)):
        if getattr(module, "random", None) is random:
            module.random = _APART  # type: ignore[attr-defined]
    standard = sys.modules.get("botocore.retries.standard")
    if (pauses := getattr(standard, "ExponentialBackoff", None)) is not None:  # it has the function as a default
        given = pauses.__init__.__defaults__ or ()
        pauses.__init__.__defaults__ = tuple(_APART.random if each == random.random else each for each in given)


def _options(url: str) -> dict[str, Any]:
    """An event loop and bounds of ours; what the user has configured for botocore stands."""
    scheme = fsspec.core.split_protocol(url)[0] or "file"
    if not issubclass(fsspec.get_filesystem_class(scheme), AsyncFileSystem):
        return {}
    if scheme not in ("s3", "s3a"):
        return {"loop": loop_of(url)}
    own: dict[str, Any] = {}
    for name in ("s3a", "s3"):
        own |= dict(fsspec.config.conf.get(name, {})).get("config_kwargs") or {}
    # The read timeout of s3fs, 15 s, would come first, unnamed.
    ours = {"max_pool_connections": REQUESTS, "read_timeout": 2 * SILENT_S}
    return {"loop": loop_of(url), "config_kwargs": {**ours, **own}}


def is_s3(files: Any) -> bool:
    """Whether a file system is that of S3, of which more can be asked."""
    return hasattr(files, "call_s3")


def try_writing(url: str) -> None:
    """Write a small object directly below a URL, and remove it.

    Raises:
        SettingsError: if the URL is malformed or its file system is not installed.
        TierError: if it cannot be written.
    """
    files, root = open_filesystem(url)
    path = f"{root}/{_TRIAL}"
    with tier_errors(url):
        files.pipe_file(path, b"lightning_spot")
        with contextlib.suppress(Exception):  # another server may have removed it, or nothing may be removed there
            files.rm_file(path)


def check_bucket(files: Any, root: str, url: str) -> None:
    """Fail if the bucket of an object store is not there.

    Raises:
        TierError: in that case.
    """
    bucket = root.split("/")[0]
    try:
        there = files.exists(bucket)
    except FileNotFoundError:
        there = False
    if not there:
        raise TierError(
            f"bucket {bucket!r} of {url} does not exist, or may not be listed with these credentials. Make it first:"
            " lightning_spot makes none",
            tier=url,
        )


@contextlib.contextmanager
def tier_errors(url: str, *, reading: bool = False) -> Iterator[None]:
    """Turn errors of the library into ours.

    Args:
        url: of the tier.
        reading: whether an object that is not there is :class:`SnapshotNotFoundError`; when writing it is a tier that
            fails.
    """
    try:
        yield
    except SpotError:
        raise
    except FileNotFoundError as error:
        gone = f"{str(error).removesuffix('does not exist').rstrip()} does not exist"  # s3fs says so itself of a bucket
        if reading:
            raise SnapshotNotFoundError(f"{url}: {gone}") from error
        raise TierError(f"{url}: {gone}", tier=url) from error
    except Exception as error:  # every cloud library has errors of its own; all mean that this tier failed
        if sys.is_finalizing():  # a daemon thread, from under which modules go: nobody waits for it
            raise SystemExit from error
        if type(error).__name__ in _NO_CREDENTIALS:
            raise TierError(
                f"no credentials were found for {url} ({error}). {_credentials(url)}, or give this machine a role that"
                " may use the bucket",
                tier=url,
                reason=TierReason.NO_CREDENTIALS,
            ) from error
        why = words_of(error)
        if isinstance(error, PermissionError) or _CREDENTIALS.search(why):
            forget_sessions()
        raise TierError(f"{url}: {why}{_way_on(url, code_of(error))}", tier=url) from error


_MAYBE_CHECKSUMS = frozenset(
    {"400", "501", "InvalidArgument", "InvalidRequest", "MissingContentLength", "NotImplemented", "NotSupported"}
)
"""What stores answer that do not know the checksums which AWS's libraries add to each PUT since botocore 1.36."""


_LONGEST_WORDS = 300
"""Of an answer that is a page of a gateway, nobody reads more."""


def words_of(error: BaseException) -> str:
    """What an error of a library says, in one line: its class, its words and the code of the store's answer."""
    why = str(error).removesuffix("None")  # as s3fs says where a store sends no message
    why = re.split(r"\n(?:RequestId|ErrorCode):", why)[0]  # Azure's library adds all that was answered, as XML
    if isinstance(error, NotImplementedError):  # fsspec says no more
        why = why or "the file system of this URL cannot be written to, or not in this way"
    why = " ".join(why.split())
    if len(why) > _LONGEST_WORDS:
        why = f"{why[:_LONGEST_WORDS]}…"
    if (code := code_of(error)) not in why:
        why = f"{why} ({code})" if why else code
    return f"{type(error).__name__}: {why}" if why else type(error).__name__


def code_of(error: BaseException) -> str:
    """The code of a store's answer, which libraries leave out of their texts; ``""`` if there is none."""
    for one in filter(None, (error, error.__cause__)):
        response = getattr(one, "response", None)
        if isinstance(response, dict):  # botocore's; of an answer without a code there is the status
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return str(response.get("Error", {}).get("Code") or status or "")
        if code := getattr(one, "error_code", None):  # Azure's
            return str(getattr(code, "value", code))
        for name in ("status", "status_code", "code"):  # aiohttp's, Azure's and gcsfs's
            if isinstance(number := getattr(one, name, None), int):
                return str(int(number))
    return ""


def _way_on(url: str, code: str) -> str:
    """What may help against an error with that code."""
    if url.startswith("s3") and code in _MAYBE_CHECKSUMS and read_environment().aws_checksums is None:
        return ". If this store is not AWS, set AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
    return ""


T = TypeVar("T")

SILENT_S = 20.0
"""How long no byte may move on a connection. The libraries keep an unused one for 15 s at most."""

CONNECT_S = 10.0
_LOOKS = 8  # at each connection in SILENT_S; counted, so that a process that was stopped gives nothing up
_TCP_INFO = getattr(socket, "TCP_INFO", None)  # Linux only
_FACTS = struct.Struct("=44xI4xI64xQQ")  # the last two since Linux 4.1


class StoreLoop(asyncio.SelectorEventLoop):
    """An event loop that bounds connecting, and gives up connections on which no byte moves for :data:`SILENT_S`.

    Args:
        store: scheme and bucket, for messages.

    Attributes:
        silent: what was given up last, ``""`` if nothing was.
    """

    def __init__(self, store: str) -> None:
        super().__init__()
        self._store = store
        self.silent = ""
        self._count = 0
        # Asyncio resolves names in a pool whose threads Python waits for: minutes where no name server answers.
        self.set_default_executor(_Daemons())

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Connect, within a bound."""
        try:
            await asyncio.wait_for(super().sock_connect(sock, address), CONNECT_S)
        except TimeoutError as error:
            raise TimeoutError(f"no connection within {CONNECT_S:.0f} s") from error

    async def create_connection(self, *arguments: Any, **more: Any) -> Any:
        """Connect, and watch the connection."""
        if more.get("ssl"):
            more.setdefault("ssl_handshake_timeout", SILENT_S)
        transport, protocol = await super().create_connection(*arguments, **more)
        self._look(transport, protocol, [], 0)
        return transport, protocol

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Log what nobody waits for, such as clients that s3fs closes on another loop than theirs."""
        logger.debug("%s: %s", self._store, context.get("message"), exc_info=context.get("exception"))

    def _look(self, transport: Any, protocol: Any, before: list[int], still: int) -> None:
        if transport.is_closing() or (facts := _facts(transport)) is None:
            return
        sent_ago, received_ago, *moved = facts
        still = still + 1 if moved == before else 0
        if still < _LOOKS:
            self.call_later(SILENT_S / _LOOKS, self._look, transport, protocol, moved, still)
            return
        # A request is under way: the last byte went out, or an answer is unfinished, as aiohttp tells.
        if not moved[1] or sent_ago < received_ago or getattr(protocol, "should_close", False):
            self._warn()
        transport.abort()

    def _warn(self) -> None:
        self.silent = f"{self._store}: no byte moved for {SILENT_S:.0f} s"
        self._count += 1
        say(
            logging.WARNING,
            "storage-silent",
            "{about} ({count} so far). The request is sent again on a new connection. If this repeats, check the store"
            " and the network to it.",
            about=self.silent,
            count=self._count,
        )


def loop_of(url: str) -> StoreLoop:
    """The running loop of a URL's bucket in this process; started if there is none."""
    key = _key(url)
    if (loop := _LOOPS.get(key)) is None:
        made = StoreLoop(key[1])
        threading.Thread(target=made.run_forever, name="spot-store-loop", daemon=True).start()
        if (loop := _LOOPS.setdefault(key, made)) is not made:
            made.call_soon_threadsafe(made.stop)
    return loop


def silent(url: str) -> str:
    """What was given up last at a URL's bucket by this process, ``""`` if nothing was."""
    loop = _LOOPS.get(_key(url))
    return loop.silent if loop is not None else ""


_LOOPS: dict[tuple[int, str], StoreLoop] = {}
"""By process (none runs in a forked child) and bucket."""


def _key(url: str) -> tuple[int, str]:
    return os.getpid(), "/".join(without_password(url).split("/")[:3])


def _facts(transport: Any) -> tuple[int, ...] | None:
    """How long ago bytes were last sent and received; how many the other end has acknowledged, and sent.

    ``None`` if the kernel does not count them.
    """
    connection = transport.get_extra_info("socket")
    if _TCP_INFO is None or connection is None:
        return None
    try:
        facts = _FACTS.unpack_from(connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256))
    except (OSError, struct.error):  # closed, no TCP, or an older kernel
        return None
    return facts if facts[2] else None  # what counts has counted the handshake


class _Daemons(ThreadPoolExecutor):
    """No pool at all, though asyncio takes nothing else: each call has a daemon thread of its own."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call ``fn``."""
        return in_background(functools.partial(fn, *args, **kwargs), "spot-asyncio")


_CONNECTIONS = 16
"""Over which parts move at once: S3 gives 45–90 MB/s to each. With parts of 8 MiB, 128 MiB are under way."""

REQUESTS = 32
"""At once, with those that ask beside."""

_IN_FLIGHT_BYTES = 128 * 1024 * 1024


def connections(part_bytes: int) -> int:
    """Over how many connections parts of at most so many bytes move at once."""
    return max(1, min(_CONNECTIONS, _IN_FLIGHT_BYTES // max(1, part_bytes)))


def move(jobs: Iterable[Callable[[], None]], part_bytes: int) -> None:
    """Do all jobs, in any order; the next one is asked for when a connection is free.

    When this returns or raises no job is running any more.

    Args:
        jobs: each moves a part.
        part_bytes: most bytes of one of them.

    Raises:
        Exception: the first error of a job, or of ``jobs`` itself; what was not begun is not done then.
    """
    in_turn(jobs, lambda job: job(), connections(part_bytes), "spot-transfer")
