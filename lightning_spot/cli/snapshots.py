"""``lightning-spot ls``, ``show``, ``verify``, ``cp``, ``export``: what there is where, how safe, and copies of it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from lightning_spot.cli.arguments import LATEST, add_run, check_servers, location_of, split_run
from lightning_spot.cli.output import (
    add_output,
    age,
    error_console,
    incomplete,
    print_answer,
    print_line,
    table_of,
    warning,
)
from lightning_spot.client.remote import ServerStore
from lightning_spot.config import PART_BYTES, format_bytes, names_server
from lightning_spot.errors import (
    CorruptSnapshotError,
    ServerUnreachableError,
    SettingsError,
    SnapshotNotFoundError,
    SpotError,
    TierError,
)
from lightning_spot.protocol.wire import parse_spot_url
from lightning_spot.retry import RetryPolicy
from lightning_spot.run.reading import OpenSnapshot, SnapshotReader
from lightning_spot.run.sources import ScatteredSource, Source, StoreSource
from lightning_spot.run.survey import Survey, ask_all, of_tier, scattered, survey
from lightning_spot.server.tier import state_in_memory
from lightning_spot.snapshot.manifest import MANIFEST_FILE, OWN_DIR, Manifest, snapshot_order
from lightning_spot.store.store import Holdings, Store
from lightning_spot.untrusted import plain

ONCE = RetryPolicy(tries=1, silent_s=6.0)
"""A person waits for the answer."""

SET_ASIDE = "set aside"
"""State of a snapshot from which no start resumes, since a rewind goes back to an older one."""


_ONE = "; RUN@STEP for one snapshot (default: the newest, RUN@latest)"


def add_ls_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ls``."""
    add_run(parser)
    add_output(parser, names=True)


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``show``."""
    add_run(parser, "RUN[@STEP]", _ONE)
    add_output(parser, names=True)


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify``."""
    add_run(parser, "RUN[@STEP]", "; RUN@STEP for one snapshot, RUN@latest for the newest (default: all)")
    add_output(parser, names=True)


def add_cp_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``cp``."""
    add_run(parser, "RUN[@STEP]", _ONE)
    _add_target(parser, "copy")
    plain_file = "make one plain file of a sharded snapshot (needs torch)"
    parser.add_argument("--consolidate", action="store_true", help=plain_file)


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``export``."""
    add_run(parser, "RUN[@STEP]", _ONE)
    _add_target(parser, "write")
    parser.add_argument("--safetensors", action="store_true", required=True, help="as safetensors (needs torch)")


