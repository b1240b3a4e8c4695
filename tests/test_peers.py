"""``python -m benchmarks peers``: its plan, its tables, and (in the long form) the command itself."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import benchmarks.__main__ as every
from benchmarks.baselines.baseline import Baseline
from benchmarks.blocking import Idle
from benchmarks.measure import Result
from benchmarks.peers import command, measure, processes, turns
from benchmarks.peers import compare as comparing
from benchmarks.peers.cell import Cell, Stopwatch
from benchmarks.peers.command import PUBLISHED, main
from benchmarks.peers.plan import Found, blocks, together
from benchmarks.peers.report import BEGIN, END, details, groups, report, write_docs, write_report
from benchmarks.peers.results import Times
from benchmarks.peers.seam_watch import SeamWatch
from benchmarks.peers.turns import Due, Training
from benchmarks.peers.ways import WAYS, of_callback

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
    "state_bytes": {"gpt2": 3 * 2**20},
}


def turn(way: str, number: int, wall_s: float, **other: Any) -> dict[str, Any]:
    saves = way not in ("none", "none again")
    return {
        "model": "gpt2",
        "interval": 10,
        "way": way,
        "round": number,
        "steps": 10,
        "wall_s": wall_s,
        "left_s": 0.1 if saves else 0.0,
        "cpu_s": 3.0 if saves else 2.0,
        "blocked_s": 0.05 if saves else 0.0,
        "taken": 1 if saves else 0,
        "safe_after_s": {"host": [0.1, 0.3] if saves else [], "peer": [], "durable": []},
        **other,
    }


def cell(way: str, number: int, **other: Any) -> dict[str, Any]:
    saves = way != "none"
    return {
        "model": "gpt2",
        "interval": 10,
        "way": way,
        "round": number,
        "after_begin": 3 if saves else 0,
        "snapshots": 4 if saves else 0,
        "peak_bytes": 2**21 if saves else 2**20,
        "sent_bytes": 3 * 2**20 if saves else 0,
        "written_bytes": 4 * 2**20 if saves else 0,
        "restore_s": 0.5 if saves else None,
        "equal": True if saves else None,
        "killed": 0,
        **other,
    }


def columns_of(way: str, text: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {way} "))
    return [column.strip() for column in line.strip("|").split("|")]


def test_every_turn_is_compared_with_those_without_checkpoints_of_its_own_round() -> None:
    turns = [turn("none", 0, 0.9), turn("none", 0, 1.1), turn("ours", 0, 1.1)]
    turns += [turn("none", 1, 2.0), turn("ours", 1, 2.5), turn("ours", 2, 99.0)]  # the last one has none beside it
    turns += [turn("none", -1, 9.0), turn("ours", -1, 9.0)]  # the first ones do not count
    times = Times.of(Found(ABOUT, turns=turns), ("gpt2", 10))
    assert times.longer("ours").values == pytest.approx([0.2, 0.3])
    assert times.added("ours").values == pytest.approx([0.2, 0.6])
    text = report(Found(ABOUT, turns=turns, cells=[cell("none", 0), cell("ours", 0)]))
    assert columns_of("ours", text) == [
        "ours",
        "+25.0 (+22.5 to +27.5) %; 0.40 s",
        "50 ms",
        "1.00 s",
        "0.10 s",
        "0.20 s / – / –",
        "+1 MiB",
        "1 MiB",
        "1 MiB",
        "0.50 s",
        "",
    ]
    assert columns_of("none", text)[1] == "0.150 s a step, 2 rounds"
    assert "| gpt2, 3 MiB, every 10 steps |" in text


def test_of_an_interval_that_is_longer_than_a_turn_a_step_is_longer_by_less() -> None:
    turns = [turn("none", 0, 1.0, interval=100), turn("ours", 0, 1.4, interval=100)]
    times = Times.of(Found(ABOUT, turns=turns), ("gpt2", 100))
    assert times.added("ours").values == pytest.approx([0.5])
    assert times.longer("ours").values == pytest.approx([0.05])


def test_several_snapshots_in_a_turn_share_what_they_cost() -> None:
    turns = [turn("none", 0, 1.0, interval=1, steps=4), turn("ours", 0, 1.9, interval=1, steps=4, taken=4)]
    times = Times.of(Found(ABOUT, turns=turns), ("gpt2", 1))
    assert times.added("ours").values == pytest.approx([0.25])
    assert times.longer("ours").values == pytest.approx([1.0])
    turns[1]["taken"] = 2
    assert times.added("ours").values == pytest.approx([0.5])
    assert times.longer("ours").values == pytest.approx([1.0])
    assert times.remarks("ours") == ["2 of 4 snapshots taken"]


def test_a_table_says_what_is_wrong_with_a_way() -> None:
    turns = [turn("none", 0, 1.0), turn("dash", 0, 1.5, taken=0), turn("asymcheck-topk", 0, 1.2)]
    bad = cell("dash", 0, equal=False, killed=1, sent_bytes=None)
    text = report(Found(ABOUT, turns=turns, cells=[cell("none", 0), bad, cell("asymcheck-topk", 0, equal=False)]))
    wrong = "0 of 1 snapshots taken; **restored another state**; processes had to be killed"
    assert columns_of("dash", text)[-1] == wrong
    assert columns_of("dash", text)[1] == "+60.0 %; –"
    assert columns_of("asymcheck-topk (not exact)", text)[-1] == ""
    assert text.index("asymcheck-topk") < text.index("dash")  # the cheapest first
    nowhere = turn("dash", 0, 1.0, safe_after_s={"host": [], "peer": [], "durable": []})
    assert "none seen safe" in report(Found(ABOUT, turns=[turn("none", 0, 1.0), nowhere]))


def test_models_of_one_interval_share_a_table_and_one_of_several_has_its_own() -> None:
    keys = [("gpt2", 1), ("gpt2", 10), ("bert", 10), ("vit", 10)]
    turns = [turn("none", 0, 1.0, model=model, interval=interval) for model, interval in keys]
    found = Found(ABOUT, turns=turns)
    assert groups(found) == [[("gpt2", 1), ("gpt2", 10)], [("bert", 10), ("vit", 10)]]
    heads = [line for line in report(found).splitlines() if line.startswith("| way")]
    assert [head.count(" waits ") for head in heads] == [1, 0]
    assert details(found).count("| way") == 4


def test_what_was_not_measured_and_what_failed_is_named() -> None:
    missing = [{"model": "vit", "interval": 1, "way": way, "round": 0} for way in ("ours", "dash")]
    missing += [{"model": "gpt2", "interval": 10, "way": "dash", "round": number} for number in (1, 2)]
    missing += [{"model": "bert", "interval": 10, "way": "all of it"}]
    failed = [{"model": "gpt2", "interval": 1, "way": "dash", "round": 0, "error": "OSError: full"}]
    turns = [turn("none", 0, 1.0), turn("dash", 0, 1.0)]
    text = report(Found(ABOUT, turns=turns, missing=missing, failed=failed))
    assert "Not measured within the budget:\n\n- bert, every 10: all of it\n" in text
    assert "Not measured within the budget in a process of its own (memory, sent, written, restore):\n\n- gpt2" in text
    assert "- vit, every 1: dash, ours\n" in text
    assert "- gpt2, every 10: dash (2 times)\n" in text
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
    turns = [turn("none", 0, 1.0), turn("dash", 0, 1.1)]
    both = [Found({**ABOUT, "scale": scale}, turns=turns) for scale in ("a", "b")]
    text = write_report(both, tmp_path)
    assert "of scale `a`" in text
    assert "of scale `b`" in text
    assert text.count("| dash | +20.0 %; 0.20 s |") == 2
    assert (tmp_path / "peers-a-gpt2-10.svg").exists()
    assert (tmp_path / "details.md").read_text().count("| dash |") == 2


def test_comparisons_of_one_scale_share_tables_unless_they_measured_the_same() -> None:
    def of(scale: str, interval: int) -> Found:
        turns = [turn("none", 0, 1.0, interval=interval), turn("dash", 0, 1.1, interval=interval)]
        return Found({**ABOUT, "scale": scale}, turns=turns)

    apart = [of("a", 1), of("a", 10), of("b", 1), of("a", 10)]
    found = together(apart)
    assert [(one.about["scale"], sorted(one.keys())) for one in found] == [
        ("a", [("gpt2", 1), ("gpt2", 10)]),
        ("b", [("gpt2", 1)]),
        ("a", [("gpt2", 10)]),
    ]
    assert [len(one.turns) for one in apart] == [2, 2, 2, 2]  # what was measured stays as it is


def test_to_publish_measures_every_part_within_its_share_and_one_that_ends_early_leaves_the_others_in_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}")
    asked: list[Any] = []

    def compare(options: Any, path: Path) -> None:
        asked.append(options)
        models = options.models[:1]
        turns = [turn("none", 0, 1.0, model=model, interval=n) for model in models for n in options.intervals]
        path.write_text(json.dumps(Found({**ABOUT, "scale": options.scale}, turns=turns).plain()))
        if len(asked) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "DOCS", page)
    monkeypatch.setattr(command, "compare", compare)
    with pytest.raises(KeyboardInterrupt):
        main(["--publish", "--budget", "100s", "--out", str(tmp_path / "out")])
    assert [options.budget for options in asked] == pytest.approx([100 * part["share"] for part in PUBLISHED[:3]])
    assert (
        "| gpt2, 3 MiB, every step | gpt2, 3 MiB, every 10 steps | gpt2, 3 MiB, every 100 steps |" in page.read_text()
    )
    assert "| bert, 0 MiB, every 10 steps |" in page.read_text()  # of the one that was ended, what there was
    assert sum(part["share"] for part in PUBLISHED) == pytest.approx(1.0)


def test_a_training_or_a_cell_that_fails_in_any_way_is_named_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no room")

    def one(cell: Cell, folder: Path, limit_s: float) -> dict[str, Any]:
        return fail() if cell.way == "dash" else {"way": cell.way}  # type: ignore[return-value]

    monkeypatch.setattr(comparing, "measure_in_turns", fail)
    monkeypatch.setattr(comparing, "measure", one)
    monkeypatch.setattr(comparing.processes, "adopt_orphans", lambda: None)
    arguments = ["--models", "plain", "--intervals", "1,10", "--ways", "none,dash,gemini", "--scale", "tiny"]
    comparing.compare(command.parser().parse_args(arguments), tmp_path / "found.json")
    found = Found(**json.loads((tmp_path / "found.json").read_text()))
    failed = sorted((missed["interval"], missed["way"], missed["error"]) for missed in found.failed)
    assert failed == [(n, way, "OSError('no room')") for n, way in ((1, "all of it"), (1, "dash"), (10, "all of it"))]
    assert sorted(cell["way"] for cell in found.cells) == ["gemini", "none"]
    assert not found.missing


def test_a_snapshot_for_which_there_was_no_slot_does_not_count_as_begun() -> None:
    spot: Any = SimpleNamespace(snapshots=SimpleNamespace(begun_step=-1), num_skipped=0)
    watch, trainer = SeamWatch(spot), SimpleNamespace()
    for step, skipped in ((1, 0), (2, 1), (2, 1), (3, 1)):
        watch.after_batch(trainer)  # type: ignore[arg-type]
        spot.snapshots.begun_step, spot.num_skipped = step, skipped
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


@pytest.mark.parametrize(("interval", "steps"), [(1, 4), (3, 6), (4, 4), (10, 10), (100, 20)])
def test_a_turn_is_an_interval_within_bounds(interval: int, steps: int) -> None:
    assert Training(model="plain", interval=interval, ways=(), scale="tiny", device="cpu").steps == steps


def test_a_snapshot_is_due_in_its_own_turn_from_its_first_step_on() -> None:
    due = Due()
    taken = []
    due.begin(7, 3)
    for step in range(7, 14):
        if due.due(step, 0.0):
            taken.append(step)
            due.taken(step, 0.0)
    due.end()
    assert taken == [7, 10, 13]
    assert not due.due(16, 0.0)
    due.begin(20, 3)
    assert not due.due(19, 0.0)
    assert due.due(21, 0.0)  # one for which there was no slot is taken at the next step


class Saver(Baseline):
    """Notes what is asked of it, and when; may fail."""

    def __init__(self, folder: Path, every: int) -> None:
        super().__init__(folder, every)
        self.said: list[str] = []

    def begin(self, step: int, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        self.said.append(f"begin {step}")

    def wait(self) -> None:
        self.said.append("wait")

    def settle(self) -> None:
        self.said.append("settle")
        for step in self.begun:
            self.reached(step, "durable")

    def let_go(self) -> None:
        self.said.append("let go")

    def join(self, trainer: pl.Trainer) -> None:
        self.said.append("join")

    def leave(self) -> None:
        self.said.append("leave")

    def restore(self) -> tuple[int, dict[str, Any]]:
        raise NotImplementedError


class Failing(Saver):
    def begin(self, step: int, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        raise OSError("full")


@pytest.fixture
def turns_here(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Turns run in this process, and change nothing in it for good: neither where threads run, nor what is logged."""
    monkeypatch.setattr(turns, "bind_team", lambda: [])
    caplog.set_level(logging.ERROR, "lightning.pytorch")


