"""Every kind of URL that fsspec knows passes the tests of a tier (``test_stores``), or is refused by name at once."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.registry import known_implementations

from lightning_spot import SpotCheckpoint, SpotCheckpointIO
from lightning_spot.cli import main
from lightning_spot.client.stores import open_store
from lightning_spot.config import BUCKET_SCHEMES
from lightning_spot.errors import SettingsError
from lightning_spot.run.location import Location, local_file_system
from lightning_spot.server.runs import refusal
from tests.conftest import Cli
from tests.integration.test_stores import FILES, REAL

PASSES = {
    **dict.fromkeys(("file", "local"), "local"),
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "fake-gcs-server"),
    **dict.fromkeys(("az", "abfs"), "Azurite"),
    **dict.fromkeys(("spot", "spots"), "server"),
}
"""Which of the stores of ``test_stores`` stands for a kind of URL. ``spot://`` is ours, and no durable tier."""

REFUSED = sorted({*fsspec.available_protocols(), "cos", "obs"} - {*PASSES, *BUCKET_SCHEMES})

SECRET = "hunter2"
WITH_SECRETS = [
    f"{scheme}{end}"
    for scheme in ("az", "ftp", "github", "hf", "https", "kept", "s3", "simplecache", "webdav")
    for end in (
        f"://me:{SECRET}@host/run",
        f"://me:a/{SECRET}@host/run",
        f"://me:a@{SECRET}@host/run",
        f"://host/run?sv=1&sig={SECRET}",
        f"://host/run?X-Amz-Security-Token={SECRET}&x=1",
        f"::sftp://me:{SECRET}@host/run",
    )
]
WITH_TOKENS = [f"{scheme}://{SECRET}@host/run" for scheme in ("ftp", "github", "hf", "https", "webdav")]


def no_step(*_: Any, **__: Any) -> Any:
    raise AssertionError("it was tried")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is connected to, nor imported from elsewhere."""
    monkeypatch.setattr(socket.socket, "connect", no_step)
    monkeypatch.setattr(fsspec.core, "url_to_fs", no_step)


STARTS: dict[str, Callable[[str], Any]] = {
    "callback": SpotCheckpoint,
    "location": lambda url: Location.of(url, local_server=False),
    "store": open_store,
    "plugin": lambda url: SpotCheckpointIO().save_checkpoint({"global_step": 1}, f"{url}/x.ckpt"),
}


def test_what_passes_is_tested_and_all_others_are_refused() -> None:
    names = {*(item if isinstance(item, str) else item.values[0] for item in FILES), "server"}
    assert set(PASSES.values()) <= names
    assert {"fake-gcs-server", "Azurite"} <= set(REAL)
    for scheme, twin in (("s3a", "s3"), ("gcs", "gs"), ("abfs", "az"), ("local", "file")):
        assert known_implementations[scheme]["class"] == known_implementations[twin]["class"]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("scheme", REFUSED)
def test_a_file_system_that_keeps_no_snapshots_is_refused_first(
    scheme: str, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in (f"{scheme}://host/run", f"{scheme.upper()}://host/run", f"{scheme}::s3://bucket/run"):
        with pytest.raises(SettingsError) as raised:
            STARTS[start](url)
        assert f"{scheme}:" in str(raised.value)
        assert "cannot keep snapshots" in str(raised.value)
    for command in ("ls", "report", "doctor"):
        assert main([command, f"{scheme}://host/run"]) == 2
        assert "cannot keep snapshots" in capsys.readouterr().err


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("url", [*WITH_SECRETS, *WITH_TOKENS])
def test_no_secret_of_a_url_is_shown(
    url: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for start in STARTS.values():
        with pytest.raises(SettingsError) as raised:
            start(url)
        assert SECRET not in str(raised.value)
    for command in (
        ["ls", url],
        ["report", url],
        ["doctor", url],
        ["serve", "--storage", url],
        ["serve", "--allow-storage", url],
    ):
        assert main(command) == 2
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err + caplog.text


@pytest.mark.parametrize("end", ["1", "port", "0", "1/run"])
@pytest.mark.parametrize("scheme", ["spot://", "spots://", "http://", ""])
def test_no_secret_of_a_servers_address_is_shown(scheme: str, end: str, cli: Cli) -> None:
    server = f"{scheme}me:{SECRET}@host:{end}"
    with pytest.raises(SettingsError) as raised:
        SpotCheckpoint("x", servers=server)
    assert SECRET not in str(raised.value) + cli("ls", "x", "--server", server, code=2)


@pytest.mark.parametrize("chain", ["s3://bucket/a::b", "file:///a::s3://bucket/run", "kept://a::file:///b"])
def test_a_chain_is_refused_wherever_it_begins(chain: str) -> None:
    with pytest.raises(SettingsError, match="::"):
        Location.of(chain, local_server=False)


@pytest.mark.parametrize("url", ["s3://[x]/run", "az://b[1/run", "gs://]/run"])
def test_a_bucket_that_no_library_takes_is_one_error(url: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(url)):
        Location.of(url, local_server=False)


@pytest.mark.parametrize("spelled", ["file://{}", "local://{}", "FILE://{}", "Local://{}/"])
def test_a_directory_is_one_however_it_is_spelled(spelled: str, tmp_path: Path) -> None:
    plain = Location.of(tmp_path / "run", local_server=False)
    url = spelled.format(tmp_path / "run")
    assert Location.of(url, local_server=False).url == plain.url
    store = open_store(url)
    assert store.root == tmp_path / "run"
    assert refusal(url, [str(tmp_path)]) == ""
    assert refusal(url, [str(tmp_path / "other")]) != ""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data/run", "ext4"),
        ("file:///data/run", "ext4"),
        ("/data/with blank/run", None),  # NFS
        ("/bucket/run", None),  # FUSE
        ("/data-2/run", "overlay"),
        ("/hidden/run", "xfs"),
        ("s3://data/run", None),
    ],
)
def test_a_local_disk_is_distinguished_from_a_network_mount(tmp_path: Path, path: str, kind: str | None) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 0:1 / / rw,relatime - overlay overlay rw\n"
        "2 1 8:1 / /data rw shared:1 - ext4 /dev/sda1 rw\n"
        "3 2 0:2 / /data/with\\040blank rw - nfs4 server:/export rw\n"
        "4 1 0:3 / /bucket rw - fuse.gcsfuse bucket rw\n"
        "5 1 0:4 / /hidden rw - nfs4 server:/export rw\n"
        "6 1 8:2 / /hidden rw - xfs /dev/sdb1 rw\n"
    )
    assert local_file_system(path, mounts) == kind
    assert local_file_system("/data/run", tmp_path / "none") is None
