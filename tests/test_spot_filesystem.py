"""``spot://`` as fsspec users know a file system: what it does, what it refuses, and a run that outgrew its node."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_spot.client.filesystem import SpotFileSystem
from lightning_spot.client.node_client import NodeClient
from lightning_spot.client.remote import NodeStore
from lightning_spot.errors import CorruptSnapshot, SettingsError, SnapshotNotFound, SpotError
from lightning_spot.image.manifest import Manifest
from lightning_spot.memory.slots import Slot
from lightning_spot.protocol.wire import parse_spot_url
from lightning_spot.service import files
from lightning_spot.tiers.local import LocalStore
from tests.conftest import RunningNode
from tests.models import Net, data, trainer
from tests.test_node import put
from tests.test_stores import sharded

StartNode = Callable[..., RunningNode]


def file_system(node: RunningNode) -> SpotFileSystem:
    fs: SpotFileSystem = fsspec.core.url_to_fs(node.url + "/run")[0]
    return fs


def settle(node: RunningNode) -> None:
    """Return when everything is at the tier below."""
    client = NodeClient(parse_spot_url(node.url)[0])
    assert client.call("POST", "/v1/flush", {"wait_s": 30})["unreached"] == []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A node of two slots above a directory: most of what is written leaves its memory."""
    folder = tmp_path_factory.mktemp("node")
    flags = ["--listen", "127.0.0.1:0", "--memory", "64MiB", "--slots", "2", "--flush-to", str(folder / "durable")]
    environment = {"LIGHTNING_SPOT_SHM_DIR": "", "LIGHTNING_SPOT_RUNTIME_DIR": str(folder)}
    node = RunningNode(flags, folder / "node.log", environment).wait_listening()
    yield node
    node.stop(9)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """A run of the test's own at the shared node."""
    return "".join(character if character.isalnum() else "-" for character in request.node.name)[-60:].lstrip("-")


def test_a_snapshot_of_several_files_is_a_directory_of_them(shared: RunningNode, run: str, tmp_path: Path) -> None:
    """One in memory, one that only the directory below has."""
    fs, made = file_system(shared), {step: sharded(step) for step in (1, 2)}
    LocalStore(shared.log.parent / "durable" / run).put(made[1][0], memoryview(made[1][1]), attempt=1)
    store = NodeStore(f"{shared.url}/{run}")
    store.put(made[2][0], memoryview(made[2][1]), attempt=1)
    for manifest, image in made.values():
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
        with pytest.raises(PermissionError, match=manifest.name):
            fs.rm_file(f"{folder}/.metadata")
        fs.get(folder, str(tmp_path / manifest.name), recursive=True)
        assert (tmp_path / manifest.name / "__0_0.distcp").read_bytes() == image[4096:13096]
        buffer = bytearray(manifest.nbytes)
        store.fetch(manifest, memoryview(buffer))
        assert buffer == image
    with pytest.raises(SnapshotNotFound, match="the newest snapshot is several"):
        fs.cat_file(f"{run}/last.ckpt")
    fs.rm(f"{run}/{made[2][0].name}")
    assert fs.ls(run, detail=False) == [f"{run}/{made[1][0].name}"]


# -- what it does -----------------------------------------------------------------------------------------------------


def test_files_written_in_every_way_are_read_in_every_way(shared: RunningNode, run: str, tmp_path: Path) -> None:
    fs = file_system(shared)
    text = bytes(range(256)) * 100
    (tmp_path / "local").write_bytes(text)
    fs.pipe_file(f"{run}/piped", text)
    fs.pipe({f"{run}/piped-too": text})
    with fs.open(f"{run}/opened", "wb") as file:
        assert file.write(text[:100]) == 100
        file.write(text[100:])
    with fsspec.open(f"{shared.url}/{run}/by-url", "wb") as file:
        file.write(text)
    fs.put_file(str(tmp_path / "local"), f"{run}/put")
    fs.put(str(tmp_path / "local"), f"{run}/put-too")
    names = ["by-url", "opened", "piped", "piped-too", "put", "put-too"]
    assert fs.ls(run, detail=False) == fs.find(run) == fs.glob(f"{run}/*") == [f"{run}/{name}" for name in names]
    assert list(fs.walk(run)) == [(run, [], names)]
    assert fs.du(run) == 6 * len(text)
    for name in names:
        path = f"{run}/{name}"
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
    fs.get_file(f"{run}/put", str(tmp_path / "got"))
    assert (tmp_path / "got").read_bytes() == text
    assert fs.cat_ranges([f"{run}/put"] * 2, [0, 10], [5, 15]) == [text[:5], text[10:15]]


