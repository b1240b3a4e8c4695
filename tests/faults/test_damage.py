"""What is damaged, forged or foreign is one clear error, or costs what it says: never a wrong resume, never a crash."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import os
import random
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_spot import EverySteps, SpotCheckpoint, SpotCheckpointIO
from lightning_spot.cli.command import main
from lightning_spot.client.filesystem import SpotFileSystem
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.server_client import ServerClient
from lightning_spot.errors import (
    CorruptSnapshotError,
    FailureReason,
    FencedError,
    MalformedError,
    Reason,
    RunBusyError,
    ServerRefusedError,
    ServerUnreachableError,
    SettingsError,
    SnapshotFailedError,
    SnapshotNotFoundError,
    SpotError,
    TierError,
    TierReason,
)
from lightning_spot.goodput.ledger import AttemptRecord, account_after
from lightning_spot.goodput.records import Journal, write_record
from lightning_spot.protocol.wire import UPGRADE, Address, error_body, error_from_body, file_path
from lightning_spot.run import survey
from lightning_spot.snapshot.files import FileSpan, note_name
from lightning_spot.snapshot.manifest import MANIFEST_FILE, Manifest, ShardOf, shard_name, snapshot_name
from lightning_spot.snapshot.shards import failed
from lightning_spot.store.commit import commit_left, put_shards
from lightning_spot.store.fences import ATTEMPTS_DIR, Claim, claim_name
from lightning_spot.store.local import LocalStore
from lightning_spot.untrusted import (
    as_object,
    plain,
    read_json,
    sealed_json,
)
from tests.conftest import Cli
from tests.support.server import Bench, MakeBench, sessions_of
from tests.support.shards import PART, failed_shard, sealed_apart, shard_image
from tests.support.trainer import Net, trainer
from tests.support.trainer import data as examples
from tests.support.waiting import new_process, until

pytestmark = pytest.mark.guarantee("G1")

WRONG: tuple[Any, ...] = (None, "x", [], {}, -1, 1e308, float("nan"), float("inf"), True, 10**30, [[1]], {"a": [1]})
HOSTILE = "\x1b]52;c;Y3VybA==\x07\x1b[2J[/nothing][link=http://evil]\nCRITICAL forged\u202e\u2028\ud800"


def wrongly(fields: Any) -> Iterator[Any]:
    """The same JSON with each of its values, wherever it is, replaced or left out."""
    places = fields.items() if isinstance(fields, dict) else enumerate(fields) if isinstance(fields, list) else ()
    for key, value in list(places):
        for other in [*WRONG, *wrongly(value)]:
            changed = copy.copy(fields)
            changed[key] = other
            yield changed
        if isinstance(fields, dict):
            yield {name: each for name, each in fields.items() if name != key}


# -- records of attempts ----------------------------------------------------------------------------------------------


def test_a_damaged_record_costs_statistics_but_never_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = AttemptRecord(attempt=1, begun_unix_s=1e9, trained_unix_s=1e9 + 1, step=9, unix_s=1e9 + 9, end="failed")
    second = AttemptRecord(attempt=2, begun_unix_s=1e9 + 20, earlier=account_after(first), from_unix_s=1e9 + 7)
    write_record(str(tmp_path), second)
    path = tmp_path / "attempts" / "attempt-0002.progress.json"
    good = json.loads(path.read_text())
    del good["checksum"]
    for record in [*wrongly(good), [], "x", None, 1]:
        path.write_text(json.dumps(record))
        caplog.clear()
        journal = Journal(str(tmp_path), 3, heartbeat_s=1000.0, begun_unix_s=1e9 + 30)
        journal.train(12, 1e9 + 25, 0.1)
        assert journal.spent.total_s >= 0
        assert len(caplog.records) <= 1
        journal.close("failed")


# -- manifests --------------------------------------------------------------------------------------------------------


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {"run": "r", "name": snapshot_name(5, 1), "step": 5, "attempt": 1, "nbytes": 3}
    fields |= {"run_id": "0123456789ab", "created_unix_s": 1.5e9, "versions": {"torch": "2.10"}}
    fields["checksums"] = ("0" * 32,)
    return Manifest(**{**fields, **changes})


SHARD = manifest(
    name=shard_name(snapshot_name(5, 1), 1),
    shard=ShardOf(1, 2, "digest"),
    files=(FileSpan("__1_0.distcp", 0, 3),),
)


CLAIM = Claim(attempt=3, run_id="0123456789ab", digest="d", location="file:///r", started_unix_s=1e9, host="vm", pid=7)


@pytest.mark.parametrize(
    "good",
    [
        manifest(),
        manifest(name=snapshot_name(5, 1, complete=True), complete=True),
        manifest(name="a.ckpt", file=""),
        SHARD,
        CLAIM,
    ],
    ids=["snapshot", "the end", "file", "shard", "claim"],
)
def test_a_flipped_bit_of_a_manifest_is_refused_or_harmless(good: Manifest | Claim) -> None:
    text, read = bytearray(good.to_json().encode()), type(good).from_json
    for place in range(8 * len(text)):
        text[place // 8] ^= 1 << place % 8
        with contextlib.suppress(CorruptSnapshotError):
            assert read(bytes(text)) == good, f"bit {place} is not seen"
        text[place // 8] ^= 1 << place % 8
    assert read(bytes(text)) == good


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 7},
        {"attempt": 2},
        {"complete": True},
        {"exact": False},
        {"name": snapshot_name(6, 1)},
        {"name": "model"},
    ],
)
def test_a_manifest_agrees_with_its_name(changes: dict[str, Any]) -> None:
    old = {**manifest().to_dict(), "format": 3}  # written before manifests had a checksum of themselves
    assert Manifest.from_json(json.dumps(old)) == manifest()
    with pytest.raises(CorruptSnapshotError):
        Manifest.from_json(json.dumps({**old, **changes}))


def test_a_manifest_without_checksum_or_with_bad_values_fails() -> None:
    with pytest.raises(CorruptSnapshotError):
        Manifest.from_json(json.dumps(manifest().to_dict()))
    for fields in wrongly(SHARD.to_dict()):
        with contextlib.suppress(CorruptSnapshotError):
            Manifest.from_dict(fields).to_json()


# -- JSON and text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"\xff", b"\xef\xbb\xbf{}", b"[" * 100_000, b"[" * 33 + b"]" * 33, b"9" * 100_000,
        b"-" + b"9" * 5000, b"0." + b"9" * 100_000, b"1e400", b"NaN", b"[Infinity]", b'{"a": -Infinity}',
        b'{"a": 1, "a": 2}', b'"\\ud800"',
        b" " * 300_000 + b"1", b'{"a": "\\udfff"}', b'"a\nb"',
    ],
    ids=lambda data: repr(data[:12]),
)  # fmt: skip
def test_json_beyond_its_bounds_is_one_error(data: bytes) -> None:
    with pytest.raises(MalformedError) as caught:
        read_json(data)
    assert len(str(caught.value)) < 300


def test_foreign_text_is_shown_on_one_line() -> None:
    shown = plain(HOSTILE)
    assert shown.isprintable()
    assert "forged" in shown
    assert plain("snapshot é 漢") == "snapshot é 漢"
    assert len(plain("x" * 10**6)) == 200
    assert len(plain("\x1b" * 10**6)) <= 200


def few_or(many: int, few: int) -> pytest.MarkDecorator:
    """So many cases every day, and many more in the soak."""
    return pytest.mark.parametrize("cases", [few, pytest.param(many, marks=pytest.mark.soak)], ids=["few", "many"])


def mutated(rnd: random.Random, data: bytes) -> bytes:
    """Some bytes of it flipped, set, cut out, doubled, or replaced by what has a meaning."""
    changed = bytearray(data)
    pieces = [b"NaN", b"1e999", b"-1", b"{", b"[", b'"', b"null", b"9" * 30, b"\\ud800", b"\xff", b"\0", b"\x1b[2J"]
    for _ in range(rnd.choice([1, 1, 2, 4, 8])):
        if not changed:
            break
        at, how = rnd.randrange(len(changed)), rnd.randrange(6)
        if how == 0:
            changed[at] ^= 1 << rnd.randrange(8)
        elif how == 1:
            changed[at] = rnd.randrange(256)
        elif how == 2:
            del changed[at : at + rnd.randrange(1, 6)]
        elif how == 3:
            changed[at:at] = changed[at : at + rnd.randrange(1, 40)]
        elif how == 4:
            changed[at : at + rnd.randrange(5)] = rnd.choice(pieces)
        else:
            del changed[at:]
    return bytes(changed)


# -- registers at storage ---------------------------------------------------------------------------------------------

LIKELY: tuple[Any, ...] = (0, 1, 2, 3, 2**46, PART, 2 * PART, "", "plan", "1" * 12, "model.ckpt", "__0_0.distcp", False)


def forged(rnd: random.Random, fields: Any) -> Any:
    """The same JSON with one of its values, wherever it is, replaced by one that is wrong, or likely."""
    changed = copy.copy(fields)
    key = rnd.choice(list(changed) if isinstance(changed, dict) else range(len(changed)))
    if isinstance(changed[key], dict | list | tuple) and changed[key] and rnd.random() < 0.8:
        changed[key] = list(changed[key]) if isinstance(changed[key], tuple) else changed[key]
        changed[key] = forged(rnd, changed[key])
    else:
        changed[key] = rnd.choice(WRONG + LIKELY)
    return changed


@few_or(20_000, few=300)
def test_any_registers_at_storage_are_a_snapshot_or_refused(tmp_path: Path, cases: int, seed: int) -> None:
    """Damaged, and forged with fresh checksums: what is committed is what the registers that were read make."""
    rnd, store, name = random.Random(seed), LocalStore(tmp_path / "run"), snapshot_name(1, 1)
    put_shards(
        store, [(each, memoryview(shard_image(each))) for each in (sealed_apart(1, 0), sealed_apart(1, 1))], attempt=1
    )
    folder = tmp_path / "run" / name
    (folder / MANIFEST_FILE).unlink()
    fates: Counter[str] = Counter()
    for _ in range(cases):
        notes = {note_name(writer): sealed_apart(1, writer).to_dict() for writer in range(2)}
        if rnd.random() < 0.2:
            notes[note_name(1, failed=True)] = failed_shard(1, 1).to_dict()
        for file in list(notes):
            how = rnd.random()
            if how < 0.5:
                notes[file] = forged(rnd, notes[file])
            with contextlib.suppress(ValueError):  # no number of JSON
                (folder / file).write_bytes(data := sealed_json(notes[file]).encode())
                if how > 0.9:
                    (folder / file).write_bytes(mutated(rnd, data))
        try:
            made = commit_left(store, name).manifest
            fates["nothing" if made is None else "committed"] += 1
        except (CorruptSnapshotError, SnapshotFailedError) as error:
            fates[type(error).__name__] += 1
            made = None
        if made is not None:
            assert store.survey().manifests == [made]
            image = bytearray(made.nbytes)
            with contextlib.suppress(CorruptSnapshotError):
                store.fetch(made, memoryview(image))
        for file in folder.glob("*.json"):
            file.unlink()
    print(dict(fates))
    assert fates["committed"] > cases / 20
    assert fates["nothing"] > cases / 20


# -- claims, greetings, answers ---------------------------------------------------------------------------------------

RECORD = AttemptRecord(attempt=2, begun_unix_s=1e9, earlier=account_after(AttemptRecord(attempt=1, begun_unix_s=9e8)))


def read_record(data: bytes) -> AttemptRecord:
    return AttemptRecord.from_dict(as_object(read_json(data)))


READ: dict[str, tuple[Callable[[Any], Any], list[bytes]]] = {
    "JSON": (read_json, [manifest().to_json().encode(), b'{"a": [1, 2.5e3, "\\u00e9", null, {"b": true}]}']),
    "manifest": (Manifest.from_json, [each.to_json().encode() for each in (manifest(), SHARD, failed(SHARD, "why"))]),
    "claim": (Claim.from_json, [CLAIM.to_json().encode()]),
    "record": (read_record, [json.dumps(dataclasses.asdict(RECORD)).encode()]),
}


@few_or(60_000, few=2000)
@pytest.mark.parametrize("kind", READ)
def test_whatever_is_damaged_is_read_or_one_error(kind: str, cases: int, seed: int) -> None:
    (read, seeds), rnd = READ[kind], random.Random(seed)
    unsealed = [{**json.loads(each)} for each in seeds]
    for fields in unsealed:
        fields.pop("checksum", None)
    forgeries = (json.dumps(wrong) for fields in unsealed for wrong in wrongly(fields))
    for data in (*forgeries, *(mutated(rnd, rnd.choice(seeds)) for _ in range(cases))):
        with contextlib.suppress(MalformedError, CorruptSnapshotError):
            read(data)


@pytest.mark.parametrize(
    "answer",
    [
        {}, {"runs": None}, {"runs": [1]}, {"runs": [{}]}, {"runs": [{"name": HOSTILE}]},
        {"runs": [{"name": "../x", "id": ""}]},
        {"runs": [{"name": "r", "id": "", "location": "", "attempt": "1", "host": ""}]},
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_one_error(answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    client = ServerClient(Address("127.0.0.1", 1))
    monkeypatch.setattr(ServerClient, "call", lambda *_what, **_how: answer)
    with pytest.raises(ServerUnreachableError, match=r"127\.0\.0\.1:1\b") as caught:
        survey._listed(client)
    assert str(caught.value).isprintable()
    with pytest.raises((ServerUnreachableError, SnapshotNotFoundError)):
        ServerStore("spot://127.0.0.1:1/run").survey()


def held(item: Manifest) -> dict[str, Any]:
    """A server's answer, which holds it."""
    kept = {"manifest": item.to_dict(), "dirty": ["s3://bucket"], "safe": ["s3://bucket/run"]}
    return {"attempt": 1, "committed": "", "snapshots": [kept]}


