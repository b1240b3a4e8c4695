"""``python -m benchmarks peers``: its plan, its tables, and (in the long form) the command itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import benchmarks.__main__ as every
from benchmarks.blocking import Idle
from benchmarks.measure import Result
from benchmarks.peers import processes
from benchmarks.peers.cell import Cell, Stopwatch
from benchmarks.peers.command import main
from benchmarks.peers.plan import Found, blocks
from benchmarks.peers.report import BEGIN, END, report, tables, write_docs, write_report
from benchmarks.peers.seam_watch import SeamWatch

ABOUT = {
    "when": "2026-01-01 00:00 UTC",
    "commit": "abc",
    "cpus": 2,
    "memory_bytes": 2**34,
    "system": "Linux",
    "device": "cpu",
    "threads": 2,
    "scale": "tiny",
    "torch": "2",
    "lightning": "2",
    "load_before": 0.1,
    "load_after": 0.2,
    "note": "Quiet.",
}


def cell(way: str, number: int, wall_s: float, **other: Any) -> dict[str, Any]:
    saves = way != "none"
    return {
        "model": "gpt2",
        "interval": 10,
        "way": way,
        "round": number,
        "measured_steps": 20,
        "wall_s": wall_s,
        "blocked_s": 0.1 if saves else 0.0,
        "inside": 2 if saves else 0,
        "after_begin": 3 if saves else 0,
        "snapshots": 4 if saves else 0,
        "cpu_s": 13.0 if saves else 10.0,
        "peak_bytes": 2**21 if saves else 2**20,
        "sent_bytes": 3 * 2**20 if saves else 0,
        "written_bytes": 4 * 2**20 if saves else 0,
        "restore_s": 0.5 if saves else None,
        "state_bytes": 2**20,
        "safe_after_s": {"host": [0.1, 0.3] if saves else [], "peer": [], "durable": []},
        "equal": True if saves else None,
        "killed": 0,
        **other,
    }


def test_every_way_is_compared_with_the_training_without_checkpoints_of_its_own_round() -> None:
    cells = [cell("none", 0, 1.0), cell("ours", 0, 1.1), cell("none", 1, 2.0), cell("ours", 1, 2.4)]
    lost = cell("ours", 2, 99.0)  # without a training to compare it with
    table = tables(Found(ABOUT, cells=[*cells, lost]))["gpt2", 10]
    assert table.overhead("ours").values == pytest.approx([0.1, 0.2])
    line = next(line for line in report(Found(ABOUT, cells=cells)).splitlines() if line.startswith("| ours"))
    columns = [column.strip() for column in line.strip("|").split("|")]
    assert columns[1] == "+15.0% (+10.0% to +20.0%)"
    assert columns[2] == "50.0 ms (50.0 ms to 50.0 ms)"
    assert columns[3] == "0.12 s (0.05 s to 0.20 s)"
    assert columns[4] == "1.00 s (1.00 s to 1.00 s)"
    assert columns[5] == "+1 MiB (+1 MiB to +1 MiB)"
    assert columns[6] == "0.20 s / – / –"
    assert columns[7:] == ["1 MiB (1 MiB to 1 MiB)"] * 2 + ["0.50 s (0.50 s to 0.50 s)", "2"]


def test_a_table_says_what_is_wrong_with_a_way() -> None:
    bad = cell("dash", 0, 1.5, inside=1, equal=False, killed=1, sent_bytes=None)
    text = report(Found(ABOUT, cells=[cell("none", 0, 1.0), bad, cell("asymcheck-topk", 0, 1.2)]))
    assert "1 of 2 snapshots taken; **restored another state**; processes had to be killed" in text
    assert "| asymcheck-topk (not exact) |" in text
    assert text.index("asymcheck-topk") < text.index("dash")  # the cheapest first
    idle = cell("dash", 0, 1.0, inside=0, snapshots=1)
    assert "0 of 2 snapshots taken" in report(Found(ABOUT, cells=[cell("none", 0, 1.0), idle]))
    nowhere = cell("dash", 0, 1.0, safe_after_s={"host": [], "peer": [], "durable": []})
    assert "none seen safe" in report(Found(ABOUT, cells=[cell("none", 0, 1.0), nowhere]))


def test_what_was_not_measured_is_named_and_a_table_of_part_of_it_is_no_table_of_all() -> None:
    missing = [{"model": "vit", "interval": 1, "way": way, "round": 0} for way in ("ours", "dash")]
    missing += [{"model": "gpt2", "interval": 10, "way": "dash", "round": number} for number in (1, 2)]
    failed = [{"model": "gpt2", "interval": 1, "way": "dash", "round": 0, "error": "OSError: full"}]
    text = report(Found(ABOUT, cells=[cell("none", 0, 1.0), cell("dash", 0, 1.0)], missing=missing, failed=failed))
    assert "Not measured within the budget" in text
    assert "moments (incomplete: see below)**" in text
    assert "- vit, every 1: dash, ours\n" in text
    assert "- gpt2, every 10: dash (2 rounds)\n" in text
    assert "- gpt2, every 1: dash: OSError: full\n" in text


def test_tables_go_between_the_marks_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_docs(page, "new\n")
    write_docs(page, "newer\n")
    assert page.read_text() == f"before\n{BEGIN}\n\nnewer\n\n{END}\nafter\n"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="has no section"):
        write_docs(page, "new\n")


def test_several_comparisons_are_one_report(tmp_path: Path) -> None:
    both = [
        Found({**ABOUT, "scale": scale}, cells=[cell("none", 0, 1.0), cell("dash", 0, 1.1)]) for scale in ("a", "b")
    ]
    text = write_report(both, tmp_path)
    assert "of scale `a`" in text
    assert "of scale `b`" in text
    assert text.count("| dash | +10.0% |") == 2


def test_a_snapshot_for_which_there_was_no_slot_does_not_count_as_begun() -> None:
    spot: Any = SimpleNamespace(snapshots=SimpleNamespace(begun_step=-1), skipped=0)
    watch, trainer = SeamWatch(spot), SimpleNamespace()
    for step, skipped in ((1, 0), (2, 1), (2, 1), (3, 1)):
        watch.after_batch(trainer)  # type: ignore[arg-type]
        spot.snapshots.begun_step, spot.skipped = step, skipped
        watch.passed()
    assert sorted(watch.begun) == [1, 3]


def test_of_an_optimizer_that_does_nothing_all_counts_as_written() -> None:
    """Else ours would copy nothing again, and be measured without its copies."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = Idle([parameter])
    optimizer.step()
    owned = [parameter, *optimizer.state[parameter].values()]
    before = [tensor._version for tensor in owned]
    optimizer.step()
    assert all(tensor._version > version for tensor, version in zip(owned, before, strict=True))