def test_what_is_there_and_what_is_not(shared: RunningNode, run: str) -> None:
    fs = file_system(shared)
    fs.pipe_file(f"{run}/file", b"x")
    assert fs.exists(run)
    assert fs.isdir(run)
    assert fs.info("")["type"] == "directory"
    assert run in fs.ls("", detail=False)
    assert fs.exists(f"{run}/file")
    assert not fs.exists(f"{run}/none")
    assert not fs.isfile(run)
    assert fs.ls(f"{run}/file", detail=False) == [f"{run}/file"]
    fs.makedirs(run, exist_ok=True)
    fs.mkdir(run)
    for ask in (fs.info, fs.cat_file, fs.size, fs.rm_file, fs.rm, fs.ls, fs.open):
        with pytest.raises(FileNotFoundError):
            ask(f"{run}/none")
    with pytest.raises(FileNotFoundError):
        fs.cp_file(f"{run}/none", f"{run}/copy")
    with pytest.raises(IsADirectoryError):
        fs.cat_file(run)


@pytest.mark.parametrize("how", ["pipe", "touch", "open"])
def test_empty_files(shared: RunningNode, run: str, how: str) -> None:
    fs = file_system(shared)
    path = f"{run}/empty"
    if how == "pipe":
        fs.pipe_file(path, b"")
    elif how == "touch":
        fs.touch(path)
    else:
        fs.open(path, "wb").close()
    for _ in range(2):
        assert (fs.size(path), fs.cat_file(path), fs.open(path).read()) == (0, b"", b"")
        assert fs.ls(run, detail=False) == [path]
        settle(shared)
        for index in range(3):
            fs.pipe_file(f"{run}-others/{index}", b"x")  # it leaves memory
    fs.pipe_file(path, b"more")
    fs.touch(path, truncate=False)
    assert fs.cat_file(path) == b"more"
    fs.touch(path)
    assert fs.size(path) == 0


def test_create_makes_new_files_only_in_memory_and_below(shared: RunningNode, run: str) -> None:
    fs = file_system(shared)
    for place in ("memory", "below"):
        path = f"{run}/{place}"
        fs.pipe_file(path, b"first", mode="create")
        if place == "below":
            settle(shared)
            for index in range(3):
                fs.pipe_file(f"{run}-others/{index}", b"x")
        with pytest.raises(FileExistsError):
            fs.pipe_file(path, b"second", mode="create")
        with pytest.raises(FileExistsError):
            fs.open(path, "xb")
        assert fs.cat_file(path) == b"first"
    one, two = fs.open(f"{run}/race", "xb"), fs.open(f"{run}/race", "xb")
    one.write(b"one")
    two.write(b"two")
    one.close()
    with pytest.raises(FileExistsError):
        two.close()
    assert fs.cat_file(f"{run}/race") == b"one"


