"""Whoever was overtaken changes nothing at a durable tier: every change is refused, whenever the other one came."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_spot.client.stores import open_store
from lightning_spot.errors import FencedError
from lightning_spot.store.fences import Owner, digest_of
from lightning_spot.store.store import Store
from tests.support.oracle import claim_of
from tests.support.store import Kept, fetched, parts_of, put, snapshot

pytestmark = pytest.mark.guarantee("G15")

THERE, DATA = snapshot(5)
OTHER, MORE = snapshot(6)


@pytest.fixture(params=["local", "kept"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else f"kept://runs/{os.urandom(6).hex()}"


def mine(url: str) -> Store:
    """The store of the first attempt."""
    store = open_store(url)
    store.owner = Owner(1, digest_of("mine"))
    return store


def take_over(url: str) -> None:
    """Have somebody else hold the number of the first attempt."""
    files, root = fsspec.core.url_to_fs(url)
    files.rm_file(f"{root}/attempts/attempt-0001.json")
    open_store(url).claim(claim_of(1, token="another"))


def names(url: str) -> set[str]:
    files, root = fsspec.core.url_to_fs(url)
    return {Path(path).name for path in files.find(root)}


CHANGES: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put(OTHER, memoryview(MORE), attempt=1),
    "put-what-is-there": lambda store: store.put(THERE, memoryview(DATA), attempt=1),
    "put-in-parts": lambda store: store.put_parts(replace(OTHER, checksums=()), parts_of(MORE), attempt=1),
    "delete": lambda store: store.delete(THERE),
    "sweep": lambda store: store.sweep(THERE),
    "claim": lambda store: store.claim(claim_of(1, token="mine")),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("by", ["later", "same-number"])
def test_nothing_is_changed_for_who_was_overtaken(url: str, change: str, by: str) -> None:
    store = mine(url)
    if change != "claim" or by == "same-number":
        store.claim(claim_of(1, token="mine"))
    if by == "later":
        open_store(url).claim(claim_of(2))
    else:
        take_over(url)
    other = open_store(url)
    put(other, 5, by=2)
    before = names(url)
    with pytest.raises(FencedError):
        CHANGES[change](store)
    assert names(url) == before
    assert fetched(other, THERE) == DATA


@pytest.mark.parametrize("change", ["put", "put-in-parts"])
def test_without_an_owner_the_number_counts(url: str, change: str) -> None:
    store = open_store(url)
    store.claim(claim_of(2))
    with pytest.raises(FencedError):
        CHANGES[change](store)
    assert store.survey().manifests == []


def test_who_is_overtaken_while_its_bytes_come_leaves_none(url: str) -> None:
    store = mine(url)
    store.claim(claim_of(1, token="mine"))

    def parts() -> Iterator[memoryview]:
        coming = parts_of(MORE)
        yield next(coming)
        take_over(url)
        yield from coming

    with pytest.raises(FencedError):
        store.put_parts(replace(OTHER, checksums=()), parts(), attempt=1)
    assert names(url) == {"attempt-0001.json"}


@pytest.mark.parametrize("after", [OTHER.data_path, OTHER.manifest_path], ids=["bytes", "manifest"])
def test_a_writer_fenced_after_its_upload_commits_nothing(monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    """Also where the other one's claim comes after the last look at it, while the manifest is written."""
    url = f"kept://runs/{os.urandom(6).hex()}"
    store = mine(url)
    store.claim(claim_of(1, token="mine"))
    pipe, written = Kept.pipe_file, list[str]()

    def then_overtaken(files: Kept, path: str, value: bytes, **more: Any) -> None:
        pipe(files, path, value, **more)
        if path.endswith(after):
            written.clear()
            take_over(url)
        written.append(path)

    monkeypatch.setattr(Kept, "pipe_file", then_overtaken)
    with pytest.raises(FencedError):
        store.put(OTHER, memoryview(MORE), attempt=1)
    assert store.survey().manifests == []
    assert [Path(path).name for path in written] == ["attempt-0001.json", Path(after).name], "it may replace another's"


def test_what_the_other_of_two_starts_has_stored_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loser finds the winner's snapshot in place of its own."""
    url = f"kept://runs/{os.urandom(6).hex()}"
    store, there = mine(url), replace(OTHER, created_unix_s=1.0)
    store.claim(claim_of(1, token="mine"))
    pipe = Kept.pipe_file

    def then_overtaken(files: Kept, path: str, value: bytes, **more: Any) -> None:
        pipe(files, path, value, **more)
        if path.endswith(OTHER.manifest_path):
            monkeypatch.undo()
            take_over(url)
            open_store(url).put(there, memoryview(MORE), attempt=1)

    monkeypatch.setattr(Kept, "pipe_file", then_overtaken)
    with pytest.raises(FencedError):
        store.put(OTHER, memoryview(MORE), attempt=1)
    assert store.survey().manifests == [there]
    assert fetched(store, there) == MORE
