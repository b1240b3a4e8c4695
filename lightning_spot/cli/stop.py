"""``lightning-spot stop``: ends servers of this host once everything is uploaded, and clears up after dead ones."""

from __future__ import annotations

import argparse
import contextlib
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lightning_spot.cli.arguments import add_servers, ask_status, check_servers, location_of
from lightning_spot.cli.output import add_output, error_console, print_answer, table_of
from lightning_spot.client.starting import end_process, end_server, revived
from lightning_spot.config import UPLOAD_TIMEOUT_S, is_loopback, read_environment
from lightning_spot.errors import ServerRefusedError, SettingsError, SnapshotNotFoundError, SpotError
from lightning_spot.protocol.ownership import own_directories
from lightning_spot.protocol.process import ProcessId
from lightning_spot.protocol.record import ServerRecord, find_record, local_records, port_area
from lightning_spot.protocol.wire import Address, answered, parse_spot_url
from lightning_spot.server.area import left_in, remove_abandoned
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.untrusted import as_object, flag, integer

_STARTED = {"slots": 4, "memory_bytes": 2**30, "server_idle_timeout_s": 60.0}
"""How a server is run that only uploads what a dead one left, if that one left no note of it."""
_SHOWN = 4
_DONE = {True: "discarded", False: "stopped"}
_LISTENS = "0A"  # a state of TCP, see proc(5)


@dataclass(kw_only=True, slots=True)
class Stopped:
    """What became of a server.

    Attributes:
        server: ``"host"`` for a local server, else ``spot://host:port``.
        runs: that it served.
        result: ``"stopped"``, or ``"discarded"`` with all that it held; ``"kept"``: it has ended, and snapshots that
            are stored nowhere else stay in memory; ``"in use"``: a trainer is connected; ``"running"``: it did not end.
        kept: the snapshots that stay, as ``RUN@STEP``.
        kept_bytes: their size.
        reason: why it is not stopped, or why they stay.
    """

    server: str = "host"
    runs: list[str] = field(default_factory=list)
    result: str = "stopped"
    kept: list[str] = field(default_factory=list)
    kept_bytes: int = 0
    reason: str = ""

    def keeps(self, left: list[Manifest], reason: str) -> None:
        """Note what is left in memory of a server that has ended."""
        self.result, self.reason = "kept", f"stored nowhere else{reason}"
        self.kept = sorted({f"{manifest.run}@{manifest.step}" for manifest in left})
        self.kept_bytes = sum(manifest.nbytes for manifest in left)


def add_stop_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``stop``."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="run whose local server on this host ends")
    add_servers(parser, "end this snapshot server, on a loopback address of this host; may be given several times")
    parser.add_argument("--all", action="store_true", help="end all local servers on this host")
    discard = "end at once, and drop snapshots that are stored nowhere"
    parser.add_argument("--discard", action="store_true", help=discard)
    add_output(parser)


def stop(arguments: argparse.Namespace) -> int:
    """End servers; 1 if one did not end, or if snapshots that are stored nowhere else stay in memory."""
    if bool(arguments.run) + bool(arguments.server) + arguments.all != 1:
        raise SettingsError("stop needs one of RUN, --server and --all")
    check_servers(arguments.server)
    if arguments.run:
        url = location_of(arguments.run).url
        record = find_record(url)
        records = [record] if record in local_records() else []
        if not records:
            raise SnapshotNotFoundError(f"no local server of {arguments.run} is on this host, nor anything of one")
    else:
        records = local_records() if arguments.all else []
    ended = [_stop_local(record, arguments.discard) for record in records]
    ended += [_stop_at(parse_spot_url(server)[0], arguments.discard) for server in arguments.server]
    facts = [asdict(each) for each in ended]
    rows = [{**each, "kept": each["kept"][:_SHOWN] + ["…"] * (len(each["kept"]) > _SHOWN)} for each in facts]
    table = table_of("runs server result kept kept_bytes reason", rows)
    print_answer(arguments.output, {"servers": facts}, [table if ended else "no local server is on this host"])
    return 0 if all(each.result in _DONE.values() for each in ended) else 1


