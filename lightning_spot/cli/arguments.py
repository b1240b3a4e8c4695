"""The arguments that commands share, checked in words of the command line: an error names the flag."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning_spot.client.server_client import ServerClient
from lightning_spot.config import (
    check_number,
    directory_of,
    names_server,
    parse_flag_bytes,
    parse_seconds,
    scheme_of,
    why_no_place,
    without_password,
)
from lightning_spot.errors import SettingsError
from lightning_spot.protocol.wire import Address, parse_spot_url
from lightning_spot.run.location import Location
from lightning_spot.snapshot.manifest import snapshot_order

LATEST = "latest"
"""The newest snapshot of a run."""

_ANSWER_S = 5.0


def add_run(
    parser: argparse.ArgumentParser,
    metavar: str = "RUN",
    which: str = "",
    *,
    servers: bool = True,
    stored: bool = False,
) -> None:
    """Add a run, or a snapshot of one, and where to ask for it.

    Args:
        parser: of the command.
        metavar: how the run is shown.
        which: what may follow it, for the help.
        servers: whether snapshot servers may be named, too.
        stored: whether it is named by its place in storage only.
    """
    places = "directory or fsspec URL" if stored else "directory, fsspec URL, or spot://host:port/NAME"
    parser.add_argument("run", metavar=metavar, help=f"{places}{which}")
    if servers:
        add_servers(parser, "also ask this snapshot server; may be given several times")


def add_servers(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--server``."""
    parser.add_argument("--server", action="append", default=[], metavar="spot://HOST:PORT", help=text)


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the command that trains, which ends the command line."""
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command that trains")


def program_of(arguments: argparse.Namespace) -> list[str]:
    """The command that trains.

    Raises:
        SettingsError: if there is none.
    """
    program: list[str] = arguments.program[arguments.program[:1] == ["--"] :]
    if not program:
        raise SettingsError(f"give the command that trains: lightning-spot {arguments.command} -- python train.py")
    return program


class CheckedValue(argparse.Action):
    """A flag whose value is read and checked by ``read(text, flag)``, so that an error names the flag."""

    def __init__(self, *, read: Callable[[str, str], object], **how: Any) -> None:
        super().__init__(**how)
        self._read = read

    def __call__(self, _parser: object, namespace: argparse.Namespace, values: Any, _flag: object = None) -> None:
        """See :class:`argparse.Action`."""
        setattr(namespace, self.dest, self._read(values, self.option_strings[-1]))


def takes_time(least_s: float = 0, *, above: bool = False) -> dict[str, Any]:
    """For a flag that takes a duration such as ``90s`` or ``2h``: ``least_s`` or more, more only if ``above``."""

    def read(given: str, flag: str) -> float:
        check_number(flag, value_s := parse_seconds(given, f"{flag} "), least_s, above=above)
        return value_s

    return {"action": CheckedValue, "read": read, "metavar": "TIME"}


def takes_size(per: str = "") -> dict[str, Any]:
    """For a flag that takes a size, or a speed with ``per="/s"`` behind it."""

    def read(given: str, flag: str) -> int:
        return parse_flag_bytes(given.removesuffix(per), flag)

    return {"action": CheckedValue, "read": read, "metavar": f"SIZE{per}"}


def takes_number(least: float = 0, *, whole: bool = True) -> dict[str, Any]:
    """For a flag that takes a number, of ``least`` or more."""

    def read(given: str, flag: str) -> object:
        number: object = given
        with contextlib.suppress(ValueError):
            number = int(given) if whole else float(given)
        check_number(flag, number, least, whole=whole)
        return number

    return {"action": CheckedValue, "read": read, "metavar": "N"}


def split_run(given: str) -> tuple[str, str | None]:
    """A run, and which of its snapshots is meant: ``RUN@STEP``, ``RUN@NAME`` or ``RUN@latest``; ``None`` if none is.

    ``spot://host:port/NAME@ID`` is a run. A directory whose own name ends so is given with a slash behind it.
    """
    run, separator, selector = given.rpartition("@")
    is_step = re.fullmatch(r"\d{1,11}", selector) is not None  # an ID has twelve hexadecimal digits
    selects = is_step or selector == LATEST or snapshot_order(selector) is not None
    return (run, selector) if separator and selects else (given, None)


def ask_status(address: Address) -> dict[str, Any]:
    """What a server says of itself.

    Raises:
        SpotError: if it does not answer, or refuses.
    """
    with contextlib.closing(ServerClient(address)) as client:
        return client.call("GET", "/v1/status", timeout_s=_ANSWER_S)


def check_servers(servers: Sequence[str], given_by: str = "--server") -> None:
    """Refuse what names no snapshot server.

    Raises:
        SettingsError: naming the flag or variable.
    """
    for server in servers:
        try:
            address, path = parse_spot_url(server)
        except SettingsError as error:
            raise SettingsError(f"{given_by} {error}") from error
        if path:
            raise SettingsError(f"{given_by} {server!r} names more than a server: give {address} only")
    if twice := [server for server in servers if servers.count(server) > 1]:
        raise SettingsError(f"{given_by} names {twice[0]} twice")


def location_of(url: str, servers: Sequence[str] = ()) -> Location:
    """Where a run is.

    Args:
        url: its directory or URL.
        servers: snapshot servers that are asked, too.

    Raises:
        SettingsError: in words of the command line.
    """
    if names_server(url):
        raise SettingsError(f"{url} is a snapshot server: give a directory or URL of a run, in storage")
    if why := why_no_place(url):
        raise SettingsError(f"{without_password(url)!r}: {why}")
    check_servers(servers)
    if not scheme_of(url) and os.path.isfile(directory_of(url)):
        raise SettingsError(
            f"{url} is a file, and not the directory of a run: give that. A checkpoint is read by torch.load, or named"
            " in fit(ckpt_path=)"
        )
    try:
        return Location.of(url, servers=servers or None)
    except SettingsError:  # it ends with no name of a run, which only its trainer needs
        return replace(Location.of(url, servers=servers or None, run_name="run"), named=False)
