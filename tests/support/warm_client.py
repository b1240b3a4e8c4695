"""Called like ``python``; runs what it is given in a fork of a warm process, see ``warm.py``. Imports little."""

import json
import os
import signal
import socket
import sys

LIGHT = ("lightning_spot", "tests.support.small_trainer", "tests.support.oracle")  # what never needs torch, but for:
HEAVY = ("lightning_spot.state", "lightning_spot.sharded")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def pass_on(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended: how is about to be said


def main() -> None:
    arguments = sys.argv[1:]
    unbuffered = arguments[0] == "-u"
    arguments = arguments[unbuffered:]
    if arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
        os.execv(sys.executable, [sys.executable, *arguments])  # an option of Python's
    light = arguments[0] == "-m" and arguments[1].startswith(LIGHT) and not arguments[1].startswith(HEAVY)
    kind = "servers" if light else "trainers"
    request = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
    request |= {"unbuffered": unbuffered, "network": f"/proc/{os.getpid()}/ns/net"}
    text = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.path.join(os.path.dirname(sys.argv[0]), kind))
        socket.send_fds(server, [len(text).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(text)
        with server.makefile("rb") as answers:
            pid = int(answers.readline())
            for number in PASSED_ON:
                signal.signal(number, lambda number, _: pass_on(pid, number))
            code = int(answers.readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