def _add_target(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument("dest", metavar="DEST", help=f"file, or directory to {verb} it into")
    parser.add_argument("--force", action="store_true", help="replace an existing file")


@dataclass(slots=True)
class Entry:
    """A snapshot at a tier.

    Attributes:
        manifest: what it is.
        source: where it is.
        state: ``"persisted"`` in storage; of one in memory ``"replicated"`` (at another tier, too), ``"uploading"`` (on
            its way to one) or ``"local"`` (neither). Of a rank's shard of a snapshot that is not complete there, which
            of them it is; of one whose shards are at several of the tiers that were asked ``"replicated"``. Of one that
            a rewind has set aside, that.
    """

    manifest: Manifest
    source: Source
    state: str


@dataclass(slots=True)
class Found:
    """What the tiers answered.

    Attributes:
        url: the run that was asked for.
        selected: step or name of the snapshot of it that was, if one was.
        unreadable: snapshots that are there but cannot be used, with tier and reason.
        problems: one line for each tier that did not answer.
        entries: snapshots, newest first.
        seen: the answers, of a run in storage.
    """

    url: str
    selected: str | None
    unreadable: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    seen: Survey | None = None

    def names(self) -> list[str]:
        """``RUN@STEP`` of the snapshots that are complete."""
        return [f"{self.url}@{entry.manifest.step}" for entry in self.entries if entry.manifest.shard is None]

    def document(self, snapshots: Iterable[Mapping[str, object]]) -> dict[str, object]:
        """The answer for programs, of what it says of each snapshot."""
        unreadable = [{"name": name, "reason": why} for name, why in self.unreadable.items()]
        return {"run": self.url, "snapshots": [*snapshots], "unreadable": unreadable, "not_asked": self.problems}

    def take(self, entries: list[Entry]) -> None:
        """Have these entries, in their order, and note which of them are set aside."""
        self.entries = sorted(entries, key=lambda entry: entry.manifest.order, reverse=True)
        for entry in self.entries:
            if self.seen is not None and self.seen.is_aside(entry.manifest.order):
                entry.state = SET_ASIDE


def ask(run: str, servers: Sequence[str]) -> Found:
    """Ask every tier of a run, as the command line names it, and these servers.

    Raises:
        SettingsError: if a URL is malformed, names one of several runs of that name, or one snapshot and no run.
        SnapshotNotFoundError: if no tier that was asked answers, or no run was ever there: a wrong path is no run
            without snapshots.
    """
    url, selected = split_run(run)
    _check_names_a_run(url)
    found, hint = Found(url, selected), "give the directory or URL of one"
    if names_server(url):
        answers, problems = _ask_servers(url, servers)
        hint = "a server that was restarted knows only what it had in memory; ask by the run's URL"
    else:
        found.seen = seen = survey(location_of(url, servers), ONCE, begins=False)
        answers, problems = seen.answers, seen.problems
        found.unreadable = seen.unreadable
        if (Path(seen.location.url) / OWN_DIR).is_dir():
            hint = "SpotCheckpointIO has saved plain checkpoint files there, which ls and load_from_checkpoint read"
    found.problems += [of_tier(tier, why) for tier, why in problems.items()]
    found.take([entry for source, holdings in answers for entry in _entries(source, holdings)])
    if not (found.entries or found.unreadable or any(holdings.highest_attempt for _, holdings in answers)):
        said = "no tier that answers knows of a run" if found.problems else "no run is, or ever was,"
        raise SnapshotNotFoundError("; ".join([f"{said} at {url!r}: {hint}", *found.problems]))
    return found


def pick(found: Found, wanted: str | None) -> Entry:
    """The newest snapshot that is not set aside, or the newest of that name or step.

    Raises:
        SnapshotNotFoundError: if there is none; names what there is.
    """
    whole = [entry for entry in found.entries if entry.manifest.shard is None]
    for entry in whole:
        is_newest = wanted in (None, LATEST) and entry.state != SET_ASIDE
        if is_newest or wanted in (entry.manifest.name, str(entry.manifest.step)):
            return entry
    names = ", ".join(sorted({entry.manifest.name for entry in whole})) or "nothing"
    if len(whole) < len(found.entries):
        names += " that is complete; shards, which lie at several snapshot servers, are one if all are given (--server)"
    what = f"no snapshot {wanted!r}" if wanted is not None else "no snapshot"
    bad = [f"{item} cannot be used ({why})" for item, why in found.unreadable.items()]
    raise SnapshotNotFoundError(
        "; ".join([f"{what} of {found.url} at any tier; there is {names}", *bad, *found.problems])
    )


def _check_names_a_run(url: str) -> None:
    """A directory of a run is easily given for it: nothing would be found below, or another one shown."""
    parts = url.split("/")
    for place, part in enumerate(parts):
        if place and snapshot_order(part) is not None:
            run = "/".join(parts[:place])
            raise SettingsError(f"{url!r} is one snapshot: write {run}@{part} (for ls, its run {run})")


def _ask_servers(url: str, more: Sequence[str]) -> tuple[list[tuple[Source, Holdings]], dict[str, str]]:
    """Ask servers for a run by its name (``RUN``, or ``RUN@ID`` where several have it), all at once."""
    check_servers(more)
    address, path = parse_spot_url(url)
    run = path.split("/")[0]
    if not run:
        raise SettingsError(f"{url!r} names no run; write {address}/RUN")
    servers = [str(address), *(str(parse_spot_url(item)[0]) for item in more)]
    sources = {server: StoreSource(ServerStore(f"{server}/{run}"), server) for server in servers}
    holdings, problems = ask_all({server: source.survey for server, source in sources.items()}, ONCE.answer_s)
    answers: list[tuple[Source, Holdings]] = [(sources[server], held) for server, held in holdings.items()]
    return answers + scattered(answers), problems


def _entries(source: Source, holdings: Holdings) -> list[Entry]:
    """The snapshots a tier holds, and shards in memory of others, with their state."""
    stored, copies = "replicated" if isinstance(source, ScatteredSource) else "persisted", holdings.copies
    entries = []
    for manifest in holdings.manifests:
        parts = {each.name for each in (manifest, *holdings.shards) if each.snapshot == manifest.name} & copies.keys()
        state = state_in_memory(copies[name] for name in parts) if parts else stored
        entries.append(Entry(manifest, source, state))
    whole = {manifest.name for manifest in holdings.manifests}
    for manifest in holdings.shards:
        if (shard := manifest.shard) and manifest.name in copies and manifest.snapshot not in whole:
            state = "failed" if shard.failed else f"shard {shard.writer + 1} of {shard.writers}"
            entries.append(Entry(manifest, source, state))
    return entries


def ls(arguments: argparse.Namespace) -> int:
    """List the snapshots of a run at every tier, newest first."""
    found = ask(arguments.run, arguments.server)
    if found.selected is not None:
        raise SettingsError(f"ls lists all snapshots of a run: give {found.url}, or show {arguments.run}")
    facts = [_facts(entry) for entry in found.entries]
    shown = [
        table_of("name step epoch attempt bytes created_unix_s tier state", facts)
        if facts
        else f"no snapshots of {found.url}"
    ]
    shown += [warning(f"unreadable: {name}: {why}") for name, why in found.unreadable.items()]
    print_answer(arguments.output, found.document(facts), shown, found.names())
    return incomplete(found.problems)


def show(arguments: argparse.Namespace) -> int:
    """Show everything known of one snapshot."""
    found = ask(arguments.run, arguments.server)
    entry = pick(found, found.selected)
    manifest = entry.manifest
    part_bytes = min(manifest.part_bytes, manifest.nbytes)
    most = "at most " if len(manifest.checksums) > 1 else ""
    what = "directory" if manifest.files else "file"
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
        + f" ({age(manifest.created_unix_s)} ago)",
        what: f"{manifest.data_path}, {manifest.stored_bytes} bytes ({format_bytes(manifest.stored_bytes)})",
        **({"files": f"{len(manifest.files)}, {manifest.files[0].name} first"} if manifest.files else {}),
        "parts": f"{len(manifest.checksums)} of {most}{format_bytes(part_bytes)}, xxh3-128 each",
        "metrics": ", ".join(f"{name} {value:g}" for name, value in sorted(manifest.metrics.items())) or "none",
        "world size": manifest.world_size,
        "written by": ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items())),
    }
    document = {"run": found.url, **_facts(entry), "manifest": manifest.to_dict()}
    shown = (f"{name:<11} {value}" for name, value in lines.items())
    print_answer(arguments.output, document, shown, [f"{found.url}@{manifest.step}"])
    return code_of_newest(found)


