"""``spot://`` as fsspec users know a file system: what it does, what it refuses, and what has left the memory."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_spot.checkpoint_io import SpotCheckpointIO
from lightning_spot.client.filesystem import SpotFileSystem
from lightning_spot.client.remote import ServerStore
from lightning_spot.errors import SettingsError, SnapshotNotFoundError, SpotError
from lightning_spot.store.local import LocalStore
from tests.integration.test_server import put_file
from tests.integration.test_stores import sharded
from tests.support.server import RunningServer, StartServer, lasting_server
from tests.support.trainer import Net, data, trainer
from tests.support.waiting import until


def file_system(server: RunningServer) -> SpotFileSystem:
    fs: SpotFileSystem = fsspec.core.url_to_fs(server.url + "/run")[0]
    return fs


def settle(server: RunningServer) -> None:
    """Return when everything is at the tier below."""
    client = server.client()
    assert client.call("POST", "/v1/flush", {"wait_s": 30})["unreached"] == []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server, and the directory to which it brings what it holds."""
    folder = tmp_path_factory.mktemp("server")
    with lasting_server(folder, "--memory-limit", "512MiB", "--storage", str(folder / "durable")) as server:
        yield server


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """A run of the test's own at the shared server."""
    return "".join(character if character.isalnum() else "-" for character in request.node.name)[-60:].lstrip("-")


def test_a_snapshot_of_several_files_is_a_directory_of_them(shared: RunningServer, run: str, tmp_path: Path) -> None:
    fs, (manifest, image) = file_system(shared), sharded(2)
    store = ServerStore(f"{shared.url}/{run}")
    store.put(manifest, memoryview(image), attempt=1)
    folder = f"{run}/{manifest.name}"
    assert fs.isdir(folder)
    assert fs.ls(folder, detail=False) == sorted(f"{folder}/{span.name}" for span in manifest.files)
    for span in manifest.files:
        whole = image[span.offset : span.stop]
        assert fs.info(f"{folder}/{span.name}")["size"] == span.nbytes
        assert fs.cat_file(f"{folder}/{span.name}") == whole
        with fs.open(f"{folder}/{span.name}") as file:
            file.seek(5)
            assert file.read(4100) == whole[5:4105]
    with pytest.raises(IsADirectoryError):
        fs.cat_file(folder)
    fs.get(folder, str(tmp_path / manifest.name), recursive=True)
    assert (tmp_path / manifest.name / "__0_0.distcp").read_bytes() == image[4096:13096]
    buffer = bytearray(manifest.nbytes)
    store.fetch(manifest, memoryview(buffer))
    assert buffer == image
    with pytest.raises(SnapshotNotFoundError):
        fs.cat_file(f"{run}/last.ckpt")


# -- what it does -----------------------------------------------------------------------------------------------------


def test_a_file_is_read_in_every_way(shared: RunningServer, run: str, tmp_path: Path) -> None:
    fs = file_system(shared)
    text, path = bytes(range(256)) * 100, f"{run}/file"
    put_file(shared, run, "file", text)
    put_file(shared, run, "other", text)
    assert fs.ls(run, detail=False) == fs.find(run) == fs.glob(f"{run}/*") == [path, f"{run}/other"]
    assert list(fs.walk(run)) == [(run, [], ["file", "other"])]
    assert fs.du(run) == 2 * len(text)
    assert (fs.size(path), fs.isfile(path), fs.isdir(path)) == (len(text), True, False)
    assert fs.cat_file(path) == fs.cat(path) == text
    assert fs.cat_file(path, start=10, end=20) == text[10:20]
    assert fs.cat_file(path, start=-10) == text[-10:]
    assert fs.cat_file(path, start=5, end=-5) == text[5:-5]
    assert fs.head(path, 7) == text[:7]
    assert fs.tail(path, 7) == text[-7:]
    with fs.open(path) as file:
        file.seek(1000)
        assert file.read(10) == text[1000:1010]
        assert file.tell() == 1010
        file.seek(-3, 2)
        assert file.read() == text[-3:]
        assert file.read() == b""
    with fsspec.open(f"{shared.url}/{path}") as file:
        assert file.read() == text
    fs.get_file(path, str(tmp_path / "got"))
    assert (tmp_path / "got").read_bytes() == text
    assert fs.cat_ranges([path] * 2, [0, 10], [5, 15]) == [text[:5], text[10:15]]


