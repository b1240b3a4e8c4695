"""What all tests share: a runtime directory of their own, servers that end with the test, an S3 server, a model."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import hypothesis
import pytest

from lightning_spot.cli.cert import make
from lightning_spot.client import starting
from lightning_spot.config import BUCKET_SCHEMES
from lightning_spot.goodput.records import begin_unix_s
from lightning_spot.server import reconcile
from tests.support import folders, warm
from tests.support.server import Bench, RunningServer, WithServers
from tests.support.waiting import kept_port, new_process, until

Cli = Callable[..., str]

_WARM = pytest.StashKey[str]()

fsspec.register_implementation("kept", "tests.support.store.Kept")
BUCKET_SCHEMES.add("kept")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are small: more threads only get into each other's way


def pytest_configure(config: pytest.Config) -> None:
    """Temporary files go to memory where there is room: a disk syncs each small file for milliseconds.

    A worker, which was forked by :func:`pytest_xdist_setupnodes`, is told where by the one that began it. What
    hypothesis makes up may take long on a machine that does much else: 200 ms for one example is no bound there.
    """
    unhealthy = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]  # that is left to chance
    hypothesis.settings.register_profile("slow", deadline=None, suppress_health_check=unhealthy)
    hypothesis.settings.load_profile("slow")
    if folders.has_room_in_memory():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(folders.SHM))
    if (given := getattr(config, "workerinput", None)) is not None:
        sys.executable = given["python"]
        os.environ.pop("STANDALONE_PORT", None)  # of ranks that this process would start: those of tests have their own
        if not sys.dont_write_bytecode:
            _import_in_turns(config, int(given["workerid"][2:]) / given["workercount"])


def _import_in_turns(config: pytest.Config, share: float) -> None:
    """Import what will be collected, each file while no other worker does: the first one rewrites it for all.

    To rewrite the assertions of all files takes longer than to import torch. Each worker begins elsewhere.
    """
    paths = [Path(argument.partition("::")[0]).absolute() for argument in config.args]
    files = sorted({file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))})
    begin = int(share * len(files))
    for file in [*files[begin:], *files[:begin]]:
        with open(Path(config.workerinput["warm"]).with_name(file.stem), "w") as turn:  # type: ignore[attr-defined]
            fcntl.flock(turn, fcntl.LOCK_EX)
            with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting it will tell
                importlib.import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """What lives as long as the tests do is no garbage: nobody looks through it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Collect the garbage of the tests once: pytest does so five times, whatever there is to look through."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the workers: each would import torch and Lightning for itself."""
    python, held = begin_warm()
    config.stash[_WARM] = python
    config.add_cleanup(held.close)
    for spec in specs:
        spec.python = spec.python or python


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker what it would be without a fork, and whom to ask for more of them."""
    node.workerinput.update(python=sys.executable, warm=node.config.stash[_WARM])


def begin_warm() -> tuple[str, socket.socket]:
    """Start a warm Python, see ``tests/support/warm.py``; returns it, and what keeps it alive."""
    return warm.start(Path(tempfile.mkdtemp(prefix=folders.WARM)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of the random tests")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Seed of a random test; printed, so that a failure can be run again."""
    given = request.config.getoption("--seed")
    chosen = given if given is not None else random.SystemRandom().randrange(2**31)
    print(f"--seed {chosen}")
    return int(chosen)


@pytest.fixture
def chance(seed: int) -> random.Random:
    """Randomness of a test."""
    return random.Random(seed)


@pytest.fixture(scope="session", autouse=True)
def has_fitted() -> None:
    """How long this process has been there is no time of a test's run."""
    begin_unix_s()


@pytest.fixture(autouse=True)
def as_new_process() -> None:
    """No test knows what an earlier one has trained."""
    new_process()


class _SaidInThisTest(logging.Filter):
    """What a bucket's loop says late, 20 s after the test whose bucket it was, is no later test's warning."""

    def __init__(self) -> None:
        super().__init__()
        self._earlier = {thread.ident for thread in threading.enumerate() if thread.name == "spot-store-loop"}

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread not in self._earlier


