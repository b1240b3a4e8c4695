"""The main job, shown: train on real data, kill the trainer with SIGKILL in mid-epoch, run the same command again.

    python examples/demo.py

Starts ``examples/digits.py`` twice with one command line and compares what the two attempts wrote about themselves.
Exits with 1 if the second did not carry on where the first was killed. Not a benchmark.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EPOCHS = 45
EVERY_STEPS = 50
KILL_AFTER = 0.4  # of the run
SNAPSHOTS_BEFORE_KILL = 3
LEAST_ACCURACY = 0.95
DEADLINE_S = 240.0
NODE_EXIT_S = 15.0

Entry = dict[str, Any]


class DemoFailed(Exception):
    """The demo did not show what it is there to show."""


def main() -> int:
    """Run the demo.

    Returns:
        the exit code: 0 if the run carried on, 1 if not.
    """
    # A short path: it will hold sockets, whose paths the kernel limits to 107 characters.
    with tempfile.TemporaryDirectory(prefix="spot-demo-", ignore_cleanup_errors=True) as folder:
        try:
            show(Path(folder))
        except DemoFailed as failure:
            print(f"\nFAILED: {failure}")
            for log in sorted(Path(folder).glob("attempt-*.log")):
                print(f"--- the last lines of {log.name}:\n{''.join(_lines(log)[-25:])}")
            return 1
    return 0


def show(folder: Path) -> None:
    """Train, kill, run again, compare.

    Raises:
        DemoFailed: if a part of that did not come out as promised.
    """
    diary = folder / "diary.jsonl"
    dirpath = folder / "digits"
    script = os.path.relpath(Path(__file__).with_name("digits.py"))
    command = [sys.executable, script, f"--dirpath={dirpath}", f"--diary={diary}"]
    command += [f"--epochs={EPOCHS}", f"--every-steps={EVERY_STEPS}", "--server-idle-timeout-s=60"]
    environment = {
        **os.environ,
        "LIGHTNING_SPOT_RUNTIME_DIR": str(folder / "node"),
        "LIGHTNING_SPOT_CLOUD": "none",  # the demo preempts itself; no cloud need be asked
    }

    print(f"1. Train a small CNN on scikit-learn's digits; a snapshot every {EVERY_STEPS} steps:\n")
    print(f"   {shlex.join(['python', *command[1:]])}\n")
    with _trainer(command, environment, folder / "attempt-1.log") as first:
        _kill_in_mid_epoch(first, diary)
    before = _read(diary)
    print("2. Kill it with SIGKILL in mid-epoch. What it left behind, as `lightning-spot ls` shows it:\n")
    print(_listing(dirpath, environment))

    print("3. Run the same command again:\n")
    started_s = time.time()
    with _trainer(command, environment, folder / "attempt-2.log") as second:
        if code := second.wait(DEADLINE_S):
            raise DemoFailed(f"the second attempt ended with exit code {code}")
    print("".join(f"   {line}" for line in _lines(folder / "attempt-2.log") if line.startswith("lightning_spot:")))
    _report(before, _read(diary)[len(before) :], started_s)
    _wait_for_node(folder / "node")


@contextmanager
def _trainer(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The trainer as a child process; it does not outlive the block."""
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    except subprocess.TimeoutExpired as error:
        raise DemoFailed(f"the trainer was not done after {error.timeout:.0f} s") from error
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _kill_in_mid_epoch(process: subprocess.Popen[bytes], diary: Path) -> None:
    """Wait until the trainer is well into its run and in mid-epoch, then kill it."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise DemoFailed(f"the first attempt ended before it was killed (exit code {process.returncode})")
        entries = _read(diary)
        if entries and _is_time(entries):
            process.kill()
            process.wait()
            return
        time.sleep(0.02)
    raise DemoFailed(f"the first attempt did not get far enough in {DEADLINE_S:.0f} s")


def _is_time(entries: list[Entry]) -> bool:
    start, last = entries[0], entries[-1]
    committed = {entry.get("committed_step") for entry in entries} - {None}
    batch = last["step"] % start["epoch_steps"]
    in_mid_epoch = start["epoch_steps"] / 3 < batch < start["epoch_steps"] * 2 / 3
    return last["step"] > KILL_AFTER * start["total_steps"] and len(committed) >= SNAPSHOTS_BEFORE_KILL and in_mid_epoch


def _listing(dirpath: Path, environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", "import sys; from lightning_spot.cli import main; sys.exit(main())"]
    shown = subprocess.run(
        [*command, "ls", str(dirpath)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    if shown.returncode:
        raise DemoFailed(f"lightning-spot ls ended with exit code {shown.returncode}: {shown.stderr}")
    return "".join(f"   {line}\n" for line in shown.stdout.strip().splitlines())


def _report(before: list[Entry], after: list[Entry], started_s: float) -> None:
    """Print the numbers, and raise :class:`DemoFailed` where they are not what a resumed run's must be."""
    killed, start, end = before[-1], after[0], after[-1]
    resumed = start["resumed_from"]
    if resumed is None:
        raise DemoFailed(f"the second attempt began at step {start['step']} without resuming from anything")
    epoch_steps, total = start["epoch_steps"], start["total_steps"]
    snapshot_s = next((entry["time_s"] for entry in before if entry["step"] == resumed["step"]), killed["time_s"])
    level_s = next((entry["time_s"] for entry in after if entry["step"] >= killed["step"]), end["time_s"])
    epoch, batch = divmod(killed["step"], epoch_steps)
    lost_steps = killed["step"] - resumed["step"]
    rows = [
        ("killed at", f"step {killed['step']} of {total}: epoch {epoch}, batch {batch} of {epoch_steps}"),
        ("last reported committed", f"step {killed['committed_step']}"),
        ("resumed from", f"{resumed['tier']}, {resumed['name']}"),
        ("carried on at", f"step {resumed['step']}, as attempt {start['attempt']}"),
        ("lost", f"{lost_steps} steps, {killed['time_s'] - snapshot_s:.2f} s of training"),
        ("trains again", f"{start['time_s'] - started_s:.1f} s after the command (imports and all)"),
        ("has made up the loss", f"{level_s - started_s:.1f} s after the command"),
        ("finished at", f"step {end['step']} of {total}, accuracy {end.get('val_accuracy', 0):.4f}"),
    ]
    print("\n".join(f"   {name:<24}{value}" for name, value in rows))
    first_step = next(entry["step"] for entry in after if entry["event"] == "step")
    for is_so, what in [
        (start["attempt"] == killed["attempt"] + 1, "the second run does not know that it is the next attempt"),
        (start["step"] == resumed["step"], "the second attempt did not start at its snapshot's step"),
        (resumed["step"] >= killed["committed_step"], "it resumed from an older snapshot than the newest committed"),
        (0 < resumed["step"] <= killed["step"], "it resumed from a step that the first attempt never reached"),
        (first_step == resumed["step"] + 1, "the step after the snapshot was not trained next"),
        (end["event"] == "end" and end["step"] == total, "the second attempt did not reach the end of the run"),
        (end.get("val_accuracy", 0) >= LEAST_ACCURACY, f"the accuracy is below {LEAST_ACCURACY}"),
    ]:
        if not is_so:
            raise DemoFailed(what)
    kept = resumed["step"] / killed["step"]
    print(f"\nOK: the same command carried on, with {kept:.1%} of the killed trainer's steps kept.")


def _read(diary: Path) -> list[Entry]:
    """Every whole line of the diary; a killed writer may have left half a line."""
    return [json.loads(line) for line in _lines(diary) if line.endswith("\n")]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []


def _wait_for_node(runtime_dir: Path) -> None:
    """The snapshot server ends by itself when its run is complete; its socket goes with it."""
    deadline_s = time.monotonic() + NODE_EXIT_S
    while list(runtime_dir.glob("*.http")):
        if time.monotonic() > deadline_s:
            raise DemoFailed(f"the snapshot server is still there {NODE_EXIT_S:.0f} s after the run was complete")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
