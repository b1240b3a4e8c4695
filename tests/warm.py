"""A Python that has imported torch and Lightning already, for tests that start trainers: a process that forks.

Importing both takes 3 s of a core, in every trainer and every rank of it. A trainer that is forked is a process like
any other: it has a number, is killed, leaves memory behind, and is torn from its threads.

:func:`start` (the fixture ``warm_python``) makes an executable that is called like ``python``: with ``-m MODULE``,
``-c CODE`` or a script. It is ``tests/warm_client.py``, which asks the server here for a fork with its own arguments,
environment, directory and files, passes signals on, and ends as the fork ends. The fork of one that is killed is
killed, before another one is made.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[1]
PRELOADED = ("lightning.pytorch", "lightning.pytorch.cli", "sklearn.datasets", "moto.server", "tests.exact_cases")
_REQUEST_S = 30.0


def start(folder: Path) -> str:
    """Start a server in ``folder``, whose path is short; returns the executable once it can be called.

    The server ends when nobody holds a connection from :func:`hold` any more.
    """
    python = folder / "python"
    python.write_text(f"#!{sys.executable} -SE\n{(HOME / 'tests' / 'warm_client.py').read_text()}")
    python.chmod(0o755)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "socket"))
    listening.listen(64)
    with listening, open(folder / "log", "wb") as log:
        subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(folder), str(listening.fileno())],
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # S3 wants 5 MiB in a part; with less, an upload in parts is tested with little data.
            env={**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "1024"},
            cwd=HOME,
            start_new_session=True,
        )
    return str(python)


def hold(python: str) -> socket.socket | None:
    """A connection that keeps the server of an executable alive; ``None`` if there is none, or no more."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(Path(python).with_name("socket")) if python else "")
        connection.sendall(b"hold")
    except OSError:
        connection.close()
        return None
    return connection


class Server:
    """Forks on request. ``serve`` returns in the forks only, with what each is to do."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._children: dict[socket.socket, tuple[int, int]] = {}
        self._holders: set[socket.socket] = set()

    def serve(self) -> dict[str, Any] | None:
        """Serve until the last holder is gone; ``None`` then."""
        held = False
        while self._holders or not held:
            ready = [key.fileobj for key, _ in self._selector.select(None if held else _REQUEST_S)]
            if not ready and not held:
                return None  # who started this is gone
            for file in ready:
                if isinstance(file, int):
                    self._reap(file)
                elif file is not self._listening:
                    self._hung_up(file)  # type: ignore[arg-type]
            if self._listening in ready:
                request = self._accept()
                if request is not None:
                    return request
                held = held or bool(self._holders)
        for connection in list(self._children):
            self._hung_up(connection)
        return None

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
        files += [self._listening.detach(), *(holder.detach() for holder in self._holders)]
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
    _reseed()
    what, *arguments = request["arguments"]
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


def _reseed() -> None:
    """Forks do not draw the same numbers."""
    import numpy as np
    import torch

    seed = int.from_bytes(os.urandom(4), "big")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main() -> None:
    folder = Path(sys.argv[1])
    listening = socket.socket(fileno=int(sys.argv[2]))
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the collector of a fork does not touch, and so copy, what all have in common
    request = Server(listening).serve()
    if request is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        become(request, str(folder / "python"))


if __name__ == "__main__":
    main()
