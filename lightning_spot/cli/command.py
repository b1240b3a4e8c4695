"""``lightning-spot``: parses the command line, calls the command, turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import signal
import sys
from collections.abc import Collection
from typing import Any

from lightning_spot._version import __version__
from lightning_spot.cli.output import INCOMPLETE, error_console
from lightning_spot.errors import CorruptSnapshotError, SpotError
from lightning_spot.renamed import refuse_old_words
from lightning_spot.untrusted import log_plainly

Codes = dict[int, str]
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
    words = sys.argv[1:] if argv is None else argv
    try:
        refuse_old_words(words)
        arguments = command_parser(words[:1]).parse_args(words)
        code = int(_loaded(arguments.command, arguments.command)(arguments))
        sys.stdout.flush()
        return code
    except SpotError as error:
        _say(str(error))
        return 1 if isinstance(error, CorruptSnapshotError) else 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except OSError as error:  # of the answer, or of a path that cannot be looked at: a name too long, a stale mount
        with contextlib.suppress(OSError):  # what is not printed yet stays so: Python would fail once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # whoever reads the answer has enough of it
            return 128 + signal.SIGPIPE
        _say(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        return 2


def command_parser(complete: Collection[str] | None = None) -> argparse.ArgumentParser:
    """What the command understands.

    Args:
        complete: commands whose modules are imported for their arguments; default all. ``--help`` needs none.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-spot",
        description="Snapshots of PyTorch Lightning runs: serve, look at, check and copy them.",
        epilog=f"{_exit_codes(_CODES)}\n\nlightning-spot COMMAND --help shows examples, and the codes of that command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, each in COMMANDS.items():
        examples = "".join(f"  lightning-spot {name} {words}\n" for words in each.examples)
        command = commands.add_parser(
            name,
            help=each.text,
            description=f"{each.text[0].upper()}{each.text[1:]}.",
            epilog=f"examples:\n{examples}\n{_exit_codes(_ALWAYS | each.codes)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if complete is None or name in complete:
            _loaded(name, f"add_{name}_arguments")(command)
    return parser


def module_of(command: str) -> str:
    """The module of a command, below ``lightning_spot``. It is imported when the command is called."""
    return f"cli.{_MODULES.get(command, command)}"


def _loaded(command: str, function: str) -> Any:
    return getattr(importlib.import_module(f"lightning_spot.{module_of(command)}"), function)


def _say(text: str) -> None:
    error_console().print(*text.split("\n"), sep="\n")


def _exit_codes(codes: Codes) -> str:
    return "\n".join(["exit codes:", *(f"  {code:<4} {codes[code]}" for code in sorted(codes))])


_ALWAYS: Codes = {0: "done", 2: "wrong usage, no such run or snapshot, or a server or the storage failed"}
_INCOMPLETE: Codes = {INCOMPLETE: "done, but a server or the storage did not answer: it may hold newer snapshots"}
_BAD_NEWS: Codes = {1: "bad news: a snapshot is damaged, states differ, not everything is stored"}
_CODES: Codes = {**_ALWAYS, **_BAD_NEWS, **_INCOMPLETE, 130: "interrupted"}


class _Command:
    """One command.

    Its module has a function of the command's name that runs it and returns the exit code, and ``add_NAME_arguments``.

    Args:
        text: what it does.
        examples: what may follow its name.
        codes: exit codes besides 0 and 2.
    """

    def __init__(self, text: str, *examples: str, codes: Codes | None = None) -> None:
        self.text, self.examples, self.codes = text, examples, codes or {}


COMMANDS = {
    "serve": _Command(
        "run a snapshot server",
        "--listen 0.0.0.0:7070 --storage s3://bucket/runs",
        "--listen 0.0.0.0:7070 --allow-storage /mnt/runs --memory-limit 64GiB",
        "--listen 0.0.0.0:7070 --tls-cert server.pem --tls-key server-key.pem",
        codes={1: "snapshots could not be stored"},
    ),
    "run": _Command(
        "run a training, and start it again after a crash or a kill",
        "-- python train.py",
        "--max-restarts 20 --pause 30s -- torchrun --nproc-per-node 2 train.py",
        codes={143: "ended by a preemption notice or SIGTERM; any other code is that of the last start"},
    ),
    "drill": _Command(
        "train undisturbed and with kills, and compare the final states bit by bit",
        "-- python train.py",
        "--kills 5 --limit 20min -- torchrun --nproc-per-node 2 train.py",
        codes={1: "the final states differ"},
    ),
    "simulate": _Command(
        "simulate a job under preemptions, with each interval policy",
        "--work 3d --snapshot-size 15GB --lifetime 4h",
        "--hosts 8 --server-speed 1GB/s --server-price 0.4 --price 1.2",
    ),
    "report": _Command("show where the time of a run went, attempt by attempt", "s3://bucket/run-1 --html run-1.html"),
    "doctor": _Command(
        "measure this host, its servers and the storage, and recommend settings",
        "s3://bucket/run-1",
        "s3://bucket/run-1 --server spot://10.0.0.5:7070 --snapshot-size 15GB",
        codes={1: "a server or the storage cannot be used"},
    ),
    "stop": _Command(
        "end servers of this host once everything is uploaded",
        "s3://bucket/run-1",
        "--all",
        "--server spot://127.0.0.1:7070",
        codes={1: "a server did not end, or snapshots that are stored nowhere else stay in memory"},
    ),
    "status": _Command(
        "show the runs at servers and on this host, and how safe they are",
        "-w",
        "--server spot://10.0.0.5:7070 -o json",
        "--server spot://10.0.0.5:7070 --open",
        codes=_INCOMPLETE,
    ),
    "ls": _Command(
        "list the snapshots of a run: on this host, at servers, in storage",
        "s3://bucket/run-1",
        "spot://10.0.0.5:7070/run-1 -o json",
        codes=_INCOMPLETE,
    ),
    "show": _Command(
        "show one snapshot: sizes, checksums, versions",
        "s3://bucket/run-1",
        "s3://bucket/run-1@2000",
        codes=_INCOMPLETE,
    ),
    "verify": _Command(
        "read every byte of the snapshots and check it",
        "s3://bucket/run-1",
        "s3://bucket/run-1@latest",
        codes={1: "a snapshot is damaged", **_INCOMPLETE},
    ),
    "diff": _Command(
        "show in which entries two snapshots or checkpoints differ",
        "s3://bucket/run-1@1000 s3://bucket/run-1@2000",
        "last.ckpt s3://bucket/run-1",
        codes={1: "they differ", **_INCOMPLETE},
    ),
    "cp": _Command(
        "copy a snapshot: a checkpoint file, or a directory for a sharded model",
        "s3://bucket/run-1 last.ckpt",
        "s3://bucket/run-1@2000 step-2000.ckpt --consolidate",
        codes={1: "the snapshot is damaged; nothing is copied", **_INCOMPLETE},
    ),
    "completion": _Command("print a script that completes commands in a shell", "bash"),
    "export": _Command(
        "write the weights of a snapshot into one file, as safetensors",
        "s3://bucket/run-1@2000 model.safetensors --safetensors",
        codes={1: "the snapshot is damaged; nothing is written", **_INCOMPLETE},
    ),
    "rewind": _Command(
        "have the next start resume from an earlier snapshot, and set newer ones aside",
        "s3://bucket/run-1@2000",
        "s3://bucket/run-1 --undo",
    ),
    "prune": _Command(
        "delete the snapshots in storage that a policy does not keep",
        "s3://bucket/run-1 --keep 1 --dry-run",
        "s3://bucket/run-1 --keep 2 --best 3 --monitor val_loss",
    ),
    "rm": _Command(
        "remove a snapshot or a run, on this host, at servers and in storage",
        "s3://bucket/run-1@2000",
        "s3://bucket/run-1 --all --dry-run",
    ),
    "token": _Command(
        "make a token that holds for some runs, for some time", "--run team-a --rights write --expires 7d"
    ),
    "cert": _Command(
        "make certificates to try TLS with: a CA, a server's and a client's", "certs 10.0.0.5 snapshots.example.com"
    ),
}
_MODULES = {
    "run": "supervise",
    **dict.fromkeys(("ls", "show", "verify", "cp", "export"), "snapshots"),
    **dict.fromkeys(("prune", "rm", "rewind"), "history"),
}
"""Modules of commands that are not named like them."""
