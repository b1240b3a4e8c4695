"""Each guarantee is turned off in turn, and the tests that are to notice it fail (``make mutations``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 300.0


def run(tests: list[str], mutation: Mutation | None = None) -> subprocess.CompletedProcess[str]:
    """Run tests in a process of their own, and in it and all that it starts the mutation, if one is given."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    if mutation is not None:
        change = {"module": mutation.module, "old": mutation.old, "new": mutation.new}
        environment |= {"MUTATION": json.dumps(change), "PYTHONPATH": str(ROOT / "tests" / "mutated")}
    flags = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not stores", "--seed", "1"]
    within_s = LONGEST_S if mutation is not None else None
    command = [sys.executable, "-m", "pytest", *flags, *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=within_s)


def test_each_mutation_changes_one_place_and_its_tests_are_there() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(names) == len(set(names))
    for mutation in MUTATIONS:
        spec = find_spec(mutation.module)
        source = Path(spec.origin).read_text()
        assert source.count(mutation.old) == 1, mutation.name
        compile(source.replace(mutation.old, mutation.new), spec.origin, "exec")
        for test in mutation.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test


@pytest.mark.soak
def test_nothing_fails_without_a_mutation() -> None:
    done = run(sorted({test for mutation in MUTATIONS for test in mutation.tests}))
    assert done.returncode == pytest.ExitCode.OK, done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_mutation_is_noticed(mutation: Mutation) -> None:
    done = run([*mutation.tests], mutation)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, f"{mutation.why}\n{done.stdout}{done.stderr}"
