"""What compressed deltas bring: on consecutive states of a real training, and over links of several speeds.

The training is the GPT of ``examples/stdlib_gpt.py`` in fp32 with AdamW. Its weights and its two moments are measured
apart, one step and ten steps after the state before; and once more with weights in bf16 beside the moments in fp32.
Then a sequence of its states goes to a snapshot server, as it is and with ``compression="auto"``, in turns: through
connections that are throttled, and over bare loopback, which is as fast as 25 Gbit/s or more.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.nn import functional as F

from benchmarks.measure import GIB, Result, memory_node, scratch
from benchmarks.throttle import Throttle
from examples.stdlib_gpt import ByteGPT, StdlibSource
from lightning_spot.client.part_streams import CONNECTIONS
from lightning_spot.client.remote import ServerStore
from lightning_spot.protocol.wire import PartKind
from lightning_spot.server.ring import Glance
from lightning_spot.server.runs import RunInfo
from lightning_spot.snapshot.delta import Coding, decode, encode
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from lightning_spot.snapshot.packing import Compression
from lightning_spot.store.retention import Keep

THIRDS = ("weights", "exp_avg", "exp_avg_sq")
WARM_STEPS = 60
LINKS_GBIT_PER_S = (0.5, 2.0, 10.0)
TARGET_RATIO = 1.4
TARGET_TIME = 1.05  # 5 % for what rounds of one machine differ by
PART = 2**20
RUN_ID = "00de17a00000"

State = dict[str, bytes]


def run(quick: bool) -> list[Result]:
    states = training_states(steps=6 if quick else 11)
    results = [*_on_states(states), *_on_states([in_bf16(state) for state in states], "bf16 weights, ")]
    with scratch() as folder, memory_node(folder) as port:
        for number, link in enumerate(LINKS_GBIT_PER_S):
            with Throttle(port, link * 1e9 / 8 / 1e6 / CONNECTIONS) as throttle:
                results += _over_link(states, throttle.port, number, f"{link:g} Gbit/s", copies=2 if quick else 4)
        results += _over_link(states, port, len(LINKS_GBIT_PER_S), "loopback", copies=2 if quick else 4)
    return results


def in_bf16(state: State) -> State:
    """The state with its weights in bf16, as they are where the moments stay in fp32."""
    weights = torch.frombuffer(bytearray(state["weights"]), dtype=torch.float32).bfloat16()
    return {**state, "weights": weights.view(torch.uint8).numpy().tobytes()}


def training_states(steps: int) -> list[State]:
    """Weights and moments after each of ``steps`` consecutive steps, and last ten steps after the first of them."""
    torch.manual_seed(1)
    data = StdlibSource(max_bytes=400_000)
    data.setup("fit")
    model = ByteGPT(width=256)
    configured = model.configure_optimizers()
    assert isinstance(configured, dict)
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    batches = _forever(data)
    states = []
    for step in range(WARM_STEPS + max(steps, 11)):
        windows = next(batches).long()
        logits = model(windows[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step >= WARM_STEPS and (step < WARM_STEPS + steps or step == WARM_STEPS + 10):
            states.append(_state(model, optimizer))
    return states if steps < 11 else states[:11]


def _forever(data: StdlibSource) -> Iterator[torch.Tensor]:
    while True:
        for (windows,) in data.train_dataloader():
            yield windows


def _state(model: ByteGPT, optimizer: torch.optim.Optimizer) -> State:
    parameters = list(model.parameters())
    thirds: tuple[Callable[[torch.nn.Parameter], torch.Tensor], ...] = (
        lambda parameter: parameter.detach(),
        lambda parameter: optimizer.state[parameter]["exp_avg"],
        lambda parameter: optimizer.state[parameter]["exp_avg_sq"],
    )
    return {
        name: b"".join(of(parameter).numpy().tobytes() for parameter in parameters)
        for name, of in zip(THIRDS, thirds, strict=True)
    }


def _on_states(states: list[State], what: str = "") -> Iterator[Result]:
    """Ratios and CPU seconds of packing and unpacking, by thirds."""
    for label, pairs in (
        ("1 step", list(itertools.pairwise(states[:-1]))),
        ("10 steps", [(states[0], states[-1])]),
    ):
        ratios: dict[str, list[float]] = {name: [] for name in THIRDS}
        pack_s, unpack_s, overall = [], [], []
        for before, after in pairs:
            left = 0
            for name in THIRDS:
                packed, seconds, unpacked = _pack(after[name], before[name])
                ratios[name].append(len(after[name]) / packed)
                pack_s.append(seconds * GIB / len(after[name]))
                unpack_s.append(unpacked * GIB / len(after[name]))
                left += packed
            overall.append(sum(len(part) for part in after.values()) / left)
        for name in THIRDS:
            yield Result(f"{what}{name} after {label}: bytes / bytes sent", ratios[name], None)
        target = TARGET_RATIO if label == "1 step" else None
        yield Result(f"{what}AdamW state after {label}: bytes / bytes sent", overall, target, at_most=False)
        yield Result(f"{what}packing after {label}, CPU", pack_s, None, unit="s/GiB")
        yield Result(f"{what}unpacking after {label}, CPU", unpack_s, None, unit="s/GiB")


def _pack(new: bytes, base: bytes) -> tuple[int, float, float]:
    """Bytes left, CPU seconds of packing and of unpacking."""
    left, pack_s, unpack_s = 0, 0.0, 0.0
    for start in range(0, len(new), PART):
        part, earlier = memoryview(new)[start : start + PART], memoryview(base)[start : start + PART]
        began_s = time.thread_time()
        packed = encode(part, earlier, [(0, len(part))], Coding.PACKED)
        packed_s = time.thread_time()
        into = bytearray(len(part))
        decode(packed, earlier, memoryview(into))
        unpack_s += time.thread_time() - packed_s
        pack_s += packed_s - began_s
        left += len(packed)
        assert into == part
    return left, pack_s, unpack_s


def _over_link(states: list[State], port: int, number: int, link: str, copies: int) -> Iterator[Result]:
    """Seconds to safety with ``auto``, over those as it is, of consecutive snapshots; and the bytes sent."""
    images = [b"".join(state[name] * copies for name in THIRDS) for state in states[:-1]]
    modes: tuple[Compression, ...] = ("off", "auto")
    senders = {
        mode: _Sender(f"spot://127.0.0.1:{port}", f"{RUN_ID[:-2]}{number}{way}", mode) for way, mode in enumerate(modes)
    }
    taken: dict[Compression, list[float]] = {mode: [] for mode in senders}
    sent: list[float] = []
    for step, image in enumerate(images):
        for mode in sorted(senders, reverse=bool(step % 2)):  # neither is always the first
            seconds, sent_bytes = senders[mode].send(step, image)
            if step >= 2:  # the first is whole, with the second speeds are learned
                taken[mode].append(seconds)
                sent += [sent_bytes / len(image)] if mode == "auto" else []
    ratios = [auto / plain for auto, plain in zip(taken["auto"], taken["off"], strict=True)]
    yield Result(f"{link}: seconds to safety, auto / as it is", ratios, TARGET_TIME)
    yield Result(f"{link}: bytes sent with auto / bytes", sent, None)


class _Sender:
    """Sends consecutive snapshots of a run of its own."""

    def __init__(self, url: str, run_id: str, compression: Compression) -> None:
        self._store = ServerStore(f"{url}/run@{run_id}")
        fields = {"name": "run", "id": run_id, "location": "", "attempt": 1, "token": "t"}
        self._info = RunInfo(**fields, keep=Keep(newest=1), compression=compression)  # type: ignore[arg-type]
        self._store.open_run(self._info)
        self._earlier: dict[str, Glance] = {}
        self._run_id = run_id

    def send(self, step: int, image: bytes) -> tuple[float, int]:
        name, view = snapshot_name(step, 1), memoryview(image)
        manifest = Manifest(run="run", run_id=self._run_id, name=name, step=step, attempt=1, nbytes=0, part_bytes=PART)
        manifest = manifest.sealed(view)
        before, began_s = self._store.sent.copy(), time.perf_counter()
        self._store.send(manifest, view, attempt=1, earlier=lambda _run, base: self._earlier.get(base))
        seconds = time.perf_counter() - began_s
        self._earlier = {name: Glance(manifest, view, lambda: True)}
        self._store.open_run(replace(self._info, persisted=manifest.name, lineage=manifest.lineage))
        sent = self._store.sent - before
        return seconds, sent.total() - sent[PartKind.SAME]