def _stop_local(record: ServerRecord, discard: bool) -> Stopped:
    """End a local server. One that was killed is started again first: it uploads the slots that are left."""
    found = Stopped(result=_DONE[discard])
    try:
        if not discard:
            with contextlib.suppress(ServerRefusedError):  # one of another version, say, ends like any other
                if (host := revived(record, settings=_STARTED)) is not None:
                    host.disconnect()
        if record.running():
            with contextlib.suppress(ServerRefusedError):  # nor can that be asked
                found.runs, trainers, _ = _asked(Address(socket_path=str(record.http)))
                if trainers:
                    found.result, found.reason = "in use", f"a trainer is connected (pid {trainers}): end it first"
                    return found
        _wait_for(found.runs, discard)
        if not end_server(record, discard=discard):
            raise SpotError(f"it did not end; its log is {record.log}")
    except SpotError as error:
        found.result, found.reason = "running", str(error)
        return found
    if not discard and record.left_slots():
        log = f"; its log, {record.log}, says why. The next start of the run has them"
        found.keeps([manifest for area in record.areas() for manifest in left_in(area)], log)
        found.runs = found.runs or sorted({name.rpartition("@")[0] for name in found.kept})
    return found


def _stop_at(address: Address, discard: bool) -> Stopped:
    """End a snapshot server that listens at a port of this host.

    Raises:
        SettingsError: if it is not on this host, or another user's.
    """
    if not is_loopback(address.host.strip("[]")):
        raise SettingsError(f"--server {address} may be another host's: give a loopback address, on the server's host")
    found, left = Stopped(server=str(address), result=_DONE[discard]), list[Manifest]()
    shm_dir = read_environment().shm_dir
    try:
        runs, _, process = _asked(address)
    except ServerRefusedError as error:
        raise SettingsError(f"{address} refuses to be stopped: {error}") from error
    except SpotError:
        runs, process = [], None
    is_there = process is not None and _listens(process.pid, address.port)  # it says so, and so does the kernel
    if process is not None and is_there:
        found.runs = runs  # trainers on other hosts turn to other servers meanwhile
        _wait_for(runs, discard)
        if not end_process(process, discard=discard):
            found.result, found.reason = "running", f"pid {process.pid} did not end"
            return found
    removed: list[bool] = []
    for area in own_directories(port_area(shm_dir, address.port)) if shm_dir is not None else ():
        with area:
            left += left_in(area)
            if discard:
                removed.append(remove_abandoned(area))
    if not (is_there or removed):
        raise SnapshotNotFoundError(f"no snapshot server of this user answers at {address}")
    if not all(removed):
        found.result, found.reason = "running", "it does not answer, and holds what is in its memory"
    elif left and not discard:
        found.keeps(left, f". lightning-spot serve at port {address.port} takes them over")
    return found


def _asked(address: Address) -> tuple[list[str], str, ProcessId | None]:
    """The runs of a server, the numbers of the trainers that are connected to it, and its process, as it says.

    Raises:
        SpotError: if it does not answer, or refuses.
    """
    answer = ask_status(address)
    with answered(str(address)):
        runs = {name: as_object(run) for name, run in as_object(answer["runs"]).items()}
        trainers = [str(integer(run, "pid", 0, 0, 2**31)) for run in runs.values() if flag(run, "live")]
        return sorted(runs), ", ".join(trainers), ProcessId.of(integer(answer, "pid", None, 1, 2**22))


def _wait_for(runs: list[str], discard: bool) -> None:
    if not discard:
        waited = ", ".join(runs) or "a server without runs"
        error_console().print(f"waiting until {waited} is uploaded, {UPLOAD_TIMEOUT_S:.0f} s at most by default")


def _listens(pid: int, port: int) -> bool:
    """Whether a process of this user listens at a port."""
    with contextlib.suppress(OSError):
        tables = "".join(table.read_text() for table in Path(f"/proc/{pid}/net").glob("tcp*"))
        fields = [line.split() for line in tables.splitlines()]
        wanted = {f"socket:[{each[9]}]" for each in fields if each[3] == _LISTENS and each[1].endswith(f":{port:04X}")}
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(fd) in wanted:
                    return True
    return False