def test_what_a_server_lists_is_right_or_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = [held(manifest())]
    monkeypatch.setattr(ServerClient, "call", lambda *_what, **_how: said[-1])
    monkeypatch.setattr(ServerClient, "receive", lambda *_what, **_how: None)
    files = SpotFileSystem(host="127.0.0.1", port=1, skip_instance_cache=True)
    assert files.find("run") == [f"run/{snapshot_name(5, 1)}/model.ckpt"]
    for wrong in wrongly(held(manifest())):
        said.append(wrong)
        with contextlib.suppress(ServerUnreachableError, SnapshotNotFoundError):
            for entry in files.find("run", detail=True).values():
                assert entry["size"] >= 0
            files.ls(f"run/{snapshot_name(5, 1)}")
            files.info("run/last.ckpt")
    for wrong in wrongly(held(SHARD)):
        said.append(wrong)
        with contextlib.suppress(ServerUnreachableError):
            for item in ServerStore("spot://127.0.0.1:1/run").listing():
                assert all(isinstance(url, str) for url in [*item.owed, *item.safe])


@pytest.mark.parametrize(
    "path", ["../../.ssh/authorized_keys", "/etc/passwd", "a//b", "", "a/..", "x\x1b[2J", "a\nb", 5]
)
def test_a_server_names_no_path_beside_its_run(path: Any) -> None:
    with pytest.raises(MalformedError):
        file_path(path)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"{", b"[" * 10**5, b'{"error": 5}', b'{"error": "FencedError", "message": [1]}',
     b"\xff" * 300,
     json.dumps(
         {"error": "FencedError", "message": HOSTILE[:-1], "facts": {"attempt": "x", "run": HOSTILE[:-1]}}
     ).encode(),
     json.dumps({"error": "PreemptedError", "message": "x" * 10**5}).encode(),
     b'{"error": "SnapshotFailedError", "message": "x", "facts": [1]}'],
)  # fmt: skip
def test_an_error_from_a_server_is_one_of_ours_and_one_line(body: bytes) -> None:
    error = error_from_body(500, body, "spot://server")
    assert isinstance(error, SpotError)
    assert str(error).isprintable()
    assert len(str(error)) < 5000


