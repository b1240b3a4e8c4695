"""The runs a server knows: who may write each, from which live connection, and where its snapshots go from here."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_spot.errors import (
    FailureReason,
    FencedError,
    RunBusyError,
    ServerRefusedError,
    SettingsError,
    SnapshotFailedError,
    SnapshotNotFoundError,
)
from lightning_spot.protocol.process import ProcessId
from lightning_spot.server.ring import Ring
from lightning_spot.server.runs import EPOCH_UNIX_S, HEARTBEAT_TIMEOUT_S, Run, RunInfo, files_name, parse_run
from lightning_spot.store.fences import check_fence, digest_of

MOST_RUNS = 256
"""Runs that a server knows: whoever begins one reads the list of them."""

MOST_AHEAD = 10_000
"""Attempts above the highest known that one may claim without storage to show it: see ``identity.JUMP``."""


class Registry:
    """Runs by their key, and the connections of trainers on this host. Methods may be called from any thread.

    Args:
        ring: holds their snapshots.
        claimed: tells the highest attempt that has claimed a run, where its storage can be asked; else 0.

    Attributes:
        lock: taken by whoever looks at several things at once; before the ring's, never after it.
        runs: by key.
        sessions: ids of the live connections of trainers on this host, and the process of each if that is known.
    """

    def __init__(self, ring: Ring, claimed: Callable[[RunInfo], int]) -> None:
        self.lock = threading.RLock()
        self.runs: dict[str, Run] = {}
        self.sessions: dict[str, ProcessId | None] = {}
        self._ring, self._claimed = ring, claimed

    def is_ahead(self, info: RunInfo) -> bool:
        """Whether an attempt is so far above all that is known here that storage has to show its claim."""
        return info.attempt > self._highest_likely(info) + MOST_AHEAD

    def check_ahead(self, info: RunInfo) -> None:
        """Refuse an attempt far above all that is known: it would fence the run for ever. May ask storage.

        Raises:
            ServerRefusedError: if no claim shows it.
        """
        if self.is_ahead(info) and self._claimed(info) < info.attempt:
            raise ServerRefusedError(
                f"attempt {info.attempt} of run {info.name!r} is far above {self._highest_likely(info)}, the highest"
                " known at this server, and no claim in its storage shows it. Nothing was changed",
                status=409,
            )

    def _highest_likely(self, info: RunInfo) -> int:
        """Highest attempt known of a run; at least the clock's for a folder of files, see :data:`EPOCH_UNIX_S`."""
        by_clock = int(time.time()) - EPOCH_UNIX_S if info.name == files_name(info.id) else 0
        return max(self.highest(info.key), by_clock)

    def take(self, info: RunInfo, client: str = "") -> tuple[Run, str]:
        """Note that an attempt writes a run; it, and the key of one that had to be forgotten. Call it under the lock.

        Args:
            info: what is said of the run.
            client: who says it.

        Raises:
            SnapshotFailedError: if there are too many runs, and none can be forgotten.
            RunBusyError: if a live trainer on this host writes the run.
            FencedError: if a later attempt writes it, or another one of the same number.
        """
        known = self.runs.get(info.key)
        former = ""
        for key, other in self.runs.items():
            # Two that begin a run at the same moment have each made an identity of it.
            if other is not known and info.location and other.info.location == info.location:
                if not info.token or other.info.token != info.token:
                    self._check_not_live(other.info, info)
                elif other.info.attempt < info.attempt:  # the same trainer, before it took the other's identity over
                    former = key
        if known is not None:
            self._check_not_live(known.info, info)
            if known.info.attempt == info.attempt:
                self._check_same(known.info, info)
        check_fence(info.name, info.attempt, self.highest(info.key))
        forgotten = former or (self._make_room(client) if known is None else "")
        if forgotten:
            self._ring.forget_run(forgotten)
            del self.runs[forgotten]
            self._ring.opened_s.pop(forgotten, None)
        run = Run(info, opened_s=time.monotonic(), client=client)
        if known is not None and known.info.attempt == info.attempt:  # other ranks and hosts have opened it, too
            run.sessions, run.carried_for = known.sessions, known.carried_for
            run.info = replace(run.info, figures=info.figures or known.info.figures)
        if info.session:
            run.sessions.add(info.session)
        self._note_carrying(run)
        self.runs[info.key] = run
        if not info.left:
            self._ring.opened_s[info.key] = run.opened_s
        return run, forgotten

    def _note_carrying(self, run: Run) -> None:
        """A run is brought to storage from here as long as one of the hosts that bring snapshots here asks for it."""
        now_s = run.opened_s  # below, minus infinity leaves a host out that does not ask for it
        asked_s = {**run.carried_for, (run.info.host, run.info.pid): now_s if run.info.carry else float("-inf")}
        run.carried_for = {who: when_s for who, when_s in asked_s.items() if now_s - when_s <= HEARTBEAT_TIMEOUT_S}
        run.info = replace(run.info, carry=bool(run.carried_for))

    def find(self, text: str) -> Run:
        """The run that ``NAME@ID`` or, if only one has it, ``NAME`` names.

        Raises:
            SnapshotNotFoundError: if this server does not know it.
            SettingsError: if several runs have that name.
        """
        name, identity = parse_run(text)
        with self.lock:
            if (exact := self.runs.get(identity or name)) is not None:
                return exact
            found = [] if identity else [run for run in self.runs.values() if run.info.name == name]
        if len(found) > 1:
            listed = ", ".join(f"{run.info.text} ({run.info.location or 'unknown'})" for run in found)
            raise SettingsError(f"several runs are named {name!r} at this server; say which one: {listed}")
        if not found:
            raise SnapshotNotFoundError(
                f"this server does not know run {text!r} (it may have been restarted); open the run again"
            )
        return found[0]

    def check_attempt(self, text: str, attempt: int, token: str) -> None:
        """Refuse to change a run for anybody but its attempt, unless that has no token.

        Args:
            text: the run, as in URLs.
            attempt: the number that is shown, 0 for none.
            token: the token that is shown, ``""`` for none.

        Raises:
            SnapshotNotFoundError: if this server does not know the run, or not that attempt yet: it is to be opened.
            FencedError: if a later attempt writes it.
            ServerRefusedError: if none, or another token is shown.
        """
        current = self.find(text).info
        is_right = hmac.compare_digest(digest_of(token), digest_of(current.token))
        if not current.token or (is_right and attempt == current.attempt):
            return
        if token:
            check_fence(current.name, attempt, current.attempt)
            if attempt > current.attempt:
                raise SnapshotNotFoundError(
                    f"this server does not know attempt {attempt} of run {text!r} yet; open the run again"
                )
        raise ServerRefusedError(
            f"run {text!r} belongs to an attempt whose token this request does not have. Nothing was changed. Only"
            " that attempt's trainer and its servers may change it",
            status=403,
        )

    def key(self, text: str) -> str:
        """What a run named in a URL is kept under; a run that is not known has the key it would have."""
        try:
            return self.find(text).info.key
        except SnapshotNotFoundError:
            name, identity = parse_run(text)
            return identity or name

    def info(self, key: str) -> RunInfo | None:
        """What is known of a run."""
        run = self.runs.get(key)
        return run.info if run is not None else None

    def highest(self, key: str) -> int:
        """Highest attempt known of a run: opened, or of a snapshot that is here; 0 if none."""
        known = self.runs.get(key)
        return max(known.info.attempt if known else 0, self._ring.highest_attempt(key))

    def begin_session(self, session: str, owner: ProcessId | None = None) -> None:
        """A trainer on this host is connected.

        Args:
            session: its connection.
            owner: its process, where that is known; sessions of one process never stand in each other's way.
        """
        with self.lock:
            self.sessions[session] = owner

    def end_session(self, session: str) -> list[RunInfo]:
        """The connection of a rank has closed: it ended or was killed; the runs that no rank is connected for now."""
        with self.lock:
            self.sessions.pop(session, None)
            return [run.info for run in self.runs.values() if self.leave(run, session)]

    def leave(self, run: Run, session: str) -> bool:
        """A rank leaves a run; whether it was the last one on this host. Call it under the lock."""
        was_live = bool(run.info.session)
        run.sessions.discard(session)
        if run.info.session == session:
            run.info = replace(run.info, session=next(iter(run.sessions), ""))
        is_last = was_live and not run.info.session
        if is_last:
            self._ring.opened_s[run.info.key] = float("-inf")
        return is_last

    def state(self, run: Run) -> str:
        """What has become of a run, as far as is known here: ``"training"``, ``"stopped"`` or ``"complete"``.

        Only on its own host a trainer is connected, and says that the run is complete. Other servers know by the
        snapshot of its end, and that it lives since its host asks for the run.
        """
        key = run.info.key
        with self._ring.changed:
            ended = [group.manifest.attempt for group in self._ring.view(key).groups if group.ends_run]
            asked_s = self._ring.opened_s.get(key, float("-inf"))
        if run.complete or self.highest(key) in ended:
            return "complete"
        is_live = run.info.session in self.sessions or time.monotonic() - asked_s < HEARTBEAT_TIMEOUT_S
        return "training" if is_live else "stopped"

    def listed(self, carries: Callable[[str], bool]) -> list[dict[str, Any]]:
        """Every run known here, also those of which only snapshots are left, as JSON-ready values.

        Args:
            carries: tells of a run's key whether it is brought to its storage from here.
        """
        with self.lock:
            runs = {key: (run, run.info.session in self.sessions) for key, run in self.runs.items()}
        with self._ring.changed:  # else a slot may be emptied in between
            here = [(slot.run, slot.content) for slot in self._ring.contents()]
        for key, manifest in here:
            if key not in runs:
                left = RunInfo(name=manifest.run, id=manifest.run_id, location="", attempt=manifest.attempt, token="")
                runs[key] = (Run(left), False)
        return [
            {
                "name": run.info.name,
                "id": run.info.id,
                "location": run.info.location,
                "host": run.info.host,
                "attempt": self.highest(key),
                "live": live,
                "state": self.state(run),
                "durable_url": run.info.durable_url,
                "carries": carries(key),
            }
            for key, (run, live) in runs.items()
        ]

    def has_other_writer(self, current: RunInfo, session: str) -> bool:
        """Whether a live trainer on this host has the run, another than this session's. Call it under the lock."""
        if current.session == session or current.session not in self.sessions:
            return False
        # Who starts a run again in the moment after it was killed comes before the end of its connection.
        owner = self.sessions[current.session]
        return owner is None or (owner != self.sessions.get(session) and owner.alive)

    def _make_room(self, client: str) -> str:
        """The run to forget for one more of a client, by its key; ``""`` if there is room.

        A client may have as many as are left for others. Beyond that one of its own makes room; for its first one,
        anybody's: one without snapshots before one of which everything is safe elsewhere, and the oldest.
        """
        mine = sum(run.client == client for run in self.runs.values())
        if mine < MOST_RUNS - len(self.runs):
            return ""
        here, needed = self._ring.occupants()
        ages = [
            (key in here, run.opened_s, key)
            for key, run in self.runs.items()
            if (run.client == client or not mine) and run.info.session not in self.sessions and key not in needed
        ]
        if not ages:
            raise SnapshotFailedError(
                f"this server has {len(self.runs)} runs, {mine} of this client, with snapshots that only it holds, and"
                " takes no more. Delete what is not needed, or use another server",
                reason=FailureReason.RING_FULL,
            )
        return min(ages)[2]

    def _check_not_live(self, current: RunInfo, info: RunInfo) -> None:
        another = self.has_other_writer(current, info.session)
        # A trainer that connects again, because its connection broke, has the token of its attempt.
        itself = bool(current.token) and (current.token, current.attempt) == (info.token, info.attempt)
        if another and not itself:
            raise RunBusyError(
                f"a live trainer on this host (pid {current.pid}) already writes run {current.name!r}. Give this"
                " trainer another dirpath, or end the other one first"
            )

    def _check_same(self, current: RunInfo, info: RunInfo) -> None:
        """Refuse another trainer's attempt, and to bring one's snapshots elsewhere: only the next may move its run."""
        if current.token and current.token != info.token:
            raise FencedError(
                f"attempt {info.attempt} of run {current.name!r} is another trainer's (on"
                f" {current.host or 'another host'}): two were started at once. Stop one of them",
                current=current.attempt,
            )
        for name in ("location", "durable_url"):
            here, there = getattr(current, name), getattr(info, name)
            if here and there and here != there:
                raise SettingsError(
                    f"attempt {info.attempt} of run {current.name!r} goes to {here}, not to {there}: it stays there."
                    " Start the trainer again to store it elsewhere"
                )
