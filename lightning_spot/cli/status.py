"""``lightning-spot status``: which runs are at which servers, and how safe their newest snapshots are."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.live import Live

from lightning_spot.cli.arguments import add_servers, ask_status, check_servers
from lightning_spot.cli.output import (
    INCOMPLETE,
    PlainConsole,
    add_output,
    incomplete,
    print_answer,
    print_line,
    table_of,
)
from lightning_spot.client.server_client import ServerClient
from lightning_spot.config import LARGEST, MOST_SERVERS, names_server, read_environment
from lightning_spot.errors import ServerRefusedError, SettingsError, SpotError
from lightning_spot.protocol.record import local_records
from lightning_spot.protocol.wire import Address, answered, parse_spot_url
from lightning_spot.untrusted import MOST_UNIX_S, as_object, integer, number, plain, text, texts

_EVERY_S = 2.0
_SHOWN = (
    "run attempt state committed_step committed_unix_s replicated_step persisted_step persisted_unix_s lag_steps slots"
    " server"
)
_MOST_STEP = 10**15
_PATH = re.compile(r"/open/[\w-]{1,100}", re.ASCII)


Row = dict[str, Any]
"""A run at a server, by the names that ``-o json`` has; or the state of a server that has none or does not answer."""


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``status``."""
    add_servers(parser, "ask this snapshot server; may be given several times (default: LIGHTNING_SPOT_SERVERS)")
    parser.add_argument("-w", "--watch", action="store_true", help="show it again every 2 s, until Ctrl-C")
    parser.add_argument("--open", action="store_true", help="print a link to the status page of the server, for once")
    add_output(parser, names=True)


def status(arguments: argparse.Namespace) -> int:
    """Show the runs of the servers that are named, and of the local servers of this host."""
    if arguments.watch and not (arguments.output == "table" and sys.stdout.isatty()):
        raise SettingsError("-w rewrites a table in place: use it on a terminal, without -o")
    named, given_by = arguments.server, "--server"
    if not named:
        named, given_by = read_environment().servers, "LIGHTNING_SPOT_SERVERS"
    check_servers(named, given_by)
    if arguments.open:
        if len(named) != 1:
            raise SettingsError("--open opens the page of one server: name it by --server spot://HOST:PORT")
        print_line(link(named[0]))
        return 0
    addresses = [parse_spot_url(server)[0] for server in named]
    if arguments.watch:
        return _watch(addresses)
    rows, silent = _ask(addresses)
    runs = [row for row in rows if "run" in row]
    names = [
        f"{row['name']}@{row['committed_step']}" for row in runs if row["name"] and row["committed_step"] is not None
    ]
    shown = [table_of(_SHOWN, rows)] if rows else ["no server on this host, and none named"]
    print_answer(arguments.output, {"runs": runs, "not_asked": silent}, shown, names)
    return incomplete(silent)


def link(server_url: str) -> str:
    """Have a server make a link to its status page, which a browser may open once, within a minute.

    Raises:
        SettingsError: if ``server_url`` is no server's.
        ServerUnreachableError: if no server answers there.
        ServerRefusedError: if it refuses the token, or answers with another address.
    """
    address, _ = parse_spot_url(server_url)
    path = text(ServerClient(address).call("POST", "/v1/links"), "path")
    if not _PATH.fullmatch(path):  # else it could lead to another host
        raise ServerRefusedError(f"{address} answered with {plain(path)!r} instead of a link", tier=str(address))
    return f"{'https' if address.tls else 'http'}://{address.host}:{address.port}{path}"


def _watch(addresses: Sequence[Address]) -> int:
    silent: list[str] = []
    try:
        with Live(console=PlainConsole(), auto_refresh=False) as live:
            while True:
                rows, silent = _ask(addresses)
                table = table_of(_SHOWN, rows)
                for column in table.columns:  # a terminal that breaks lines by itself would not be rewritten in place
                    column.no_wrap, column.overflow = False, "fold"
                live.update(table, refresh=True)
                time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        return INCOMPLETE if silent else 0


def _ask(addresses: Sequence[Address]) -> tuple[list[Row], list[str]]:
    """Ask the servers, and those of this host; what they say, and why others said nothing."""
    local = [Address(socket_path=str(record.http)) for record in local_records() if record.running()]
    with ThreadPoolExecutor(MOST_SERVERS) as pool:
        answers = list(pool.map(_rows, [*local, *addresses]))
    rows = [row for found, _ in answers for row in found]
    rows.sort(key=lambda row: (row.get("run", ""), row["server"]))
    return rows, [problem for _, problem in answers if problem]


def _rows(address: Address) -> tuple[list[Row], str]:
    """The rows of a server, and why it does not answer, if it does not."""
    server = str(address) if address.host else "host"
    try:
        answer = ask_status(address)
        with answered(str(address)):
            rows = [_row(server, name, as_object(run)) for name, run in as_object(answer["runs"]).items()]
    except SpotError as error:
        return [{"server": server, "state": "no answer"}], str(error)
    return rows or [{"server": server, "state": "idle"}], ""


def _row(server: str, name: str, run: Mapping[str, Any]) -> Row:
    newest = {state: as_object(found) for state, found in as_object(run["newest"]).items()}
    step = {state: integer(found, "step", None, 0, _MOST_STEP) for state, found in newest.items()}
    unix_s = {state: number(found, "unix_s", None, 0, MOST_UNIX_S) for state, found in newest.items()}
    storage = [url for url in texts(run, "destinations") if not names_server(url)]
    return {
        "server": server,
        "state": text(run, "state", None),
        "run": name,
        "attempt": integer(run, "attempt", None, 0, LARGEST),
        "committed_step": step.get("committed"),
        "committed_unix_s": unix_s.get("committed"),
        "replicated_step": step.get("replicated"),
        "persisted_step": step.get("persisted"),
        "persisted_unix_s": unix_s.get("persisted"),
        "lag_steps": max(0, step["committed"] - step.get("persisted", 0)) if "committed" in step else None,
        "slots": integer(run, "slots", None, 0, LARGEST),
        "name": next(iter(storage), "") if server == "host" else f"{server}/{name}",
    }