KNOWN: list[SpotError] = [
    *(SnapshotFailedError("why", reason=reason) for reason in FailureReason),
    *(TierError("why", tier="spot://server", reason=reason) for reason in TierReason),
    *(ServerRefusedError("why", tier="spot://server", status=500, reason=reason) for reason in TierReason),
    ServerUnreachableError("why", tier="spot://server"),
    CorruptSnapshotError("why", where="there", part=3),
    FencedError("why", current=2),
    RunBusyError("why"),
    SnapshotNotFoundError("why"),
]


@pytest.mark.parametrize("error", KNOWN, ids=lambda error: f"{type(error).__name__} {getattr(error, 'reason', '')}")
def test_an_error_comes_over_the_network_with_its_facts(error: SpotError) -> None:
    came = error_from_body(500, json.dumps(error_body(error)).encode(), "spot://server")
    assert type(came) is type(error)
    assert (str(came), vars(came)) == (str(error), vars(error))


@pytest.mark.parametrize(
    ("status", "error", "facts", "kind", "reason"),
    [
        (500, "LaterError", {}, ServerRefusedError, TierReason.REFUSED),
        (426, "LaterError", {}, ServerRefusedError, TierReason.PROTOCOL),
        (500, "TierError", {"reason": "later"}, TierError, TierReason.FAILED),
        (500, "TierError", {"reason": ["failed"]}, TierError, TierReason.FAILED),
        (401, "ServerRefusedError", {}, ServerRefusedError, TierReason.REFUSED),
        (500, "SnapshotFailedError", {"reason": "later", "later": 5}, SnapshotFailedError, FailureReason.UNEXPECTED),
        (
            500,
            "SnapshotFailedError",
            {"reason": "shard-missing", "later": {"rank": 1}},
            SnapshotFailedError,
            FailureReason.SHARD_MISSING,
        ),
    ],
)
def test_an_error_of_another_version_maps_to_the_nearest_known(
    status: int, error: str, facts: dict[str, Any], kind: type[SpotError], reason: Reason
) -> None:
    said = {"error": error, "message": "why", **({"facts": facts} if facts else {})}
    found = error_from_body(status, json.dumps(said).encode(), "spot://server")
    assert type(found) is kind
    assert reason.caused(found)


