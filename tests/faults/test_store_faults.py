"""Every call of a store fails once, in every way, and from there on: enumerated. Afterwards nothing reported is lost,
what is shown is whole, and the next attempt's sweep leaves nothing of ours behind.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.client.stores import open_store
from lightning_spot.errors import CorruptSnapshotError, SpotError
from lightning_spot.snapshot.files import FileSpan
from lightning_spot.snapshot.manifest import Manifest, snapshot_name, snapshot_order
from lightning_spot.store import posix
from lightning_spot.store.retention import Keep, retain
from lightning_spot.store.store import Store
from tests.support import faulty
from tests.support.faulty import KINDS, Plan, faulty_calls
from tests.support.folders import files_below
from tests.support.oracle import claim_of

pytestmark = pytest.mark.guarantee("G21")

PART = 1200
NBYTES = 4800
FILES = (FileSpan(".metadata", 0, 100), FileSpan("__0_0.distcp", 4096, NBYTES - 4096))
OF_SEVERAL_FILES = (3, 4)
"""Steps whose snapshots are."""
RUN_ID = "0123456789ab"


def image_of(step: int) -> bytes:
    image = random.Random(step).randbytes(NBYTES)
    if step not in OF_SEVERAL_FILES:
        return image
    return image[: FILES[0].stop].ljust(FILES[1].offset, b"\0") + image[FILES[1].offset :]


def manifest_of(step: int, attempt: int = 1, **more: Any) -> Manifest:
    name = snapshot_name(step, attempt)
    made = Manifest(run="run", name=name, step=step, attempt=attempt, nbytes=NBYTES, part_bytes=PART)
    made = replace(made, files=FILES if step in OF_SEVERAL_FILES else ())
    return replace(made, **{"run_id": RUN_ID, "lineage": "ba9876543210", **more}).sealed(memoryview(image_of(step)))


def file_of(step: int, attempt: int = 1) -> Manifest:
    return manifest_of(step, attempt, name="last.ckpt", file="")


NOTED = ".lightning_spot/last.ckpt.manifest.json"
NONE = (0, 0, False)


def order_of(name: str) -> tuple[int, int, bool]:
    return snapshot_order(name) or NONE


class Run:
    """What a scenario was told by the store, and what must therefore hold."""

    def __init__(self, store: Store, *, stale: bool) -> None:
        self.store, self.stale = store, stale
        self.durable: set[str] = set()
        self.deleted: set[str] = set()
        self.claimed = 0
        self.file_step = 0

    def play(self) -> None:
        self._claim(1)
        for step in (1, 2):
            self._put(step, in_parts=step == 2)
        self._worked(lambda: retain(self.store, Keep(newest=1), manifest_of(2)))
        for step in (1, 2):
            if self._worked(lambda step=step: self.store.put(file_of(step), memoryview(image_of(step)), attempt=1)):  # type: ignore[misc]
                self.file_step = step
        self._look()
        self._worked(lambda: self.store.fetch(manifest_of(2), memoryview(bytearray(NBYTES))))
        self._put(3)
        self._worked(lambda: retain(self.store, Keep(newest=2), manifest_of(3)))
        self._claim(2)
        self._put(4, attempt=2)
        self._worked(lambda: self.store.sweep(manifest_of(4, 2)))
        self._look()
        self.deleted.add(manifest_of(3).name)
        self._worked(lambda: self.store.delete(manifest_of(3)))

    def _put(self, step: int, attempt: int = 1, *, in_parts: bool = False) -> None:
        manifest, image = manifest_of(step, attempt), memoryview(image_of(step))

        def put() -> None:
            if in_parts:
                parts = (image[start : start + PART] for start in range(0, NBYTES, PART))
                assert self.store.put_parts(replace(manifest, checksums=()), parts, attempt=attempt) == manifest
            else:
                self.store.put(manifest, image, attempt=attempt)

        if self._worked(put):
            self.durable.add(manifest.name)

    def _claim(self, attempt: int) -> None:
        if self._worked(lambda: self.store.claim(claim_of(attempt, run_id=RUN_ID))):
            self.claimed = attempt

    def _look(self) -> None:
        """No empty answer where something is: it is shown, or named as unreadable, or the whole could not be read."""

        def survey() -> None:
            found = self.store.survey()
            shown = {manifest.name for manifest in found.manifests} | set(found.unreadable)
            assert self.stale or self.newest() <= max(map(order_of, shown), default=NONE)
            assert found.highest_attempt >= self.claimed or self.stale

        def newest_claim() -> None:
            claim = self.store.newest_claim()
            assert self.stale or not self.claimed or (claim is not None and claim.attempt >= self.claimed)

        self._worked(survey)
        self._worked(newest_claim)

    def newest(self) -> tuple[int, int, bool]:
        """The newest snapshot that was reported durable and not deleted since."""
        return max(map(order_of, self.durable - self.deleted), default=NONE)

    @staticmethod
    def _worked(action: Callable[[], Any]) -> bool:
        """Whether it did; what fails is an error of ours."""
        try:
            action()
        except SpotError:
            return False
        return True

    def check(self, root: Path) -> None:
        """With the tier working again."""
        found = self.store.survey()
        assert not found.unreadable
        newest = max((manifest.order for manifest in found.manifests), default=NONE)
        assert self.newest() <= newest, "what was durable is lost"
        for manifest in found.manifests:
            buffer = bytearray(manifest.nbytes)
            self.store.fetch(manifest, memoryview(buffer))
            assert bytes(buffer) == image_of(manifest.step), "what is shown is not whole"
        assert self.store.claimed() >= self.claimed
        self._check_file(root)
        self.store.claim(claim_of(9))
        last = manifest_of(9, 9)
        self.store.put(last, memoryview(image_of(9)), attempt=9)
        retain(self.store, Keep(newest=1), last)
        allowed = {f"{last.name}/model.ckpt", f"{last.name}/manifest.json", "last.ckpt", NOTED}
        there = {str(path.relative_to(root)) for path in files_below(root)}
        left = {name for name in there - allowed if not name.startswith("attempts/attempt-")}
        assert left == set(), "something of ours is left behind"

    def _check_file(self, root: Path) -> None:
        path, noted = root / "last.ckpt", root / NOTED
        assert path.exists() or not self.file_step
        if path.exists():
            steps = [step for step in (1, 2) if image_of(step) == path.read_bytes()]
            assert steps, "the user's file is not whole"
            assert steps[0] >= self.file_step, "the user's file is too old"
        if noted.exists() and (manifest := Manifest.from_json(noted.read_bytes())).checksums:
            manifest.verify(memoryview(path.read_bytes()), "its manifest")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(posix, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(posix.os, "fsync", lambda _fd: None)  # thousands of them, and no power is lost here
    yield
    faulty.use(Plan())


SOME = 41
"""The everyday suite takes every so many-th call, the soak takes each."""

ALL_OR_SOME = pytest.mark.parametrize(
    ("span", "stride"),
    [
        pytest.param(1, SOME, id="1-some"),
        *(pytest.param(span, 1, marks=pytest.mark.soak, id=f"{span}-all") for span in (1, 0)),
    ],
)


def each_call(tmp_path: Path, kind: str, span: int, stride: int, one: Callable[[Path, Plan], Run]) -> int:
    """Play at every call, or every so many-th, until the fault lies behind the last one; the number of calls."""
    for at in range(1, 3000, stride):
        root = tmp_path / str(at) / "run"
        fault = Plan(kind, at=at, span=span, only=("ls",) if kind == "stale" else ())
        try:
            run = one(root, fault)
            run.check(root)
        except (AssertionError, SpotError, OSError) as error:
            raise AssertionError(f"{kind} at call {at}, span {span}: {error}") from error
        if not fault.struck:
            return at - 1
    raise AssertionError("it does not end")


@ALL_OR_SOME
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "missing"])
def test_every_call_to_a_bucket(tmp_path: Path, kind: str, span: int, stride: int) -> None:
    if span == 0 and kind == "stale":
        pytest.skip("a tier that says for ever that nothing is there cannot be told from an empty one")

    def one(root: Path, fault: Plan) -> Run:
        root.parent.mkdir()
        faulty.use(fault)
        run = Run(open_store(f"faulty-objects:/{root}"), stale=kind == "stale")
        try:
            run.play()
        finally:
            faulty.use(Plan())
        return run

    calls = each_call(tmp_path, kind, span, 1 if kind == "stale" else stride, one)
    print(f"{calls} calls")
    assert calls > (10 if kind == "stale" else 60)


@ALL_OR_SOME
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "stale"])
def test_every_system_call_of_a_directory(tmp_path: Path, kind: str, span: int, stride: int) -> None:
    if span == 0 and kind == "missing":
        pytest.skip("as above")

    def one(root: Path, fault: Plan) -> Run:
        root.parent.mkdir()
        run = Run(open_store(str(root)), stale=False)
        with faulty_calls(fault, root):
            run.play()
        return run

    calls = each_call(tmp_path, kind, span, stride, one)
    print(f"{calls} calls")
    assert calls > 100


def test_a_deletion_never_leaves_a_manifest_alone(tmp_path: Path) -> None:
    """A folder that was said once not to be there kept its manifest, which was shown without its files."""
    for at in range(1, 100):
        store, manifest = open_store(str(tmp_path / str(at))), manifest_of(3)
        store.put(manifest, memoryview(image_of(3)), attempt=1)
        fault = Plan("missing", at=at, span=1)
        with faulty_calls(fault, tmp_path), contextlib.suppress(SpotError):
            store.delete(manifest)
        for shown in store.survey().manifests:
            store.fetch(shown, memoryview(bytearray(NBYTES)))
        if not fault.struck:
            return
    raise AssertionError("it does not end")


# -- S3 itself --------------------------------------------------------------------------------------------------------

KIB = 2**10


@pytest.mark.parametrize(
    ("what", "kind", "stride"),
    [
        ("snapshot", "lost", 7),
        ("file", "EIO", 7),
        *(
            pytest.param(what, kind, 1, marks=pytest.mark.soak)
            for what in ("snapshot", "file")
            for kind in ("lost", "EIO", "missing")
        ),
    ],
)
def test_every_request_of_a_put_in_blocks_to_s3(
    s3: str, what: str, kind: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards it is there whole or not at all, and what was overwritten is whole."""
    monkeypatch.setattr("lightning_spot.store.s3.BLOCK_BYTES", 5 * KIB)
    images = {step: random.Random(step).randbytes(11 * KIB) for step in (1, 2)}
    names = {"name": "last.ckpt", "file": ""} if what == "file" else {}

    def sealed(step: int, attempt: int = 1, **more: Any) -> Manifest:
        made = manifest_of(step, attempt, **more)
        return replace(made, nbytes=len(images[step]), part_bytes=KIB).sealed(memoryview(images[step]))

    def whole(store: Store, manifest: Manifest) -> bool:
        buffer = bytearray(manifest.nbytes)
        try:
            store.fetch(manifest, memoryview(buffer))
        except CorruptSnapshotError:
            return False
        return bytes(buffer) == images[manifest.step]

    for at in range(random.randrange(stride) + 1, 100, stride):
        url = f"{s3}/{what}-{at}".replace("s3://", "faulty-s3://")
        faulty.use(Plan())
        store = open_store(url)
        first, second = sealed(1, **names), sealed(2, **names)
        if what == "file":
            store.put(first, memoryview(images[1]), attempt=1)
        fault = faulty.use(Plan(kind, at=at))
        reported = Run._worked(lambda: store.put(second, memoryview(images[2]), attempt=1))  # noqa: B023
        faulty.use(Plan())
        assert not reported or store.has(second), f"call {at}"
        if store.has(second):
            assert whole(store, second), f"call {at}"
        elif what == "file":
            held = [item for item in (first, second) if whole(store, item)]
            assert held, f"call {at}: what was there is gone"
            assert held == [first] or not store.has(first), f"call {at}: a manifest stands beside other bytes"
        else:
            assert store.survey().manifests == [], f"call {at}"
        retain(store, Keep(newest=2), _put_small(store, attempt=2))
        if not fault.struck:
            assert at > 8
            return
    raise AssertionError("it does not end")


