"""Which durable URLs an operator lets a node write to: those at or below one of the prefixes given."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lightning_spot.config import directory_of, scheme_of
from lightning_spot.errors import SettingsError
from lightning_spot.image.manifest import OWN_DIR, snapshot_order
from lightning_spot.tiers.claims import ATTEMPTS_DIR


def refusal(url: str, prefixes: Sequence[str]) -> str:
    """Why a node may not write to ``url``, for people; ``""`` if it may.

    Args:
        url: durable directory of a run: a path, ``file://…`` or an fsspec URL.
        prefixes: what the operator allowed.
    """
    try:
        wanted = _segments(url)
    except SettingsError as error:
        return str(error)
    if inside := next((name for name in wanted[2:] if is_own_folder(name)), None):
        return f"{url} is no directory of a run: {inside!r} is a folder of lightning_spot. Give another directory"
    for prefix in prefixes:
        allowed = _segments(prefix)
        if wanted[: len(allowed)] == allowed:
            return ""
    listed = ", ".join(prefixes) or "nothing"
    return (
        f"this node may not write to {url} (allowed: {listed}). Its operator can start it with"
        f" --allow-storage {url.rstrip('/').rpartition('/')[0] or url}; until then the trainer's host writes there"
    )


def is_own_folder(name: str) -> bool:
    """Whether a folder of that name, within a run, is lightning_spot's: a run in it could forge what it holds."""
    return name in (ATTEMPTS_DIR, OWN_DIR) or snapshot_order(name) is not None


def check_prefix(prefix: str) -> str:
    """Return a prefix as given if it can be compared.

    Raises:
        SettingsError: otherwise.
    """
    _segments(prefix)
    return prefix


def _segments(url: str) -> list[str]:
    """Scheme, host and path segments of a URL, so that ``s3://b/run-evil`` does not pass for ``s3://b/run``."""
    if "::" in url or any(ord(character) < 32 or character in "\\?#" for character in url):
        raise SettingsError(f"{url!r} cannot be compared with the prefixes that a node may write to: write it plainly")
    if not (scheme := scheme_of(url)):
        directory = directory_of(url)
        if not directory.startswith("/"):
            raise SettingsError(f"{url!r} is no absolute path")
        if ".." in directory.split("/"):
            raise SettingsError(f"{url!r} climbs with '..'")
        return ["file", "", *[name for name in os.path.realpath(directory).split("/") if name]]
    bucket, _, path = url.partition("://")[2].partition("/")
    names = path.strip("/").split("/") if path.strip("/") else []
    if not bucket or any(name in ("", ".", "..") for name in names):
        raise SettingsError(f"{url!r} has no bucket, or a path with empty names or dots")
    return [scheme, bucket, *names]
