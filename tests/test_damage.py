"""What is damaged, forged or foreign is one clear error, or costs what it says: never a wrong resume, never a crash."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.errors import CorruptManifest, Malformed
from lightning_spot.goodput.journal import Journal
from lightning_spot.goodput.ledger import AttemptRecord, account_after
from lightning_spot.goodput.records import write_record
from lightning_spot.image.files import FileSpan
from lightning_spot.image.manifest import Manifest, PortionOf, portion_name, snapshot_name
from lightning_spot.untrusted import plain, read_json

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


def test_a_damaged_record_costs_the_account_and_never_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = AttemptRecord(attempt=1, begun_unix_s=1e9, trained_unix_s=1e9 + 1, step=9, unix_s=1e9 + 9, end="failed")
    second = AttemptRecord(attempt=2, begun_unix_s=1e9 + 20, earlier=account_after(first), snapshots=[(3, 1e9 + 25)])
    write_record(str(tmp_path), 2, second.as_dict())
    path = tmp_path / "attempts" / "attempt-0002.progress.json"
    good = json.loads(path.read_text())
    del good["checksum"]
    for record in [*wrongly(good), [], "x", None, 1]:
        path.write_text(json.dumps(record))
        caplog.clear()
        journal = Journal(str(tmp_path), 3, heartbeat_s=1000.0, begun_unix_s=1e9 + 30)
        journal.train(12, 0.1)
        assert journal.spent.total_s >= 0
        assert len(caplog.records) <= 1
        journal.close("failed")


# -- manifests --------------------------------------------------------------------------------------------------------


def manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {"run": "r", "name": snapshot_name(5, 1), "step": 5, "attempt": 1, "nbytes": 3}
    fields |= {
        "run_id": "0123456789ab",
        "created_unix_s": 1.5e9,
        "versions": {"torch": "2.10"},
        "checksums": ("0" * 32,),
    }
    return Manifest(**{**fields, **changes})


PORTION = manifest(
    name=portion_name(snapshot_name(5, 1), 1),
    portion=PortionOf(1, 2, "digest", "1" * 32),
    files=(FileSpan("__1_0.distcp", 0, 3),),
)


@pytest.mark.parametrize(
    "good",
    [
        manifest(),
        manifest(name=snapshot_name(5, 1, complete=True), complete=True),
        manifest(name="a.ckpt", file=""),
        PORTION,
    ],
    ids=["snapshot", "the end", "file", "portion"],
)
def test_any_flipped_bit_of_a_manifest_is_refused_or_reads_back_equal(good: Manifest) -> None:
    text = bytearray(good.to_json().encode())
    for place in range(8 * len(text)):
        text[place // 8] ^= 1 << place % 8
        with contextlib.suppress(CorruptManifest):
            assert Manifest.from_json(bytes(text)) == good, f"bit {place} is not seen"
        text[place // 8] ^= 1 << place % 8
    assert Manifest.from_json(bytes(text)) == good


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
    with pytest.raises(CorruptManifest):
        Manifest.from_json(json.dumps({**old, **changes}))


def test_a_manifest_without_its_checksum_is_refused() -> None:
    with pytest.raises(CorruptManifest, match="checksum"):
        Manifest.from_json(json.dumps(manifest().to_dict()))


def test_a_manifest_whose_values_are_wrong_is_refused_and_nothing_else() -> None:
    for fields in wrongly(PORTION.to_dict()):
        with contextlib.suppress(CorruptManifest):
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
    with pytest.raises(Malformed) as caught:
        read_json(data)
    assert len(str(caught.value)) < 300


def test_foreign_text_is_shown_on_one_line() -> None:
    shown = plain(HOSTILE)
    assert shown.isprintable()
    assert "forged" in shown
    assert plain("snapshot é 漢") == "snapshot é 漢"
    assert len(plain("x" * 10**6)) == 200
    assert len(plain("\x1b" * 10**6)) <= 200


def test_any_mutation_of_json_is_read_or_one_error(request: pytest.FixtureRequest) -> None:
    mutate_json(random.Random(5), cases=3000)


@pytest.mark.soak
def test_many_mutations_of_json_are_read_or_one_error() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    mutate_json(random.Random(seed), cases=60_000)


def mutate_json(rnd: random.Random, cases: int) -> None:
    seeds = [
        manifest().to_json().encode(),
        PORTION.to_json().encode(),
        b'{"a": [1, 2.5e3, "\\u00e9", null, {"b": true}]}',
    ]
    for _ in range(cases):
        data = mutated(rnd, rnd.choice(seeds))
        for read in (read_json, Manifest.from_json):
            with contextlib.suppress(Malformed, CorruptManifest):
                read(data)


def mutated(rnd: random.Random, data: bytes, pieces: tuple[bytes, ...] = ()) -> bytes:
    """Some bytes of it flipped, set, cut out, doubled, or replaced by what has a meaning."""
    changed = bytearray(data)
    pieces = pieces or (
        b"NaN",
        b"1e999",
        b"-1",
        b"{",
        b"[",
        b'"',
        b"null",
        b"9" * 30,
        b"\\ud800",
        b"\xff",
        b"\0",
        b"\x1b[2J",
    )
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
