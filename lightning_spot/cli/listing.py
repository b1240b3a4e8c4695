"""``lightning-spot ls`` and ``show``: what there is, where, how old, how safe."""

from __future__ import annotations

import argparse
import json
import time

from lightning_spot.cli.output import plain_table, wide_console
from lightning_spot.cli.tiers import Entry, ask, pick
from lightning_spot.config import format_bytes
from lightning_spot.errors import SettingsError


def ls(arguments: argparse.Namespace) -> int:
    """List the snapshots of a run at every tier, newest first."""
    found = ask(arguments)
    if found.selected is not None:
        raise SettingsError(f"ls lists all snapshots of a run: give {found.url}, or show {arguments.run}")
    if arguments.json:
        unreadable = [{"name": name, "state": "unreadable", "reason": why} for name, why in found.unreadable.items()]
        print(json.dumps([*(_facts(entry) for entry in found.entries), *unreadable], indent=1))
        return 0
    console = wide_console()
    headings = ("SNAPSHOT", "STEP", "EPOCH", "ATTEMPT", "SIZE", "AGE", "TIER", "STATE")
    table = plain_table(headings, left=("SNAPSHOT", "TIER", "STATE"))
    for entry in found.entries:
        manifest = entry.manifest
        epoch, age = str(manifest.epoch), _age(manifest.created_unix_s)
        if manifest.portion is not None:  # only the first host's knows when, and in which epoch
            epoch, age = "-", age if manifest.created_unix_s else "-"
        numbers = (str(manifest.step), epoch, str(manifest.attempt), format_bytes(manifest.stored_bytes))
        table.add_row(manifest.name, *numbers, age, entry.source.tier, entry.state)
    if found.entries:
        console.print(table)
    else:
        console.print(f"no snapshots of {found.url}")
    for name, why in found.unreadable.items():
        console.print(f"unreadable: {name}: {why}", style="yellow")
    for problem in found.problems:
        console.print(problem, style="yellow")
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Show everything known of one snapshot."""
    found = ask(arguments)
    entry = pick(found, found.selected)
    if arguments.json:
        print(json.dumps(_facts(entry), indent=1))
        return 0
    manifest = entry.manifest
    part_bytes = min(manifest.part_bytes, manifest.nbytes)
    most = "at most " if len(manifest.checksums) > 1 else ""
    console, what = wide_console(), "directory" if manifest.files else "file"
    lines = {
        "snapshot": manifest.name,
        "run": f"{manifest.run}@{manifest.run_id}" if manifest.run_id else manifest.run,
        "lineage": manifest.lineage or "unknown",
        "tier": f"{entry.source.tier} ({entry.state})",
        "step": manifest.step,
        "epoch": manifest.epoch,
        "attempt": manifest.attempt,
        "exact": "yes" if manifest.exact else "no, an approximation (lossy='topk')",
        "complete": "yes, the run had ended" if manifest.complete else "no",
        "taken": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created_unix_s))
        + f" ({_age(manifest.created_unix_s)} ago)",
        what: f"{manifest.data_path}, {manifest.stored_bytes} bytes ({format_bytes(manifest.stored_bytes)})",
        **({"files": f"{len(manifest.files)}, {manifest.files[0].name} first"} if manifest.files else {}),
        "parts": f"{len(manifest.checksums)} of {most}{format_bytes(part_bytes)}, xxh3-128 each",
        "world size": manifest.world_size,
        "written by": ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items())),
    }
    for name, value in lines.items():
        console.print(f"{name:<11} {value}")
    return 0


def _facts(entry: Entry) -> dict[str, object]:
    return {**entry.manifest.to_dict(), "tier": entry.source.tier, "state": entry.state}


def _age(created_unix_s: float) -> str:
    seconds = max(0.0, time.time() - created_unix_s)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
