"""Restoring 1 GB from the node on this host, checked, against ``torch.load`` of the same file from tmpfs."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from benchmarks.ingest import node
from benchmarks.measure import Result, scratch, seconds, training_state
from lightning_spot.client import embedded
from lightning_spot.client.remote import NodeStore
from lightning_spot.image.layout import lay_out
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.memory.runs import RunInfo
from lightning_spot.run.sources import MemorySource, Source, StoreSource, Use
from lightning_spot.staging.copier import Copier, SlotView


def run(quick: bool) -> list[Result]:
    rounds = 3 if quick else 7
    state = training_state()
    near: list[float] = []
    far: list[float] = []
    plain: list[float] = []
    with scratch() as folder, node(folder) as url:
        host = embedded.start(str(folder / "run"), "run", slots=2, memory_bytes=3 * 2**30, idle_timeout_s=300)
        durable = str(folder / "run")
        host.open_run(
            RunInfo(name="run", id="", location=durable, attempt=1, token="", durable_url=durable, nodes=(url,))
        )
        layout = lay_out(state)
        lease = host.lease(layout.nbytes, 0, limit_s=60.0)  # the slot is being made
        copier, view = Copier(), SlotView(lease.map)
        for offset, data in layout.frame:
            lease.map[offset : offset + len(data)] = data
        copier.start(layout.pieces, view).wait()
        name = snapshot_name(1, host.attempt)
        manifest = Manifest(run="run", name=name, step=1, attempt=host.attempt, nbytes=layout.nbytes)
        host.seal(lease, manifest)
        assert host.flush(120) == []
        file = Path("/dev/shm") / f"{folder.name}.ckpt"
        shutil.copy(folder / "run" / manifest.data_path, file)
        memory, remote = MemorySource(str(folder / "run"), "run"), StoreSource(NodeStore(f"{url}/run"), url)
        try:
            for _ in range(rounds + 1):
                plain.append(seconds(lambda: torch.load(file, weights_only=True)))
                near.append(seconds(lambda: _restore(memory)))
                far.append(seconds(lambda: _restore(remote)))
        finally:
            file.unlink()
        host.leave(complete=True)
    return [
        Result("restore from this host's node / torch.load from tmpfs", _ratio(near, plain), 1.5),
        Result("restore over HTTP loopback / torch.load from tmpfs", _ratio(far, plain), 2.5),
    ]


def _restore(source: Source) -> None:
    snapshot = source.open(source.survey().manifests[0], use=Use.LOAD)
    with snapshot.reader() as reader:
        torch.load(reader.as_file(), weights_only=True)
        reader.finish()
    snapshot.close()


def _ratio(ours: list[float], base: list[float]) -> list[float]:
    return [one / other for one, other in list(zip(ours, base, strict=True))[1:]]