def test_what_is_there_and_what_is_not(shared: RunningServer, run: str) -> None:
    fs = file_system(shared)
    put_file(shared, run, "file", b"x")
    assert fs.exists(run)
    assert fs.isdir(run)
    assert fs.info("")["type"] == "directory"
    assert run in fs.ls("", detail=False)
    assert fs.exists(f"{run}/file")
    assert not fs.exists(f"{run}/none")
    assert not fs.isfile(run)
    assert fs.ls(f"{run}/file", detail=False) == [f"{run}/file"]
    for ask in (fs.info, fs.cat_file, fs.size, fs.ls, fs.open):
        with pytest.raises(FileNotFoundError):
            ask(f"{run}/none")
    with pytest.raises(IsADirectoryError):
        fs.cat_file(run)


def test_an_empty_file(shared: RunningServer, run: str) -> None:
    fs, path = file_system(shared), f"{run}/empty"
    put_file(shared, run, "empty", b"")
    assert (fs.size(path), fs.cat_file(path), fs.open(path).read()) == (0, b"", b"")
    assert fs.ls(run, detail=False) == [path]


# -- what it refuses --------------------------------------------------------------------------------------------------


WRITES: dict[str, Callable[[SpotFileSystem, str, Path], Any]] = {
    "pipe_file": lambda fs, path, _local: fs.pipe_file(path, b"x"),
    "create": lambda fs, path, _local: fs.pipe_file(path, b"x", mode="create"),
    "open": lambda fs, path, _local: fs.open(path, "wb"),
    "open exclusively": lambda fs, path, _local: fs.open(path, "xb"),
    "append": lambda fs, path, _local: fs.open(path, "ab"),
    "transaction": lambda fs, path, _local: _in_a_transaction(fs, path),
    "touch": lambda fs, path, _local: fs.touch(path),
    "put_file": lambda fs, path, local: fs.put_file(str(local), path),
    "cp_file": lambda fs, path, _local: fs.cp_file(path, f"{path}-copy"),
    "mv": lambda fs, path, _local: fs.mv(path, f"{path}-moved"),
    "rm_file": lambda fs, path, _local: fs.rm_file(path),
    "rm": lambda fs, path, _local: fs.rm(path),
    "rm a run": lambda fs, path, _local: fs.rm(path.partition("/")[0], recursive=True),
    "mkdir": lambda fs, path, _local: fs.mkdir(f"{path}-folder"),
    "makedirs": lambda fs, path, _local: fs.makedirs(f"{path}-folder", exist_ok=True),
    "rmdir": lambda fs, path, _local: fs.rmdir(path),
}


def _in_a_transaction(fs: SpotFileSystem, path: str) -> None:
    with fs.transaction, fs.open(path, "wb") as file:
        file.write(b"x")


@pytest.mark.parametrize("how", WRITES)
def test_nothing_is_written_or_removed(shared: RunningServer, tmp_path: Path, how: str) -> None:
    fs, path = file_system(shared), "read-only/file"
    if not fs.exists(path):
        put_file(shared, "read-only", "file", b"text")
    (tmp_path / "local").write_bytes(b"x")
    with pytest.raises(OSError, match="spot://") as refused:
        WRITES[how](fs, path, tmp_path / "local")
    assert refused.value.errno == errno.EROFS
    assert fs.ls("read-only", detail=False) == [path]
    assert fs.cat_file(path) == b"text"


