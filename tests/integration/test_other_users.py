"""Other users of the host: they reach no socket, read and write no file of ours, and what they put in our place harms
nothing: another name is taken, or one error says what is there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.client import starting
from lightning_spot.client.local_server import LocalServer
from lightning_spot.client.server_client import ServerClient
from lightning_spot.errors import ServerRefusedError, ServerUnreachableError, SettingsError, TierReason
from lightning_spot.goodput.ledger import AttemptRecord
from lightning_spot.goodput.records import keep_reached, read_reached
from lightning_spot.protocol.ownership import make_directory, own_socket
from lightning_spot.protocol.process import ProcessId
from lightning_spot.protocol.record import ServerRecord, find_record, hold
from lightning_spot.protocol.slot import SlotMemory
from lightning_spot.protocol.wire import Address
from lightning_spot.server.area import SlotArea
from lightning_spot.server.runs import RunInfo
from lightning_spot.server.slots import Slot

pytestmark = pytest.mark.guarantee("G30")

SOON_S = 20.0  # a start that waits for something takes 30 s
NOBODY = 65534
RUN = RunInfo(name="run", id="0123456789ab", location="", attempt=1, token="")
SETTINGS = {"slots": 2, "memory_bytes": 2**26, "server_idle_timeout_s": 30.0}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as two users")


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that other users may enter, as the parents of pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="ls-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def runtime(open_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory that others may enter, but not write to."""
    (folder := open_dir / "rt").mkdir()
    folder.chmod(0o755)
    monkeypatch.setenv("LIGHTNING_SPOT_RUNTIME_DIR", str(folder))
    return folder


@pytest.fixture
def mine(open_dir: Path) -> Iterator[Path]:
    """A directory of this user's, with files that are called like ours; nothing may happen to it."""
    (folder := open_dir / "documents").mkdir(mode=0o700)
    for name in ("thesis.tmp", "slot-machine.txt", "slot-7.img", "slot-7.json"):
        (folder / name).write_text(name)
    before = contents(folder)
    yield folder
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def as_nobody(act: Callable[[], Any]) -> Any:
    """What ``act`` returns in a process of another user; the name of its error if it fails."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, json.dumps(act()).encode())
        except OSError as error:
            os.write(writer, json.dumps(type(error).__name__).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return json.loads(said)


def asked(path: Path, say: bytes) -> str:
    """What is answered at a socket; empty if it is closed."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SOON_S)
        connection.connect(str(path))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(say)
            return connection.recv(65536).decode()
    return ""


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


# -- what there is of ours ---------------------------------------------------------------------------------------------


@as_root
def test_another_user_gets_no_answer_at_the_sockets_of_a_server(runtime: Path, tmp_path: Path) -> None:
    host = starting.start(str(tmp_path), "run", **SETTINGS)
    record = find_record(str(tmp_path))
    request = b"GET /v1/runs HTTP/1.1\r\nHost: x\r\n\r\n"
    assert as_nobody(lambda: asked(record.http, request)) == "PermissionError"
    record.http.chmod(0o666)  # as if its mode were no hindrance
    assert as_nobody(lambda: asked(record.http, request)) == ""
    assert asked(record.http, request), "nor gets this user one"
    assert {path.name: path.stat().st_mode & 0o077 for path in runtime.iterdir() if not path.is_socket()} == {
        record.alive.name: 0,
        record.log.name: 0,
    }
    host.disconnect()


