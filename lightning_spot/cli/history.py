"""``lightning-spot prune``, ``rm`` and ``rewind``: which snapshots a run has, and from which of them it resumes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_spot.cli.arguments import LATEST, add_run, location_of, split_run, takes_number, takes_time
from lightning_spot.cli.output import add_output, plain_table, print_answer, print_line
from lightning_spot.cli.snapshots import ONCE
from lightning_spot.client.local_server import LocalServer
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.server_client import quoted
from lightning_spot.client.starting import attach
from lightning_spot.client.stores import open_store
from lightning_spot.config import LARGEST, format_bytes
from lightning_spot.errors import RunBusyError, SettingsError, SnapshotNotFoundError, SpotError, TierError
from lightning_spot.goodput.records import completed, newest_record
from lightning_spot.run.identity import ServerRun
from lightning_spot.run.location import Location
from lightning_spot.run.sources import HOST
from lightning_spot.run.survey import Survey, of_tier, survey
from lightning_spot.server.runs import RunInfo, run_text
from lightning_spot.snapshot.manifest import MANIFEST_FILE, Manifest, order_name, snapshot_name
from lightning_spot.store.fences import ATTEMPTS_DIR, Rewind, files_of_attempts
from lightning_spot.store.local import LocalStore
from lightning_spot.store.posix import remove_if_empty
from lightning_spot.store.retention import Keep, expired
from lightning_spot.store.store import Folder, Holdings, Store

SILENT_S = 60.0
"""A trainer that gave no sign of life for so long counts as gone: it gives one every 10 s."""

_FLUSH_S = 30.0


def add_prune_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``prune``."""
    add_run(parser, "RUN", servers=False, stored=True)
    parser.add_argument("--keep", required=True, help="keep the newest N snapshots", **takes_number(1))
    parser.add_argument("--every-n-steps", help="and the first at or after each multiple of N", **takes_number(1))
    parser.add_argument("--newer-than", help="and those that are younger, such as 2d or 90min", **takes_time())
    parser.add_argument("--best", default=0, help="and the N with the best value of --monitor", **takes_number())
    parser.add_argument("--monitor", metavar="NAME", help="logged metric that ranks them")
    parser.add_argument("--mode", choices=("min", "max"), default="min", help="which value is the best (min)")
    _add_deletion(parser)


def add_rm_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rm``."""
    add_run(parser, "RUN[@STEP]", "; RUN@STEP for one snapshot", stored=True)
    parser.add_argument("--all", action="store_true", help="remove the run: all its snapshots, claims and records")
    _add_deletion(parser)


def add_rewind_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rewind``."""
    add_run(parser, "RUN[@STEP]", "; RUN@STEP for the snapshot to go back to", stored=True)
    parser.add_argument("--undo", action="store_true", help="resume from the newest snapshot again")


