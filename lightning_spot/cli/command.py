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
from dataclasses import dataclass, field
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
        command = COMMANDS[arguments.command]
        code = int(command.load(arguments.command)(arguments))
        sys.stdout.flush()
        return code
    except CorruptSnapshotError as error:
        _say(str(error))
        return 1
    except SpotError as error:
        _say(str(error))
        return 2
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
        command = commands.add_parser(
            name,
            help=each.text,
            description=f"{each.text[0].upper()}{each.text[1:]}.",
            epilog="\n  ".join(["examples:", *each.examples]) + f"\n\n{_exit_codes(_ALWAYS | each.codes)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if complete is None or name in complete:
            each.load(f"add_{name}_arguments")(command)
    return parser


def _say(text: str) -> None:
    error_console().print(*text.split("\n"), sep="\n")


def _exit_codes(codes: Codes) -> str:
    return "\n".join(["exit codes:", *(f"  {code:<4} {codes[code]}" for code in sorted(codes))])


_ALWAYS: Codes = {0: "done", 2: "wrong usage, no such run or snapshot, or a server or the storage failed"}
_INCOMPLETE: Codes = {INCOMPLETE: "done, but a server or the storage did not answer: it may hold newer snapshots"}
_BAD_NEWS: Codes = {1: "bad news: a snapshot is damaged, states differ, not everything is stored"}
_CODES: Codes = {**_ALWAYS, **_BAD_NEWS, **_INCOMPLETE, 130: "interrupted"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Command:
    """One command. Its module is imported when the command is called.

    Attributes:
        module: below ``lightning_spot``, with a function of the command's name that runs it, and returns the exit code,
            and ``add_NAME_arguments``, which adds its arguments to its parser.
        text: what it does.
        codes: exit codes besides 0 and 2, and what each means.
        examples: command lines.
    """

    module: str
    text: str
    codes: Codes = field(default_factory=dict)
    examples: tuple[str, ...]

    def load(self, function: str) -> Any:
        """A function of its module."""
        return getattr(importlib.import_module(f"lightning_spot.{self.module}"), function)


COMMANDS = {
    "serve": _Command(
        module="cli.serve",
        text="run a snapshot server",
        codes={1: "snapshots could not be stored"},
        examples=(
            "lightning-spot serve --listen 0.0.0.0:7070 --storage s3://bucket/runs",
            "lightning-spot serve --listen 0.0.0.0:7070 --allow-storage /mnt/runs --memory-limit 64GiB",
            "lightning-spot serve --listen 0.0.0.0:7070 --tls-cert server.pem --tls-key server-key.pem",
        ),
    ),
    "run": _Command(
        module="cli.supervise",
        text="run a training, and start it again after a crash or a kill",
        codes={143: "ended by a preemption notice or SIGTERM; any other code is that of the last start"},
        examples=(
            "lightning-spot run -- python train.py",
            "lightning-spot run --max-restarts 20 --pause 30s -- torchrun --nproc-per-node 2 train.py",
        ),
    ),
    "drill": _Command(
        module="cli.drill",
        text="train undisturbed and with kills, and compare the final states bit by bit",
        codes={1: "the final states differ"},
        examples=(
            "lightning-spot drill -- python train.py",
            "lightning-spot drill --kills 5 --limit 20min -- torchrun --nproc-per-node 2 train.py",
        ),
    ),
    "simulate": _Command(
        module="cli.simulate",
        text="simulate a job under preemptions, with each interval policy",
        examples=(
            "lightning-spot simulate --work 3d --snapshot-size 15GB --lifetime 4h",
            "lightning-spot simulate --hosts 8 --server-speed 1GB/s --server-price 0.4 --price 1.2",
        ),
    ),
    "report": _Command(
        module="cli.report",
        text="show where the time of a run went, attempt by attempt",
        examples=("lightning-spot report s3://bucket/run-1 --html run-1.html",),
    ),
    "doctor": _Command(
        module="cli.doctor",
        text="measure this host, its servers and the storage, and recommend settings",
        codes={1: "a server or the storage cannot be used"},
        examples=(
            "lightning-spot doctor s3://bucket/run-1",
            "lightning-spot doctor s3://bucket/run-1 --server spot://10.0.0.5:7070 --snapshot-size 15GB",
        ),
    ),
    "stop": _Command(
        module="cli.stop",
        text="end servers of this host once everything is uploaded",
        codes={1: "a server did not end, or snapshots that are stored nowhere else stay in memory"},
        examples=(
            "lightning-spot stop s3://bucket/run-1",
            "lightning-spot stop --all",
            "lightning-spot stop --server spot://127.0.0.1:7070",
        ),
    ),
    "status": _Command(
        module="cli.status",
        text="show the runs at servers and on this host, and how safe they are",
        codes=_INCOMPLETE,
        examples=(
            "lightning-spot status -w",
            "lightning-spot status --server spot://10.0.0.5:7070 -o json",
            "lightning-spot status --server spot://10.0.0.5:7070 --open",
        ),
    ),
    "ls": _Command(
        module="cli.snapshots",
        text="list the snapshots of a run: on this host, at servers, in storage",
        codes=_INCOMPLETE,
        examples=(
            "lightning-spot ls s3://bucket/run-1",
            "lightning-spot ls spot://10.0.0.5:7070/run-1 -o json",
        ),
    ),
    "show": _Command(
        module="cli.snapshots",
        text="show one snapshot: sizes, checksums, versions",
        codes=_INCOMPLETE,
        examples=(
            "lightning-spot show s3://bucket/run-1",
            "lightning-spot show s3://bucket/run-1@2000",
        ),
    ),
    "verify": _Command(
        module="cli.snapshots",
        text="read every byte of the snapshots and check it",
        codes={1: "a snapshot is damaged", **_INCOMPLETE},
        examples=(
            "lightning-spot verify s3://bucket/run-1",
            "lightning-spot verify s3://bucket/run-1@latest",
        ),
    ),
    "diff": _Command(
        module="cli.diff",
        text="show in which entries two snapshots or checkpoints differ",
        codes={1: "they differ", **_INCOMPLETE},
        examples=(
            "lightning-spot diff s3://bucket/run-1@1000 s3://bucket/run-1@2000",
            "lightning-spot diff last.ckpt s3://bucket/run-1",
        ),
    ),
    "cp": _Command(
        module="cli.snapshots",
        text="copy a snapshot: a checkpoint file, or a directory for a sharded model",
        codes={1: "the snapshot is damaged; nothing is copied", **_INCOMPLETE},
        examples=(
            "lightning-spot cp s3://bucket/run-1 last.ckpt",
            "lightning-spot cp s3://bucket/run-1@2000 step-2000.ckpt --consolidate",
        ),
    ),
    "completion": _Command(
        module="cli.completion",
        text="print a script that completes commands in a shell",
        examples=("lightning-spot completion bash",),
    ),
    "export": _Command(
        module="cli.snapshots",
        text="write the weights of a snapshot into one file, as safetensors",
        codes={1: "the snapshot is damaged; nothing is written", **_INCOMPLETE},
        examples=("lightning-spot export s3://bucket/run-1@2000 model.safetensors --safetensors",),
    ),
    "rewind": _Command(
        module="cli.history",
        text="have the next start resume from an earlier snapshot, and set newer ones aside",
        examples=(
            "lightning-spot rewind s3://bucket/run-1@2000",
            "lightning-spot rewind s3://bucket/run-1 --undo",
        ),
    ),
    "prune": _Command(
        module="cli.history",
        text="delete the snapshots in storage that a policy does not keep",
        examples=(
            "lightning-spot prune s3://bucket/run-1 --keep 1 --dry-run",
            "lightning-spot prune s3://bucket/run-1 --keep 2 --best 3 --monitor val_loss",
        ),
    ),
    "rm": _Command(
        module="cli.history",
        text="remove a snapshot or a run, on this host, at servers and in storage",
        examples=(
            "lightning-spot rm s3://bucket/run-1@2000",
            "lightning-spot rm s3://bucket/run-1 --all --dry-run",
        ),
    ),
    "token": _Command(
        module="cli.token",
        text="make a token that holds for some runs, for some time",
        examples=("lightning-spot token --run team-a --rights write --expires 7d",),
    ),
    "cert": _Command(
        module="cli.cert",
        text="make certificates to try TLS with: a CA, a server's and a client's",
        examples=("lightning-spot cert certs 10.0.0.5 snapshots.example.com",),
    ),
}
