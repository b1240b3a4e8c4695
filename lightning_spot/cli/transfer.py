"""``lightning-spot cp`` and ``verify``: read snapshots, check every byte, with a progress bar."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from lightning_spot.cli.output import error_console, print_line
from lightning_spot.cli.tiers import Entry, Found, ask, look_again, pick
from lightning_spot.config import PART_BYTES, format_bytes, format_count
from lightning_spot.errors import CorruptSnapshotError, SettingsError, SnapshotNotFoundError, SpotError, TierError
from lightning_spot.image.files import cut
from lightning_spot.image.manifest import MANIFEST_FILE, Manifest
from lightning_spot.run.reading import OpenSnapshot
from lightning_spot.untrusted import plain

_LOOKS = 10
"""How often the newest snapshot is looked for where training supersedes each one before it can be opened."""


def copy(arguments: argparse.Namespace) -> int:
    """Copy the newest snapshot (or the one named) into a file, or a directory, that torch and Lightning read.

    Where what could not be read may be newer, that is said. Where the newest is damaged, an error names the one before.
    """
    found = ask(arguments)
    wanted = pick(found, found.selected).manifest
    _target(arguments, wanted)  # an error in it is said before anything is read
    if found.selected is None:
        for what, why in found.unreadable.items():
            print_line(f"passed over: {what}: {why}")
        for problem in found.problems:
            print_line(f"not asked: {problem}")
    snapshot = _open_newest(found) if found.selected is None else _open_somewhere(found, wanted.name)
    try:
        wanted = snapshot.manifest
        target, one_file = _target(arguments, wanted), arguments.consolidate or not wanted.files
        if wanted.files and one_file:
            _consolidate(snapshot, target)
        else:
            _copy(snapshot, target)
    finally:
        snapshot.close()
    nbytes = target.stat().st_size if one_file else wanted.stored_bytes
    print_line(f"{target}: {format_bytes(nbytes)}, step {wanted.step}, from {snapshot.tier}, every checksum holds")
    if not one_file:
        print_line("That is a directory, of a sharded model. --consolidate makes one plain file of it")
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Read and check every snapshot at every tier (or those of one name); exit code 1 if one is bad.

    One that left its tier meanwhile, as all do while training goes on, is not bad.
    """
    found = ask(arguments)
    if found.selected is not None:
        name = pick(found, found.selected).manifest.name
        found.entries = [entry for entry in found.entries if entry.manifest.name == name]
        found.unreadable = {what: why for what, why in found.unreadable.items() if what.startswith(f"{name} at ")}
    if not found.entries and not found.unreadable:
        raise SnapshotNotFoundError("; ".join([f"no snapshot of {found.url} to verify", *found.problems]))
    bad = len(found.unreadable)
    for what, why in found.unreadable.items():
        print_line(f"BAD  {what}: {why}")
    for entry in found.entries:
        label = f"{entry.manifest.name} at {entry.source.tier}"
        try:
            _open(entry).close()
        except SpotError as error:
            if _has_left(entry):
                print_line(f"gone {label}: it has left this tier since it was listed, as older ones do")
                continue
            bad += 1
            print_line(f"BAD  {label}: {error}")
        else:
            parts = format_count(len(entry.manifest.checksums), "part")
            print_line(f"good {label}: {format_bytes(entry.manifest.stored_bytes)}, {parts}")
    for problem in found.problems:
        print_line(f"not asked: {problem}")
    return 1 if bad else 0


def _open_newest(found: Found) -> OpenSnapshot:
    """Open the newest snapshot. With one at every step it may have left memory since it was listed.

    Its tier is asked again then, and what it has now is opened at once. Where training supersedes that, too, each time,
    the older one of another tier is taken.
    """
    looks = 0
    while True:
        newest = pick(found, None)  # of portions alone there is nothing to open
        try:
            return _open_somewhere(found, newest.manifest.name)
        except SnapshotNotFoundError:
            looks += 1
            look_again(found, newest.source, forget=looks >= _LOOKS)
            if not found.entries:
                raise
        except (
            CorruptSnapshotError
        ) as error:  # older weights than those asked for are no answer; how to have them is said
            names = (entry.manifest.name for entry in found.entries if entry.manifest.portion is None)
            older = next((name for name in names if name != newest.manifest.name), None)
            if older is None:
                raise
            raise CorruptSnapshotError(
                f"{error}. To have the snapshot before it: lightning-spot cp {found.url}@{older} DEST",
                where=error.where,
                part=error.part,
            ) from error


