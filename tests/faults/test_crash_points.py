"""The order of fsync and rename, which kill -9 alone cannot test: a reclaimed VM loses its page cache.

``tests/faults/test_crash.py`` strikes at every step of a commit.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_spot.store.local import LocalStore
from tests.support.oracle import image_of, manifest_of

pytestmark = pytest.mark.guarantee("G16")


@pytest.mark.parametrize(("step", "names"), [(1, ["model.ckpt"]), (2, [".metadata", "__0_0.distcp"])])
def test_bytes_reach_the_disk_before_names_and_the_manifest_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, names: list[str]
) -> None:
    calls: list[str] = []

    def name_of(fd: int) -> str:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        return "directory" if path.is_dir() else "file"

    real_fsync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(f"fsync {name_of(fd)}"), real_fsync(fd)))
    monkeypatch.setattr(
        os,
        "replace",
        lambda source, target: (calls.append(f"rename {Path(target).name}"), real_replace(source, target)),
    )
    image = memoryview(image_of(step))
    LocalStore(tmp_path).put(manifest_of(step).sealed(image), image, attempt=1)
    assert calls == [
        "fsync directory",  # the run's, in which the snapshot's folder was made
        *("fsync file" for _ in names),
        "fsync file",
        *(f"rename {name}" for name in names),
        "fsync directory",
        "rename manifest.json",
        "fsync directory",
        "fsync directory",  # the run's own, which holds the snapshot's name
    ]
