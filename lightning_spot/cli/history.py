"""``lightning-spot prune``, ``rm`` and ``rewind``: which snapshots a run has, and from which of them it resumes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from lightning_spot.cli.arguments import add_run, location_of, split_run, takes_number, takes_time
from lightning_spot.cli.output import add_output, print_answer, print_line, table_of
from lightning_spot.cli.snapshots import ask, pick
from lightning_spot.client.local_server import LocalServer
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.server_client import quoted
from lightning_spot.client.starting import attach
from lightning_spot.client.stores import open_store
from lightning_spot.config import LARGEST
from lightning_spot.errors import RunBusyError, SettingsError, SnapshotNotFoundError, SpotError, TierError
from lightning_spot.goodput.records import completed, newest_record
from lightning_spot.run.identity import ServerRun
from lightning_spot.run.sources import HOST, STORAGE
from lightning_spot.server.runs import RunInfo, run_text
from lightning_spot.snapshot.files import is_own_file
from lightning_spot.snapshot.manifest import MANIFEST_FILE, Manifest, order_name, snapshot_name, snapshot_order
from lightning_spot.store.fences import ATTEMPTS_DIR, Rewind, claim_name, files_of_attempts, highest_claim
from lightning_spot.store.local import LocalStore
from lightning_spot.store.posix import remove_if_empty
from lightning_spot.store.retention import Keep, expired
from lightning_spot.store.store import Folder

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


class _Run:
    """A run, all of whose tiers have answered.

    Args:
        arguments: name it.

    Attributes:
        found: what the tiers hold.
        seen: how that was learned.
        held: what storage holds of it.
        store: storage.
        whole: the snapshots that are complete, at whatever tier.

    Raises:
        TierError: if a tier does not answer: what it holds is not known.
        SnapshotNotFoundError: if no run was ever there.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        location_of(split_run(arguments.run)[0])  # no server's
        self.found = found = ask(arguments.run, arguments.server)
        if found.problems or found.seen is None or found.seen.durable is None:
            silent = "; ".join(found.problems)
            raise TierError(f"nothing was changed, since not all could be asked: {silent}", tier=found.url)
        self.seen, self.held = found.seen, found.seen.durable
        self.url, self.store = self.seen.location.url, open_store(self.seen.location.url)
        self.whole = [entry.manifest for entry in found.entries if entry.manifest.shard is None]

    @property
    def attempt(self) -> int:
        """The newest that any tier knows of."""
        return max(self.seen.seen_attempts)

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
            raise RunBusyError(f"a trainer on this host writes {self.url}. End it first")
        if claim is None:
            return
        record = newest_record(self.url)
        if record is not None and record.attempt >= claim.attempt:
            is_running = completed(self.url, record, ()).end == "running"
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
            raise RunBusyError(f"a trainer of {self.url} has begun meanwhile: nothing more is changed")


# -- prune ------------------------------------------------------------------------------------------------------------


def prune(arguments: argparse.Namespace) -> int:
    """Delete the snapshots in storage that a policy does not keep."""
    rules = ("every_n_steps", "newer_than", "best", "monitor", "mode")
    keep = Keep(newest=arguments.keep, **{rule: getattr(arguments, rule) for rule in rules})
    url, selected = split_run(arguments.run)
    if selected is not None:
        raise SettingsError(f"prune is of a run: give {url}, or rm {arguments.run}")
    store = open_store(location_of(url).url)
    held = store.survey()
    if not held.manifests:
        raise SnapshotNotFoundError(f"no snapshots are at {url!r}")
    gone: list[Manifest] = []
    for lineage in dict.fromkeys(manifest.lineage for manifest in held.manifests):
        line = [each for each in held.manifests if each.lineage == lineage and not held.sets_aside(each.order)]
        found = expired(held, line[0], keep, time.time()) if line else []
        if found and not store.has(line[0]):
            raise TierError(f"{line[0].name} is not whole: nothing older is deleted. Run verify {url}", tier=url)
        gone += found
    known = set(held.rewinds)
    for manifest in gone[::-1] if not arguments.dry_run else ():  # the oldest first
        if not store.delete(manifest, wanted=lambda: not known.issuperset(store.rewinds())):
            raise RunBusyError(f"{url} was rewound meanwhile: nothing more is deleted. Run prune again")
    _show(url, ((manifest, STORAGE) for manifest in gone), arguments)
    return 0


