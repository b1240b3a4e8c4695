"""Two Pythons that have imported what takes long, for tests that start processes: servers that fork.

Importing torch and Lightning takes 3 s of a core and more, in every trainer, every rank of it and every worker of
pytest; what a server imports takes half a second. A process that is forked is like any other: it has a number, is
killed, leaves memory behind, and is torn from its threads.

:func:`start` (the fixture ``warm_python``) makes an executable that is called like ``python``: with ``-m MODULE``,
``-c CODE`` or a script. It is ``warm_client.py``, which asks a server here for a fork with its own arguments,
environment, directory, network and files, passes signals on, and ends as the fork ends. Servers and commands are forked
from a server that has never seen torch; everything else from one that is started when it is first asked for.

:class:`Fork` is such a process without the client between: its number is that of the fork.

The fork of one that is killed is killed, before another one is made. So nothing that was forked, not even a process
that was stopped, outlives a test run that is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

HOME = Path(__file__).resolve().parents[2]
SERVERS, TRAINERS = "servers", "trainers"
PRELOADED = {
    SERVERS: ("lightning_spot.cli", "lightning_spot.http.routes", "s3fs"),
    TRAINERS: (
        *("lightning.pytorch", "lightning.pytorch.cli", "sklearn.datasets", "moto.server", "tests.support.exact_cases"),
        "s3fs",  # which Lightning's loggers and checkpoints look for
        *("hypothesis.strategies", "xdist.remote"),  # for the workers
    ),
}
_REQUEST_S = 30.0
_OWN_NETWORK = "/proc/self/ns/net"
_CLONE_NEWNET = 0x40000000


def start(folder: Path) -> tuple[str, socket.socket]:
    """Start the servers in ``folder``, whose path is short; returns the executable, which can be called, and a holder.

    They end when nobody holds this or a connection from :func:`hold` any more.
    """
    python = folder / "python"
    python.write_text(f"#!{sys.executable} -SE\n{(HOME / 'tests' / 'support' / 'warm_client.py').read_text()}")
    python.chmod(0o755)
    ours, its = socket.socketpair()
    with its, _listen(folder / SERVERS) as servers, _listen(folder / TRAINERS) as trainers:
        _serve(folder, SERVERS, servers, its, trainers)
    return str(python), ours


def _listen(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen(64)
    return listening


def _serve(folder: Path, kind: str, *sockets: socket.socket) -> None:
    """Start a server, see :func:`main`."""
    numbers = [each.fileno() for each in sockets]
    with open(folder / f"{kind}.log", "wb") as log:
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm", str(folder), kind, *map(str, numbers)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # S3 wants 5 MiB in a part; with less, an upload in parts is tested with little data.
            env={**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "1024"},
            cwd=HOME,
            start_new_session=True,
        )


def hold(python: str) -> socket.socket | None:
    """A connection that keeps the servers of an executable alive; ``None`` if there are none, or no more."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(Path(python).with_name(SERVERS)) if python else "")
        connection.sendall(b"hold")
    except OSError:
        connection.close()
        return None
    return connection


