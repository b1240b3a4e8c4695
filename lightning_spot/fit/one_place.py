"""Where no memory node serves several hosts, the durable tier must be one place for all of them."""

from __future__ import annotations

import time

from lightning_spot.client.stores import open_store
from lightning_spot.errors import CorruptManifest, SettingsError, SnapshotNotFound, TierError
from lightning_spot.fit.agreement import Agreement
from lightning_spot.fit.hosts import place_of
from lightning_spot.memory.runs import parse_run
from lightning_spot.run.location import Location
from lightning_spot.tiers.claims import ATTEMPTS_DIR, Claim, claim_name, digest_of
from lightning_spot.tiers.store import HasFolders, Store

_LOOK_S = 0.05
_SEEN_S = 90.0  # a network mount may show late what another host has written


def check_read_everywhere(ranks: Agreement, location: Location, run: str, number: int, token: str) -> None:
    """Refuse a durable tier that some host does not see: nothing could be resumed there. Every rank calls it.

    Args:
        ranks: all of them.
        location: of the run.
        run: as ``NAME@ID``.
        number: of the attempt.
        token: of its claim, which rank 0 has written.

    Raises:
        SettingsError: if one host does not see there what rank 0 has written.
    """
    places = ranks.gather(place_of(location))
    leads = places[ranks.rank] != places[0] and places.index(places[ranks.rank]) == ranks.rank
    ranks.together(lambda: check_place(location.url, run, number, token, writes=False) if leads else None)


def check_place(url: str, run: str, number: int, token: str, *, writes: bool = True) -> None:
    """Refuse a durable tier that is not the same place for all hosts.

    Args:
        url: of the durable tier.
        run: as ``NAME@ID``.
        number: of the attempt.
        token: of its claim, which rank 0 has written.
        writes: whether this host brings its part of each snapshot there, or only reads what it resumes from.

    Raises:
        SettingsError: if this host does not see there what rank 0 has written, or cannot write there itself.
    """
    store, deadline_s = open_store(url), time.monotonic() + _SEEN_S
    while True:
        try:
            if _is_claimed(store, run, number, token, writes=writes):
                return
            problem = f"the claim of attempt {number}, which rank 0 has written there, is not seen"
        except TierError as error:
            problem = str(error)
        if time.monotonic() > deadline_s:
            break
        time.sleep(_LOOK_S)
    what = "brings its part of a snapshot there" if writes else "reads there what it resumes from"
    raise SettingsError(
        f"{url} cannot be used from every host ({problem}): without a memory node, each host {what},"
        " so it must be one place for all of them. Give a bucket, or a directory that"
        " all hosts mount; or start a memory node that all hosts reach, and name it (memory='spot://host:7070')"
    )


def _is_claimed(store: Store, run: str, number: int, token: str, *, writes: bool) -> bool:
    """Whether this attempt's claim is seen, by its name: a mount may list it late. Then it is written once more."""
    assert isinstance(store, HasFolders)
    folder = store.folder(ATTEMPTS_DIR, attempt=number, run_id=parse_run(run)[1])
    try:
        claim = Claim.from_json(folder.read(claim_name(number)))
    except (SnapshotNotFound, CorruptManifest):
        return False
    if claim.digest != digest_of(token):
        return False
    if writes:
        store.claim(claim)  # which changes nothing, and shows that it may
    return True
