"""Opens what is at a tier's URL."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_spot.client.remote import ServerStore
from lightning_spot.config import SERVER_SCHEMES, directory_of, scheme_of
from lightning_spot.server.tier import no_storage
from lightning_spot.store.local import LocalStore
from lightning_spot.store.objects import ObjectStore
from lightning_spot.store.store import Store


def open_store(url: str, beneath: Sequence[str] | None = None) -> Store:
    """The storage of a run: a directory, or a URL in a bucket.

    Args:
        url: of the run.
        beneath: of a server that acts for others, below which prefixes a directory must be, see :class:`LocalStore`.

    Raises:
        SettingsError: if the URL is malformed or its file system is not installed.
        TierError: if a directory is below none of these prefixes.
    """
    scheme = scheme_of(url)
    if scheme in SERVER_SCHEMES:
        raise no_storage(url)
    if not scheme:
        return LocalStore(directory_of(url), beneath)
    return ObjectStore(url, is_lent=beneath is not None)


def open_tier(url: str, beneath: Sequence[str] | None = None) -> Store | ServerStore:
    """The storage of a run, see :func:`open_store`, or a snapshot server, for ``spot://host:port/run``."""
    return ServerStore(url) if scheme_of(url) in SERVER_SCHEMES else open_store(url, beneath)