@pytest.fixture
def bench(make_bench: MakeBench, runtime_dir: Path) -> Bench:
    return make_bench(area=runtime_dir / "area")


@few_or(5_000, few=100)
def test_any_greeting_is_answered_or_hung_up_on(runtime_dir: Path, bench: Bench, cases: int, seed: int) -> None:
    """No thread of the channel dies of it, and the next one is served."""
    rnd, folder, died = random.Random(seed), runtime_dir, list[str]()
    before = threading.excepthook
    threading.excepthook = lambda args: died.append(f"{args.exc_type.__name__}: {args.exc_value}")
    upgrade = f"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nUpgrade: {UPGRADE}\r\nConnection: Upgrade\r\n\r\n".encode()
    asked = json.dumps({"run": "r", "name": "n", "give": True, "slot": 3}).encode()
    with sessions_of(bench.server, folder / "http") as begin:
        for _ in range(cases):
            first, then = (mutated(rnd, line) if rnd.random() < 0.6 else line for line in (b"{}", asked))
            with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
                connection.settimeout(10)
                connection.connect(str(folder / "http"))
                connection.sendall(upgrade)
                connection.recv(4096)
                connection.sendall(rnd.choice([first, b"[]", b"null", b"5", b'"x"']) + b"\n" + then + b"\n")
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass
        begin().close()
        until(lambda: not bench.server.registry.sessions, "the last session to end")
    threading.excepthook = before
    assert died == []


