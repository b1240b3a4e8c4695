"""What to rent: the formulas by their properties, the command, and the table of docs/scale.md."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_spot.cli import sizing
from lightning_spot.cli.command import main
from lightning_spot.config import parse_bytes
from lightning_spot.errors import SettingsError
from lightning_spot.image.portion import MOST_HOSTS
from lightning_spot.memory.slots import Limits, capacity_for
from lightning_spot.simulation.sizing import COPIES, CPU_S_PER_BYTE, Demand, size
from tests.chained import FIRST, RUN, SECOND, THIRD, chained

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
JOB = Demand(gpus=64, state_bytes=100e9, durable_bytes_per_s=80e6)


def test_the_table_of_the_page_is_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `--")]
    assert {row.split()[2] for row in rows} == {"8", "64", "512", "4096"}
    for row in rows:
        command, *told = (cell.strip() for cell in row.strip("|").split("|"))
        assert main(["simulate", *command.strip("`").split(), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["simulate", *command.strip("`").split()]) == 0
        said = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
        names = ("machines", "one is lost every", "memory nodes", "memory of each", "each receives")
        names = (*names, "processors of each", "safe in")
        plain = [said[name].strip() for name in (*names, "lost", "lost without nodes")]
        assert [*plain, "yes" if found["pays"] else "no"] == told


def test_a_snapshot_is_whole_at_one_node_as_it_is_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three nodes that a run named, it was told to rent, each had a third of what it sends: one has all of it."""
    with chained(tmp_path, monkeypatch) as make:
        bench = make()
        bench.start(FIRST, SECOND, THIRD)
        bench.save(1, wait_s=10)
        assert bench.flush() == []
        held = [[slot.manifest for slot in node.committed(RUN)] for node in bench.nodes.values()]
    (manifest,) = (each for found in held for each in found)
    found = size(replace(JOB, state_bytes=manifest.nbytes), 1)
    assert found.replicas == 1
    assert found.memory_bytes >= COPIES * manifest.nbytes


@pytest.mark.parametrize("state", [20 * 2**30, 50 * 10**9, 333 * 10**9])
def test_a_node_with_the_memory_that_is_told_has_three_slots(state: int) -> None:
    """As it is printed: a slot is a little larger than its snapshot, and three times the state was room for two."""
    found = size(replace(JOB, state_bytes=state), 1)
    memory = parse_bytes(sizing.described(replace(JOB, state_bytes=state), found)["memory of each"].replace(" ", ""))
    for given, slots in ((memory, COPIES), (COPIES * state, COPIES - 1)):
        assert given // capacity_for(state, Limits(slots=None, memory_bytes=given, run_memory_bytes=None)) == slots


def test_more_of_anything_never_makes_it_worse() -> None:
    found = size(JOB)
    assert size(replace(JOB, node_bytes_per_s=2.5e9)).lost < found.lost
    assert size(replace(JOB, lifetime_s=86400.0)).lost < found.lost
    assert size(replace(JOB, node_back_s=0.0), 1).lost < size(JOB, 1).lost
    larger = [size(replace(JOB, gpus=64 * factor)) for factor in (1, 2, 4, 8)]
    assert all(one.lost <= other.lost for one, other in itertools.pairwise(larger))  # more machines fail more often


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_what_is_rented_holds_and_takes_what_it_must(replicas: int) -> None:
    for gpus, state, node_bytes_per_s in itertools.product((8, 64, 512), (10e9, 100e9, 3e12), (1.25e9, 25e9)):
        job = replace(JOB, gpus=gpus, state_bytes=state, node_bytes_per_s=node_bytes_per_s)
        found = size(job, replicas)
        assert found.replicas == replicas
        assert COPIES * state < found.memory_bytes < 1.02 * COPIES * state + 10**9
        assert found.in_bytes_per_s <= job.node_bytes_per_s * 1.001
        assert found.in_bytes_per_s * replicas <= job.senders * job.host_bytes_per_s * 1.001
        assert found.processors >= found.in_bytes_per_s * CPU_S_PER_BYTE
        assert found.safe_s <= found.interval_s
        assert found.by_hosts == (replicas * job.node_bytes_per_s >= job.senders * job.host_bytes_per_s)


def test_a_second_replica_pays_where_nodes_do_not_last() -> None:
    assert size(JOB).replicas == 1
    assert size(replace(JOB, node_lifetime_s=1800.0)).replicas == 2


def test_one_host_that_sends_all_is_bound_by_its_own_network() -> None:
    found = size(replace(JOB, sending_hosts=1, node_bytes_per_s=12.5e9))
    assert found.by_hosts
    assert found.safe_s == pytest.approx(80.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpus": 0},
        {"state_bytes": -1.0},
        {"lifetime_s": 0.0},
        {"sending_hosts": -1},
        {"stall_s": -1.0},
        {"node_price": -1},
    ],
)
def test_what_is_no_job_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        replace(JOB, **wrong)


