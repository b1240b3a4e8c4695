"""Starts beside what an earlier attempt still writes, with odd numbers and paths; what trainers hear of tiers."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.config import HIGHEST_ATTEMPT
from lightning_spot.errors import SettingsError, TierError
from lightning_spot.run.identity import next_attempt
from lightning_spot.snapshot.manifest import Manifest
from lightning_spot.store.local import LocalStore
from lightning_spot.store.retention import Keep, retain
from tests.integration.test_identity import train
from tests.support.said import said
from tests.support.snapshots import serverless
from tests.support.trainer import At, Net, Probe, Stop, StopAt, data, trainer


class LateWriter(Net):
    """Its set-up takes long, and meanwhile the server of an earlier attempt ends a write that it had begun."""

    def __init__(self, run: Path, newest: Manifest, image: bytes) -> None:
        super().__init__()
        begun, self._go, self._done = threading.Event(), threading.Event(), threading.Event()

        def parts() -> Any:
            begun.set()
            self._go.wait(120)
            yield memoryview(image)

        def write() -> None:
            store = LocalStore(run)
            retain(store, Keep(newest=1), store.put_parts(newest, parts(), attempt=newest.attempt))
            self._done.set()

        threading.Thread(target=write, daemon=True).start()
        assert begun.wait(120)

    def setup(self, stage: str) -> None:
        self._go.set()
        assert self._done.wait(120)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_snapshot_persisted_while_an_attempt_begins_is_resumed(tmp_path: Path, keep: int) -> None:
    run = tmp_path / "run-1"
    train(run, 10, keep=3)
    store = LocalStore(run)
    newest = store.survey().manifests[0]
    image = (run / newest.data_path).read_bytes()
    store.delete(newest)
    if keep == 1:
        store.delete(store.survey().manifests[-1])
    probe = Probe()
    with pytest.raises(Stop):
        trainer(serverless(run, keep=keep), probe, StopAt(11)).fit(LateWriter(run, newest, image), data())
    assert min(probe.states) == newest.step == 9


@pytest.mark.parametrize("stray", ["step-000000001-attempt-999999999", "attempts/attempt-999999999.json"])
def test_an_attempt_number_above_the_limit_is_an_error(tmp_path: Path, stray: str) -> None:
    (tmp_path / "run-1" / stray).mkdir(parents=True)
    with pytest.raises(SettingsError, match="999999999"):
        trainer(serverless(tmp_path / "run-1")).fit(Net(), data())
    assert next_attempt([HIGHEST_ATTEMPT - 1], durable_was_read=True) == HIGHEST_ATTEMPT


def test_training_without_a_server_finds_an_earlier_servers_data(tmp_path: Path) -> None:
    run = tmp_path / "run-1"
    train(run, 10, local_server=True)
    newest = LocalStore(run).survey().manifests[0]
    shutil.rmtree(run / newest.name)  # in memory only, as after a kill
    assert train(run, 11, local_server=False)[1] == newest.step == 9


@pytest.mark.parametrize("strict", [False, True])
def test_a_run_without_its_last_snapshot_in_storage_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    run = tmp_path / "run-1"

    def breaks() -> None:
        shutil.rmtree(run)
        run.write_text("no directory")

    spot = serverless(run, upload_timeout_s=1.0, on_error="raise" if strict else "warn")
    fit = trainer(spot, At(3, breaks, "on_train_batch_end"), max_epochs=1).fit
    if strict:
        with pytest.raises(TierError, match=re.escape(str(run))):
            fit(Net(), data())
    else:
        fit(Net(), data())
        assert said(caplog, "not-persisted")
        last = [record for record in caplog.records if record.name.startswith("lightning_spot")][-1]
        assert last.levelname == "ERROR"
        assert "does not have its last snapshot" in last.getMessage()
