"""``lightning-spot``: parses the command line, calls the command, turns errors into one line and an exit code.

Exit codes: 0 done, 1 the answer is bad news (a snapshot is corrupt, something could not be flushed), 2 wrong usage or
a tier that failed.
"""

from __future__ import annotations

import argparse
import io
import logging
import sys

from lightning_spot._version import __version__
from lightning_spot.cli import doctor, drill, listing, report, simulate, transfer
from lightning_spot.cli.output import error_console
from lightning_spot.errors import CorruptSnapshotError, SpotError
from lightning_spot.renamed import refuse_old_words
from lightning_spot.service import flags, program
from lightning_spot.untrusted import log_plainly


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; default those of the process.

    Returns:
        the exit code.
    """
    for stream in (sys.stdout, sys.stderr):  # a symbol must not end the command where the terminal is ASCII
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    log_plainly(logging.WARNING, "%(message)s")
    try:
        refuse_old_words(sys.argv[1:] if argv is None else argv)
        arguments = command_parser().parse_args(argv)
        return int(arguments.call(arguments))
    except CorruptSnapshotError as error:
        _say(str(error))
        return 1
    except SpotError as error:
        _say(str(error))
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


def command_parser() -> argparse.ArgumentParser:
    """What the command understands."""
    parser = argparse.ArgumentParser(prog="lightning-spot", description="Snapshots of Lightning runs, at every tier.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run a snapshot server")
    flags.add_arguments(serve)
    serve.set_defaults(call=_serve)

    for name, module, call, text in (
        ("drill", drill, drill.drill, "train undisturbed and with kills, and compare the final states bit by bit"),
        ("simulate", simulate, simulate.simulate, "simulate a job under preemptions: which policy, which tiers"),
        ("report", report, report.report, "where the time of a run went, attempt by attempt"),
        ("doctor", doctor, doctor.doctor, "measure this host and its tiers, and recommend settings"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        module.add_arguments(command)
        command.set_defaults(call=call)

    for name, call, text in (
        ("ls", listing.ls, "list the snapshots of a run at every tier"),
        ("show", listing.show, "show one snapshot: sizes, checksums, versions, what is in it"),
        ("verify", transfer.verify, "read every byte of the snapshots and check it"),
        ("cp", transfer.copy, "copy a snapshot's checkpoint into a file, or a sharded one into a directory"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        one = {"ls": "", "verify": "; RUN@STEP for one snapshot, RUN@latest for the newest (default: all)"}
        command.add_argument(
            "run",
            metavar="RUN" if name == "ls" else "RUN[@STEP]",
            help="directory, fsspec URL, or spot://host:port/NAME"
            + one.get(name, "; RUN@STEP for one snapshot (default: the newest, RUN@latest)"),
        )
        command.add_argument(
            "--server",
            action="append",
            default=[],
            metavar="spot://HOST:PORT",
            help="also ask this snapshot server; may be given several times",
        )
        command.add_argument("--run-name", metavar="NAME", help="name of the run (default: last component of RUN)")
        if name == "cp":
            command.add_argument("dest", metavar="DEST", help="file, or directory to copy it into")
            command.add_argument("--force", action="store_true", help="replace an existing file")
            command.add_argument(
                "--consolidate", action="store_true", help="make one plain file of a sharded snapshot (needs torch)"
            )
        if name in ("ls", "show"):
            command.add_argument("--json", action="store_true", help="print JSON, for programs")
        command.set_defaults(call=call)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    logging.getLogger().setLevel(logging.INFO)
    try:
        return program.run_node(flags.settings_from(arguments))
    except OSError as error:
        _say(f"lightning-spot serve: {error}")
        return 2


def _say(text: str) -> None:
    error_console().print(*text.split("\n"), sep="\n")