def code_of_newest(found: Found) -> int:
    """The exit code of a command that takes the newest snapshot, unless one is named."""
    return incomplete(found.problems) if found.selected in (None, LATEST) else 0


def _facts(entry: Entry) -> dict[str, object]:
    """What programs are told of a snapshot at a tier."""
    manifest = entry.manifest
    fields = ("name", "step", "epoch", "attempt", "created_unix_s", "complete", "exact")
    return {
        **{name: getattr(manifest, name) for name in fields},
        "bytes": manifest.stored_bytes,
        "tier": entry.source.tier,
        "state": entry.state,
    }


_LOOKS = 10
"""How often the newest snapshot is looked for where training supersedes each one before it can be opened."""


def cp(arguments: argparse.Namespace) -> int:
    """Copy the newest snapshot (or the one named) into a file, or a directory, that torch and Lightning read.

    Where what could not be read may be newer, that is said. Where the newest is damaged, an error names the one before.
    """
    found = ask(arguments.run, arguments.server)
    wanted = pick(found, found.selected).manifest
    one_file = arguments.consolidate or not wanted.is_sharded
    suffix = ".ckpt" if one_file else ""
    _target(arguments, wanted, suffix)  # an error in it is said before anything is read
    with closing(open_selected(found)) as snapshot:
        wanted = snapshot.manifest
        target = _target(arguments, wanted, suffix)
        if wanted.is_sharded and one_file:
            _converted(snapshot, target, "plain")
        else:
            copy_files(snapshot, target, only_checkpoint=one_file)
    nbytes = target.stat().st_size if one_file else wanted.stored_bytes
    print_line(f"{target}: {format_bytes(nbytes)}, step {wanted.step}, from {snapshot.tier}, every checksum holds")
    if one_file and wanted.files and not wanted.is_sharded:
        print_line("That is the checkpoint. What only one rank knows (generators, data position) is not in it")
    if not one_file:
        print_line("That is a directory, of a sharded model. --consolidate makes one plain file of it")
    return code_of_newest(found)


