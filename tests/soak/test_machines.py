"""Machines that train together, and one thing of them is lost in one phase of a snapshot or of a resume.

Each thing that may be lost, at each time, is a test. Training goes on or is started again, and ends as its twin does,
bit for bit.

==================  =====================================================================================
lost                a rank; the second machine (all its processes and memory); the first machine, which
                    has rank 0; the snapshot server, or the bucket; the link of the second machine, for some seconds
when                staging, sending, committing, flushing, restoring, or any moment of training
trained             DDP and FSDP2, each on two and on four ranks
where               with a snapshot server; FSDP2 also with several, or by way of a bucket; DDP also with neither
links               good; far, and losing packets; slow
==================  =====================================================================================

What happens on one host is in ``test_trainings.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_spot.state.compare import differences
from tests.support.link import FAR, Link
from tests.support.machines import PHASES, STEPS, Bucket, Machines, Sharded, at_once, flushing, started, variant
from tests.support.program import Outcome
from tests.support.training import train
from tests.support.waiting import until

SLOW = Link(bits_per_s=200_000_000)
CUT_S = 20.0
WAIT_S = 800.0  # a snapshot at each step, which crosses the far link a dozen times: on a busy machine minutes

Twin = Callable[..., Outcome]
When = Callable[[Machines], None]

Apart = variant(Machines, memories=())
Zero = variant(Machines, memories=(), more={"optimizer": "zero"})
Spread = variant(Sharded, memories=("memory", "other"))
Twice = variant(Sharded, memories=("memory", "other", "another"), more={"sharded": True, "replicas": 2})
KINDS: dict[str, type[Machines]] = {
    "ddp on two ranks": Machines,
    "ddp on four": variant(Machines, local=2),
    "shards on two ranks": variant(Sharded, local=1),
    "shards on four": Sharded,
    "shards and servers": Spread,
    "shards and a bucket": Bucket,
    "no server": Apart,
    "no server and zero": Zero,
}
LOST = ("a rank", "a machine", "the first machine", "a link")
WHENS = (at_once, *PHASES, flushing)
CELLS = [
    *((kind, what, when) for kind in list(KINDS)[:6] for what in (*LOST, KINDS[kind].third) for when in WHENS),
    *((kind, what, at_once) for kind in list(KINDS)[6:] for what in (*LOST, "the first rank", "the first server")),
]
EVERYDAY = [("ddp on two ranks", "the first machine", flushing)]


@pytest.fixture
def machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str, kind: type[Machines] | str, link: Link | None
) -> Iterator[Machines]:
    made = KINDS[kind] if isinstance(kind, str) else kind
    yield from started(variant(made, link=link) if link is not None else made, tmp_path, monkeypatch, warm_python)


@pytest.fixture
def link() -> Link | None:
    return None


def twin_of(machines: Machines, twin: Twin) -> Outcome:
    """The same training on one machine, undisturbed."""
    how = {key: machines.more[key] for key in ("sharded", "optimizer") if key in machines.more}
    return twin(train, ranks=machines.count, steps=STEPS, **how)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "what", "when"),
    [
        pytest.param(
            *cell, marks=[] if cell in EVERYDAY else pytest.mark.soak, id=f"{cell[0]}-{cell[1]}-{cell[2].__name__}"
        )
        for cell in CELLS
    ],
)
def test_machines_train_and_something_is_lost(machines: Machines, twin: Twin, what: str, when: When) -> None:
    if isinstance(machines, Sharded):
        machines.train_slowly_to(8)
    else:
        machines.train()
        machines.come_to(12)
    when(machines)
    machines.lose(what)
    machines.wait()
    machines.check(twin_of(machines, twin))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", [Twice])
@pytest.mark.parametrize("when", [*PHASES, flushing])
@pytest.mark.parametrize("what", ["a machine", "the first machine"])
def test_with_replicas_a_machine_and_a_server_are_lost_at_once(
    machines: Machines, twin: Twin, what: str, when: When
) -> None:
    """It goes on from the servers that are left, with what a resume found there."""
    machines.train_slowly_to(8)
    when(machines)
    machines.network.lose("memory")
    machines.lose(what)
    until(lambda: machines.run.resumed or machines.ended(), "it to go on", 200.0)
    machines.start_servers("memory")
    machines.wait()
    machines.check(twin_of(machines, twin))


@pytest.mark.soak
@pytest.mark.guarantee("G20")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("link", [FAR, SLOW], ids=["far", "slow"])
@pytest.mark.parametrize("when", [*PHASES, flushing])
@pytest.mark.parametrize("kind", ["ddp on two ranks", "shards on four", "shards and a bucket"])
def test_machines_train_by_bad_links_and_one_is_cut(machines: Machines, twin: Twin, when: When) -> None:
    if when is flushing and isinstance(machines, Bucket):
        pytest.skip("each host brings its files to the bucket at once: there is no other phase than sending")
    machines.train()
    machines.come_to(8)
    when(machines)
    machines.cut_for_a_while(seconds=CUT_S)
    machines.wait(WAIT_S)
    machines.check(twin_of(machines, twin))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", [variant(Machines, more={"lossy": "topk", "min_upload_interval_s": 3600.0})])
@pytest.mark.parametrize("what", ["a rank", "the first rank", "the first machine", "the snapshot server", "a link"])
def test_two_machines_send_approximations_and_something_is_lost(machines: Machines, twin: Twin, what: str) -> None:
    """A run that went on from an approximation says so; each other one ends with the bits of its twin."""
    machines.train(steps=60)
    machines.come_to(12)
    machines.lose(what, 60)
    machines.wait()
    log = machines.run.log
    said = "is not exact (lossy='topk')" in log
    assert said == bool(re.search(r"resumes at .*-inexact", log))
    assert bool(differences(twin(train, steps=60, lossy="topk").final(), machines.run.final())) == said
    if not said:
        machines.run.check_states()


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", [variant(Sharded, more={"sharded": True, "loses_server": True})])
def test_the_first_host_loses_its_server_at_the_last_snapshot(machines: Machines) -> None:
    """Of the last step there is the regular one."""
    machines.train()
    machines.wait()
    assert "does not have its last snapshot" in machines.run.log
    newest = machines.run.snapshots[0]
    assert (newest.step, newest.complete) == (STEPS, False)
    machines.run.check_states()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [Apart, pytest.param(Machines, marks=pytest.mark.soak)])
def test_machines_that_know_no_ipv4(
    kind: type[Machines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str
) -> None:
    for machines in started(kind, tmp_path, monkeypatch, warm_python, "fd79::"):
        machines.train(steps=400)
        machines.come_to(10)
        machines.lose("a rank", len(machines.run.steps) + 5)
        machines.wait()
        assert re.search(r"resumes at step \d+ .* from (host|storage|spot://\[fd79::3\])", machines.run.log)
        assert machines.run.accounts(2)[0]["aborted"] == 0
        machines.run.check_states()