@pytest.mark.parametrize("mask", [0, 0o002, 0o077, 0o777], ids=oct)
def test_what_is_made_is_this_users_alone_whatever_the_umask(mask: int, tmp_path: Path, runtime_dir: Path) -> None:
    (tmp_path / "held").touch(mode=0o644)  # an earlier version's
    with umask(mask):
        fd = hold(tmp_path / "held", 0.0)
        assert fd is not None
        os.close(fd)
        own_socket(runtime_dir / "sock").close()
        keep_reached(str(tmp_path), AttemptRecord(attempt=1, begun_unix_s=1.0))
    with umask(mask & 0o077):
        area = SlotArea(tmp_path / "area")
        make_directory(tmp_path / "one" / "two")
        area.keep_run(RUN, False)
        SlotMemory.create(4096, area.image(Slot(1))).map.close()
    for path in (*tmp_path.rglob("*"), *runtime_dir.iterdir()):
        wanted = 0o700 if path.is_dir() else 0o600 & ~mask if path.is_socket() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


# -- what is not ours in our place: the runtime directory --------------------------------------------------------------


def is_others(path: Path, _mine: Path) -> None:
    path.mkdir()
    os.chown(path, NOBODY, NOBODY)


def is_others_link(path: Path, mine: Path) -> None:
    path.symlink_to(mine)
    os.lchown(path, NOBODY, NOBODY)


def is_a_socket(path: Path, _mine: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def is_others_file(path: Path, _mine: Path) -> None:
    path.write_text("{}")
    os.chown(path, NOBODY, NOBODY)


def is_others_too(path: Path, mine: Path) -> None:
    is_others_file(mine.parent / "others", mine)
    os.link(mine.parent / "others", path)


def has_mode(mode: int, path: Path, _mine: Path) -> None:
    path.mkdir()
    path.chmod(mode)


Squat = Callable[[Path, Path], Any]
ANYTHING: dict[str, Squat] = {
    "others": is_others,
    "others' link": is_others_link,
    "link": lambda path, mine: path.symlink_to(mine),
    "dangling link": lambda path, mine: path.symlink_to(mine / "new"),
    "file": lambda path, _: path.touch(),
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": is_a_socket,
    "device": lambda path, _: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)),  # /dev/zero, which never ends
}
FILES: dict[str, Squat] = {
    "others' file": is_others_file,
    "two names": lambda path, mine: os.link(mine / "thesis.tmp", path),
    "others' second name": is_others_too,
}
MODES = {f"mode {mode:o}": partial(has_mode, mode) for mode in (0o777, 0o1777, 0o770, 0o1770, 0o702)}
SQUATS: dict[str, Squat] = {**ANYTHING, **FILES, **MODES}


@as_root
@pytest.mark.parametrize("squat", [*ANYTHING, *MODES])
def test_a_runtime_directory_open_to_others_is_named_at_once(
    squat: str, open_dir: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_dir / "rt"
    SQUATS[squat](folder, mine)
    monkeypatch.setenv("LIGHTNING_SPOT_RUNTIME_DIR", str(folder))
    before, began_s = os.lstat(folder), time.monotonic()
    for begin in (starting.attach, lambda url, run: starting.start(url, run, **SETTINGS)):
        with pytest.raises(SettingsError, match=r"rt .*LIGHTNING_SPOT_RUNTIME_DIR"):
            begin(str(open_dir / "run"), "run")
    assert time.monotonic() - began_s < SOON_S
    assert os.path.samestat(os.lstat(folder), before)
    assert not folder.is_dir() or folder.is_symlink() or not list(folder.iterdir())


# -- a record ----------------------------------------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize(
    ("name", "squat"),
    [
        *itertools.product(("alive", "lock", "log"), [each for each in (*ANYTHING, *FILES) if each != "file"]),
        ("http", "others"),
    ],
)
def test_what_is_in_the_place_of_a_record_is_named_at_once(
    name: str, squat: str, runtime: Path, mine: Path, tmp_path: Path
) -> None:
    """It was there before the directory became this user's alone, say."""
    place: Path = getattr(find_record(str(tmp_path)), name)
    SQUATS[squat](place, mine)
    began_s = time.monotonic()
    with pytest.raises(SettingsError, match=re.escape(place.name)):
        starting.start(str(tmp_path), "run", **SETTINGS)
    assert time.monotonic() - began_s < SOON_S
    assert os.path.lexists(place)
    assert stat.S_IMODE((mine / "thesis.tmp").stat().st_mode) != 0o600, "its mode was changed"