# -- terminals and logs -----------------------------------------------------------------------------------------------


def test_a_command_prints_nothing_that_a_terminal_obeys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    write_record(str(run), replace(RECORD, attempt=1))
    made = manifest(versions={"torch": HOSTILE[:-1], HOSTILE[:-1]: "1"})
    folder = run / made.name
    folder.mkdir()
    (folder / "manifest.json").write_text(made.to_json())
    (folder / "model.ckpt").write_bytes(b"abc")
    (run / "step-000000009-attempt-0001").mkdir()
    (run / "step-000000009-attempt-0001" / "manifest.json").write_text(json.dumps({"format": 3, "run": HOSTILE[:-1]}))
    for command in (["ls"], ["show"], ["verify"], ["report"], ["cp", str(tmp_path / "out.ckpt")]):
        main([command[0], str(run), *command[1:]])
        said = capsys.readouterr()
        for text in (said.out, said.err):
            assert text.replace("\n", "").isprintable(), command
            assert not [line for line in text.split("\n") if line.startswith("CRITICAL")]
    main(["show", str(run)])
    assert "[link=http://evil]" in capsys.readouterr().out


@pytest.mark.parametrize(
    "make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path)], ids=["pipe", "folder", "loop"]
)
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, cli: Cli, make: Callable[[Path], None]) -> None:
    run, made = tmp_path / "run", manifest()
    write_record(str(run), replace(RECORD, attempt=1))
    (run / made.name).mkdir()
    (run / made.name / "manifest.json").write_text(made.to_json())
    make(run / made.name / "model.ckpt")
    make(run / "attempts" / "attempt-0002.progress.json")
    assert "BAD" in cli("verify", run, code=1)
    assert main(["report", str(run)]) == 0


