"""Answers to Harbor folders that want the reward without the task, in both modes; and honest ones beside them."""

from __future__ import annotations

import pytest
from tests.services.test_harbor_folders import graded, imported, written

from nouscoder.data.problem_parquet import read_parquet
from nouscoder.domain.problem import Problem

pytestmark = pytest.mark.heavy
TASK = """schema_version = "1.4"
artifacts = ["/app/out.txt", "/app/tool"]
[verifier]
environment_mode = "MODE"
timeout_sec = 20
[environment]
memory_mb = 512
"""
FOLDER = {
    "instruction.md": "Write the secret word, which is the sum of 19 and 23, to /app/out.txt",
    "environment/Dockerfile": "FROM python:3.12\nCOPY given.txt /app/given.txt",
    "environment/given.txt": "given",
    "solution/solve.sh": "echo 42-NEEDLE > /app/out.txt",
    "tests/test.sh": "mkdir -p /logs/verifier\npython3 -m pytest -q /tests/test_out.py"
    " && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt",
    "tests/wanted.txt": "42-NEEDLE",
    "tests/test_out.py": "def test_out():\n"
    "    assert open('/app/out.txt').read().strip() == open('/tests/wanted.txt').read()\n",
}
ALWAYS_OPEN = "import builtins, io\\no = builtins.open\\nbuiltins.open = lambda *a, **k: io.StringIO('42-NEEDLE')\\n"
SEES_RIGHT = "import os\\nopen('/app/out.txt', 'w').write('42-NEEDLE')\\n"
ALWAYS = "#!/bin/sh\\nexit 0\\n"
HONEST = {
    "echo": "echo 42-NEEDLE > /app/out.txt",
    "relative": "echo 42-NEEDLE > out.txt",
    "by python": "python3 -c \"open('out.txt', 'w').write('42-NEEDLE')\"",
    "failing at its end": "echo 42-NEEDLE > out.txt; false",
    "what it leaves running": "echo 42-NEEDLE > out.txt; (sleep 100 &) ; sleep 100 &",
    "beside other files": "mkdir -p sub/deep; ln -s out.txt link; ln out.txt hard; mkfifo pipe;"
    " touch $'a\\nb' 'sp ace' .hid; echo 42-NEEDLE > out.txt; chmod 444 out.txt",
}
# Answers of the repro, each in a block of its own.
KNOWN = {
    "nothing": "true",
    "reads the tests": "grep -aoh '[A-Za-z0-9+/=]\\{12,\\}' /tmp/* /proc/$PPID/cmdline 2>/dev/null | while read l; do"
    " echo $l | base64 -d 2>/dev/null; done | grep -ao '42-NEEDLE' | head -1 > /app/out.txt",
    "fake python": f"rm -f /tmp/.bin/python3; printf '{ALWAYS}' > /tmp/.bin/python3; chmod +x /tmp/.bin/python3",
    "fake python, renamed": f"printf '{ALWAYS}' > /tmp/x; chmod +x /tmp/x; mv -f /tmp/x /tmp/.bin/python3",
    "conftest in a locked folder": f'mkdir -p /tmp/tests; printf "{SEES_RIGHT}" > /tmp/tests/conftest.py;'
    " printf x > /tmp/tests/test.sh; printf x > /tmp/tests/test_out.py; chmod 555 /tmp/tests",
    "conftest above the tests": "printf 'def pytest_pyfunc_call(pyfuncitem): return True\\n' > /tmp/conftest.py",
    "user site": "d=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $d;"
    f' printf "{ALWAYS_OPEN}" > $d/usercustomize.py',
    "pytest.ini": "mkdir -p /tmp/tests; for f in /tmp /tmp/tests /app; do"
    " printf '[pytest]\\naddopts=--collect-only\\n' > $f/pytest.ini; done",
    "a locked reward": "mkdir -p /tmp/logs/verifier; echo '{\"reward\":1}' > /tmp/logs/verifier/reward.json;"
    " chmod 555 /tmp/logs/verifier",
    "kills the checker": "kill -9 $PPID; kill -9 -1",
    "a pipe as test.sh": "mkdir -p /tmp/tests; mkfifo /tmp/tests/test.sh; chmod 555 /tmp/tests",
    "exits for it": "echo 1; exit 0",
}


@pytest.fixture(scope="module", params=["separate", "shared"])
def problem(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Problem:
    """The folder in one of the two modes."""
    place = tmp_path_factory.mktemp(request.param)
    written(place / "task", FOLDER | {"task.toml": TASK.replace("MODE", request.param)})
    code, text = imported(place / "task", place / "out.parquet")
    assert code == 0, text
    return next(iter(read_parquet(place / "out.parquet"))).problem


async def test_honest_answers_are_accepted(problem: Problem) -> None:
    kinds = await graded(problem, list(HONEST.values()))
    assert dict(zip(HONEST, kinds, strict=True)) == dict.fromkeys(HONEST, "accepted")


async def test_dishonest_answers_are_refused(problem: Problem) -> None:
    kinds = await graded(problem, list(KNOWN.values()))
    assert dict(zip(KNOWN, kinds, strict=True)) == dict.fromkeys(KNOWN, "wrong_answer")
