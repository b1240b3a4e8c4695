"""The fsspec file system of a URL, and what all uses of one share: buckets are never made, errors are ours."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import re
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import fsspec
import fsspec.config
from fsspec.asyn import AsyncFileSystem

from lightning_spot.config import BUCKET_SCHEMES, read_environment, why_no_place, without_password
from lightning_spot.errors import SettingsError, SnapshotNotFoundError, SpotError, TierError, TierReason
from lightning_spot.tiers.connections import SILENT_S, loop_of
from lightning_spot.tiers.transfers import REQUESTS

_EXTRAS = {
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "gcs")),
    **dict.fromkeys(("az", "abfs", "abfss"), ("adlfs", "azure")),
}
"""Of schemes whose file system is not installed with this package: which it is, and the extra that installs it."""

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
    """Have this thread's plain file system of a URL list anew: other processes, such as nodes, write there, too.

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


def time_of(fact: dict[str, Any]) -> float:
    """When a file was changed, as file systems say it in different ways: seconds since 1970, 0 if they do not."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = fact.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0


def speaks(files: Any, protocols: frozenset[str] = BUCKET_SCHEMES) -> bool:
    """Whether a file system is of one of these protocols; default: whether it is an object store with buckets."""
    own = files.protocol
    return bool(protocols & frozenset(own if isinstance(own, (tuple, list)) else (own,)))


def make_parent(files: Any, path: str) -> None:
    """Make the folder of a path where there are real folders; object stores have none, and s3fs would make a bucket."""
    if not speaks(files):
        files.makedirs(path.rpartition("/")[0], exist_ok=True)


def check_bucket(files: Any, root: str, url: str) -> None:
    """Fail if the bucket of an object store is not there.

    Raises:
        TierError: in that case.
    """
    if not speaks(files):
        return
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
        raise TierError(f"{url}: {why}{_way_on(url, _code_of(error))}", tier=url) from error


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
    if (code := _code_of(error)) not in why:
        why = f"{why} ({code})" if why else code
    return f"{type(error).__name__}: {why}" if why else type(error).__name__


def _code_of(error: BaseException) -> str:
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