class Fork:
    """A process forked for a snapshot server: of :class:`subprocess.Popen` what tests need.

    It is killed when the process that asked for it ends.
    """

    _kept: ClassVar[set[Fork]] = set()  # a process lives on when nobody looks at it any more

    def __init__(
        self,
        python: str,
        arguments: Sequence[str],
        *,
        stdout: IO[bytes],
        env: Mapping[str, str],
        cwd: str = "/",
        stdin: IO[bytes] | None = None,
        **_: object,
    ) -> None:
        self.returncode: int | None = None
        request = {"arguments": list(arguments), "environment": dict(env), "directory": cwd}
        text = json.dumps(request).encode()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(str(Path(python).with_name(SERVERS)))
        with open(os.devnull, "rb") as nothing:
            files = [(stdin or nothing).fileno(), stdout.fileno(), stdout.fileno()]
            socket.send_fds(self._server, [len(text).to_bytes(4, "big")], files)
        self._server.sendall(text)
        self._said = self._server.makefile("rb")
        self.pid = int(self._said.readline())
        self._kept.add(self)

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; ``None`` while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if (code := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _ended(self, within_s: float | None) -> int | None:
        if self.returncode is None and self._is_told(within_s):
            line = self._said.readline()
            self.returncode = int(line) if line else -signal.SIGKILL  # a server that ends kills its forks
            self._said.close()
            self._server.close()
            self._kept.discard(self)
        return self.returncode

    def _is_told(self, within_s: float | None) -> bool:
        """Whether the server has said how it ended, or has ended itself; ``select`` knows the first 1024 files only."""
        polling = select.poll()
        polling.register(self._server, select.POLLIN)
        return bool(polling.poll(None if within_s is None else 1000 * within_s))


class Server:
    """Forks on request. ``serve`` returns in the forks only, with what each is to do.

    Args:
        folder: where it is.
        listening: where requests come in.
        holder: a connection that keeps it alive, as those from :func:`hold` do.
        sleeping: where those for the server of trainers come in, which is started then.
    """

    def __init__(
        self, folder: Path, listening: socket.socket, holder: socket.socket, sleeping: socket.socket | None = None
    ) -> None:
        self._folder = folder
        self._listening = listening
        self._sleeping = sleeping
        self._held: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        for each in (listening, holder, *([sleeping] if sleeping is not None else [])):
            self._selector.register(each, selectors.EVENT_READ)
        self._children: dict[socket.socket, tuple[int, int]] = {}
        self._holders = {holder}

    def serve(self) -> dict[str, Any] | None:
        """Serve until the last holder is gone; ``None`` then."""
        while self._holders:
            ready = [key.fileobj for key, _ in self._selector.select()]
            for file in ready:
                if isinstance(file, int):
                    self._reap(file)
                elif file is self._sleeping:
                    self._wake(self._sleeping)
                elif file is not self._listening:
                    self._hung_up(file)  # type: ignore[arg-type]
            if self._listening in ready and (request := self._accept()) is not None:
                return request
        for connection in list(self._children):
            self._hung_up(connection)
        return None

    def _wake(self, listening: socket.socket) -> None:
        """Start the server of trainers: somebody asks for it."""
        ours, its = socket.socketpair()
        with its:
            _serve(self._folder, TRAINERS, listening, its)
        self._held.append(ours)
        self._selector.unregister(listening)
        listening.close()
        self._sleeping = None

    def _accept(self) -> dict[str, Any] | None:
        connection, _ = self._listening.accept()
        connection.settimeout(_REQUEST_S)
        try:
            data, files, _, _ = socket.recv_fds(connection, 4, 3)
        except OSError:
            data, files = b"", []
        if data == b"hold":
            self._holders.add(connection)
            self._selector.register(connection, selectors.EVENT_READ)
            return None
        if len(files) != 3 or len(data) != 4:
            connection.close()  # was killed before it could ask
            return None
        with connection.dup().makefile("rb") as stream:
            request: dict[str, Any] = json.loads(stream.read(int.from_bytes(data, "big")) or b"{}")
        pid = os.fork() if request else -1
        if pid == 0:
            for target, file in enumerate(files):
                os.dup2(file, target)
            self._let_go([*files, connection.detach()])
            return request
        for file in files:
            os.close(file)
        if pid < 0:
            connection.close()
            return None
        watched = os.pidfd_open(pid)
        self._children[connection] = (pid, watched)
        self._selector.register(connection, selectors.EVENT_READ)
        self._selector.register(watched, selectors.EVENT_READ)
        self._say(connection, pid)
        return None

    def _let_go(self, files: list[int]) -> None:
        """In a fork: it has none of the server's files."""
        for connection, (_, watched) in self._children.items():
            files += [connection.detach(), watched]
        sleeping = [self._sleeping] if self._sleeping is not None else []
        files += [other.detach() for other in (self._listening, *self._holders, *self._held, *sleeping)]
        self._selector.close()
        for file in files:
            os.close(file)

    def _hung_up(self, connection: socket.socket) -> None:
        """Its client was killed, or a holder has left."""
        if connection in self._holders:
            self._holders.discard(connection)
        elif connection in self._children:
            pid, watched = self._children.pop(connection)
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is its own
            os.waitpid(pid, 0)
            self._selector.unregister(watched)
            os.close(watched)
        else:
            return  # its fork has ended in the same round
        self._selector.unregister(connection)
        connection.close()

    def _reap(self, watched: int) -> None:
        for connection, (pid, file) in list(self._children.items()):
            if file == watched:
                _, status = os.waitpid(pid, 0)
                del self._children[connection]
                self._selector.unregister(watched)
                os.close(watched)
                self._selector.unregister(connection)
                self._say(connection, os.waitstatus_to_exitcode(status))
                connection.close()

    @staticmethod
    def _say(connection: socket.socket, number: int) -> None:
        try:
            connection.sendall(b"%d\n" % number)
        except OSError:
            return  # it was killed; that is seen in the next round


def become(request: dict[str, Any], python: str) -> None:
    """Run what a fork is to do, as an interpreter of its own would."""
    os.setsid()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.executable = python  # its ranks are forked, too
    for item in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if item and item not in sys.path:
            sys.path.insert(0, item)
    for number, name in ((1, "stdout"), (2, "stderr")):  # those of the parent were files, these may be pipes
        stream = open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115 # for good
        stream.reconfigure(write_through=bool(request.get("unbuffered")), line_buffering=number == 2)
        setattr(sys, name, stream)
    _reseed()
    try:
        enter_network(request.get("network", _OWN_NETWORK))
        with _port_for_ranks():
            _run(request["arguments"])
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        code = 0
    _end(code)


def enter_network(path: str) -> None:
    """Go on in another network namespace, as on another machine; nothing happens if it is this one. Needs root."""
    if os.path.samefile(path, _OWN_NETWORK):
        return
    with open(path, "rb") as network:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(network.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {path}")


@contextlib.contextmanager
def _port_for_ranks() -> Iterator[None]:
    """Keep a port at which Lightning can have its ranks meet: one that only was free another may have by then."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("", 0))
        os.environ["STANDALONE_PORT"] = str(kept.getsockname()[1])
        yield


def _run(command: list[str]) -> None:
    what, *arguments = command
    if what == "-m":
        module, *arguments = arguments
        sys.argv = [module, *arguments]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif what == "-c":
        code, *arguments = arguments
        sys.argv = ["-c", *arguments]
        sys.path.insert(0, os.getcwd())
        main_module = types.ModuleType("__main__")
        main_module.__spec__ = None
        sys.modules["__main__"] = main_module
        exec(compile(code, "<string>", "exec"), main_module.__dict__)
    else:
        sys.argv = [what, *arguments]
        sys.path.insert(0, str(Path(what).resolve().parent))
        runpy.run_path(what, run_name="__main__")


def _end(code: object) -> None:
    """End as Python does, but for what takes it half a second: to take all modules apart."""
    if not (code is None or isinstance(code, int)):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit((code or 0) & 0xFF)


def _reseed() -> None:
    """Forks do not draw the same numbers."""
    seed = int.from_bytes(os.urandom(4), "big")
    random.seed(seed)
    if "torch" in sys.modules:
        import numpy as np
        import torch

        np.random.seed(seed)
        torch.manual_seed(seed)


def _look_up_once() -> None:
    """Each Trainer asks all that is installed for callbacks, each worker reads the package for constants to try."""
    registry = importlib.import_module("lightning.fabric.utilities.registry")
    registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[attr-defined]
    getattr(importlib.import_module("hypothesis.internal.conjecture.providers"), "_get_local_constants", int)()


def main() -> None:
    """Serve in FOLDER as KIND (of servers, of trainers), with sockets as :class:`Server` has them."""
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    for module in PRELOADED[kind]:
        importlib.import_module(module)
    if kind == TRAINERS:
        _look_up_once()
    gc.collect()
    gc.freeze()  # the collector of a fork does not touch, and so copy, what all have in common
    server = Server(folder, *(socket.socket(fileno=int(number)) for number in sys.argv[3:]))
    request = server.serve()
    if request is not None:
        become(request, str(folder / "python"))
    elif kind == SERVERS:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