def _open_somewhere(found: Found, name: str) -> OpenSnapshot:
    """Open a snapshot at the first tier whose copy is good."""
    problem: SpotError | None = None
    tier = ""
    for entry in found.entries:
        if entry.manifest.name != name:
            continue
        if problem is not None:  # that of the last tier is the error
            print_line(f"{tier} is passed over: {problem}")
        try:
            return _open(entry)
        except SpotError as error:
            problem, tier = error, entry.source.tier
    raise problem or CorruptSnapshotError(f"{name} is at no tier any more")


def _open(entry: Entry) -> OpenSnapshot:
    with _progress() as progress:
        task = progress.add_task(plain(f"{entry.manifest.name} from {entry.source.tier}"), total=entry.manifest.nbytes)
        return entry.source.open(entry.manifest, lambda nbytes: progress.update(task, advance=nbytes))


def _has_left(entry: Entry) -> bool:
    """Whether the tier has it no more: as a whole, and not only a part of it."""
    try:
        holdings = entry.source.survey()
    except SpotError:  # not known: what was wrong with the snapshot stands
        return False
    name = entry.manifest.name
    return name not in holdings.unreadable and all(manifest.name != name for manifest in holdings.manifests)


def _target(arguments: argparse.Namespace, wanted: Manifest) -> Path:
    target, name, one_file = Path(arguments.dest), wanted.name, arguments.consolidate or not wanted.files
    if target.is_dir():
        target = target / (name if not one_file or name.endswith(".ckpt") else f"{name}.ckpt")
    if target.exists() and not one_file:
        raise SettingsError(f"{target} exists, and a directory is never replaced; name another path")
    if target.exists() and not arguments.force:
        raise SettingsError(f"{target} exists; pass --force to replace it, or name another path")
    if not target.parent.is_dir():
        raise SettingsError(f"{target.parent} is no directory; make it first, or name another path")
    return target


def _consolidate(snapshot: OpenSnapshot, target: Path) -> None:
    """Make one plain file of a sharded snapshot, in a process of its own: commands know no torch."""
    folder = target.parent / f".{target.name}.{uuid.uuid4().hex}.shards"
    try:
        _copy(snapshot, folder)
        command = [sys.executable, "-m", "lightning_spot.sharded.consolidate", str(folder), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
            raise SpotError(f"no plain file could be made of {snapshot.manifest.name}: {reason}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy(snapshot: OpenSnapshot, target: Path) -> None:
    """Write beside the target, then rename: a broken copy never stands under the final name."""
    temporary, manifest = target.parent / f".{target.name}.{uuid.uuid4().hex}", snapshot.manifest
    try:
        with _progress() as progress:
            task = progress.add_task(f"writing {target}", total=manifest.nbytes)
            if manifest.files:
                temporary.mkdir()
            for span, data in cut(
                manifest.spans, _parts(snapshot, lambda nbytes: progress.update(task, advance=nbytes))
            ):
                _write(temporary / span.name if manifest.files else temporary, data)
            if manifest.files:
                _write(temporary / MANIFEST_FILE, [memoryview(manifest.to_json().encode())])
        os.replace(temporary, target)
    except OSError as error:
        raise TierError(f"{target} cannot be written: {error.strerror}", tier=str(target)) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)


def _parts(snapshot: OpenSnapshot, advance: Callable[[int], None]) -> Iterator[memoryview]:
    reader = snapshot.reader()  # which checks again what it reads
    while part := reader.read(PART_BYTES):
        yield memoryview(part)
        advance(len(part))


def _write(path: Path, data: Iterable[memoryview]) -> None:
    with open(path, "wb") as file:
        for piece in data:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _progress() -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # To the error stream, and only for people: pipes get the result alone.
    console = error_console()
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
