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
timeout_sec = 10
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


# What an answer does beside and after its own run. None finds the tests, and nothing of it is there when they run.
_EVIL_ARCHIVE = """import io, os, sys, tarfile
import zlib
sys.path.remove('/tmp') if '/tmp' in sys.path else None
del sys.modules['gzip']
import gzip
names = ['tests/wanted.txt', '../tests/test_out.py', '/tmp/.bin/python3', 'app/../tests/conftest.py', 'app/../../x',
         'app/../logs/verifier/reward.json', 'logs/artifacts/../verifier/reward.txt', 'app/__pycache__/x.pyc']
kinds = {'app/hard': (tarfile.LNKTYPE, '/tests/wanted.txt'), 'app/device': (tarfile.CHRTYPE, ''),
         'app/up': (tarfile.SYMTYPE, '..'), 'app/out.txt': (tarfile.SYMTYPE, 'up/tests/wanted.txt')}
with tarfile.open('output', 'w:gz') as tar:
    for name in names:
        one = tarfile.TarInfo(name)
        one.size = 1
        tar.addfile(one, io.BytesIO(b'1'))
    for name, (kind, target) in kinds.items():
        one = tarfile.TarInfo(name)
        one.type, one.linkname = kind, target
        tar.addfile(one)
os._exit(0)
"""
NEW = {
    "a link to the tests": "ln -s /tests/wanted.txt out.txt",
    "a link to where the tests really are": "ln -s /tmp/tests/wanted.txt out.txt",
    "a relative link": "ln -s ../tests/wanted.txt out.txt",
    "links in a chain": "ln -s .. up; ln -s up/tests/wanted.txt out.txt",
    "a link by /proc": "ln -s /proc/self/cwd/../tests/wanted.txt out.txt",
    "a link by another process": "ln -s /proc/1/root/tmp/tests/wanted.txt out.txt; ln -s /dev/fd/0 in",
    "/app is a link": "cd /; rm -rf /tmp/app; mkdir -p /tmp/tests; ln -s /tmp/tests /tmp/app",
    "/logs/artifacts is a link": "rm -rf /tmp/logs/artifacts; mkdir -p /tmp/logs/verifier;"
    " ln -s /tmp/logs/verifier /tmp/logs/artifacts; echo 1 > /tmp/logs/verifier/reward.txt",
    "a pipe": "mkfifo out.txt",
    "a socket": "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('out.txt')\"",
    "a folder": "mkdir -p out.txt/42-NEEDLE",
    "a hard link to the runner's files": "for one in /tmp/*; do ln $one out.txt && break; done",
    "too many bytes": "head -c 200M /dev/zero > out.txt",
    "a sparse file": "truncate -s 10G out.txt",
    "a full disk": "head -c 2G /dev/zero > /tmp/fill; head -c 2G /dev/zero > /tmp/output.part",
    "many names": "for one in {1..3000}; do : > $one; done; mkdir -p $(printf 'd/%.0s' {1..900})",
    "names that are no text": "touch $'\\xff\\xfe' $'\\n' $'\\e[2J'; mkdir $'\\xff'",
    "a folder that cannot be read": "chmod 000 /tmp/app",
    "a folder that cannot be written": "chmod 555 /tmp/app /tmp/app/*; chmod 000 /tmp/logs",
    "the archive's place is taken": "mkdir -p /tmp/output/x /tmp/output.part/x",
    "the archive is a link": "ln -s /tmp/app/out.txt /tmp/output.part",
    "an archive of its own": f"cat > /tmp/gzip.py <<'E'\n{_EVIL_ARCHIVE}E\n",
    "processes that stay": 'for one in 1 2 3; do setsid nohup bash -c \'trap "" HUP TERM INT; while :; do'
    " cp /tests/wanted.txt /app/out.txt; mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done' & done",
    "a daemon that waits for the tests": 'python3 -c "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\n'
    "if os.fork(): os._exit(0)\nwhile not os.path.exists('/tests/wanted.txt'): time.sleep(0.01)\n"
    "open('/app/out.txt', 'w').write(open('/tests/wanted.txt').read())\"",
    "a trap at its end": "trap 'mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt' EXIT; kill -TERM $$",
    "what others hold open": "timeout 2 cat /proc/*/fd/* /proc/*/environ /proc/*/cmdline 2>/dev/null < /dev/null"
    " | grep -ao '4[2]-NEEDLE' | head -1 > out.txt",
    "a checker that is stopped": "kill -STOP $PPID; kill -STOP -1",
    "limits of its own": "ulimit -f 0; ulimit -n 4; ulimit -v 1000; exit 0",
    "locale and time": "echo 'LC_ALL=tr_TR' > .env; export TZ=../tests LC_ALL=tr_TR PYTEST_ADDOPTS=--co;"
    " export BASH_ENV=/app/.env PYTHONSTARTUP=/app/x.py LD_PRELOAD=/app/x.so",
    "code of Python": "mkdir -p __pycache__ /tmp/tests/__pycache__; echo x > __pycache__/test_out.cpython-311.pyc;"
    " cp __pycache__/* /tmp/tests/__pycache__/",
    "hooks": "mkdir -p .git/hooks node_modules/x;"
    " printf '#!/bin/sh\\nexit 0' | tee .git/hooks/pre-commit x.so > Makefile;"
    " printf '[core]\\nfsmonitor = /app/x.so\\n' > .git/config; chmod -R 777 .git",
}
LIMITS = {"a checker that is stopped": "time_limit_exceeded"}
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


@pytest.fixture(scope="module", params=["separate", "shared"])
def open_problem(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Problem:
    """The folder in one of the two modes, which keeps all of /app."""
    return problem_of(tmp_path_factory.mktemp(request.param), request.param, "/app", {})


async def test_files_of_an_answer_never_replace_what_tests_are_run_with(open_problem: Problem) -> None:
    kinds = await graded(open_problem, list(PLANTED.values()))
    assert dict(zip(PLANTED, kinds, strict=True)) == dict.fromkeys(PLANTED, "wrong_answer")


async def test_what_an_answer_leaves_or_takes_over_never_meets_the_tests(open_problem: Problem) -> None:
    kinds = await graded(open_problem, list(NEW.values()))
    assert dict(zip(NEW, kinds, strict=True)) == dict.fromkeys(NEW, "wrong_answer") | LIMITS


async def test_honest_answers_are_accepted_where_all_of_app_stays(open_problem: Problem) -> None:
    kinds = await graded(open_problem, list(HONEST.values()))
    assert dict(zip(HONEST, kinds, strict=True)) == dict.fromkeys(HONEST, "accepted")


@pytest.mark.parametrize("mode", ["separate", "shared"])
async def test_tests_can_import_the_modules_of_an_answer(tmp_path: Path, mode: str) -> None:
    folder = await asyncio.to_thread(problem_of, tmp_path, mode, "/app", OF_MODULES)
    kinds = await graded(folder, list(HONEST_MODULES.values()))
    assert dict(zip(HONEST_MODULES, kinds, strict=True)) == dict.fromkeys(HONEST_MODULES, "accepted")