@as_root
@pytest.mark.parametrize("squat", [*ANYTHING, *FILES])
def test_what_is_in_the_place_of_how_far_an_attempt_got(squat: str, runtime: Path, mine: Path, tmp_path: Path) -> None:
    record = AttemptRecord(attempt=1, begun_unix_s=1.0)
    place = runtime / f"{find_record(str(tmp_path)).key}.attempt-0001.reached"
    SQUATS[squat](place, mine)
    assert read_reached(str(tmp_path), 1) is None
    with contextlib.suppress(SettingsError, OSError):  # of a directory, which cannot be replaced
        keep_reached(str(tmp_path), record)
        assert stat.S_ISREG(place.lstat().st_mode)
        assert (found := read_reached(str(tmp_path), 1)) is not None
        assert found.begun_unix_s == 1.0


def test_a_record_without_an_end_is_not_read(runtime_dir: Path, tmp_path: Path) -> None:
    record = find_record(str(tmp_path))
    for path in (record.alive, runtime_dir / f"{record.key}.attempt-0001.reached"):
        with open(path, "wb") as huge:
            huge.truncate(2**40)
    with pytest.raises(SettingsError, match=re.escape(record.alive.name)):
        record.process()
    assert record.settings() == {}
    assert read_reached(str(tmp_path), 1) is None
    record.remove()


@as_root
@pytest.mark.parametrize("squat", ["others' link", "link", "pipe", "device", "others' file", "two names"])
def test_what_is_in_the_place_of_a_socket_is_removed(squat: str, runtime: Path, mine: Path, tmp_path: Path) -> None:
    record = find_record(str(tmp_path))
    SQUATS[squat](record.http, mine)
    starting.start(str(tmp_path), "run", **SETTINGS).disconnect()


def test_the_end_of_a_huge_log_is_shown(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(find_record(str(tmp_path)).log, "wb") as log:
        log.truncate(2**40)
        log.seek(2**40)
        log.write(b"the end\n")
    monkeypatch.setattr(starting, "subprocess", subprocess)  # started cold, as everywhere but in the tests
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ServerUnreachableError, match="the end"):
        starting.start(str(tmp_path), "run", **SETTINGS)