# -- rm ---------------------------------------------------------------------------------------------------------------


def rm(arguments: argparse.Namespace) -> int:
    """Remove a snapshot, or a whole run, at every tier. Memory first: it would bring it to storage again."""
    run = _Run(arguments)
    if (run.found.selected is None) is not arguments.all:
        raise SettingsError(f"say what is removed: one snapshot, rm {run.url}@STEP, or the run, with --all")
    if not arguments.all:
        wanted = pick(run.found, run.found.selected).manifest
        run.found.entries = [entry for entry in run.found.entries if entry.manifest.snapshot == wanted.name]
        if any(rewind.to == wanted.order for rewind in _pending(run)):
            raise SettingsError(f"the run is rewound to {wanted.name}: undo that first, rewind --undo")
    gone = {entry.manifest.snapshot for entry in run.found.entries}
    shown = [(entry.manifest, entry.source.tier) for entry in run.found.entries]
    shown += [(manifest, STORAGE) for manifest in _incomplete(run)] if arguments.all else []
    if not arguments.dry_run:
        run.check_idle()
        _forget(run, gone)
        for manifest in sorted(run.held.manifests, key=lambda manifest: manifest.order):  # a kill leaves the newest
            if manifest.name in gone:
                run.check_not_begun()
                run.store.delete(manifest)
        if arguments.all:
            run.check_not_begun()
            _remove_rest(run)
    _show(run.url, shown, arguments)
    return 0


def _forget(run: _Run, names: set[str]) -> None:
    """Remove snapshots from the memory of servers; they delete what they have brought elsewhere, too."""
    info: RunInfo | None = None
    for source, holdings in run.seen.answers:
        held = dict.fromkeys(each.name for each in (*holdings.manifests, *holdings.shards) if each.snapshot in names)
        known = run.seen.runs.get(source.tier)
        if known is None or not held:
            continue
        text = run_text(known.name, known.id)
        with contextlib.ExitStack() as ends:
            server: LocalServer | ServerStore
            if source.tier != HOST:  # only an attempt may change what is there
                info = info or _begin(run, known)
                server = ServerStore(f"{source.tier}/{text}")
                server.open_run(info)
            elif host := attach(run.url, text):
                ends.callback(host.disconnect)
                server = host
            else:
                continue
            for name in held:
                with contextlib.suppress(SnapshotNotFoundError):  # it has left memory, or went with the shard before
                    server.client.call("DELETE", f"/v1/files/{quoted(text, name)}")
            if left := server.flush(_FLUSH_S):
                raise TierError(
                    f"a server has not deleted all that it brought elsewhere: {'; '.join(left)}. Run rm again"
                )


def _begin(run: _Run, known: ServerRun) -> RunInfo:
    """Claim the next attempt: no earlier one brings to a server what is removed there.

    What the server stores meanwhile takes nothing else away: the run's rules are not known here. And the claim is no
    sign of life of a trainer.
    """
    run.check_not_begun()
    info = RunInfo(
        name=known.name,
        id=known.id,
        location=run.seen.location.canonical,
        attempt=run.attempt + 1,
        token=secrets.token_hex(8),
        keep=Keep(newest=LARGEST),
        durable_url=run.url,
        pid=os.getpid(),
        host=os.uname().nodename,
    )
    run.seen.claim = replace(info.claim(), started_unix_s=0.0)
    run.store.claim(run.seen.claim)
    return info


def _incomplete(run: _Run) -> Iterator[Manifest]:
    """What :func:`_remove_rest` removes of snapshots: those that hold nothing but our own files, as far as is known."""
    for name in (*run.held.unfinished, *run.held.unreadable):
        sizes, order = run.store.folder(name, attempt=0, run_id="").sizes(), snapshot_order(name)
        if order and sizes and all(is_own_file(file) or file == MANIFEST_FILE for file in sizes):
            yield Manifest(run="-", name=name, attempt=order[0], step=order[1], nbytes=sum(sizes.values()))