@pytest.mark.parametrize("plugins", [[], [SpotCheckpointIO()]], ids=["lightning's", "ours"])
def test_a_model_checkpoint_there_is_one_error(shared: RunningServer, run: str, plugins: list[Any]) -> None:
    own = ModelCheckpoint(f"{shared.url}/{run}", every_n_train_steps=1)
    with pytest.raises(OSError, match="spot://"):
        trainer(own, max_steps=2, plugins=plugins).fit(Net(), data())
    with pytest.raises(OSError, match="spot://"):
        SpotCheckpointIO().save_checkpoint({}, f"{shared.url}/{run}/mine.ckpt")


def test_names_may_be_odd(shared: RunningServer, run: str) -> None:
    fs = file_system(shared)
    for name in ("modèle=1 é.ckpt", "epoch=3-step=40%.ckpt", "a&b#c?d.ckpt", "日本.ckpt"):
        put_file(shared, run, name, name.encode())
        settle(shared)
        assert fs.cat_file(f"{run}/{name}") == fs.open(f"{run}/{name}").read() == name.encode()
        assert f"{run}/{name}" in fs.ls(run, detail=False)
    assert not fs.exists(f"{run}-never-written")


def test_runs_of_one_name_are_told_apart_by_their_identity(shared: RunningServer, run: str) -> None:
    fs, client = file_system(shared), shared.client()
    name = run[-40:]
    one, two = f"{name}@0123456789ab", f"{name}@ba9876543210"
    for text in (one, two):
        put_file(shared, text, "file", text.encode())
    assert {one, two} <= set(fs.ls("", detail=False))
    for text in (one, two):
        assert fs.cat_file(f"{text}/file") == text.encode()
        with fsspec.open(f"{shared.url}/{text}/file") as file:
            assert file.read() == text.encode()
    with pytest.raises(SettingsError, match=f"{one}.*{two}|{two}.*{one}"):
        fs.ls(name)
    listed = {item["id"]: item for item in client.call("GET", "/v1/runs")["runs"] if item["name"] == name}
    assert set(listed) == {"0123456789ab", "ba9876543210"}
    assert all(item["attempt"] == 1 and not item["live"] for item in listed.values())


def test_a_file_replaced_during_a_read_is_an_error_not_a_mixture(shared: RunningServer, run: str) -> None:
    fs = file_system(shared)
    path = f"{run}/file"
    put_file(shared, run, "file", b"a" * 30_000_000)
    file = fs.open(path, block_size=1_000_000)
    assert file.read(1_000_000) == b"a" * 1_000_000
    put_file(shared, run, "file", b"b" * 30_000_000)
    file.seek(20_000_000)
    with pytest.raises(SpotError, check=lambda error: error.status == 412):
        file.read(1_000_000)


# -- what has left the memory -----------------------------------------------------------------------------------------


def test_an_evicted_snapshot_is_hidden_and_its_storage_is_named(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--slots", "1", "--storage", str(tmp_path))
    fs, durable, (gone, image) = file_system(server), tmp_path / "run", sharded(1)
    held = sharded(2)[0]
    for manifest, content in ((gone, image), sharded(2)):
        ServerStore(f"{server.url}/run").put(manifest, memoryview(content), attempt=1)
        settle(server)
    assert fs.ls("run", detail=False) == [f"run/{held.name}"]
    for ask in (fs.info, fs.cat_file, fs.ls):
        with pytest.raises(SnapshotNotFoundError, match=str(durable)):
            ask(f"run/{gone.name}")
    server.client().call("DELETE", f"/v1/files/run/{held.name}")
    until(lambda: not (durable / held.name).exists(), "what is removed from memory to be removed there, too")
    assert fs.ls("run", detail=False) == []
    into = bytearray(gone.nbytes)
    LocalStore(durable).fetch(gone, memoryview(into))
    assert into == image
