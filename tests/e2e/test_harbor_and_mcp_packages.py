"""Harbor's loader and lint on our folders, and mcp's clients, 1 and 2, with the service: make test-trainers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import serving

from nouscoder.http_server.api_keys import new_api_key

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "trainer_packages"
PROBLEM = {
    "problem_id": "sum/1",
    "prompt": "Print the sum of two integers.",
    "tests": {"type": "stdin", "cases": [{"input": "1 2\n", "output": "3\n"}]},
    "public_tests": {"type": "stdin", "cases": [{"input": "5 2\n", "output": "7\n"}]},
    "references": ["print(sum(map(int, input().split())))"],
}
PINNED = "python:3.12-slim@sha256:" + 64 * "0"
pytestmark = [
    pytest.mark.trainers,
    pytest.mark.skipif(
        bool(os.environ.get("NOUSCODER_WITHOUT_312")),
        reason="no Python 3.12 for Harbor: make test-trainers PYTHON_312=...",
    ),
]


def output_of(venv: str, script: str, *arguments: str) -> Any:
    """The last line of a script, as JSON. The test fails without the environment."""
    python = ROOT / venv / "bin" / "python"
    assert python.exists(), f"{python} is missing: run make test-trainers"
    command = [str(python), str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A problem file."""
    file = tmp_path_factory.mktemp("problems") / "problems.jsonl"
    file.write_text(json.dumps(PROBLEM) + "\n")
    return file


@pytest.mark.parametrize("pinned", [False, True])
def test_harbor_loads_and_lints_what_we_export(problems: Path, tmp_path: Path, pinned: bool) -> None:
    export = ["data", "export", "harbor", str(problems), "--out", str(tmp_path / "tasks")]
    command = [sys.executable, "-m", "nouscoder", *export, *(["--image", PINNED] if pinned else [])]
    subprocess.run(command, check=True, timeout=120)
    found = output_of(".venv-harbor", "harbor_tasks.py", str(tmp_path / "tasks"))
    print(f"Harbor {found['harbor']}: {found}")
    assert found["names"] == ["nouscoder/sum-1"]
    assert found["modes"] == ["separate"]
    assert found["lint"] == 0
    # The other rules are not among harbor's defaults. Agents install themselves as root.
    assert found["all_rules"] == ["root-agent"] + ([] if pinned else ["unpinned-image"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount the folders of a root")
def test_harbor_runs_what_we_export_and_gives_the_oracle_1_and_nothing_0(problems: Path, tmp_path: Path) -> None:
    """Harbor's own trials, with a separate verifier, in roots of mount namespaces in place of containers."""
    command = [
        sys.executable,
        "-m",
        "nouscoder",
        "data",
        "export",
        "harbor",
        str(problems),
        "--out",
        str(tmp_path / "tasks"),
    ]
    subprocess.run(command, check=True, timeout=120)
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    for agent, mean in (("oracle", 1.0), ("nop", 0.0)):
        command = [str(ROOT / ".venv-harbor" / "bin" / "harbor"), "run", "-p", str(tmp_path / "tasks"), "-a", agent]
        command += ["-e", "harbor_root:RootEnvironment", "-o", str(tmp_path / "jobs"), "--job-name", agent, "-y"]
        subprocess.run(command, check=True, timeout=290, env=environment, cwd=tmp_path)
        stats = json.loads((tmp_path / "jobs" / agent / "result.json").read_text())["stats"]
        (evaluation,) = stats["evals"].values()
        print(f"harbor run -a {agent}: {evaluation['metrics']}, {evaluation['n_errors']} errors")
        assert (stats["n_completed_trials"], evaluation["n_errors"]) == (1, 0)
        assert evaluation["metrics"] == [{"mean": mean}]


@pytest.fixture(scope="module")
def service(problems: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URL of a service that offers the problems, and its API key."""
    key, line = new_api_key("alice")
    folder = tmp_path_factory.mktemp("service")
    (folder / "keys").write_text(f"{line}\n")
    with serving(folder, f"verifier.problems={problems}", f"verifier.tokens_file={folder / 'keys'}") as url:
        yield f"{url}/mcp", key


@pytest.mark.parametrize(
    ("venv", "generation", "version", "protocol"),
    [
        (".venv-nemo-gym", "auto", "1.", "2025-11-25"),
        (".venv-harbor", "auto", "2.", "2026-07-28"),
        (".venv-harbor", "legacy", "2.", "2025-11-25"),
    ],
)
def test_clients_of_both_generations_list_and_call_the_tools(
    service: tuple[str, str], venv: str, generation: str, version: str, protocol: str
) -> None:
    found = output_of(venv, "mcp_client.py", *service, generation)
    print(f"mcp {found['mcp']}, {generation}: {found}")
    assert found["mcp"].startswith(version)
    assert found["protocol"] == protocol
    assert found["tools"] == ["run_code", "list_problems", "grade_on_public_tests"]
    assert found["run"]["stdout"] == "42\n"
    assert found["problems"] == ["sum/1"]
    assert found["verdicts"] == ["accepted", "wrong_answer"]
    assert "'cobol' is not installed" in found["fault"]