def test_copy_and_move_within_a_run(shared: RunningNode, run: str) -> None:
    fs = file_system(shared)
    text = b"0123456789" * 2_000_000  # more than a block
    fs.pipe_file(f"{run}/a", text)
    fs.cp_file(f"{run}/a", f"{run}/b")
    fs.copy(f"{run}/a", f"{run}/c")
    fs.mv(f"{run}/a", f"{run}/d")
    assert fs.ls(run, detail=False) == [f"{run}/b", f"{run}/c", f"{run}/d"]
    assert fs.cat_file(f"{run}/b") == fs.cat_file(f"{run}/c") == fs.cat_file(f"{run}/d") == text
    fs.touch(f"{run}/empty")
    fs.mv(f"{run}/empty", f"{run}/still-empty")
    assert fs.size(f"{run}/still-empty") == 0
    manifest = put(shared, 3, run=run)
    fs.cp_file(f"{run}/last.ckpt", f"{run}/mine.ckpt")
    assert fs.size(f"{run}/mine.ckpt") == manifest.nbytes


def test_what_is_moved_onto_itself_is_not_lost(shared: RunningNode, run: str) -> None:
    """One run has two spellings: the file was copied onto itself, and removed."""
    fs, exactly = file_system(shared), f"{run}@{12 * 'a'}"
    fs.pipe_file(f"{exactly}/a", b"text")
    for source, target in [("a", f"{exactly}/a"), ("a", f"{exactly}/"), ("*", exactly), (["a"], [f"{exactly}/a"])]:
        paths = [f"{run}/{name}" for name in source] if isinstance(source, list) else f"{run}/{source}"
        with pytest.raises(shutil.SameFileError, match="are the same file"):
            fs.mv(paths, target)
        assert fs.cat_file(f"{run}/a") == b"text"
    fs.mv(f"{run}/a", f"{exactly}/b")
    assert [fs.cat_file(f"{exactly}/b"), fs.exists(f"{run}/a")] == [b"text", False]


def test_remove_by_name_list_and_pattern(shared: RunningNode, run: str) -> None:
    fs = file_system(shared)
    for name in ("a.ckpt", "b.ckpt", "c.txt", "d.txt", "e", "f"):
        fs.pipe_file(f"{run}/{name}", b"x")
    settle(shared)
    fs.rm(f"{run}/*.ckpt")
    assert [path.split("/")[1] for path in fs.ls(run, detail=False)] == ["c.txt", "d.txt", "e", "f"]
    fs.rm([f"{run}/e", f"{run}/?.txt"])
    assert fs.ls(run, detail=False) == [f"{run}/f"]
    with pytest.raises(FileNotFoundError):
        fs.rm(f"{run}/*.none")
    with pytest.raises(IsADirectoryError):
        fs.rm(run)
    fs.rm(run, recursive=True)
    assert fs.ls(run, detail=False) == []
    settle(shared)
    assert fs.ls(run, detail=False) == []
    fs.pipe_file(f"{run}/f", b"again")
    assert fs.ls(run, detail=False) == [f"{run}/f"]


# -- what it refuses --------------------------------------------------------------------------------------------------


def test_folders_within_a_run_are_refused_by_name(shared: RunningNode, run: str) -> None:
    fs = file_system(shared)
    fs.pipe_file(f"{run}/file", b"x")
    for attempt in (
        lambda: fs.pipe_file(f"{run}/folder/x.ckpt", b"x"),
        lambda: fs.open(f"{run}/folder/x.ckpt", "wb"),
        lambda: fs.makedirs(f"{run}/folder", exist_ok=True),
        lambda: fs.mkdir(f"{run}/folder"),
        lambda: fs.cp_file(f"{run}/file", f"{run}/folder/copy"),
        lambda: fs.touch(f"{run}/folder/empty"),
    ):
        with pytest.raises(NotADirectoryError, match="without folders"):
            attempt()
    with pytest.raises(IsADirectoryError):
        fs.pipe_file(run, b"x")
    for mode in ("ab", "r+b"):
        with pytest.raises(NotImplementedError, match="'wb'"):
            fs.open(f"{run}/file", mode)
    assert fs.ls(run, detail=False) == [f"{run}/file"]