def test_a_state_that_the_node_does_not_hold_and_a_job_that_brings_none_together_are_named() -> None:
    with pytest.raises(SettingsError, match=r"needs 3047\.00 GB for 3 .* of 1000\.00 GB.*take a larger one"):
        size(replace(JOB, state_bytes=1e12, node_memory_bytes=256 * 2.0**30))
    with pytest.raises(SettingsError, match=f"at most {MOST_HOSTS}"):
        replace(JOB, gpus=8 * MOST_HOSTS + 1)


def test_the_command_says_what_to_rent(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--gpus", "64", "--state", "100GB", "--memory-node-price", "1.5", "--price", "25"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "rent 1 memory node with 305.00 GB" in said
    assert "1.50 an hour" in said
    assert "the machines can send 10.00 GB/s" in said
    assert main([*command, "--replicas", "2"]) == 0
    assert "SpotCheckpoint(replicas=2)" in capsys.readouterr().out
    assert main(["simulate", "--gpus", "8", "--state", "1GB"]) == 0
    assert "will do" in capsys.readouterr().out
    assert main(["simulate", "--gpus", "4096", "--state", "5TB"]) == 0
    assert "every 14.1 s: no snapshots" in capsys.readouterr().out
    assert main([*command, "--replicas", "0"]) == 2
    assert "replicas=0" in capsys.readouterr().err


def test_every_figure_has_a_name() -> None:
    assert len(sizing.described(JOB, size(JOB))) == 12


def test_nodes_over_which_a_model_in_shards_is_spread_need_a_part_of_the_memory_each() -> None:
    one, four = size(JOB, 1), size(replace(JOB, nodes=4), 1)
    assert four.nodes == 4
    assert one.memory_bytes / 4 <= four.memory_bytes < one.memory_bytes / 3.9
    assert four.safe_s == pytest.approx(one.safe_s / 4)
    two = size(replace(JOB, nodes=4), 2)
    assert two.memory_bytes > 1.9 * four.memory_bytes
    assert size(replace(JOB, nodes=3), 1).memory_bytes > size(replace(JOB, nodes=4), 1).memory_bytes
    with pytest.raises(SettingsError, match="each of 4 memory nodes needs"):
        size(replace(JOB, nodes=4, node_memory_bytes=10e9), 1)
    assert size(replace(JOB, nodes=1), 1) == one


def test_no_more_nodes_are_paid_for_than_there_are_portions(capsys: pytest.CaptureFixture[str]) -> None:
    """A hundred were billed for eight machines, and so it was said that they cost more than they save."""
    assert size(replace(JOB, nodes=100), 1) == size(replace(JOB, nodes=8), 1)
    assert size(replace(JOB, nodes=100), 2).nodes == 16
    assert main(["simulate", "--gpus", "64", "--state", "1TB", "--memory-nodes", "100"]) == 0
    said = capsys.readouterr().out
    assert "rent 8 memory nodes" in said
    assert "of 100 nodes the others get nothing" in said


def test_the_durable_tier_is_not_advised_where_nothing_comes_to_an_end_with_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["simulate", "--gpus", "64", "--state", "1TB", "--memory-nodes", "8"]
    assert main([*command, "--price", "1", "--memory-node-price", "10"]) == 0
    said = capsys.readouterr().out
    assert "rent 8 memory nodes" in said
    assert "without them 100 % of the time is lost; yet they cost more than they save" in said
    assert size(replace(JOB, state_bytes=1e12, lifetime_s=4000.0), 1).lost <= 1.0


def test_more_replicas_than_nodes_are_no_choice() -> None:
    with pytest.raises(SettingsError, match=r"replicas=3.*2 memory nodes"):
        size(replace(JOB, nodes=2), 3)
    assert size(replace(JOB, nodes=1, node_lifetime_s=1800.0)).replicas == 1


@pytest.mark.parametrize("flag", [["--memory-nodes", "3"], ["--replicas", "2"], ["--gpus-per-host", "4"]])
def test_what_only_a_rent_has_is_refused_in_a_simulation(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flag]) == 2
    assert f"{flag[0]}={flag[1]}: it says what to rent" in capsys.readouterr().err


def test_the_size_of_a_snapshot_has_two_names(capsys: pytest.CaptureFixture[str]) -> None:
    """A simulation did not look at ``--state``."""
    told = []
    for flag in ("--state", "--snapshot-size"):
        assert main(["simulate", flag, "50GB", "--runs", "5", "--policy", "YoungDaly", "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]