@as_root
def test_a_server_of_another_user_is_not_spoken_to(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever listens in our place would be sent the token, and map what it likes into the trainer."""
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", "0123456789abcdef")
    record = find_record(str(tmp_path))
    heard, told = os.pipe()
    runtime.chmod(0o777)
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(record.http))
            record.http.chmod(0o666)
            listener.listen()
            os.write(told, b"ready\n")
            time.sleep(60)
        finally:
            os._exit(0)
    try:
        assert os.read(heard, 10) == b"ready\n"
        runtime.chmod(0o755)
        alive = hold(record.alive, 0.0)
        assert alive is not None
        record.note(alive, **SETTINGS)  # type: ignore[arg-type]
        began_s = time.monotonic()
        with pytest.raises(ServerRefusedError, check=TierReason.REFUSED.caused):
            LocalServer(record, "run")
        with pytest.raises(ServerRefusedError, check=TierReason.REFUSED.caused):
            ServerClient(Address(socket_path=str(record.http))).ping()
        with pytest.raises(ServerRefusedError, check=TierReason.REFUSED.caused):
            starting.start(str(tmp_path), "run", **SETTINGS)
        assert time.monotonic() - began_s < SOON_S
        os.close(alive)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_a_swapped_directory_is_not_the_one_that_was_opened(runtime_dir: Path, mine: Path) -> None:
    """Where others may write to the directory above, any may be put in its place between the check and the use."""
    folder, away = runtime_dir / "rt", runtime_dir / "away"
    folder.mkdir(mode=0o700)
    with ServerRecord(folder, "0" * 16).opened() as record:
        folder.rename(away)
        folder.symlink_to(mine)
        alive = hold(record.alive, 0.0)
        assert alive is not None
        record.note(alive, **SETTINGS)  # type: ignore[arg-type]
        with own_socket(record.http), record.starting(0.0):
            assert sorted(path.suffix for path in away.iterdir()) == [".alive", ".http", ".lock"]
        process = record.process()
        assert process is not None
        assert process == ProcessId.of(os.getpid())
        os.close(alive)
        record.remove()
    assert not list(away.iterdir())


# -- slots -------------------------------------------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize("squat", [*ANYTHING, *MODES])
def test_an_area_of_another_user_costs_a_different_name_only(squat: str, open_dir: Path, mine: Path) -> None:
    SQUATS[squat](open_dir / "area", mine)
    before = os.lstat(open_dir / "area")
    area = SlotArea(open_dir / "area")
    assert area.path.name.startswith("area-")
    assert (area.path.stat().st_uid, stat.S_IMODE(area.path.stat().st_mode)) == (os.geteuid(), 0o700)
    assert area.adopt() == []
    area.keep_run(RUN, False)
    area._lock_file.close()  # killed
    heir = SlotArea(open_dir / "area")
    assert (heir.path, [left.info for left in heir.runs()]) == (area.path, [RUN])
    heir.close()
    assert not area.path.exists()
    assert os.path.samestat(os.lstat(open_dir / "area"), before)


@as_root
def test_slots_of_others_are_not_counted_as_left(runtime: Path, tmp_path: Path) -> None:
    """A file without blocks had every start wait as if it were read, and any had a server started for it."""
    record = find_record(str(tmp_path))
    is_others(area := record.area(Path(os.environ["LIGHTNING_SPOT_SHM_DIR"])), tmp_path)
    (area / "slot-0.json").touch()
    with open(area / "slot-0.img", "wb") as image:
        image.truncate(2**40)
    assert not record.left_slots()
    assert record.left_bytes() == 0
    assert starting.attach(str(tmp_path), "run") is None


def test_a_swapped_area_leaves_the_new_one_alone(tmp_path: Path, mine: Path) -> None:
    area = SlotArea(tmp_path / "area")
    area.path.rename(tmp_path / "away")
    area.path.symlink_to(mine)
    area.keep_run(RUN, False)
    memory = SlotMemory.create(4096, area.image(Slot(7)))
    assert sorted(path.name for path in (tmp_path / "away").iterdir()) == ["lock", f"run-{RUN.key}.json", "slot-7.img"]
    assert area.adopt() == []
    memory.close()
    area.close()


@pytest.mark.parametrize("squat", ["link", "pipe", "socket", "two names"])
def test_a_slot_is_made_anew_whatever_has_its_name(squat: str, open_dir: Path, mine: Path) -> None:
    SQUATS[squat](open_dir / "slot-7.img", mine)
    memory = SlotMemory.create(4096, open_dir / "slot-7.img")
    memory.map[:4] = b"ours"
    assert (open_dir / "slot-7.img").read_bytes()[:4] == b"ours"
    memory.close()


@pytest.mark.parametrize("squat", ["link", "dangling link", "pipe", "socket"])
@pytest.mark.parametrize("name", ["slot-3.json", "slot-3.img", f"run-{RUN.key}.json"])
def test_what_is_in_the_place_of_a_slot_is_dropped(squat: str, name: str, tmp_path: Path, mine: Path) -> None:
    (tmp_path / "area").mkdir(mode=0o700)
    for each in ("slot-3.json", "slot-3.img"):
        (tmp_path / "area" / each).write_text("{}")
    (tmp_path / "area" / name).unlink(missing_ok=True)
    SQUATS[squat](tmp_path / "area" / name, mine)
    area = SlotArea(tmp_path / "area")
    assert (area.adopt(), list(area.runs())) == ([], [])
    area.close()