def test_names_that_a_run_needs_itself_are_refused_and_others_may_be_odd(shared: RunningNode, run: str) -> None:
    fs = file_system(shared)
    for name in ("attempts", "step-000000001-attempt-0001", ".hidden", "x" * 300):
        with pytest.raises(SpotError, match="cannot name a file"):
            fs.pipe_file(f"{run}/{name}", b"x")
    for name in ("modèle=1 é.ckpt", "epoch=3-step=40%.ckpt", "a&b#c?d.ckpt", "日本.ckpt"):
        fs.pipe_file(f"{run}/{name}", b"text")
        assert fs.cat_file(f"{run}/{name}") == fs.open(f"{run}/{name}").read() == b"text"
        assert fs.ls(run, detail=False) == [f"{run}/{name}"]
        settle(shared)
        fs.rm_file(f"{run}/{name}")
    assert not fs.exists(f"{run}-never-written")


def test_runs_of_one_name_are_told_apart_by_their_identity(shared: RunningNode, run: str) -> None:
    fs, client = file_system(shared), NodeClient(parse_spot_url(shared.url)[0])
    name = run[-40:]
    one, two = f"{name}@0123456789ab", f"{name}@ba9876543210"
    for text in (one, two):
        client.call("POST", f"/v1/runs/{text}/open", {"attempt": 1, "token": "t"})
        fs.pipe_file(f"{text}/file", text.encode())
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


def test_a_snapshot_is_not_removed_by_its_alias(shared: RunningNode, run: str) -> None:
    fs = file_system(shared)
    manifest = put(shared, 3, run=run)
    with pytest.raises(PermissionError, match="its own name"):
        fs.rm(f"{run}/last.ckpt")
    assert fs.exists(f"{run}/last.ckpt")
    fs.rm(f"{run}/{manifest.name}")
    assert not fs.exists(f"{run}/last.ckpt")


def test_a_write_that_fails_leaves_what_was_there(shared: RunningNode, run: str) -> None:
    fs = file_system(shared)
    path, url = f"{run}/file", f"{shared.url}/{run}/file"
    fs.pipe_file(path, b"before")

    def direct() -> None:
        with fs.open(path, "wb") as file:
            file.write(b"half")
            raise ZeroDivisionError

    def by_url() -> None:
        with fsspec.open(url, "wb") as file:
            file.write(b"half")
            raise ZeroDivisionError

    def finally_closed() -> None:
        file = fs.open(path, "wb")
        try:
            file.write(b"half")
            raise ZeroDivisionError
        finally:
            file.close()

    def in_a_transaction() -> None:
        with fs.transaction:
            with fs.open(path, "wb") as file:
                file.write(b"whole")
            raise ZeroDivisionError

    def forgotten() -> None:
        fs.open(path, "wb").write(b"half")
        gc.collect()
        raise ZeroDivisionError

    for fail in (direct, by_url, finally_closed, in_a_transaction, forgotten):
        with pytest.raises(ZeroDivisionError):
            fail()
        assert fs.cat_file(path) == b"before", fail.__name__
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:  # an exception from before is no reason not to write
        with fsspec.open(url, "wb") as file:
            file.write(b"after")
    assert fs.cat_file(path) == b"after"
    with fs.transaction, fs.open(path, "wb") as file:
        file.write(b"committed")
    assert fs.cat_file(path) == b"committed"


def test_a_file_that_is_replaced_while_it_is_read_is_an_error_not_a_mixture(shared: RunningNode, run: str) -> None:
    fs = file_system(shared)
    path = f"{run}/file"
    fs.pipe_file(path, b"a" * 30_000_000)
    file = fs.open(path, block_size=1_000_000)
    assert file.read(1_000_000) == b"a" * 1_000_000
    fs.pipe_file(path, b"b" * 30_000_000)
    file.seek(20_000_000)
    with pytest.raises(SpotError, match="replaced"):
        file.read(1_000_000)


# -- a run that outgrew its node --------------------------------------------------------------------------------------


