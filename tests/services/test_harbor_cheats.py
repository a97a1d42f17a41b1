"""Answers to Harbor folders that want the reward without the task, in both modes; and honest ones beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.services.test_harbor_folders import graded, imported, written

from nouscoder.data.problem_parquet import read_parquet
from nouscoder.domain.problem import Problem

pytestmark = pytest.mark.heavy
TASK = """schema_version = "1.4"
artifacts = ["ARTIFACT", "/app/tool"]
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


# Answers that leave files in /app, where `python3 -m pytest` and other commands of the tests start.
_PASSES = "import os; open('/app/out.txt', 'w').write('42-NEEDLE')"
PLANTED = {
    **{
        f"module {name}": f'echo "{_PASSES}" > {name}.py'
        for name in ("pytest", "pluggy", "iniconfig", "re", "encodings", "sitecustomize", "usercustomize", "conftest")
    },
    "what others import if it is there": "mkdir -p org/python; for one in org/__init__ org/python/core"
    f' typing_extensions argcomplete trio numpy_ simplejson readline colorama; do echo "{_PASSES}" > $one.py; done',
    "packages": f'for one in _pytest json site; do mkdir -p $one; echo "{_PASSES}" > $one/__init__.py; done',
    "a plugin": f'echo "{_PASSES}" > evil.py; mkdir evil-1.dist-info;'
    " printf 'Metadata-Version: 2.1\nName: evil\nVersion: 1\n' > evil-1.dist-info/METADATA;"
    " printf '[pytest11]\nevil = evil\n' > evil-1.dist-info/entry_points.txt",
    "a .pth": f'echo "{_PASSES}" > all.pth; mkdir -p lib/python3.11/site-packages;'
    " cp all.pth lib/python3.11/site-packages",
    "configuration of pytest": "for one in pytest.ini .pytest.ini tox.ini; do"
    " printf '[pytest]\naddopts=--co\n' > $one; done;"
    " printf '[tool:pytest]\naddopts=--co\n' > setup.cfg;"
    " printf '[tool.pytest.ini_options]\naddopts=\"--co\"\n' > pyproject.toml",
    "start of a shell": "for one in .bashrc .profile .bash_profile .bash_env .env; do echo 'exit 0' > $one; done;"
    f" mkdir -p .bin; printf '{ALWAYS}' | tee python3 bash mkdir pytest .bin/python3 > /dev/null; chmod +x * .bin/*",
    "environment of a virtual one": f"printf 'home = /app\n' > pyvenv.cfg; printf '{ALWAYS}' > env; ln -s env python",
}
HONEST_MODULES = {
    "a module": "printf 'def word():\n    return \"42-NEEDLE\"\n' > secret.py",
    "a package": "mkdir secret; printf 'from .one import word\n' > secret/__init__.py; touch secret/__main__.py;"
    " printf 'def word():\n    return \"42-NEEDLE\"\n' > secret/one.py",
    "a program with a module of its own": "printf 'word = lambda: \"42-NEEDLE\"\n' > queue.py;"
    " printf 'import queue\nprint(queue.word())\n' > main.py",
}
# Tests that use the modules of an answer in each way that Python knows.
OF_MODULES = {
    "tests/test.sh": "mkdir -p /logs/verifier; cd /app\n"
    "if [ -f main.py ]; then [ $(python3 main.py) = $(cat /tests/wanted.txt) ]; else"
    " python3 -m pytest -q /tests/test_out.py && [ $(python3 -c 'import secret; print(secret.word())') = 42-NEEDLE ]"
    " && echo 'import secret' | python3 - && python3 -m secret && python3 /tests/by_path.py; fi\n"
    "echo $((1 - $?)) > /logs/verifier/reward.txt",
    "tests/test_out.py": "import secret, helper\ndef test_out():\n    assert secret.word() == helper.wanted\n",
    "tests/helper.py": "wanted = open('/tests/wanted.txt').read()\n",
    "tests/by_path.py": "import sys, helper\nsys.path.insert(0, '/app')\nimport secret\n"
    "assert secret.word() == helper.wanted\n",
    "solution/solve.sh": HONEST_MODULES["a module"],
}


def problem_of(place: Path, mode: str, artifact: str, files: Mapping[str, str]) -> Problem:
    """The folder in one of the two modes, imported."""
    task = TASK.replace("MODE", mode).replace("ARTIFACT", artifact)
    written(place / "task", FOLDER | {"task.toml": task} | dict(files))
    code, text = imported(place / "task", place / "out.parquet")
    assert code == 0, text
    return next(iter(read_parquet(place / "out.parquet"))).problem


@pytest.fixture(scope="module", params=["separate", "shared"])
def problem(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Problem:
    """The folder in one of the two modes."""
    return problem_of(tmp_path_factory.mktemp(request.param), request.param, "/app/out.txt", {})


async def test_honest_answers_are_accepted(problem: Problem) -> None:
    kinds = await graded(problem, list(HONEST.values()))
    assert dict(zip(HONEST, kinds, strict=True)) == dict.fromkeys(HONEST, "accepted")


async def test_dishonest_answers_are_refused(problem: Problem) -> None:
    kinds = await graded(problem, list(KNOWN.values()))
    assert dict(zip(KNOWN, kinds, strict=True)) == dict.fromkeys(KNOWN, "wrong_answer")


@pytest.mark.parametrize("mode", ["separate", "shared"])
async def test_files_of_an_answer_never_replace_what_tests_are_run_with(tmp_path: Path, mode: str) -> None:
    folder = await asyncio.to_thread(problem_of, tmp_path, mode, "/app", {})
    kinds = await graded(folder, list(PLANTED.values()))
    assert dict(zip(PLANTED, kinds, strict=True)) == dict.fromkeys(PLANTED, "wrong_answer")


@pytest.mark.parametrize("mode", ["separate", "shared"])
async def test_tests_can_import_the_modules_of_an_answer(tmp_path: Path, mode: str) -> None:
    folder = await asyncio.to_thread(problem_of, tmp_path, mode, "/app", OF_MODULES)
    kinds = await graded(folder, list(HONEST_MODULES.values()))
    assert dict(zip(HONEST_MODULES, kinds, strict=True)) == dict.fromkeys(HONEST_MODULES, "accepted")
