"""``lightning-spot stop``: ends local servers of this host once all is uploaded, and clears up after dead ones."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import asdict, dataclass, field

from lightning_spot.cli.arguments import ask_status, location_of
from lightning_spot.cli.output import add_output, error_console, plain_table, print_answer
from lightning_spot.client.starting import end_server, revived
from lightning_spot.config import UPLOAD_TIMEOUT_S, format_bytes
from lightning_spot.errors import ServerRefusedError, SettingsError, SnapshotNotFoundError, SpotError
from lightning_spot.protocol.record import ServerRecord, find_record, local_records
from lightning_spot.protocol.wire import Address, answered
from lightning_spot.server.area import left_in
from lightning_spot.untrusted import as_object, flag, integer

_STARTED = {"slots": 4, "memory_bytes": 2**30, "server_idle_timeout_s": 60.0}
"""How a server is run that only uploads what a dead one left, if that one left no note of it."""
_SHOWN = 4


@dataclass(kw_only=True, slots=True)
class Stopped:
    """What became of a server.

    Attributes:
        runs: that it served.
        result: ``"stopped"``, or ``"discarded"`` with all that it held; ``"kept"``: it has ended, and snapshots that
            are stored nowhere else stay in memory; ``"in use"``: a trainer is connected; ``"running"``: it did not end.
        kept: the snapshots that stay, as ``RUN@STEP``.
        kept_bytes: their size.
        reason: why it is not stopped, or why they stay.
    """

    runs: list[str] = field(default_factory=list)
    result: str = "stopped"
    kept: list[str] = field(default_factory=list)
    kept_bytes: int = 0
    reason: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``stop``."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="run whose local server on this host ends")
    parser.add_argument("--all", action="store_true", help="end all local servers on this host")
    parser.add_argument(
        "--discard", action="store_true", help="end at once, and drop snapshots that are stored nowhere"
    )
    add_output(parser)


def stop(arguments: argparse.Namespace) -> int:
    """End servers; 1 if one did not end, or if snapshots that are stored nowhere else stay in memory."""
    if bool(arguments.run) is arguments.all:
        raise SettingsError("stop needs one of RUN and --all")
    if arguments.run:
        url = location_of(arguments.run, (), "stop").url
        record = find_record(url)
        records = [record] if record in local_records() else []
        if not records:
            raise SnapshotNotFoundError(f"no local server of {arguments.run} is on this host, nor anything of one")
    else:
        records = local_records()
    ended = [_stop_local(record, arguments.discard) for record in records]
    table = plain_table(headings := ("RUN", "RESULT", "KEPT", "REASON"), left=headings)
    for each in ended:
        more = f" and {len(each.kept) - _SHOWN} more" if len(each.kept) > _SHOWN else ""
        kept = f"{', '.join(each.kept[:_SHOWN])}{more}, {format_bytes(each.kept_bytes)}" if each.kept else ""
        table.add_row(", ".join(each.runs), each.result, kept, each.reason)
    shown = [table if ended else "no local server is on this host"]
    print_answer(arguments.output, {"servers": [asdict(each) for each in ended]}, shown)
    return 0 if all(each.result in ("stopped", "discarded") for each in ended) else 1


def _stop_local(record: ServerRecord, discard: bool) -> Stopped:
    """End a local server. One that was killed is started again first: it uploads the slots that are left."""
    found = Stopped()
    try:
        if not discard:
            with contextlib.suppress(ServerRefusedError):  # one of another version, say, ends like any other
                if (host := revived(record, settings=_STARTED)) is not None:
                    host.disconnect()
        if record.running() and _is_in_use(found, Address(socket_path=str(record.http))):
            return found
        if not discard:
            runs = ", ".join(found.runs) or "a server without runs"
            error_console().print(f"waiting until {runs} is uploaded, {UPLOAD_TIMEOUT_S:.0f} s at most by default")
        has_ended = end_server(record, discard=discard)
    except SpotError as error:
        found.result, found.reason = "running", str(error)
        return found
    if not has_ended:
        found.result, found.reason = "running", f"it did not end; its log is {record.log}"
    elif discard:
        found.result = "discarded"
    elif record.left_slots():
        left = [manifest for area in record.areas() for manifest in left_in(area)]
        found.result, found.kept = "kept", sorted({f"{manifest.run}@{manifest.step}" for manifest in left})
        found.kept_bytes = sum(manifest.nbytes for manifest in left)
        found.runs = found.runs or sorted({name.rpartition("@")[0] for name in found.kept})
        found.reason = f"stored nowhere else; its log, {record.log}, says why. The next start of the run has them"
    return found


def _is_in_use(found: Stopped, address: Address) -> bool:
    """Whether a trainer is connected to a server, or may be; its runs are noted. Another version cannot be asked."""
    try:
        answer = ask_status(address)
        with answered(str(address)):
            runs = {name: as_object(run) for name, run in as_object(answer["runs"]).items()}
            trainers = [integer(run, "pid", 0, 0, 2**31) for run in runs.values() if flag(run, "live")]
    except ServerRefusedError:
        return False
    except SpotError as error:
        found.result, found.reason = "running", str(error)
        return True
    found.runs = sorted(runs)
    if trainers:
        pids = ", ".join(map(str, trainers))
        found.result, found.reason = "in use", f"a trainer is connected (pid {pids}): end it first"
    return bool(trainers)
