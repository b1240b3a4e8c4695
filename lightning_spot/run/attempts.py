"""Begins an attempt: its number lies above all that any tier has seen, and is claimed before training begins.

If the storage cannot be claimed at that time, a thread retries; then it checks that the claim stays. The attempt of a
folder of plain checkpoint files has no claim: its number orders what is saved there.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from lightning_spot import retry
from lightning_spot.client.stores import open_store
from lightning_spot.errors import CorruptSnapshotError, FencedError, SnapshotNotFoundError, TierError, TierReason
from lightning_spot.protocol.wire import parse_spot_url
from lightning_spot.retry import pause_after
from lightning_spot.run.identity import next_attempt
from lightning_spot.run.location import RingSettings
from lightning_spot.run.survey import Survey
from lightning_spot.say import recovered, say
from lightning_spot.server.host import Host
from lightning_spot.server.placement import placed
from lightning_spot.server.runs import EPOCH_UNIX_S, RunInfo, files_name
from lightning_spot.snapshot.manifest import MANIFEST_FILE, OWN_DIR, Manifest
from lightning_spot.store.fences import Claim, Owner
from lightning_spot.store.retention import Keep
from lightning_spot.store.store import Store, claim_late
from lightning_spot.threads import all_at_once

logger = logging.getLogger(__name__)

_FIRST_RETRY_S, _LAST_RETRY_S, _CLOSE_S = 1.0, 30.0, 5.0
CLAIM_LOOK_S = 5.0
"""A claim that stands is read again so often, by one small request."""

_MOST_NUMBERS = 8  # others that start at the same moment each take one


def begin_attempt(found: Survey, host: Host, settings: RingSettings) -> tuple[RunInfo, bool]:
    """Take the next attempt of the run at this host's ring and in storage.

    The ring comes first: it refuses a second trainer of this host before that one fences the first.

    Args:
        found: what the tiers hold; its storage may be unreadable, then the number leaves room for it.
        host: ring on this host.
        settings: of the ring.

    Returns:
        the attempt as the tiers know it, and whether storage is claimed; see :class:`ClaimWatch`.

    Raises:
        RunBusyError: if a live trainer on this host writes the run.
        FencedError: if other trainers take number after number.
    """
    location = found.location
    info = RunInfo(
        name=location.name,
        id=found.identity.run_id,
        location=location.canonical,
        attempt=next_attempt(found.seen_attempts, durable_was_read=found.durable is not None),
        token=secrets.token_hex(8),
        keep=settings.keep,
        durable_url=location.url,
        min_upload_interval_s=settings.min_upload_interval_s,
        compression=settings.compression,
        servers=placed(elsewhere(location.servers, settings.replicas), found.identity.run_id),
        replicas=settings.replicas,
        pid=os.getpid(),
        host=os.uname().nodename,
    )
    claimed = False
    for last in (False,) * (_MOST_NUMBERS - 1) + (True,):
        try:
            host.open_run(info)
            if found.durable is not None:
                claimed = _claim(open_store(location.url), info.claim())
            break
        except FencedError as error:
            if last:
                raise
            text = "{error}. This attempt takes a later number"
            say(logging.INFO, "attempt-taken", text, about=location.url, error=error)
            there = _of_the_run_there(found, info, error.current)
            info = replace(there, attempt=max(info.attempt, error.current) + 1)
    if found.identity.copied_from:
        text = "{about} is a copy of {source}. From here on it is a run of its own"
        say(logging.WARNING, "run-copied", text, about=location.url, source=found.identity.copied_from)
    return info, claimed


def _of_the_run_there(found: Survey, info: RunInfo, attempt: int) -> RunInfo:
    """The same attempt, of the run that another trainer has begun there since: none was, and this one made an identity.

    Two runs of one directory would not fence each other at snapshot servers.

    Args:
        found: what the tiers held.
        info: of this attempt.
        attempt: number of one that is claimed there, though it may not be listed yet.
    """
    if found.durable is None or found.claim is not None or found.runs:
        return info
    try:
        store = open_store(info.durable_url or "")
        claim = store.newest_claim() or store.claim_of(attempt)
    except (TierError, CorruptSnapshotError) as error:
        logger.debug("it cannot be read which run was begun meanwhile: %s", error)
        return info
    if claim is None or claim.location != info.location:
        return info
    return replace(
        info, id=claim.run_id, servers=placed(elsewhere(found.location.servers, info.replicas), claim.run_id)
    )


def _claim(store: Store, claim: Claim) -> bool:
    """Claim storage; whether that came to be, after a few tries."""
    policy = retry.DEFAULT_POLICY

    def once() -> None:
        retry.unless_silent(lambda: store.claim(claim), threading.Event(), policy.silent_s, store.url)

    try:
        retry.with_retries(once, policy, store.url)
    except TierError as error:
        text = "attempt {attempt} could not be claimed at {about} ({error}). An earlier one may write there. Retrying"
        say(logging.WARNING, "claim-failing", text, about=store.url, attempt=claim.attempt, error=error)
        return False
    return True


class ClaimWatch:
    """Holds an attempt's claim, on a thread of its own: makes it if that failed at first, then reads it now and then.

    On a store that does not create exclusively, two trainers that start at once may both make the claim of one number.
    The last one stays; the other finds out here, or with the next thing that it has written.

    Args:
        url: of storage.
        claim: to hold.
        is_made: whether it was made.
        fenced: told if another trainer has taken the number, or a later one the run. Called on the thread.
    """

    def __init__(self, url: str, claim: Claim, *, is_made: bool, fenced: Callable[[FencedError], None]) -> None:
        self._url, self._claim, self._is_made, self._fenced = url, claim, is_made, fenced
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="spot-claim", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        failures = 0 if self._is_made else 1
        while not self._closed.wait(pause_after(failures, _FIRST_RETRY_S, _LAST_RETRY_S) if failures else CLAIM_LOOK_S):
            try:
                self._look()
                failures = 0
            except FencedError as error:
                say(logging.WARNING, "fenced", "{error}", about=self._url, error=error)
                self._fenced(error)
                return
            except Exception as error:  # whatever it is: without a claim, no earlier attempt would be kept out
                logger.debug("the claim at %s cannot be made, or read, now: %s", self._url, error)
                failures += 1

    def _look(self) -> None:
        store = open_store(self._url)
        if self._is_made:
            store.owner = Owner(self._claim.attempt, self._claim.digest)
            try:
                store.check_owner()
            except TierError as error:
                if error.reason is not TierReason.UNCLAIMED:
                    raise
                self._is_made = False  # it was removed, with its folder perhaps
        if not self._is_made:
            claim_late(store, self._claim)
            self._is_made = True
            text = "attempt {attempt} is claimed at {about}"
            recovered("claim-failing", text, about=self._url, attempt=self._claim.attempt)


def elsewhere(servers: Sequence[str], replicas: int) -> tuple[str, ...]:
    """The servers that outlive this machine; all of them if none does. A server at a loopback address counts as one.

    Args:
        servers: ``spot://host:port`` of each.
        replicas: how many are wanted; fewer are said.
    """
    found = tuple(server for server in servers if not is_here(parse_spot_url(server)[0].host))
    if len(found) < min(replicas, len(servers)):
        say(
            logging.WARNING,
            "replicas-here",
            "replicas={replicas}, but only {count} servers are on other machines ({about}). What is on this machine is"
            " lost with it. Name more servers",
            about=", ".join(found) or "none",
            replicas=replicas,
            count=len(found),
        )
    return found or tuple(servers)


def is_here(host: str) -> bool:
    """Whether a host's name or address is one of this machine, other than loopback; what cannot be told is not."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_DGRAM)
    except OSError as error:
        logger.debug("%s cannot be looked up: %s", host, error)
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> bool:
    if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        return False
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)  # port 0: only what this machine has can be bound
    except OSError:
        return False
    return True


