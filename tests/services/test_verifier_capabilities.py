"""GET /v1/capabilities: versions come from a real sandbox, are asked for once, and are null while they are unknown."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.config import SandboxSection
from nouscoder.verifier.api.capabilities import Capabilities
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.grading.grader import Grader, QueueFull
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import open_sandbox
from nouscoder.verifier.sandbox.base import Exit, Program, RunResult, SandboxError
from nouscoder.verifier.toolchains import probe_program
from nouscoder.verifier.toolchains.languages import installed
from nouscoder.verifier.toolchains.libraries import library_folders

# The judge set of the sandbox image (deploy/images/sandbox), where Debian puts it.
JUDGE_SET = [
    ("cpp", "boost", "/usr/include/boost/version.hpp"),
    ("cpp", "gmp", "/usr/include/gmpxx.h"),
    ("c", "gmp", "/usr/include/gmpxx.h"),
    ("cpp", "openssl", "/usr/include/openssl/opensslv.h"),
    ("c", "openssl", "/usr/include/openssl/opensslv.h"),
    ("javascript", "lodash", "/usr/share/nodejs/lodash/package.json"),
    ("typescript", "lodash", "/usr/share/nodejs/lodash/package.json"),
]


@pytest.fixture
async def grader() -> AsyncIterator[Grader]:
    sandbox = open_sandbox(SandboxSection(slots=1, site_packages=library_folders(["sortedcontainers"])))
    await sandbox.start()
    yield Grader(sandbox, VerifierMetrics(CollectorRegistry()))
    await sandbox.close()


async def test_the_answer_has_what_a_candidate_sees(grader: Grader) -> None:
    app = make_app(grader, CollectorRegistry(), DrainState(), 1000, capabilities=Capabilities(grader, ["seccomp"]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        answer = (await http.get("/v1/capabilities")).raise_for_status().json()
    assert answer["backend"] == "local"
    assert answer["isolation"] == ["seccomp"]
    assert answer["num_slots"] == 1
    assert set(answer["languages"]) == set(installed())
    assert answer["languages"]["python"]["version"] == f"CPython {platform.python_version()}"
    assert answer["languages"]["cpp"]["version"].startswith("g++")
    assert {"-O2", "-std=gnu++20", "-DONLINE_JUDGE"} <= set(answer["languages"]["cpp"]["flags"])
    if "rust" in answer["languages"]:
        assert answer["languages"]["rust"]["flags"] == ["-O", "--edition=2021"]
    if "java" in answer["languages"]:
        assert answer["languages"]["java"]["version"].startswith("javac ")
    assert answer["libraries"] == {"sortedcontainers": _version("sortedcontainers")}
    for language, library, file in JUDGE_SET:
        if language in installed():
            version = answer["languages"][language]["libraries"][library]
            assert version[0].isdigit() if Path(file).exists() else version is None, (library, version)
    for name, one in answer["languages"].items():  # null before, for go and rust outside of the sandbox's PATH
        assert one["version"] is not None, name
        assert "error" not in one["version"], name
    assert answer["languages"]["bash"]["libraries"] == {}
    assert answer["default_limits"]["wall_time_s"] == 15
    assert answer["max_limits"]["wall_time_s"] == 300
    assert "lcb" in answer["profiles"]
    assert "kattis" in answer["comparators"]


def test_what_a_command_says_is_a_version_only_if_it_succeeds_and_has_a_number() -> None:
    """Before, the message of a compiler that did not find a header was the version of boost."""
    asked = {
        "path": os.environ["PATH"],
        "languages": {
            "fails": ["sh", "-c", "echo 1.2; exit 1"],
            "says nothing": ["true"],
            "has no number": ["echo", "usage: x"],
            "is missing": ["nouscoder-no-such-tool"],
            "to stderr": ["sh", "-c", "echo info: x 1.2 >&2"],
            "warns": ["sh", "-c", "echo warning 7 >&2; echo x 3.4"],
        },
        "native": {"c": {"message": ["echo", "<stdin>:1:10: fatal error"], "good": ["echo", "1.74"]}},
    }
    run = subprocess.run(
        [sys.executable, probe_program.__file__], input=json.dumps(asked).encode(), capture_output=True, check=True
    )
    found = json.loads(run.stdout)
    del found["languages"]["python"]
    assert found["languages"] == {"to stderr": "info: x 1.2", "warns": "x 3.4"}
    assert found["native"] == {"c": {"good": "1.74"}}


def _version(name: str) -> str:
    import importlib.metadata

    return importlib.metadata.version(name)


class _Answers:
    """Stands in for a grader whose sandbox gives these answers in turn."""

    backend = "fake"
    num_slots = 1

    def __init__(self, *answers: RunResult | Exception) -> None:
        self.answers = list(answers)

    async def run_once(self, program: Program, stdin: bytes, files: Mapping[str, bytes]) -> tuple[RunResult, float]:
        await asyncio.sleep(0)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer, 0.0


_DONE = RunResult(Exit.EXITED, 0, 0, 0.01, 0.01, 1000, b"", b"")
_GOOD = replace(
    _DONE, stdout=json.dumps({"languages": {"python": "CPython 3.13"}, "libraries": {"a": "1"}, "native": {}}).encode()
)


@pytest.mark.parametrize(
    "failure",
    [
        QueueFull(1),
        SandboxError("lost"),
        replace(_DONE, exit=Exit.MEMORY_LIMIT),
        replace(_DONE, stdout=b"not JSON"),
        replace(
            _DONE, stdout=json.dumps({"languages": {"python": "x" * 10_000}, "libraries": {}, "native": {}}).encode()
        ),
    ],
    ids=["full queue", "sandbox", "memory", "not JSON", "too long"],
)
async def test_versions_are_null_after_a_failure_and_asked_for_again(failure: RunResult | Exception) -> None:
    grader = _Answers(failure, _GOOD)
    capabilities = Capabilities(grader, [])  # type: ignore[arg-type]
    first = await capabilities.answer()
    assert first.libraries is None
    assert first.languages["python"].version is None
    second = await capabilities.answer()
    assert second.libraries == {"a": "1"}
    assert second.languages["python"].version == "CPython 3.13"


async def test_the_program_runs_once_for_requests_at_the_same_time_and_afterwards() -> None:
    capabilities = Capabilities(_Answers(_GOOD), [])  # type: ignore[arg-type]
    answers = await asyncio.gather(*(capabilities.answer() for _ in range(5)))
    assert {answer.languages["python"].version for answer in (*answers, await capabilities.answer())} == {
        "CPython 3.13"
    }
