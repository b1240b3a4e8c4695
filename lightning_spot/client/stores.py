"""Opens the right store for a tier's URL."""

from __future__ import annotations

from urllib.parse import urlsplit

from lightning_spot.client.remote import NodeStore
from lightning_spot.client.spread import SpreadStore
from lightning_spot.tiers.local import LocalStore
from lightning_spot.tiers.objects import ObjectStore
from lightning_spot.tiers.store import Store


def open_store(url: str) -> Store:
    """The store of a run's URL: a directory, ``spot://host:port/run``, or any fsspec URL.

    Raises:
        SettingsError: if the URL is malformed or its file system is not installed.
    """
    scheme = urlsplit(url).scheme
    if scheme == "spot":
        return NodeStore(url)
    if scheme == "spread":
        return SpreadStore(url)
    if scheme in ("", "file"):
        return LocalStore(url.removeprefix("file://"))
    return ObjectStore(url)