def _put_small(store: Store, attempt: int) -> Manifest:
    manifest = manifest_of(9, attempt)
    store.put(manifest, memoryview(image_of(9)), attempt=attempt)
    return manifest


LAG_S = 0.25


def test_a_store_that_lists_late_loses_nothing(
    s3: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A snapshot of several files failed until a listing showed all of them."""
    monkeypatch.setattr(faulty.FaultyS3, "unlisted_s", LAG_S)
    store = open_store(f"{s3}/run".replace("s3://", "faulty-s3://"))
    said: set[str] = set()
    put: list[Manifest] = []
    for attempt in (1, 2):
        store.claim(claim_of(attempt, run_id=RUN_ID))
        for step in range(1, 5):
            put.append(manifest_of(step, attempt))
            store.put(put[-1], memoryview(image_of(step)), attempt=attempt)
            assert store.has(put[-1])
            said.add(retain(store, Keep(newest=2), put[-1]))
            if step % 2:
                time.sleep(LAG_S)
        time.sleep(LAG_S)
        found = store.survey()
        assert [item.name for item in found.manifests[:2]] == [item.name for item in put[:-3:-1]]
        assert found.highest_attempt == attempt
        for manifest in found.manifests:
            store.fetch(manifest, memoryview(bytearray(NBYTES)))
    assert len(said | {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}) <= 2
    monkeypatch.setattr(faulty.FaultyS3, "unlisted_s", 0.0)
    retain(store, Keep(newest=2), put[-1])
    assert [item.name for item in store.survey().manifests] == [item.name for item in put[:-3:-1]]
