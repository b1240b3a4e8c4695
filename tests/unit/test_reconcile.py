"""What is to be done in a situation, as plain text: what is wanted and seen above the line, the actions below it.

``run`` says what the run is to have, ``server`` and ``destination`` what was seen there, ``slot`` what is here: a step,
or one writer's shard of it (``3/1of2``), and where that was seen. A time after ``@`` is when an action is due.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_spot.server.reconcile import (
    Action,
    Deletion,
    Desired,
    Destination,
    Kind,
    Observed,
    Role,
    Servers,
    actions,
    awaited,
    presumed_gone_s,
)
from lightning_spot.server.runs import Opened, RunInfo
from lightning_spot.server.slots import Commit, Known, Mark, Slot, SlotState, Tiers, View
from lightning_spot.snapshot.manifest import Manifest
from tests.support.server import RUN_ID, manifest_of
from tests.support.shards import failed_shard, sealed_shard

pytestmark = pytest.mark.guarantee("G19")

STORAGE = "/storage"
MARKS = {mark.value: mark for mark in Mark}

SITUATIONS = {
    "the newest goes to storage, what is superseded does not": """
        run live
        slot 1
        slot 2
        ----
        put 2 storage
    """,
    "those that ended a run go there all the same": """
        run live
        slot 1 complete
        slot 2
        ----
        put 1 storage
        put 2 storage
    """,
    "what storage has is not brought again, what it refuses neither": """
        run live
        slot 1 safe=storage
        slot 2 refused=storage
        ----
    """,
    "a file goes to the destinations that were named for it": """
        run live
        slot 1 safe=storage
        file best.ckpt destinations=other
        ----
        put best.ckpt other
    """,
    "of one host nobody looks at storage why a shard failed": """
        run asked=900
        slot 1/0of2 failed
        ----
    """,
    "why a shard failed goes to where other hosts look": """
        run live hosts=2
        slot 1/0of2 failed
        ----
        put shards 1 storage @1000.5
    """,
    "what failed waits, and nothing else does": """
        run live
        destination storage failed=put:3
        slot 3
        file best.ckpt
        ----
        put best.ckpt storage
        put 3 storage @1000.5
    """,
    "of two servers the first is asked, and storage waits": """
        run live servers=a,b
        slot 1
        ----
        ask a
    """,
    "the one that is used gets the newest and is asked again": """
        run live servers=a,b
        server a used uploads asked=995
        slot 1
        slot 2
        ----
        ask a @1005
        send 2 a
    """,
    "what a server has is learned from it": """
        run live servers=a
        server a used uploads asked=995 looked=1001
        slot 2 safe=a
        ----
        ask a @1005
        look a @1001.25
    """,
    "what one server has made durable goes to the other, too": """
        run live servers=a,b replicas=2
        server a used uploads asked=995
        server b used asked=995
        slot 2 safe=a,storage
        ----
        ask a @1005
        ask b @1005
        send 2 b
    """,
    "while no server works this host brings it to storage": """
        run live servers=a,b
        server a away=1020
        server b away=1030
        slot 2
        ----
        ask a @1020
        put 2 storage
    """,
    "one that refuses is kept, and this host brings it to storage": """
        run live servers=a
        server a used refuses asked=995
        slot 2
        ----
        ask a @1005
        send 2 a
        put 2 storage
    """,
    "another takes the place of a lost one": """
        run live servers=a,b,c replicas=2
        server a away=1020
        server b used asked=995
        ----
        ask b @1005
        ask c
    """,
    "a shard goes to its server at once, and to storage with those of its host": """
        run live hosts=2
        slot 2/0of2 at=999.8
        ----
        put shards 2 storage @1000.3
    """,
    "one host waits for its own ranks' shards": """
        run live
        slot 2/0of2
        ----
        put shards 2 storage @inf
    """,
    "a trainer that is gone leaves what there is to storage": """
        run hosts=2 asked=990
        slot 2/0of2
        ----
        put shards 2 storage @1025
    """,
    "what is whole goes as one": """
        run live
        slot 2/0of2
        slot 2/1of2
        ----
        put 2 storage
    """,
    "what storage is not to have goes there only when nothing newer comes": """
        run live
        slot 2/0of2 unkept
        slot 2/1of2 unkept
        ----
        put 2 storage @inf
    """,
    "registers of others are looked at as long as some are missing": """
        run live hosts=2 servers=a
        server a used uploads asked=995
        slot 2/0of2
        ----
        ask a @1005
        look a
        send 2 a
    """,
    "a deletion waits for no snapshot": """
        run live
        destination storage deletes=1
        slot 2
        ----
        delete 1 storage
        put 2 storage
    """,
    "a deletion waits for a file that may replace what goes": """
        run live
        destination storage deletes=1 behind=best.ckpt
        file best.ckpt
        ----
        put best.ckpt storage
    """,
    "a deletion waits for no file that came later": """
        run live
        destination storage deletes=1
        file later.ckpt
        ----
        delete 1 storage
        put later.ckpt storage
    """,
    "a deletion waits for that of a file that never was there": """
        run live
        destination storage deletes=1 behind=best.ckpt
        destination storage deletes=best.ckpt behind=better.ckpt
        file better.ckpt
        ----
        put better.ckpt storage
    """,
    "a deletion waits for that of a file only while that waits": """
        run live
        destination storage deletes=1 behind=best.ckpt
        destination storage deletes=best.ckpt
        ----
        delete best.ckpt storage
        delete 1 storage
    """,
    "older ones go once the newest is there": """
        run live
        destination storage newest=2 deletes=1
        slot 2 safe=storage
        ----
        delete 1 storage
        retain 2 storage
    """,
    "of a run that was forgotten, older ones stay": """
        destination storage newest=2
        slot 2 safe=storage
        ----
    """,
}


class Situation:
    """What the lines above the line say."""

    def __init__(self, lines: list[str]) -> None:
        self.now_s, self.known = 1000.0, Known()
        self.slots: list[Slot] = []
        self.destinations: dict[str, Destination] = {}
        self.servers: Servers | None = None
        self.desired = Desired()
        for line in lines:
            what, *words = line.split()
            fields = dict(word.partition("=")[::2] for word in words)
            getattr(self, what)(words, fields)

    def run(self, words: list[str], fields: dict[str, str]) -> None:
        servers = tuple(f"spot://{name}" for name in fields.get("servers", "").split(",") if name)
        info = RunInfo(
            name="run", id=RUN_ID, location=STORAGE, attempt=1, token="t", durable_url=STORAGE, servers=servers
        )
        every = float(fields["every"]) if "every" in fields else None
        info = replace(info, session="live" if "live" in words else "", hosts=int(fields.get("hosts", 1)))
        info = replace(info, replicas=int(fields.get("replicas", 1)), min_upload_interval_s=every)
        self.servers = Servers(info) if servers else None
        asked_s = float(fields.get("asked", self.now_s))
        gone_s = presumed_gone_s(info, asked_s, None)
        self.desired = Desired(info=info, presumed_gone_s=gone_s, urgent="urgent" in words)
        self.desired = replace(self.desired, is_stuck=lambda _writer: "stuck" in words)

    def server(self, words: list[str], fields: dict[str, str]) -> None:
        server = self.servers.find(self.url(words[0]))
        server.role = Role.UPLOADS if "uploads" in words else Role.KEEPS if "used" in words else Role.NONE
        server.why_not = "it may not" if "refuses" in words else ""
        server.answered_s, server.looked_s = float(fields.get("asked", 0)), float(fields.get("looked", "-inf"))
        server.away_until_s, server.failures = float(fields.get("away", 0)), int("away" in fields)

    def destination(self, words: list[str], fields: dict[str, str]) -> None:
        url = self.url(words[0])
        destination = self.destinations.setdefault(url, Destination(url))
        if "begun" in fields:
            destination.uploaded_s[RUN_ID] = float(fields["begun"]), float(fields.get("took", 0))
        if "failed" in fields:
            kind, _, step = fields["failed"].partition(":")
            words = ["complete"] if step.endswith("c") else []
            action = Action(Kind(kind), url, RUN_ID, manifest=self.manifest(step.rstrip("c"), words))
            destination.failed(action, "it failed", self.now_s)
        if "deletes" in fields:
            behind = {fields["behind"]: 1} if "behind" in fields else {}
            what = fields["deletes"]
            manifest = manifest_of(int(what)) if what.isdigit() else replace(manifest_of(1), name=what, file="")
            destination.deletions.append(Deletion(manifest, behind))
        if "newest" in fields:
            destination.newest[RUN_ID] = manifest_of(int(fields["newest"]))

    def slot(self, words: list[str], fields: dict[str, str]) -> None:
        self.add(self.manifest(words[0], words), words, fields)

    def file(self, words: list[str], fields: dict[str, str]) -> None:
        self.add(replace(manifest_of(1), name=words[0], file=""), words, fields)

    def add(self, manifest: Manifest, words: list[str], fields: dict[str, str]) -> None:
        slot = Slot(len(self.slots), SlotState.HELD, run=RUN_ID, manifest=manifest)
        slot.writer = manifest.shard.writer if manifest.shard is not None else 0
        slot.commit = Commit(len(self.slots) + 1, float(fields.get("at", self.now_s)))
        slot.commit.after_s = float(fields.get("after", "inf"))
        if "destinations" in fields:
            slot.commit.destinations = tuple(self.url(name) for name in fields["destinations"].split(","))
        for mark in MARKS.keys() & fields.keys():
            slot.seen.update(dict.fromkeys((self.url(name) for name in fields[mark].split(",")), MARKS[mark]))
        self.slots.append(slot)

    def manifest(self, what: str, words: list[str]) -> Manifest:
        step, _, shard = what.partition("/")
        if not shard:
            return manifest_of(int(step), complete="complete" in words)
        writer, _, writers = shard.partition("of")
        if "failed" in words:
            return failed_shard(int(step), int(writer), int(writers))
        manifest = sealed_shard(int(step), int(writer), int(writers))
        return replace(manifest, shard=replace(manifest.shard, persist="unkept" not in words))

    def url(self, name: str) -> str:
        servers = self.servers.all if self.servers is not None else []
        return next((each.url for each in servers if each.url.startswith(f"spot://{name}/")), f"/{name}")

    def observed(self) -> Observed:
        tiers = self.servers.tiers() if self.servers is not None else Tiers((STORAGE,))
        view = View(self.slots, tiers, self.known)
        return Observed(RUN_ID, view, tiers, self.destinations, self.servers)


def line_of(action: Action) -> str:
    where = action.url.removeprefix("spot://").removesuffix(f"/run@{RUN_ID}").strip("/")
    manifest = action.manifest
    name = [] if manifest is None else [manifest.name if manifest.is_file else str(manifest.step)]
    due = [f"@{action.due_s:g}"] if action.due_s else []
    return " ".join([action.kind.value, *name, where, *due])


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_is_to_be_done(name: str) -> None:
    above, _, below = SITUATIONS[name].partition("----")
    situation = Situation([line.strip() for line in above.strip().splitlines()])
    found = actions(situation.desired, situation.observed(), situation.now_s)
    assert sorted(map(line_of, found)) == sorted(line.strip() for line in below.strip().splitlines())


@pytest.mark.parametrize(
    ("run", "tier", "slot", "due"),
    [
        ("live every=60", "", "", "@160"),
        ("live every=60 urgent", "", "", ""),
        ("live every=60", "failed=put:3", "", "@1000.5"),  # it is tried again, not put off
        ("live", "took=0.1", "at=102 after=1", "@104"),  # in quick succession: its turn comes
        ("live", "took=10", "at=126 after=1", "@130"),  # but comes at least so often
        ("live", "took=10", "at=102 after=1", "@107"),  # none follows in time
        ("live", "took=10", "at=102 after=6", ""),  # after a pause
        ("live urgent", "took=10", "at=102 after=1", ""),
        ("live stuck", "took=10", "at=102 after=1", ""),  # the next one has no memory until this one is safe
        ("", "took=10", "at=102 after=1", ""),  # the trainer has gone: nothing is expected
    ],
)
def test_when_storage_takes_the_next_one(run: str, tier: str, slot: str, due: str) -> None:
    situation = Situation([f"run {run}", f"destination storage begun=100 {tier}", f"slot 3 {slot}"])
    found = actions(situation.desired, situation.observed(), situation.now_s)
    assert [line_of(each) for each in found] == [f"put 3 storage {due}".strip()]


def test_what_was_put_off_comes_later() -> None:
    storage = "destination storage failed=put:1c newest=1 deletes=1"
    situation = Situation(["run live", storage, "slot 1 complete", "slot 2"])
    found = [line_of(each) for each in actions(situation.desired, situation.observed(), situation.now_s)]
    assert found == ["delete 1 storage", "retain 1 storage", "put 2 storage", "put 1 storage @1000.5"]


def test_the_first_server_uploads_whichever_is_asked_first() -> None:
    servers = Situation(["run live servers=a,b,c replicas=2"]).servers
    first, second, third = servers.all
    for server in (second, first):
        servers.asks(server, 1000.0)
    assert (first.asked, second.asked) == (Role.UPLOADS, Role.KEEPS)
    servers.answered(second, Opened(1, carries=False), 1000.0)
    servers.lost(first, "it does not answer", 1000.0)
    assert second.is_due
    for server in (third, second):
        servers.asks(server, 1000.0)
    assert (second.asked, third.asked) == (Role.UPLOADS, Role.KEEPS)
    servers.answered(second, Opened(1, carries=True), 1000.0)
    assert servers.uploader is second


def test_a_server_that_fails_three_times_is_lost_for_a_moment() -> None:
    servers = Situation(["run live servers=a", "server a used uploads asked=995"]).servers
    (server,) = servers.all
    for failures in (1, 2, 3):
        assert server.used
        servers.heard(server, "it failed", 1000.0)
        assert server.failures == failures
    assert (server.used, server.away_until_s) == (False, 1004.0)


def test_one_that_is_not_asked_now_keeps_no_other_from_uploading() -> None:
    """It did not show its registers, and was never asked for anything else."""
    servers = Situation(["run live servers=a,b"]).servers
    servers.all[0].away_until_s = 1010.0
    assert servers.is_to_upload(servers.all[1], 1000.0)


@pytest.mark.parametrize(
    ("lines", "waited_for"),
    [
        (["run live", "slot 1"], {STORAGE}),
        (["run live", "slot 1 safe=storage"], set()),
        (["run live", "slot 1/0of2"], set()),  # the other one is to come here
        (["run live hosts=2", "slot 1/0of2"], {STORAGE}),
        (["run live", "slot 1/0of2 unkept", "slot 1/1of2 unkept"], set()),
        (["run live", "slot 1 safe=storage", "destination storage deletes=1"], {STORAGE}),
    ],
)
def test_what_is_waited_for(lines: list[str], waited_for: set[str]) -> None:
    situation: Any = Situation(lines)
    assert awaited(situation.desired, situation.observed()) == waited_for
