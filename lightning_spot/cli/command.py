"""``lightning-spot``: parses the command line, calls the command, turns errors into one line and an exit code.

Exit codes: 0 done, 1 the answer is bad news (a snapshot is damaged, something could not be uploaded), 2 wrong usage or
a tier that failed, 3 done as far as tiers answered.
"""

from __future__ import annotations

import argparse
import io
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

from lightning_spot._version import __version__
from lightning_spot.cli import cert, doctor, drill, report, simulate, snapshots, supervise, token
from lightning_spot.cli.output import error_console
from lightning_spot.cli.snapshots import INCOMPLETE
from lightning_spot.errors import CorruptSnapshotError, SpotError
from lightning_spot.http import flags, program
from lightning_spot.renamed import refuse_old_words
from lightning_spot.untrusted import log_plainly

Codes = dict[int | str, str]
"""Exit codes, and what each means."""


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
    log_plainly(logging.WARNING, "message")
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
    parser = argparse.ArgumentParser(
        prog="lightning-spot",
        description="Snapshots of PyTorch Lightning runs: serve, look at, check and copy them.",
        epilog=f"{_exit_codes(_CODES)}\n\nlightning-spot COMMAND --help shows examples, and the codes of that command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, each in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=each.text,
            description=f"{each.text[0].upper()}{each.text[1:]}.",
            epilog="\n  ".join(["examples:", *each.examples]) + f"\n\n{_exit_codes(each.codes)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        each.add_arguments(command)
        command.set_defaults(call=each.call)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    log_plainly(logging.INFO, arguments.log_format)
    try:
        return program.serve(flags.settings_from(arguments))
    except OSError as error:
        _say(f"lightning-spot serve: {error}")
        return 2


def _say(text: str) -> None:
    error_console().print(*text.split("\n"), sep="\n")


def _exit_codes(codes: Codes) -> str:
    return "\n".join(["exit codes:", *(f"  {code:<4} {meaning}" for code, meaning in codes.items())])


_INTERRUPTED: Codes = {130: "interrupted"}
_CODES: Codes = {
    0: "done",
    1: "bad news: a snapshot is damaged, states differ, not everything is stored",
    2: "wrong usage, or a server or the storage failed",
    INCOMPLETE: "done, but a server or the storage did not answer",
    **_INTERRUPTED,
}
_NO_RUN: Codes = {2: "wrong usage, no such run, or nothing that could be asked answers"}
_NO_SNAPSHOT: Codes = {2: "wrong usage, no such run or snapshot, or nothing that could be asked answers"}


@dataclass(frozen=True, slots=True)
class _Command:
    """One command.

    Attributes:
        call: runs it.
        add_arguments: adds its arguments to its parser.
        text: what it does.
        codes: exit codes, and what each means.
        examples: command lines.
    """

    call: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    text: str
    codes: Codes
    examples: tuple[str, ...]


_COMMANDS = {
    "serve": _Command(
        _serve,
        flags.add_arguments,
        "run a snapshot server",
        {
            0: "ended by SIGTERM or SIGINT, and every snapshot is stored",
            1: "ended, but snapshots could not be stored",
            2: "wrong usage, or the address or the storage cannot be used",
        },
        (
            "lightning-spot serve --listen 0.0.0.0:7070 --storage s3://bucket/runs",
            "lightning-spot serve --listen 0.0.0.0:7070 --allow-storage /mnt/runs --memory-limit 64GiB",
            "lightning-spot serve --listen 0.0.0.0:7070 --tls-cert server.pem --tls-key server-key.pem",
        ),
    ),
    "run": _Command(
        supervise.run,
        supervise.add_arguments,
        "run a training, and start it again after a crash or a kill",
        {
            0: "the training is done",
            2: "wrong usage, or the training cannot be started",
            143: "ended by a preemption notice or SIGTERM",
            "N": "that of the last start, if it was not started again",
        },
        (
            "lightning-spot run -- python train.py",
            "lightning-spot run --max-restarts 20 --pause 30s -- torchrun --nproc-per-node 2 train.py",
        ),
    ),
    "drill": _Command(
        drill.drill,
        drill.add_arguments,
        "train undisturbed and with kills, and compare the final states bit by bit",
        {
            0: "the final states are equal",
            1: "the final states differ",
            2: "wrong usage, or a training failed",
            **_INTERRUPTED,
        },
        (
            "lightning-spot drill -- python train.py",
            "lightning-spot drill --kills 5 --limit 20min -- torchrun --nproc-per-node 2 train.py",
        ),
    ),
    "simulate": _Command(
        simulate.simulate,
        simulate.add_arguments,
        "simulate a job under preemptions, with each interval policy",
        {0: "done", 2: "wrong usage", **_INTERRUPTED},
        (
            "lightning-spot simulate --work 3d --snapshot-size 15GB --lifetime 4h",
            "lightning-spot simulate --hosts 8 --server-speed 1GB/s --server-price 0.4 --price 1.2",
        ),
    ),
    "report": _Command(
        report.report,
        report.add_arguments,
        "show where the time of a run went, attempt by attempt",
        {0: "done", 2: "wrong usage, no record of such a run, or the storage failed", **_INTERRUPTED},
        ("lightning-spot report s3://bucket/run-1 --plot run-1.svg",),
    ),
    "doctor": _Command(
        doctor.doctor,
        doctor.add_arguments,
        "measure this host, its servers and the storage, and recommend settings",
        {
            0: "everything can be used",
            1: "a server or the storage cannot be used",
            2: "wrong usage",
            **_INTERRUPTED,
        },
        (
            "lightning-spot doctor s3://bucket/run-1",
            "lightning-spot doctor s3://bucket/run-1 --server spot://10.0.0.5:7070 --snapshot-size 15GB",
        ),
    ),
    "ls": _Command(
        snapshots.ls,
        snapshots.add_ls_arguments,
        "list the snapshots of a run: on this host, at servers, in storage",
        {
            0: "done",
            **_NO_RUN,
            INCOMPLETE: "done, but a server or the storage did not answer: it may hold more snapshots",
            **_INTERRUPTED,
        },
        ("lightning-spot ls s3://bucket/run-1", "lightning-spot ls spot://10.0.0.5:7070/run-1 --json"),
    ),
    "show": _Command(
        snapshots.show,
        snapshots.add_show_arguments,
        "show one snapshot: sizes, checksums, versions",
        {
            0: "done",
            **_NO_SNAPSHOT,
            INCOMPLETE: "done, but a server or the storage did not answer: it may hold a newer snapshot",
            **_INTERRUPTED,
        },
        ("lightning-spot show s3://bucket/run-1", "lightning-spot show s3://bucket/run-1@2000"),
    ),
    "verify": _Command(
        snapshots.verify,
        snapshots.add_verify_arguments,
        "read every byte of the snapshots and check it",
        {
            0: "every snapshot is good",
            1: "a snapshot is damaged",
            **_NO_SNAPSHOT,
            INCOMPLETE: "all that was read is good, but a server or the storage did not answer",
            **_INTERRUPTED,
        },
        ("lightning-spot verify s3://bucket/run-1", "lightning-spot verify s3://bucket/run-1@latest"),
    ),
    "cp": _Command(
        snapshots.copy,
        snapshots.add_copy_arguments,
        "copy a snapshot: a checkpoint file, or a directory for a sharded model",
        {
            0: "the snapshot is copied",
            1: "the snapshot is damaged; nothing is copied",
            2: "wrong usage, no such run or snapshot, or it cannot be read or written",
            INCOMPLETE: "copied, but a server or the storage did not answer: it may hold a newer snapshot",
            **_INTERRUPTED,
        },
        (
            "lightning-spot cp s3://bucket/run-1 last.ckpt",
            "lightning-spot cp s3://bucket/run-1@2000 step-2000.ckpt --consolidate",
        ),
    ),
    "token": _Command(
        token.token,
        token.add_arguments,
        "make a token that holds for some runs, for some time",
        {0: "done", 2: "wrong usage, or no secret to sign with", **_INTERRUPTED},
        ("lightning-spot token --run team-a --rights write --expires 7d",),
    ),
    "cert": _Command(
        cert.cert,
        cert.add_arguments,
        "make certificates to try TLS with: a CA, a server's and a client's",
        {0: "done", 2: "wrong usage, or a file is there already", **_INTERRUPTED},
        ("lightning-spot cert certs 10.0.0.5 snapshots.example.com",),
    ),
}