@pytest.fixture(autouse=True)
def warnings_of_this_test(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What is captured is what this test had said."""
    with caplog.filtering(_SaidInThisTest()):
        yield


@pytest.fixture(scope="session")
def own_folders() -> Iterator[list[Path]]:
    """Folders of this test process; what dead ones left is removed."""
    folders.clear_up()
    with folders.kept() as made:
        yield made


@pytest.fixture(autouse=True)
def runtime_dir(own_folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory and a tmpfs folder of the test's own; local servers it left running are ended."""
    folder, shm = (Path(tempfile.mkdtemp(prefix="", dir=home)) for home in own_folders)
    monkeypatch.setenv("LIGHTNING_SPOT_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("LIGHTNING_SPOT_SHM_DIR", str(shm))
    monkeypatch.setenv("LIGHTNING_SPOT_CLOUD", "none")  # tests ask nobody beyond loopback
    for name in ("TOKEN", "TOKEN_FILE", "CA", "CLIENT_CERT"):
        monkeypatch.delenv(f"LIGHTNING_SPOT_{name}", raising=False)
    yield folder
    folders.end_servers(folder)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(shm, ignore_errors=True)


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Has so many threads of a name not start."""
    start, left = threading.Thread.start, {"": 0}

    def limited(thread: threading.Thread) -> None:
        for name, count in left.items():
            if count > 0 and thread.name.startswith(name):
                left[name] -= 1
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    return left.__setitem__


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Start snapshot servers on free loopback ports."""
    servers: list[RunningServer] = []

    def start(*arguments: str, environment: dict[str, str] | None = None, listen: str = "127.0.0.1:0") -> RunningServer:
        flags = ["--listen", listen, "--memory-limit", "256MiB", *arguments]
        servers.append(RunningServer(flags, tmp_path / f"server-{len(servers)}.log", environment))
        return servers[-1].wait_listening()

    yield start
    for server in servers:
        server.stop(signal.SIGKILL)


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of a CA for servers at loopback, as ``lightning-spot cert`` makes them."""
    folder = tmp_path_factory.mktemp("certs")
    make(folder, ["127.0.0.1", "localhost"])
    return folder


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Makes snapshot servers of this process, see ``tests/support/server.py``."""
    with contextlib.ExitStack() as made:

        def make(root: Path = tmp_path, kind: type[Bench] = Bench, **settings: Any) -> Bench:
            return made.enter_context(contextlib.closing(kind(root, **settings)))

        yield make


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    """A snapshot server of this process."""
    return make_bench()


@pytest.fixture
def with_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WithServers]]:
    """Makes hosts whose runs have snapshot servers, which are asked again soon."""
    monkeypatch.setattr(reconcile, "ASK_AGAIN_S", 0.2)
    monkeypatch.setattr(reconcile, "FIRST_AWAY_S", 0.1)
    with contextlib.ExitStack() as made:

        def make(allow: list[str] | None = None) -> WithServers:
            kept = WithServers(tmp_path, [str(tmp_path)] if allow is None else allow)
            return made.enter_context(contextlib.closing(kept))

        yield make


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Any]:
    """A rank that writes snapshots into this process, see ``tests/support/ranks.py``."""
    from tests.support.ranks import Desk  # torch

    with contextlib.closing(Desk(tmp_path)) as made:
        yield made


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Cli:
    """Runs a command of ours, which ends with a code; what it has printed, for bad input in one line.

    A process that needs torch is forked from one that has it.
    """
    from lightning_spot.cli import main

    monkeypatch.setattr(sys, "executable", warm_python)

    def run(*arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        assert main([str(each) for each in arguments]) == code
        said = capsys.readouterr()
        return said.out if code == 0 else " ".join(said.err.split()) if code == 2 else said.out + said.err

    return run


@pytest.fixture(scope="session")
def warm_python(request: pytest.FixtureRequest) -> Iterator[str]:
    """A Python to call in ``sys.executable``'s place, see ``support/warm.py``; all workers of a test run share it."""
    shared = getattr(request.config, "workerinput", {}).get("warm")
    python, held = (shared, warm.hold(shared)) if shared else begin_warm()
    with held:
        yield python


@pytest.fixture(scope="session")
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Any:
    """Runs a training, see ``tests/support/program.py``, undisturbed, once for all that ask for it."""
    from tests.support.program import Outcome, command, run

    home = tmp_path_factory.getbasetemp()
    home = home.parent if hasattr(request.config, "workerinput") else home

    @functools.cache
    def of(function: Callable[..., Any], **arguments: Any) -> Outcome:
        root = home / f"twin-{zlib.crc32(' '.join(command('', function, home, **arguments)).encode()):08x}"
        with open(f"{root}.lock", "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if not (root / "ended").exists():
                shutil.rmtree(root, ignore_errors=True)
                run(warm_python, function, root, **arguments)
                (root / "ended").touch()
        return Outcome(root)

    return of


@pytest.fixture(scope="session", autouse=True)
def warm_servers(warm_python: str) -> Iterator[None]:
    """Servers are forked, also the local ones of trainers in this process: each is there in a tenth of the time."""

    def fork(command: list[str], **how: Any) -> warm.Fork:
        return warm.Fork(warm_python, command[1:], **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningServer, "python", warm_python)
        patch.setattr(starting, "subprocess", SimpleNamespace(Popen=fork, DEVNULL=subprocess.DEVNULL))
        yield


@pytest.fixture
def port() -> Iterator[int]:
    """See :func:`kept_port`."""
    with kept_port() as kept:
        yield kept


@pytest.fixture(scope="session")
def s3_server(warm_python: str) -> Iterator[str]:
    """Endpoint of a moto S3 server over real HTTP."""
    from botocore import session

    def answers() -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", port)) == 0

    with kept_port() as port:
        process = subprocess.Popen(
            [warm_python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(answers, "moto to listen")
            with pytest.MonkeyPatch.context() as patch:
                # Each client reads 2 MB of JSON otherwise, which takes longer than most tests.
                patch.setattr(session, "create_loader", functools.cache(session.create_loader))
                yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of an empty bucket; the environment points to the server."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    _forget_other_servers(s3_server)
    bucket = f"bucket-{random.SystemRandom().randrange(10**12)}"
    s3fs.S3FileSystem(use_listings_cache=False).mkdir(bucket)
    yield f"s3://{bucket}"
    _forget_other_servers(s3_server)


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No credentials are to be found for S3, and nobody answers there."""
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


def _forget_other_servers(endpoint: str) -> None:
    """Keep what fsspec keeps for its next caller only where it speaks to ``endpoint``: to make a client takes long."""
    import s3fs

    clients = [files._s3 for files in s3fs.S3FileSystem._cache.values()]
    if any(client is not None and client.meta.endpoint_url != endpoint for client in clients):
        s3fs.S3FileSystem.clear_instance_cache()
