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
from lightning_spot.errors import SettingsError
from lightning_spot.simulation.sizing import COPIES, Demand, size

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
        names = ("machines", "one is lost every", "memory nodes", "memory of each", "each receives", "safe in")
        plain = [said[name].strip() for name in (*names, "lost", "lost without nodes")]
        assert [*plain, "yes" if found["pays"] else "no"] == told


def test_more_of_anything_never_makes_it_worse() -> None:
    found = size(JOB)
    assert size(replace(JOB, node_bytes_per_s=2.5e9)).lost <= found.lost
    assert size(replace(JOB, lifetime_s=86400.0)).lost <= found.lost
    assert size(replace(JOB, node_price=0.5)).nodes <= found.nodes
    assert size(replace(JOB, state_bytes=400e9)).nodes > found.nodes
    larger = [size(replace(JOB, gpus=64 * factor)) for factor in (1, 2, 4, 8)]
    assert all(one.lost <= other.lost for one, other in itertools.pairwise(larger))  # more machines fail more often


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_what_is_rented_holds_and_takes_what_it_must(replicas: int) -> None:
    for gpus, state in itertools.product((8, 64, 512), (10e9, 100e9, 3e12)):
        job = replace(JOB, gpus=gpus, state_bytes=state)
        found = size(job, replicas)
        assert found.nodes >= replicas
        assert found.memory_bytes <= job.node_memory_bytes
        assert found.memory_bytes * found.nodes == pytest.approx(COPIES * replicas * state)
        assert found.in_bytes_per_s <= job.node_bytes_per_s * 1.001
        assert found.in_bytes_per_s * found.nodes <= job.senders * job.host_bytes_per_s * 1.001
        assert found.safe_s <= found.interval_s


def test_a_second_replica_pays_where_nodes_do_not_last() -> None:
    assert size(JOB).replicas == 1
    assert size(replace(JOB, node_lifetime_s=1800.0)).replicas == 2


def test_one_host_that_sends_all_is_bound_by_its_own_network() -> None:
    found = size(replace(JOB, sending_hosts=1))
    assert found.by_hosts
    assert found.safe_s == pytest.approx(80.0)
    assert found.nodes == 2  # for their memory


@pytest.mark.parametrize(
    "wrong",
    [{"gpus": 0}, {"state_bytes": -1.0}, {"lifetime_s": 0.0}, {"sending_hosts": -1}, {"stall_s": -1.0}],
)
def test_what_is_no_job_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        replace(JOB, **wrong)


def test_a_state_that_no_fleet_holds_is_named() -> None:
    with pytest.raises(SettingsError, match="larger ones"):
        size(replace(JOB, state_bytes=1e15))


def test_the_command_says_what_to_rent(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--gpus", "64", "--state", "100GB", "--memory-node-price", "1.5", "--price", "25"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "rent 3 memory nodes with 100.00 GB" in said
    assert "4.50 an hour" in said
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
