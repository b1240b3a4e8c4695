"""The scan of advisories: one in a dependency fails CI; where none can be had, a line says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AUDIT = Path(__file__).parents[2] / "scripts" / "audit"
GOOD = {"name": "yarl", "version": "1.24.2", "vulns": []}
FLAW = {"id": "CVE-0000-0001", "fix_versions": ["3.14.1"], "description": "unbounded"}
BAD = {"name": "aiohttp", "version": "3.9.5", "vulns": [FLAW]}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.13.0+cpu)"}


@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        ([GOOD, UNKNOWN], 0, "audit: 1 packages, 0 advisories"),
        ([GOOD, BAD], 1, "audit: aiohttp 3.9.5 has CVE-0000-0001, fixed in 3.14.1"),
        ([UNKNOWN], 0, "audit: no advisories could be had"),
        (None, 0, "audit: no advisories could be had"),
    ],
    ids=["none", "one", "a mirror that knows no package", "no service"],
)
def test_an_advisory_fails_and_no_service_does_not(
    found: list[dict[str, Any]] | None, status: int, said: str, tmp_path: Path
) -> None:
    answer = json.dumps({"dependencies": found})
    program = f"import sys; print({answer!r}); sys.stderr.write('No known vulnerabilities')"
    (tmp_path / "pip_audit.py").write_text(program if found is not None else "raise OSError('no service')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, AUDIT], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.startswith(said)) == (status, True)