def _remove_rest(run: _Run) -> None:
    """Remove what a run has besides snapshots: unfinished ones, then records and claims, the newest claim last."""
    for name in run.held.unreadable:
        run.store.folder(name, attempt=0, run_id="").remove([MANIFEST_FILE])
    last, run_id = run.attempt + 1, run.seen.identity.run_id  # after which nothing is on its way any more
    run.store.sweep(Manifest(run="-", run_id=run_id, name=snapshot_name(0, last), step=0, attempt=last, nbytes=0))
    names = files_of_attempts(run.attempts.sizes())
    newest = claim_name(highest_claim(names))
    run.attempts.remove([name for name in names if name != newest])
    run.attempts.remove([newest])  # only then: a kill leaves no earlier one that counts as the newest
    if isinstance(run.store, LocalStore):
        for place in (run.store.root / ATTEMPTS_DIR, run.store.root):
            remove_if_empty(place)


# -- rewind -----------------------------------------------------------------------------------------------------------


def rewind(arguments: argparse.Namespace) -> int:
    """Have the next start resume from an earlier snapshot in storage; newer ones are set aside, not deleted."""
    run = _Run(arguments)
    if (run.found.selected is None) is not arguments.undo:
        raise SettingsError(f"name a snapshot to go back to, {run.url}@STEP, or --undo")
    run.check_idle()
    if arguments.undo:
        return _undo(run)
    run.found.entries = [entry for entry in run.found.entries if entry.source.tier == STORAGE]
    to = pick(run.found, run.found.selected).manifest
    wanted = Rewind(run.attempt, to.order)
    others = [each for each in run.held.rewinds if each.after == wanted.after or each.sets_aside(wanted.to)]
    said = {"snapshot": to.name, "asked_unix_s": time.time(), "host": os.uname().nodename}
    run.attempts.write(wanted.file, memoryview(json.dumps(said, indent=1).encode()))
    try:
        if not run.store.has(to):
            raise TierError(f"{to.name} is not whole. Run verify {run.url}", tier=run.url)
        run.check_not_begun()
    except SpotError:
        run.attempts.remove([wanted.file])
        raise
    # Only then: of two, the one that goes back further counts.
    run.attempts.remove([each.file for each in others if each != wanted])
    names = {item.name for item in run.whole if wanted.sets_aside(item.order)}
    print_line(f"the next start resumes from {to.name}; newer snapshots set aside until one is stored: {len(names)}")
    return 0


def _pending(run: _Run) -> list[Rewind]:
    """The rewinds since which no snapshot was taken."""
    newest = max((item.attempt for item in run.whole), default=0)
    return [each for each in run.held.rewinds if each.after >= newest]


def _undo(run: _Run) -> int:
    pending = _pending(run)
    if not pending:
        raise SettingsError("there is no rewind to undo: none was asked for, or a snapshot was taken since")
    run.attempts.remove([each.file for each in pending])
    run.check_not_begun()
    newest = max((item.order for item in run.whole), default=None)
    print_line(f"the next start resumes from {order_name(newest)}" if newest is not None else "no snapshot is left")
    return 0


# -- what is shown ----------------------------------------------------------------------------------------------------


def _show(url: str, gone: Iterable[tuple[Manifest, str]], arguments: argparse.Namespace) -> None:
    """What was deleted, or would be, and from which tiers."""
    found: dict[str, dict[str, Any]] = {}
    for each, tier in gone:
        fact = {"name": each.snapshot, "step": each.step, "attempt": each.attempt, "bytes": each.stored_bytes}
        tiers = found.setdefault(each.snapshot, {**fact, "tiers": []})["tiers"]
        if tier not in tiers:  # of several shards of a snapshot, each is there
            tiers.append(tier)
    facts = [*found.values()]
    deleted = f"{'would be ' if arguments.dry_run else ''}deleted: {len(facts)}"
    shown = [table_of("name step attempt bytes tiers", facts), deleted] if facts else ["nothing to delete"]
    document = {"run": url, "dry_run": arguments.dry_run, "deleted": facts}
    print_answer(arguments.output, document, shown, [f"{url}@{fact['step']}" for fact in facts])