def test_a_log_has_a_line_for_each_record() -> None:
    code = "import logging; from lightning_spot.untrusted import log_plainly\n"
    code += "log_plainly(20, 'message');"
    code += " logging.warning('%s', 'a\\nCRITICAL forged \\x1b[2J'); logging.error('x', exc_info=ValueError('b\\x1bc'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split("\n")[0] == "a\\nCRITICAL forged \\x1b[2J"
    assert done.stderr.replace("\n", "").isprintable()


def cut_short() -> bytes:
    """A file of torch whose end is missing."""
    saved = io.BytesIO()
    torch.save({"a": torch.zeros(100), "b": [1, "x"]}, saved)
    return saved.getvalue()[:-50]


@pytest.mark.parametrize("data", [bytes(1000), b"PK\5\6" + bytes(18), b"", cut_short()], ids=len)
def test_a_snapshot_that_torch_cannot_read_is_passed_over(tmp_path: Path, data: bytes) -> None:
    run = tmp_path / "run"
    first = SpotCheckpoint(str(run), local_server=False, interval=EverySteps(2), on_full="wait", keep=3)
    trainer(first, max_steps=4).fit(Net(), examples())
    newest = LocalStore(run).survey().manifests[0]
    forged_one = replace(newest, name=snapshot_name(9, 1), step=9, complete=False).sealed(memoryview(data))
    (run / forged_one.name).mkdir()
    (run / forged_one.name / "manifest.json").write_text(forged_one.to_json())
    (run / forged_one.name / "model.ckpt").write_bytes(data)
    (run / newest.name / "manifest.json").unlink()  # which is of the end
    new_process()
    spot = SpotCheckpoint(str(run), local_server=False, interval=EverySteps(2))
    trainer(spot, max_steps=6).fit(Net(), examples())
    assert spot.resumed_from.step < 9


def test_a_file_is_not_saved_under_a_name_that_nobody_could_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"\[2J\.ckpt"):
        SpotCheckpointIO(local_server=False).save_checkpoint({"state_dict": {}}, tmp_path / "a\x1b[2J.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_claims_that_all_disagree_with_their_names_are_damage(tmp_path: Path) -> None:
    (tmp_path / ATTEMPTS_DIR).mkdir()
    for number in (7, 8, 9):
        (tmp_path / ATTEMPTS_DIR / claim_name(number)).write_text(CLAIM.to_json())
    with pytest.raises(CorruptSnapshotError, match=r"attempt 3\b"):
        LocalStore(tmp_path).newest_claim()
