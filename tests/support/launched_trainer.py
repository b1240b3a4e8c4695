"""A training without torch for drills, whose launcher does as torchrun.

``python -m tests.support.launched_trainer RESTARTS [SECONDS]``: the launcher starts its rank in a session of its own,
after so many seconds, again as often as it fails, and then exits with a code of its own.
The rank says of a notice what it heard in ``rank-heard``, beside its run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from lightning_spot.config import DRILL_VARIABLE
from lightning_spot.preemption.watcher import FileSource, open_sources
from lightning_spot.snapshot.manifest import snapshot_name
from lightning_spot.store.local import LocalStore
from tests.support.oracle import claim_of
from tests.support.small_trainer import image_of, manifest_of

STEPS = 30
_NBYTES = 1000


def launch(restarts: int, after_s: float = 0.0) -> int:
    for _ in range(restarts + 1):
        time.sleep(after_s)
        rank = subprocess.Popen([sys.executable, "-m", "tests.support.launched_trainer"], start_new_session=True)
        signal.signal(signal.SIGTERM, lambda number, _, rank=rank: rank.send_signal(number) or sys.exit(rank.wait(10)))
        if rank.wait() == 0:
            return 0
    return 1


def train(folder: Path) -> int:
    store = LocalStore(folder / "runs" / "run")
    found = store.survey()
    attempt, step = found.highest_attempt + 1, found.manifests[0].step if found.manifests else 0
    store.claim(claim_of(attempt))
    (notices,) = (source for source in open_sources("auto") if isinstance(source, FileSource))
    while step < STEPS:
        time.sleep(0.03)
        if notices.poll() is not None:
            with open(folder / "rank-heard", "a") as file:
                file.write(f"{step}\n")
            return 143
        step += 1
        image, manifest = image_of(step, _NBYTES), manifest_of(step, attempt, _NBYTES)
        if step == STEPS:
            manifest = replace(manifest, complete=True, name=snapshot_name(step, attempt, complete=True))
        store.put(manifest.sealed(memoryview(image)), memoryview(image), attempt=attempt)
    return 0


if __name__ == "__main__":
    sys.exit(
        launch(int(sys.argv[1]), *map(float, sys.argv[2:]))
        if len(sys.argv) > 1
        else train(Path(os.environ[DRILL_VARIABLE]))
    )
