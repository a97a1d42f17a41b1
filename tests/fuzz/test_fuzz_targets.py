"""libFuzzer finds no input that breaks a parser of hostile text. fuzz_targets.py has the properties."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

HERE = Path(__file__).parent
TARGETS = sorted(folder.name for folder in (HERE / "seeds").iterdir())
START_S = 240.0  # to import the targets and to end, on a busy machine
HANG_S = 10

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this machine: pip install atheris"
)


class Budget(Protocol):
    """See conftest.py."""

    target_s: int
    thorough: bool
    kept: Path


def run_target(target: str, *arguments: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run fuzz_targets.py in a separate process."""
    command = [sys.executable, str(HERE / "fuzz_targets.py"), target, *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit_s)


@pytest.mark.heavy  # each target starts a process that takes seconds to instrument what it imports
@pytest.mark.timeout(0)  # the processes have their own limits
@pytest.mark.parametrize("fuzz_target", TARGETS)
def test_no_input_breaks_a_target(fuzz_target: str, budget: Budget, tmp_path: Path) -> None:
    corpus = (budget.kept / "corpus" if budget.thorough else tmp_path) / fuzz_target
    crashes = budget.kept / "crashes"
    for folder in (corpus, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    done = run_target(
        fuzz_target,
        f"-max_total_time={budget.target_s}",
        f"-timeout={HANG_S}",
        "-max_len=4096",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
        f"-dict={HERE / 'words.dict'}",
        f"-artifact_prefix={crashes}/{fuzz_target}-",
        *([] if budget.thorough else ["-seed=1"]),
        str(corpus),
        str(HERE / "seeds" / fuzz_target),
        limit_s=budget.target_s + START_S,
    )
    found = re.search(r"Test unit written to (\S+)", done.stderr)
    if found:
        replay = f"{sys.executable} {HERE / 'fuzz_targets.py'} {fuzz_target} {found[1]}"
        pytest.fail(f"reproduce with: {replay}\n{done.stdout[-4000:]}\n{done.stderr[-1500:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    executed = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    assert executed is not None, done.stderr[-3000:]
    assert int(executed[1]) > 100, "too few inputs"
    print(f"{fuzz_target}: {executed[1]} inputs")


@pytest.mark.heavy
def test_a_violated_property_is_found_and_can_be_replayed(tmp_path: Path) -> None:
    """Runs the fuzzer with a comparator that is wrong on purpose."""
    broken = tmp_path / "broken.py"
    broken.write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "import fuzz_targets as t\n"
        "right = t.same_text\n"
        "t.same_text = lambda expected, actual, c: right(expected, actual, c) and b'7' not in actual\n"
        "t.main(sys.argv)\n"
    )
    command = [sys.executable, str(broken), "text"]
    options = ["-seed=1", "-runs=100000", f"-artifact_prefix={tmp_path}/", str(HERE / "seeds" / "text")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, errors="replace", timeout=START_S)
    found = re.search(r"Test unit written to (\S+)", done.stderr)
    assert found, done.stderr[-2000:]
    again = subprocess.run([*command, found[1]], capture_output=True, text=True, errors="replace", timeout=START_S)
    assert again.returncode != 0
    assert "AssertionError" in again.stdout + again.stderr
    assert run_target("text", found[1], limit_s=START_S).returncode == 0