def export(arguments: argparse.Namespace) -> int:
    """Write the weights of the newest snapshot (or the one named) into one file."""
    found = ask(arguments.run, arguments.server)
    _target(arguments, pick(found, found.selected).manifest, ".safetensors")
    with closing(open_selected(found)) as snapshot:
        wanted = snapshot.manifest
        target = _target(arguments, wanted, ".safetensors")
        _converted(snapshot, target, "safetensors", str(wanted.step), wanted.run)
    size = format_bytes(target.stat().st_size)
    print_line(f"{target}: {size}, the weights of step {wanted.step}, from {snapshot.tier}, every checksum holds")
    return code_of_newest(found)


def verify(arguments: argparse.Namespace) -> int:
    """Read and check every snapshot at every tier (or those of one name); exit code 1 if one is bad.

    One that left its tier meanwhile, as all do while training goes on, is not bad. What a server that does not answer
    holds is neither good nor bad.
    """
    found = ask(arguments.run, arguments.server)
    if found.selected is not None:
        name = pick(found, found.selected).manifest.name
        found.entries = [entry for entry in found.entries if entry.manifest.name == name]
        found.unreadable = {what: why for what, why in found.unreadable.items() if what.startswith(f"{name} at ")}
    if not found.entries and not found.unreadable:
        raise SnapshotNotFoundError("; ".join([f"no snapshot of {found.url} to verify", *found.problems]))
    checked = [_check(entry) for entry in found.entries if not entry.manifest.why_failed]  # those have no bytes
    found.problems += [f"{each['name']} at {each['tier']}: {each['reason']}" for each in checked if not each["state"]]
    checked = [each for each in checked if each["state"]]
    bad = bool(found.unreadable) or any(each["state"] == "bad" for each in checked)
    rows = ({**each, "state": str(each["state"]).replace("bad", "BAD")} for each in checked)
    shown = [
        table_of("state name tier reason", rows),
        *(warning(f"BAD {what}: {why}") for what, why in found.unreadable.items()),
    ]
    good = [f"{found.url}@{each['step']}" for each in checked if each["state"] == "good"]
    print_answer(arguments.output, found.document(checked), shown, good)
    code = incomplete(found.problems)
    return 1 if bad else code


def _check(entry: Entry) -> dict[str, object]:
    """Read a snapshot at a tier; what programs are told of that. A tier that does not answer leaves no state."""
    state, reason = "good", ""
    source, manifest = entry.source, entry.manifest
    try:
        _open(entry).close()
        # What was appended to a file is not read, and moves the end from which others read a checkpoint.
        store = source.store if isinstance(source, StoreSource) and manifest.shard is None else None
        if isinstance(store, Store) and not store.has(manifest):
            raise CorruptSnapshotError(f"{manifest.name} has files of other sizes than its manifest says")
    except ServerUnreachableError as error:
        state, reason = "", str(error)
    except SpotError as error:
        state, reason = "bad", str(error)
        if _has_left(entry):
            state, reason = "gone", "it has left this tier since it was listed, as older ones do"
    return {**_facts(entry), "state": state, "reason": reason}


def open_selected(found: Found) -> OpenSnapshot:
    """Open the snapshot that was selected, or the newest of the run, and say what is skipped.

    With a snapshot at every step the newest may have left memory since it was listed. Its tier is asked again then, and
    what it has now is opened at once. If training supersedes that, too, each time, the older one of another tier is
    taken.
    """
    if found.selected not in (None, LATEST):
        return _open_somewhere(found, pick(found, found.selected).manifest.name)
    for what, why in found.unreadable.items():
        _skipped(what, why)
    looks = 0
    while True:
        newest = pick(found, None)  # of shards alone there is nothing to open
        try:
            return _open_somewhere(found, newest.manifest.name)
        except SnapshotNotFoundError:
            looks += 1
            others = [entry for entry in found.entries if entry.source is not newest.source]
            again = _entries(newest.source, newest.source.survey()) if looks < _LOOKS else []
            if not (others or again):
                raise
            found.take([*others, *again])
        except CorruptSnapshotError as error:  # older weights are no answer; how to get them is said
            names = (entry.manifest.name for entry in found.entries if entry.manifest.shard is None)
            older = next((name for name in names if name != newest.manifest.name), None)
            if older is None:
                raise
            raise CorruptSnapshotError(
                f"{error}. To have the snapshot before it: lightning-spot cp {found.url}@{older} DEST",
                where=error.where,
                part=error.part,
            ) from error


def _skipped(what: str, why: object) -> None:
    error_console().print(f"skipped: {what}: {why}")


