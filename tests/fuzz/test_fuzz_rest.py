"""A real service answers valid and invalid requests as its OpenAPI document says.

schemathesis generates the requests; schemathesis.toml has the checks. A finding is printed with a curl command that
reproduces it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

HERE = Path(__file__).parent
START_S = 60.0
EXAMPLES = "4"  # for each operation, in the default run


class Verifier(Protocol):
    """See conftest.py."""

    url: str


class Budget(Protocol):
    """See conftest.py."""

    rest_s: int
    thorough: bool
    kept: Path


@pytest.mark.heavy
@pytest.mark.timeout(0)  # the process has its own limit
def test_the_rest_api_conforms_to_its_openapi_document(verifier: Verifier, budget: Budget, tmp_path: Path) -> None:
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is missing: pip install schemathesis")
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "schemathesis.toml"), "--no-color"]
    command += ["run", f"{verifier.url}/openapi.json"]
    command += ["--max-time", str(budget.rest_s)] if budget.thorough else ["--seed", "1", "--max-examples", EXAMPLES]
    folder = budget.kept if budget.thorough else tmp_path  # where `st replay` looks for findings
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=budget.rest_s + START_S,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    tried = re.search(r"(\d+) generated", done.stdout)
    assert tried is not None, done.stdout[-3000:]
    assert int(tried[1]) > 5, "too few requests"
    print(f"REST: {tried[1]} requests")