_READERS = 32
MOST_READ = 2000
"""Manifests of a folder that are read when its first file is saved; beyond them, the clock orders what is saved."""

_attempts: dict[str, int] = {}  # attempts of this process, by folder
_attempts_lock = threading.Lock()


def folder_info(folder: str, now_unix_s: float | None = None) -> RunInfo:
    """A user's folder as a server knows it: the folder is a run, and whoever begins to save there is an attempt.

    The attempt is the time in seconds, or one more than that of any file that is there (of very many: of the last ones,
    by name, so of ``last.ckpt``), or that was given here before.
    So what is left with the server of somebody before never replaces what is saved from now on.

    Args:
        folder: absolute path or URL.
        now_unix_s: the time; default now.
    """
    key = hashlib.sha256(folder.encode()).hexdigest()[:12]
    now = int(time.time() if now_unix_s is None else now_unix_s)
    highest = _highest_attempt(folder)
    with _attempts_lock:
        _attempts[key] = attempt = 1 + max(now - EPOCH_UNIX_S - 1, highest, _attempts.get(key, 0))
    return RunInfo(
        name=files_name(key),
        id=key,
        location=folder if "://" in folder else f"file://{folder}",
        attempt=attempt,
        token=secrets.token_hex(8),
        keep=Keep(newest=1),
        durable_url=folder,
        is_claimed=False,
        pid=os.getpid(),
        host=os.uname().nodename,
    )


def _highest_attempt(folder: str) -> int:
    """Highest attempt of the files that have manifests in a folder; 0 if none, or if it cannot be read."""
    try:
        manifests = open_store(folder).folder(OWN_DIR, attempt=0, run_id="")
        names = sorted(name for name in manifests.sizes() if name.endswith(f".{MANIFEST_FILE}"))[-MOST_READ:]
    except TierError as error:
        text = "{error}. Only the clock orders what is saved there"
        say(logging.WARNING, "manifests-not-read", text, about=folder, error=error)
        return 0

    def attempt_in(name: str) -> int:
        try:
            return Manifest.from_json(manifests.read(name)).attempt
        except (SnapshotNotFoundError, CorruptSnapshotError):
            return 0
        except TierError as error:  # one manifest hides no other
            where = f"{folder}/{OWN_DIR}/{name}"
            say(logging.WARNING, "manifest-not-read", "{about} cannot be read ({error})", about=where, error=error)
            return 0

    return max(all_at_once([partial(attempt_in, name) for name in names], "spot-ask", _READERS), default=0)
