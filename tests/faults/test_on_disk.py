"""What was said to be durable outlives the page cache: what is synced, renamed and removed, in which order.

``kill -9`` cannot test that.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.cli import main
from lightning_spot.client.stores import open_store
from lightning_spot.errors import TierError
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.local import LocalStore
from lightning_spot.store.posix import temporary_owner
from tests.support.oracle import claim_of, image_of, manifest_of
from tests.support.store import Kept

pytestmark = pytest.mark.guarantee("G16")

NAME = manifest_of(1).name
REAL: dict[str, Callable[..., Any]] = {
    name: getattr(os, name) for name in ("rename", "replace", "link", "unlink", "mkdir")
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, by the names of files; clear it when what is of interest begins."""
    done: list[str] = []
    real_fsync = os.fsync

    def called(path: Any) -> str:
        name = Path(path).name
        return "temporary" if temporary_owner(name) is not None else name

    def fsync(fd: int) -> None:
        done.append(f"fsync {called(os.readlink(f'/proc/self/fd/{fd}'))}")
        real_fsync(fd)

    def noted(name: str) -> Callable[..., Any]:
        def call(*paths: Any, **more: Any) -> Any:
            result = REAL[name](*paths, **more)
            done.append(" ".join([name, *map(called, paths)]))
            return result

        return call

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace", "link", "unlink"):
        monkeypatch.setattr(os, name, noted(name))
    return done


def put(store: LocalStore, step: int = 1, manifest: Manifest | None = None) -> Manifest:
    image = memoryview(image_of(step))
    sealed = (manifest or manifest_of(step)).sealed(image)
    store.put(sealed, image, attempt=1)
    return sealed


def test_the_very_same_once_more_is_on_the_disk(tmp_path: Path, calls: list[str]) -> None:
    """A server that was killed may have written it, and not synced it."""
    store = LocalStore(tmp_path / "run")
    put(store)
    calls.clear()
    put(store)
    assert calls == [f"fsync {NAME}", "fsync run"]


def test_of_a_deletion_the_manifest_goes_first(tmp_path: Path, calls: list[str]) -> None:
    store = LocalStore(tmp_path / "run")
    manifest = put(store)
    calls.clear()
    store.delete(manifest)
    assert calls == ["unlink manifest.json", f"fsync {NAME}", "unlink model.ckpt"]


def test_of_a_deletion_in_a_bucket_the_manifest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"kept://runs/{os.urandom(6).hex()}")
    image = memoryview(image_of(1))
    manifest = manifest_of(1).sealed(image)
    store.put(manifest, image, attempt=1)
    remove = Kept.rm_file

    def fails(files: Kept, path: str) -> None:
        if path.endswith("model.ckpt"):
            raise OSError(errno.EIO, "it fails")
        remove(files, path)

    monkeypatch.setattr(Kept, "rm_file", fails)
    with pytest.raises(TierError):
        store.delete(manifest)
    assert store.survey().manifests == []


def test_no_old_manifest_stands_beside_new_bytes(tmp_path: Path, calls: list[str]) -> None:
    store = LocalStore(tmp_path / "run")
    mine = replace(manifest_of(1), name="mine.ckpt", file="")
    put(store, 1, mine)
    calls.clear()
    put(store, 3, replace(mine, step=3))
    noted = Path(mine.manifest_path).name
    assert calls == [
        *("fsync temporary", "fsync temporary", f"replace temporary {noted}", "fsync .lightning_spot"),
        *("replace temporary mine.ckpt", "fsync run"),
        *("fsync temporary", f"replace temporary {noted}", "fsync .lightning_spot", "fsync run"),
    ]


def test_a_claim_is_on_the_disk_whoever_wrote_it(tmp_path: Path, calls: list[str]) -> None:
    store = LocalStore(tmp_path / "run")
    claim = claim_of(1)
    store.claim(claim)
    assert calls[-4:] == [
        *("fsync temporary", "link temporary attempt-0001.json"),
        *("unlink temporary", "fsync attempts"),
    ]
    calls.clear()
    store.claim(claim)
    assert calls == ["fsync attempts"]


def test_a_claim_is_on_the_disk_without_hard_links(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links here")

    monkeypatch.setattr(os, "link", link)
    LocalStore(tmp_path / "run").claim(claim_of(1))
    assert calls[-3:] == ["fsync attempt-0001.json", "unlink temporary", "fsync attempts"]


def test_a_hosts_file_is_on_the_disk_before_it_is_noted(tmp_path: Path, calls: list[str]) -> None:
    folder = LocalStore(tmp_path).folder(NAME, attempt=1, run_id="")
    folder.write("__0_0.distcp", memoryview(random.Random(1).randbytes(100)))
    assert calls[-3:] == ["fsync temporary", "replace temporary __0_0.distcp", f"fsync {NAME}"]


def test_folders_made_for_others_are_on_the_disk(tmp_path: Path, calls: list[str]) -> None:
    LocalStore(tmp_path / "team" / "run", beneath=[str(tmp_path)]).made()
    assert calls == [f"fsync {tmp_path.name}", "fsync team"]


def test_what_cp_writes_is_on_the_disk(tmp_path: Path, calls: list[str]) -> None:
    put(LocalStore(tmp_path / "run"))
    calls.clear()
    assert main(["cp", str(tmp_path / "run"), str(tmp_path / "weights.ckpt")]) == 0
    done = [call.split() for call in calls if call.startswith(("fsync", "replace"))]
    (_, synced), (_, renamed, target) = done[-2:]
    assert (synced, target) == (renamed, "weights.ckpt")


def test_what_is_there_but_damaged_is_written_anew(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    manifest = put(store)
    data = tmp_path / manifest.data_path
    data.write_bytes(bytes(data.stat().st_size))
    put(store)
    assert data.read_bytes() == image_of(1)


@pytest.mark.parametrize(("step", "names"), [(1, ["model.ckpt"]), (2, [".metadata", "__0_0.distcp"])])
def test_bytes_reach_the_disk_before_names_and_the_manifest_last(
    tmp_path: Path, calls: list[str], step: int, names: list[str]
) -> None:
    image, store = memoryview(image_of(step)), LocalStore(tmp_path / "run")
    (tmp_path / "run").mkdir()
    manifest = manifest_of(step).sealed(image)
    store.put(manifest, image, attempt=1)
    assert calls == [
        "fsync run",  # in which the snapshot's folder was made
        *("fsync temporary" for _ in names),
        *(f"replace temporary {name}" for name in names),
        f"fsync {manifest.name}",
        *("fsync temporary", "replace temporary manifest.json", f"fsync {manifest.name}"),
        "fsync run",  # another writer may have made that folder, and been killed before it synced its name
    ]
