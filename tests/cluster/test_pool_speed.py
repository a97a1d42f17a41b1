"""Runs the verifier's bench with the runner pool and with `local`, and prints both figures without judging them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nouscoder.config import SandboxSection

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(900)]

SCALE = "0.1"


@pytest.mark.parametrize("fixture", ["runner_pool", "userns_runner_pool"])
def test_the_rate_of_the_pool_is_compared_with_local(request: pytest.FixtureRequest, fixture: str) -> None:
    runner_pool: SandboxSection = request.getfixturevalue(fixture)
    pool = {
        "backend": runner_pool.backend,
        "slots": "2",
        "pool_template": runner_pool.pool_template,
        "pool_key_file": runner_pool.pool_key_file,
        "pool_spares": "0",
    }
    given = [word for key, value in pool.items() for word in ("--set", f"verifier.sandbox.{key}={value}")]
    found = {}
    for name, options in (("local", []), ("pool", given)):
        command = [sys.executable, "-m", "nouscoder", "bench", "verifier", "--scale", SCALE, "--json", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        found[name] = json.loads(done.stdout)
    for name, record in found.items():
        print(name, json.dumps(record))
    assert found["pool"].keys() == found["local"].keys()