@pytest.mark.usefixtures("turns_here")
def test_ways_take_turns_and_one_that_fails_leaves_the_others_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Saver] = {}

    def way(name: str, kind: type[Saver]) -> Any:
        def make(folder: Path, every: int) -> Saver:
            made[name] = kind(folder, every)
            return made[name]

        return of_callback(make)

    monkeypatch.setitem(WAYS, "one", way("one", Saver))
    monkeypatch.setitem(WAYS, "two", way("two", Failing))
    said: list[dict[str, Any]] = []
    training = Training(model="plain", interval=2, ways=("one", "two"), scale="tiny", device="cpu", rounds=2, warm_up=4)
    turns.run(training, tmp_path, os.getpid(), said.append)
    told = [entry["turn"] for entry in said if "turn" in entry]
    assert sorted((entry["round"], entry["way"]) for entry in told) == [
        (-1, "none"),
        (-1, "one"),
        (0, "none"),
        (0, "none"),
        (0, "one"),
        (1, "none"),
        (1, "none"),
        (1, "one"),
    ]
    assert [entry["failed"]["way"] for entry in said if "failed" in entry] == ["two"]
    assert next(entry["failed"]["error"] for entry in said if "failed" in entry) == "OSError('full')"
    assert said[-1]["state_bytes"] > 0
    mine = [entry for entry in told if entry["way"] == "one" and entry["round"] >= 0]
    assert [len(entry["begun"]) for entry in mine] == [2, 2]
    assert all(entry["steps"] == 4 and {step for step, _, _ in entry["safe"]} == set(entry["begun"]) for entry in mine)
    between = "|".join(made["one"].said).split("join|")
    for own in between[-2:]:
        begun = [word for word in own.split("|") if word.startswith("begin")]
        assert len(begun) == 2
        assert own.split("|")[:2] == [begun[0], "wait"]
        assert own.count("wait") == 4 or own.endswith("let go")
        assert "settle|leave" in own