def _add_deletion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="show what would be deleted, and delete nothing")
    add_output(parser, names=True)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run, all of whose tiers have answered.

    Attributes:
        location: of it.
        seen: what they hold.
        held: what storage holds of that.
        store: storage.
        selected: step or name of the snapshot that was asked for, if one was.
    """

    location: Location
    seen: Survey
    held: Holdings
    store: Store
    selected: str | None

    @classmethod
    def ask(cls, arguments: argparse.Namespace) -> _Run:
        """Ask every tier.

        Raises:
            TierError: if one does not answer: what it holds is not known.
            SnapshotNotFoundError: if no run was ever there.
        """
        url, selected = split_run(arguments.run)
        location = location_of(url, arguments.server)
        seen = survey(location, ONCE, begins=False)
        if seen.problems or seen.durable is None:
            silent = "; ".join(of_tier(tier, why) for tier, why in seen.problems.items())
            raise TierError(f"nothing was changed, since not all could be asked: {silent}", tier=location.url)
        if seen.claim is None and not seen.runs and not seen.durable.manifests:
            raise SnapshotNotFoundError(f"no run is, or ever was, at {url!r}: give the directory or URL of one")
        return cls(location, seen, seen.durable, open_store(location.url), selected)

    @property
    def attempt(self) -> int:
        """The newest that any tier knows of."""
        return max(self.seen.seen_attempts)

    @property
    def manifests(self) -> list[Manifest]:
        """The snapshots that are complete, at whatever tier."""
        return [each for _, holdings in self.seen.answers for each in holdings.manifests]

    @property
    def attempts(self) -> Folder:
        """The folder with claims and rewinds."""
        return self.store.folder(ATTEMPTS_DIR, attempt=0, run_id="")

    def check_idle(self) -> None:
        """Refuse while a trainer may be at work.

        Raises:
            RunBusyError: if one is, or has given a sign of life just now.
        """
        claim = self.seen.claim
        if any(run.live for run in self.seen.runs.values()):
            raise RunBusyError(f"a trainer on this host writes {self.location.url}. End it first")
        if claim is None:
            return
        record = newest_record(self.location.url)
        if record is not None and record.attempt >= claim.attempt:
            is_running = completed(self.location.url, record, ()).end == "running"
            signs_s = [record.unix_s, record.alive_unix_s] if is_running else []
        else:
            taken = (item.created_unix_s for item in self.held.manifests if item.attempt == claim.attempt)
            signs_s = [claim.started_unix_s, *taken]
        if signs_s and (silent_s := time.time() - max(signs_s)) < SILENT_S:
            raise RunBusyError(
                f"a trainer (host {claim.host}, pid {claim.pid}) gave a sign of life {silent_s:.0f} s ago. End it"
                f" first. If its machine is gone, wait until {SILENT_S:.0f} s have passed"
            )

    def check_not_begun(self) -> None:
        """Refuse to go on if a trainer has begun since.

        Raises:
            RunBusyError: in that case.
        """
        if self.store.claimed() > self.attempt:
            raise RunBusyError(f"a trainer of {self.location.url} has begun meanwhile: nothing more is changed")

    def pick(self, manifests: Iterable[Manifest]) -> Manifest:
        """The newest of that step, or the one of that name.

        Raises:
            SnapshotNotFoundError: if there is none; names what there is.
        """
        manifests = sorted(manifests, key=lambda manifest: manifest.order, reverse=True)
        for manifest in manifests:
            if self.selected in (LATEST, manifest.name, str(manifest.step)):
                return manifest
        names = ", ".join(dict.fromkeys(manifest.name for manifest in manifests)) or "nothing"
        raise SnapshotNotFoundError(f"no snapshot {self.selected!r} of {self.location.url}; there is {names}")


# -- prune ------------------------------------------------------------------------------------------------------------


def prune(arguments: argparse.Namespace) -> int:
    """Delete the snapshots in storage that a policy does not keep."""
    keep = Keep(
        newest=arguments.keep,
        every_n_steps=arguments.every_n_steps,
        newer_than=arguments.newer_than,
        best=arguments.best,
        monitor=arguments.monitor,
        mode=arguments.mode,
    )
    url, selected = split_run(arguments.run)
    if selected is not None:
        raise SettingsError(f"prune is of a run: give {url}, or rm {arguments.run}")
    store = open_store(location_of(url).url)
    held = store.survey()
    if not held.manifests:
        raise SnapshotNotFoundError(f"no snapshots are at {url!r}")
    gone: list[Manifest] = []
    for lineage in dict.fromkeys(manifest.lineage for manifest in held.manifests):
        line = [each for each in held.manifests if each.lineage == lineage and not held.sets_aside(each)]
        found = expired(held, line[0], keep, time.time()) if line else []
        if found and not store.has(line[0]):
            raise TierError(f"{line[0].name} is not whole: nothing older is deleted. Run verify {url}", tier=url)
        gone += found
    for manifest in gone[::-1] if not arguments.dry_run else ():  # the oldest first
        store.delete(manifest)
    _show(url, gone, {each.name: ["storage"] for each in gone}, arguments)
    return 0


# -- rm ---------------------------------------------------------------------------------------------------------------


def rm(arguments: argparse.Namespace) -> int:
    """Remove a snapshot, or a whole run, at every tier. Memory first: it would bring it to storage again."""
    run = _Run.ask(arguments)
    if (run.selected is None) is not arguments.all:
        raise SettingsError(f"say what is removed: one snapshot, rm {run.location.url}@STEP, or the run, with --all")
    everything = [each for _, holdings in run.seen.answers for each in (*holdings.manifests, *holdings.shards)]
    snapshots = {each.snapshot: each for each in everything}
    gone = [*snapshots.values()]
    if not arguments.all:
        gone = [snapshots[run.pick(each for each in everything if each.shard is None).name]]
        if any(rewind.to == gone[0].order for rewind in _pending(run)):
            raise SettingsError(f"the run is rewound to {gone[0].name}: undo that first, rewind --undo")
    names = {each.snapshot for each in gone}
    at = {name: list[str]() for name in names}
    for source, holdings in run.seen.answers:
        for name in names & {each.snapshot for each in (*holdings.manifests, *holdings.shards)}:
            at[name].append(source.tier)
    if not arguments.dry_run:
        run.check_idle()
        _forget(run, names)
        for manifest in sorted(run.held.manifests, key=lambda manifest: manifest.order):  # a kill leaves the newest
            if manifest.name in names:
                run.check_not_begun()
                run.store.delete(manifest)
        if arguments.all:
            run.check_not_begun()
            _remove_rest(run)
    _show(run.location.url, sorted(gone, key=lambda manifest: manifest.order, reverse=True), at, arguments)
    return 0


def _forget(run: _Run, names: set[str]) -> None:
    """Remove snapshots from the memory of servers; they delete what they have brought elsewhere, too."""
    info: RunInfo | None = None
    for source, holdings in run.seen.answers:
        held = [each for each in (*holdings.manifests, *holdings.shards) if each.snapshot in names]
        known = run.seen.runs.get(source.tier)
        if known is None or not held:
            continue
        text = run_text(known.name, known.id)
        if source.tier == HOST:
            if (host := attach(run.location.url, text)) is None:
                continue
            with contextlib.ExitStack() as ends:
                ends.callback(host.disconnect)
                _forget_at(host, text, held)
        else:  # only an attempt may change what is there
            info = info or _begin(run, known)
            server = ServerStore(f"{source.tier}/{text}")
            server.open_run(info)
            _forget_at(server, text, held)


def _forget_at(server: LocalServer | ServerStore, text: str, held: Sequence[Manifest]) -> None:
    for name in dict.fromkeys(each.name for each in held):
        with contextlib.suppress(SnapshotNotFoundError):  # it has left memory, or went with the shard before
            server.client.call("DELETE", f"/v1/files/{quoted(text, name)}")
    if left := server.flush(_FLUSH_S):
        raise TierError(f"a server has not deleted all that it brought elsewhere: {'; '.join(left)}. Run rm again")


def _begin(run: _Run, known: ServerRun) -> RunInfo:
    """Claim the next attempt: no earlier one brings to a server what is removed there.

    What the server stores meanwhile takes nothing else away: the run's rules are not known here. And the claim is no
    sign of life of a trainer.
    """
    run.check_not_begun()
    info = RunInfo(
        name=known.name,
        id=known.id,
        location=run.location.canonical,
        attempt=run.attempt + 1,
        token=secrets.token_hex(8),
        keep=Keep(newest=LARGEST),
        durable_url=run.location.url,
        pid=os.getpid(),
        host=os.uname().nodename,
    )
    run.seen.claim = replace(info.claim(), started_unix_s=0.0)
    run.store.claim(run.seen.claim)
    return info


def _remove_rest(run: _Run) -> None:
    """Remove what a run has besides snapshots: unfinished ones, then records and claims, the newest claim last."""
    for name in run.held.unreadable:
        run.store.folder(name, attempt=0, run_id="").remove([MANIFEST_FILE])
    last, run_id = run.attempt + 1, run.seen.identity.run_id  # after which nothing is on its way any more
    run.store.sweep(Manifest(run="-", run_id=run_id, name=snapshot_name(0, last), step=0, attempt=last, nbytes=0))
    run.attempts.remove(files_of_attempts(run.attempts.sizes()))
    if isinstance(run.store, LocalStore):
        for place in (run.store.root / ATTEMPTS_DIR, run.store.root):
            remove_if_empty(place)


# -- rewind -----------------------------------------------------------------------------------------------------------


def rewind(arguments: argparse.Namespace) -> int:
    """Have the next start resume from an earlier snapshot in storage; newer ones are set aside, not deleted."""
    run = _Run.ask(arguments)
    if (run.selected is None) is not arguments.undo:
        raise SettingsError(f"name a snapshot to go back to, {run.location.url}@STEP, or --undo")
    run.check_idle()
    if arguments.undo:
        return _undo(run)
    to = run.pick(run.held.manifests)
    wanted = Rewind(run.attempt, to.order)
    others = [each for each in run.held.rewinds if each != wanted and _is_replaced(each, wanted)]
    said = {"snapshot": to.name, "asked_unix_s": time.time(), "host": os.uname().nodename}
    run.attempts.write(wanted.file, memoryview(json.dumps(said, indent=1).encode()))
    try:
        if not run.store.has(to):
            raise TierError(f"{to.name} is not whole. Run verify {run.location.url}", tier=run.location.url)
        run.check_not_begun()
    except SpotError:
        run.attempts.remove([wanted.file])
        raise
    run.attempts.remove([each.file for each in others])  # only then: of two, the one that goes back further counts
    names = {item.name for item in run.manifests if wanted.sets_aside(item.order)}
    print_line(f"the next start resumes from {to.name}; newer snapshots set aside until one is stored: {len(names)}")
    return 0


def _is_replaced(each: Rewind, wanted: Rewind) -> bool:
    """Whether a rewind gives way to a later one."""
    return each.after == wanted.after or each.sets_aside(wanted.to)


def _pending(run: _Run) -> list[Rewind]:
    """The rewinds since which no snapshot was taken."""
    newest = max((item.attempt for item in run.manifests), default=0)
    return [each for each in run.held.rewinds if each.after >= newest]


def _undo(run: _Run) -> int:
    pending = _pending(run)
    if not pending:
        raise SettingsError("there is no rewind to undo: none was asked for, or a snapshot was taken since")
    run.attempts.remove([each.file for each in pending])
    run.check_not_begun()
    newest = max((item.order for item in run.manifests), default=None)
    print_line(f"the next start resumes from {order_name(newest)}" if newest is not None else "no snapshot is left")
    return 0


# -- what is shown ----------------------------------------------------------------------------------------------------


def _show(url: str, gone: Sequence[Manifest], at: dict[str, list[str]], arguments: argparse.Namespace) -> None:
    """What was deleted, or would be."""
    facts, rows = [], []
    for each in gone:
        name, nbytes, tiers = each.snapshot, each.stored_bytes, at[each.snapshot]
        facts.append({"name": name, "step": each.step, "attempt": each.attempt, "bytes": nbytes, "tiers": tiers})
        rows.append((name, each.step, each.attempt, format_bytes(nbytes), ", ".join(tiers)))
    table = plain_table(("SNAPSHOT", "STEP", "ATTEMPT", "SIZE", "TIERS"), rows, left=("SNAPSHOT", "TIERS"))
    deleted = f"{'would be ' if arguments.dry_run else ''}deleted: {len(gone)}"
    document = {"run": url, "dry_run": arguments.dry_run, "deleted": facts}
    names = [f"{url}@{each.step}" for each in gone]
    print_answer(arguments.output, document, [table, deleted] if gone else ["nothing to delete"], names)