def test_what_left_memory_is_read_from_below_and_checked(shared: RunningNode, run: str) -> None:
    fs = file_system(shared)
    text = {f"{run}/{index}": bytes([index]) * 9_000_000 for index in range(5)}
    for path, content in text.items():
        fs.pipe_file(path, content)
    settle(shared)
    held = NodeClient(parse_spot_url(shared.url)[0]).call("GET", f"/v1/runs/{run}/snapshots")["snapshots"]
    assert len(held) <= 2
    assert fs.ls(run, detail=False) == list(text)
    for path, content in text.items():
        assert fs.cat_file(path) == content
        assert fs.cat_file(path, start=8_388_600, end=8_388_620) == content[:20]  # over the border of two parts
    fs.rm(f"{run}/0")
    assert fs.ls(run, detail=False) == list(text)[1:]
    assert not fs.exists(f"{run}/0")
    durable = Path(NodeClient(parse_spot_url(shared.url)[0]).call("GET", "/v1/status")["flush_to"])
    with open(durable / run / "1", "r+b") as file:
        file.seek(8_500_000)
        file.write(b"?")
    assert fs.cat_file(f"{run}/1", end=100) == text[f"{run}/1"][:100]
    with pytest.raises((CorruptSnapshot, SpotError)):
        fs.cat_file(f"{run}/1")


def test_model_checkpoint_keeps_its_best_file_beyond_the_nodes_memory(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node("--slots", "16", "--flush-to", str(tmp_path / "durable"))
    own = ModelCheckpoint(f"{node.url}/mine", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    run = trainer(own, max_steps=40)
    run.fit(Net(), data())
    fs = file_system(node)
    settle(node)
    names = [f"mine/step={step}.ckpt" for step in range(1, 41)]
    assert sorted(fs.ls("mine", detail=False)) == sorted(names)
    for name in names:
        with fs.open(name) as file:
            assert f"step={torch.load(file, weights_only=True)['global_step']}.ckpt" == name.split("/")[1]
    again = trainer(enable_checkpointing=False)
    again.fit(Net(), data(), ckpt_path=f"{node.url}/mine/step=1.ckpt")  # long out of memory
    assert again.global_step == 40


def test_model_checkpoint_removes_what_it_no_longer_wants(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node("--slots", "4", "--flush-to", str(tmp_path / "durable"))
    own = ModelCheckpoint(f"{node.url}/mine", monitor="val_loss", save_top_k=2, save_last=True)
    run = trainer(own, max_epochs=4)
    run.fit(Net(), data(), data(3))
    fs = file_system(node)
    best = {path.rpartition("/")[2] for path in own.best_k_models}
    assert {path.split("/")[1] for path in fs.ls("mine", detail=False)} == {*best, "last.ckpt"}
    settle(node)
    assert {path.split("/")[1] for path in fs.ls("mine", detail=False)} == {*best, "last.ckpt"}
    assert math.isfinite(float(own.best_model_score or math.nan))
    run.validate(ckpt_path="best", dataloaders=data(3), verbose=False)


def test_a_file_that_leaves_memory_while_it_is_listed_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Manifest(run="run", name="best.ckpt", step=1, attempt=1, nbytes=1, created_unix_s=0.0, file="")
    in_memory = [(Slot(index=0), manifest)]

    class Below:
        def entries(self) -> list[files.Entry]:
            in_memory.clear()  # the tier below has it now, but was asked before it had
            return []

    node = SimpleNamespace(
        below=lambda text: "file:///below",
        routes=SimpleNamespace(prefixes=None),
        ring=SimpleNamespace(committed=lambda key: [], readable=lambda key: list(in_memory)),
        registry=SimpleNamespace(key=lambda text: text, runs={}),
        flusher=SimpleNamespace(deletions=lambda key: []),
    )
    monkeypatch.setattr(files, "open_below", lambda *_: Below())
    asked = SimpleNamespace(match_info={"run": "run"})
    answer = asyncio.run(files.Files(cast(Any, node), cast(Any, None)).listing(cast(Any, asked)))
    assert [item["path"] for item in json.loads(cast(bytes, answer.body))["files"]] == [manifest.data_path]