@pytest.mark.usefixtures("turns_here")
def test_ways_of_others_take_turns_and_leave_nothing_behind_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = ("ModelCheckpoint", "AsyncCheckpointIO", "oteacheck", "DCP thread")
    modules: list[torch.nn.Module] = []
    build = turns.build

    def kept(*arguments: Any) -> Any:
        module, data = build(*arguments)
        modules.append(module)
        return module, data

    monkeypatch.setattr(turns, "build", kept)
    told: list[dict[str, Any]] = []

    def tell(said: dict[str, Any]) -> None:
        assert "failed" not in said, said
        assert not any(weight._post_accumulate_grad_hooks for weight in modules[0].parameters())
        told.extend([said["turn"]] if "turn" in said else [])

    training = Training(model="plain", interval=2, ways=ways, scale="tiny", device="cpu", rounds=1, warm_up=4)
    turns.run(training, tmp_path, os.getpid(), tell)
    for one in told:
        durable = {step for step, tier, _ in one["safe"] if tier == "durable"}
        assert (set(one["begun"]) if one["way"] != "none" else set()) >= durable
        assert len(one["begun"]) == (0 if one["way"] == "none" else one["steps"] // 2), one
        if one["way"] in ("ModelCheckpoint", "AsyncCheckpointIO", "DCP thread"):
            assert durable == set(one["begun"]), one
        assert (one["blocked_s"] > 0) == (one["way"] != "none")
    assert {one["way"] for one in told if one["round"] == 0} == {"none", *ways}


@pytest.mark.soak
def test_the_command_measures_every_way_and_says_what_it_did_not(tmp_path: Path) -> None:
    disk = tempfile.TemporaryDirectory(prefix="ls-test-", dir="/var/tmp")  # what is written to memory is not counted
    run = [sys.executable, "-m", "benchmarks", "peers", "--quick", "--out", str(tmp_path), "--folder", disk.name]
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
    assert {entry["way"] for entry in found["turns"]} == {cell["way"] for cell in found["cells"]}
    assert all(entry["taken"] == 1 for entry in found["turns"] if entry["way"] != "none" and entry["round"] == 0)
    for one in found["cells"]:
        if one["way"] != "none":
            assert one["equal"] is True, one
            # Ours passes over a step while its slots are being made, or are all busy, and takes the next one.
            assert one["way"] == "ours" or one["inside"] == 2, one
            assert one["way"] == "ours" or one["safe_after_s"]["durable"], one
            assert one["snapshots"] >= 1, one
            assert one["restore_s"] > 0
            assert one["written_bytes"] > 0
        assert not one["killed"], one
        assert one["cpu_s"] > 0
        assert one["peak_bytes"] > 2**20
    assert list(Path(disk.name).iterdir()) == []
    done = subprocess.run([*run, "--budget", "0"], cwd=root, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "Not measured within the budget:\n\n- plain, every 10: all of it\n" in done.stdout
    assert "- plain, every 10: AsyncCheckpointIO, ModelCheckpoint, dash, none, oteacheck, ours\n" in done.stdout
    disk.cleanup()


def test_nothing_of_pythons_own_is_waited_for_or_killed_after_a_process_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's resource tracker comes with the first one: each cell took 20 s more, and was said to leave something."""
    stop = measure.resource_tracker._resource_tracker._stop  # type: ignore[attr-defined]
    stop()
    monkeypatch.setattr(measure, "_inside", print)
    what: Any = SimpleNamespace(device="cuda")
    try:
        with measure.started(print, what, tmp_path) as it:
            it.process.join(60)
            assert it.process.exitcode == 0
            assert set(processes.descendants(os.getpid())) <= it.spare
    finally:
        stop()
