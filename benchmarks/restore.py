"""Restoring 1 GB, checked: one rank against ``torch.load`` of the same file from tmpfs, and four ranks against one.

Each rank copies the weights into its own model, which no restore can spare it: four copies on the processors that one
has. So that is measured, too: copies from a mapping that is there, and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from benchmarks.ingest import node
from benchmarks.measure import Result, scratch, seconds, training_state
from lightning_spot.capture.batch import SlotView
from lightning_spot.capture.copier import Copier
from lightning_spot.client import starting
from lightning_spot.client.remote import ServerStore
from lightning_spot.client.stores import open_store
from lightning_spot.run.location import Location
from lightning_spot.run.sources import STORAGE, MemorySource, Source, StoreSource
from lightning_spot.run.survey import Survey, survey
from lightning_spot.server.runs import RunInfo
from lightning_spot.session.collectives import Agreement
from lightning_spot.session.selection import _load, choose
from lightning_spot.snapshot.layout import lay_out
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.store.store import Holdings

RANKS = 4
_LIMIT_S = 300.0
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Took:
    """What a restore took until each model had its weights.

    Attributes:
        slowest_s: seconds of the slowest rank.
        cpu_s: CPU seconds of all ranks.
    """

    slowest_s: float
    cpu_s: float

    def __sub__(self, other: Took) -> Took:
        return Took(self.slowest_s - other.slowest_s, self.cpu_s - other.cpu_s)


_Pair = tuple[Took, Took]  # of one rank, and of several
_State = dict[str, Any]


def run(quick: bool) -> list[Result]:
    rounds = 3 if quick else 7
    near: list[float] = []
    far: list[float] = []
    plain: list[float] = []
    many: dict[str, list[_Pair]] = {"the local server": [], "a server over HTTP loopback": [], "a directory": []}
    copies: list[_Pair] = []
    with scratch() as folder, node(folder) as url, _at_nodes(folder, url) as manifest:
        location = Location.of(folder / "run", servers=url, run_name="run")
        file = Path("/dev/shm") / f"{folder.name}.ckpt"
        shutil.copy(folder / "run" / manifest.data_path, file)
        memory, remote = MemorySource(str(folder / "run"), "run"), StoreSource(ServerStore(f"{url}/run"), url)
        durable = StoreSource(open_store(str(folder / "run")), str(folder / "run"))
        try:
            for _ in range(rounds + 1):
                plain.append(_seconds(lambda: torch.load(file, weights_only=True)))
                near.append(_seconds(lambda: _restore(memory)))
                far.append(_seconds(lambda: _restore(remote)))
                copies.append(_one_and_many(_mapped(file), folder))
                for (_, pairs), source in zip(many.items(), (memory, remote, durable), strict=True):
                    pairs.append(_one_and_many(_chosen(location, source), folder))
        finally:
            file.unlink()
    return [
        Result("restore from the local server / torch.load from tmpfs", _ratio(near, plain), 1.5),
        Result("restore over HTTP loopback / torch.load from tmpfs", _ratio(far, plain), 2.5),
        *_ratios(f"copies of the weights alone, {RANKS} ranks / one", copies[1:], None),
        *(result for name, pairs in many.items() for result in _of_ranks(name, pairs[1:], copies[1:])),
    ]


def _of_ranks(name: str, pairs: list[_Pair], copies: list[_Pair]) -> list[Result]:
    what = f"restore of {RANKS} ranks / of one, from {name}"
    beyond = [(one - copy, all_of - copies_of) for (one, all_of), (copy, copies_of) in zip(pairs, copies, strict=True)]
    return [
        Result(f"restore of one rank, from {name}", [one.slowest_s for one, _ in pairs], None, unit="s"),
        *_ratios(what, pairs, 1.5),
        *_ratios(f"{what}, beyond these copies", beyond, None),
    ]


def _ratios(what: str, pairs: list[_Pair], target: float | None) -> list[Result]:
    """How long several ranks take, and, which other programs disturb less, how long they compute in all."""
    return [
        Result(what, [many.slowest_s / one.slowest_s for one, many in pairs], target),
        Result(f"{what}: CPU seconds of all ranks", [many.cpu_s / one.cpu_s for one, many in pairs], None),
    ]


@contextlib.contextmanager
def _at_nodes(folder: Path, url: str) -> Iterator[Manifest]:
    """A run with a snapshot of 1 GB at a server of this host, at one behind it, and in the folder."""
    host = starting.start(str(folder / "run"), "run", slots=2, memory_bytes=3 * 2**30, server_idle_timeout_s=300)
    durable = str(folder / "run")
    host.open_run(
        RunInfo(name="run", id="", location=durable, attempt=1, token="", durable_url=durable, servers=(url,))
    )
    layout = lay_out(training_state())
    lease = host.lease(layout.nbytes, 0, limit_s=60.0)  # the slot is being made
    copier, view = Copier(), SlotView(lease.map)
    for offset, data in layout.frame:
        lease.map[offset : offset + len(data)] = data
    copier.start(layout.pieces, view).wait()
    name = snapshot_name(1, host.attempt)
    manifest = Manifest(run="run", name=name, step=1, attempt=host.attempt, nbytes=layout.nbytes)
    host.seal(lease, manifest)
    assert host.flush(120) == []
    del layout, view, lease
    yield manifest
    host.leave(complete=True)


def _restore(source: Source) -> None:
    """Have the checkpoint in memory, as a resume has it before it loads the weights."""
    with contextlib.closing(source.open(source.survey().manifests[0])) as snapshot:
        _load(snapshot, trusts=False)


def _seconds(work: Callable[[], object]) -> float:
    """What it takes with no freed memory, as a restarted training has none: new memory for 1 GB takes 0.4 s here."""
    _trim()
    return seconds(work)


def _trim() -> None:
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def _ratio(ours: list[float], base: list[float]) -> list[float]:
    return [one / other for one, other in list(zip(ours, base, strict=True))[1:]]


# -- several ranks ----------------------------------------------------------------------------------------------------


def _one_and_many(prepare: _Prepare, folder: Path) -> _Pair:
    return _together(1, prepare, folder), _together(RANKS, prepare, folder)


def _together(ranks: int, prepare: _Prepare, folder: Path) -> Took:
    """What it takes so many ranks until each model has the weights.

    They begin with no freed memory. What they made and freed themselves would be warm, what this process has freed
    would be copied as it is used again: either would change what one rank takes, which reads into memory of its own,
    and not what several do, which receive into memory that they share.
    """
    _trim()
    context = multiprocessing.get_context("fork")
    took_s = context.Queue()
    meet = f"file://{folder}/meet-{uuid.uuid4().hex}"
    processes = [context.Process(target=_rank, args=(rank, ranks, meet, prepare, took_s.put)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        each = [took_s.get(timeout=_LIMIT_S) for _ in processes]
        return Took(max(wall_s for wall_s, _ in each), sum(cpu_s for _, cpu_s in each))
    finally:
        for process in processes:
            process.join(_LIMIT_S)
            process.kill()


def _rank(
    rank: int,
    ranks: int,
    meet: str,
    prepare: _Prepare,
    report: Callable[[tuple[float, float]], None],
) -> None:
    torch.set_num_threads(1)  # a forked process has none of its parent's threads
    rank_zero_only.rank = rank
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    state = training_state(only="weight")  # moments made only to be freed would be such memory
    weights = torch.nn.ParameterDict({name.replace(".", "_"): value for name, value in state.items()})
    find = prepare(_Trainer(rank, ranks))
    dist.barrier()
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    found = find()
    weights.load_state_dict({name: found[name.replace("_", ".", 1)] for name in weights})
    cpu_s = time.process_time() - cpu_s
    dist.barrier()
    report((time.perf_counter() - begun_s, cpu_s))


def _chosen(location: Location, source: Source) -> _Prepare:
    """Ranks restore from a source, as a resume does."""

    def prepare(trainer: _Trainer) -> Callable[[], _State]:
        def find() -> _State:
            agreement = Agreement(trainer)  # type: ignore[arg-type]
            found = choose(
                agreement, location, functools.partial(_found, source, location), functools.partial(_load, trusts=False)
            )
            assert found is not None
            return found[1]

        return find

    return prepare


def _mapped(file: Path) -> _Prepare:
    """Ranks have mapped a file in memory already: what is left are their copies."""

    def prepare(_: _Trainer) -> Callable[[], _State]:
        there: _State = torch.load(file, weights_only=True, mmap=True)
        return lambda: there

    return prepare


def _found(source: Source, location: Location) -> Survey:
    found = survey(location)
    storage = [(each, Holdings()) for each, _ in found.answers if each.tier == STORAGE and each.tier != source.tier]
    found.answers = [(source, source.survey()), *storage]  # storage answers, and has nothing
    return found


class _Trainer:
    """What an agreement asks of a trainer."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.global_rank, self.world_size, self.strategy = rank, ranks, self

    def broadcast(self, said: Any, src: int = 0) -> Any:
        carried = [said]
        dist.broadcast_object_list(carried, src)
        return carried[0]


_Prepare = Callable[[_Trainer], Callable[[], _State]]
"""Has ranks do what is not measured; gives what finds the state."""