def test_a_benchmark_that_fails_leaves_the_others_what_they_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = SimpleNamespace(run=lambda _quick: [Result("bytes", [2.0], None)])
    monkeypatch.setattr(every, "ALL", {"bad": SimpleNamespace(run=lambda _quick: 1 / 0), "good": good})
    monkeypatch.setattr(every, "_all_that_can_run", lambda: ["bad", "good"])
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--json", str(tmp_path / "found.json")])
    assert every.main() == 1
    said = capsys.readouterr()
    assert "ZeroDivisionError" in said.err
    assert "| bytes | 2.00 x | 2.00–2.00 | none |  |" in said.out
    assert "Failed: bad." in said.out
    found = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    assert (found["bad"]["failed"], found["good"]["failed"], found["good"]["results"][0]["values"]) == (
        True,
        False,
        [2.0],
    )


def test_all_ways_of_a_block_are_measured_next_to_each_other_in_another_order_each_time() -> None:
    found = list(blocks(["gpt2", "vit"], [1, 10], ["a", "b", "c", "d"], 3, scale="tiny", device="cpu", seed=3))
    assert len(found) == 12
    assert all(sorted(cell.way for cell in block) == ["a", "b", "c", "d"] for block in found)
    assert all(len({(cell.model, cell.interval, cell.round) for cell in block}) == 1 for block in found)
    assert len({tuple(cell.way for cell in block) for block in found}) > 3
    assert [block[0].model for block in found[:4]] == ["gpt2", "gpt2", "vit", "vit"]


@pytest.mark.parametrize("interval", [1, 7, 10, 100])
def test_what_is_measured_holds_whole_intervals_after_a_first_snapshot(interval: int) -> None:
    planned = Cell(model="gpt2", interval=interval, way="none", round=0, scale="tiny", device="cpu")
    assert planned.measured % interval == 0
    assert planned.measured >= 20
    assert planned.settled % interval == 0  # the snapshot of that step is the last that is waited for
    assert planned.first - planned.settled >= max(4, interval // 2)
    assert abs(planned.first % interval - interval / 2) <= 0.5  # half-way between two
    assert planned.steps > planned.first + planned.measured  # where the measured steps end, training goes on
    assert interval > 10 or planned.steps % interval == 0


def test_a_stopwatch_counts_a_hook_within_a_hook_once() -> None:
    watch = Stopwatch()
    entered: list[float] = []

    class Hooks:
        def on_outer(self) -> None:
            self.on_inner()
            entered.append(watch.spent_s)

        def on_inner(self) -> None:
            return

    hooks = Hooks()
    watch.wrap(hooks)
    hooks.on_outer()
    assert entered == [0.0]  # the inner one alone adds nothing
    assert watch.spent_s > 0


def test_cpu_and_memory_of_descendants_are_counted() -> None:
    work = "import os, time\nwhile time.process_time() < 0.2: pass\nprint(1, flush=True)\nx = b'1' * 2**25\ninput()"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in processes.descendants(os.getpid())
        assert processes.cpu_s(os.getpid()) >= 0.2
        assert processes.memory_bytes(os.getpid(), Path("/nowhere")) > 0
        child.communicate(b"\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "gpt3"], "unknown: gpt3; there are gpt2, bert"),
        (["--ways", "none,theirs"], "unknown: theirs"),
        (["--intervals", "1,0"], "at least 1"),
        (["--budget", "soon"], "15m"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.soak
def test_the_command_measures_every_way_and_says_what_it_did_not(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "benchmarks", "peers", "--quick", "--out", str(tmp_path), "--folder", str(tmp_path)]
    root = Path(__file__).parents[1]
    done = subprocess.run(run, cwd=root, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "peers.json").read_text())
    assert {cell["way"] for cell in found["cells"]} == {
        "none",
        "ours",
        "ModelCheckpoint",
        "AsyncCheckpointIO",
        "dash",
        "oteacheck",
    }
    for one in found["cells"]:
        if one["way"] != "none":
            assert one["equal"] is True, one
            # Ours passes over a step while its slots are being made, or are all busy, and takes the next one.
            assert one["way"] == "ours" or one["inside"] == 4, one
            assert one["way"] == "ours" or one["safe_after_s"]["durable"], one
            assert one["snapshots"] >= 1, one
            assert one["restore_s"] > 0
            assert one["written_bytes"] > 0
        assert not one["killed"], one
        assert one["cpu_s"] > 0
        assert one["peak_bytes"] > 2**20
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("ls-bench")] == []
    done = subprocess.run([*run, "--budget", "0"], cwd=root, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "Not measured within the budget" in done.stdout
    assert "- plain, every 10: AsyncCheckpointIO, ModelCheckpoint, dash, none, oteacheck, ours" in done.stdout