def _open_somewhere(found: Found, name: str) -> OpenSnapshot:
    """Open a snapshot at the first tier whose copy is good."""
    problem: SpotError | None = None
    tier = ""
    for entry in found.entries:
        if entry.manifest.name != name:
            continue
        if problem is not None:  # that of the last tier is the error
            _skipped(tier, problem)
        try:
            return _open(entry)
        except SpotError as error:
            problem, tier = error, entry.source.tier
    raise problem or CorruptSnapshotError(f"{name} is at no tier any more")


def _bar() -> Progress:
    """A bar with bytes, speed and the time left; none where standard error is no terminal."""
    console = error_console()
    can_draw = console.is_terminal and not console.is_dumb_terminal
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not can_draw)


def _open(entry: Entry) -> OpenSnapshot:
    with _bar() as progress:
        task = progress.add_task(plain(f"{entry.manifest.name} from {entry.source.tier}"), total=entry.manifest.nbytes)
        return entry.source.open(entry.manifest, lambda nbytes: progress.update(task, advance=nbytes))


def _has_left(entry: Entry) -> bool:
    """Whether the tier has it no more: as a whole, and not only a part of it."""
    try:
        holdings = entry.source.survey()
    except SpotError:  # not known: what was wrong with the snapshot stands
        return False
    name = entry.manifest.name
    there = [*holdings.manifests, *holdings.shards]
    return name not in holdings.unreadable and all(manifest.name != name for manifest in there)


def _target(arguments: argparse.Namespace, wanted: Manifest, suffix: str) -> Path:
    """The path of a copy: the one that was given, or one in that directory; without a suffix, of a directory."""
    target = Path(arguments.dest)
    if target.is_dir():
        target = target / f"{wanted.name.removesuffix(suffix)}{suffix}"
    if target.exists() and not (suffix and arguments.force):
        why = "pass --force to replace it" if suffix else "a directory is never replaced"
        raise SettingsError(f"{target} exists: {why}, or name another path")
    if not target.parent.is_dir():
        raise SettingsError(f"{target.parent} is no directory; make it first, or name another path")
    return target


def in_torch(what: str, module: str, *arguments: str) -> str:
    """What a module of ours prints that needs torch, in a process of its own: commands know none.

    Raises:
        SpotError: that ``what`` could not be done, and why.
    """
    command = [sys.executable, "-m", f"lightning_spot.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise SpotError(f"{what}: {reason}")
    return done.stdout


def _converted(snapshot: OpenSnapshot, target: Path, form: str, *said: str) -> None:
    """Make another file of a snapshot."""
    with _beside(target) as copied:
        copy_files(snapshot, copied, only_checkpoint=not snapshot.manifest.is_sharded)
        what = f"no {target.name} could be made of {snapshot.manifest.name}"
        in_torch(what, "sharded.reader", form, str(copied), str(target), *said)


def copy_files(snapshot: OpenSnapshot, target: Path, *, only_checkpoint: bool = False) -> None:
    """Write the files of a snapshot, and its manifest, into a directory; or its checkpoint into a file.

    They are written beside the target, which is then renamed: a broken copy never stands under the final name.
    """
    manifest = snapshot.manifest
    spans = manifest.spans[:1] if only_checkpoint else manifest.spans
    try:
        with _beside(target) as copied, _bar() as progress:
            task = progress.add_task(f"writing {target}", total=sum(span.nbytes for span in spans))
            if not only_checkpoint:
                copied.mkdir()
                _write(copied / MANIFEST_FILE, [manifest.to_json().encode()])
            reader = snapshot.reader(whole=True)
            for span in spans:
                reader.seek(span.offset)
                parts = _parts(reader, span.nbytes, lambda nbytes: progress.update(task, advance=nbytes))
                _write(copied if only_checkpoint else copied / span.name, parts)
            os.replace(copied, target)
    except OSError as error:
        raise TierError(f"{target} cannot be written: {error.strerror}", tier=str(target)) from error


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A path beside another one; what is there in the end is removed."""
    path = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)


def _parts(reader: SnapshotReader, nbytes: int, advance: Callable[[int], None]) -> Iterator[bytes]:
    while part := reader.read(min(PART_BYTES, nbytes)):  # which checks again what it reads
        yield part
        nbytes -= len(part)
        advance(len(part))


def _write(path: Path, data: Iterable[bytes]) -> None:
    with open(path, "wb") as file:
        file.writelines(data)
        file.flush()
        os.fsync(file.fileno())
