"""The limit of a compiler does not depend on the load: its time is the time in which it could have a CPU."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest
from tests.busy_cpu import on_a_busy_cpu

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits
from nouscoder.verifier.sandbox import (
    CompileFailed,
    CompileStarved,
    Program,
    Sandbox,
    session,
)
from nouscoder.verifier.toolchains.languages import installed

pytestmark = pytest.mark.alone

WIDE = Limits(wall_time_s=60, cpu_time_s=60)
LONG_PYTHON = "x = [" + "(1, y)," * 200_000 + "]\n"  # compiles for about 1 s
SHORT_PYTHON = "x = [" + "(1, y)," * 60_000 + "]\n"  # 0.3 s
_INCREMENTS = (
    "#define A x++;\n#define B A A A A A A A A A A\n#define C B B B B B B B B B B\n#define D C C C C C C C C C C\n"
)
LONG_C = _INCREMENTS + "int main(void) { volatile int x = 0; D D D D D D D D D D return 0; }"
SHORT_C = _INCREMENTS + "int main(void) { volatile int x = 0; D D return 0; }"
SLEEPS = "BEGIN { sleep 1000 }\nprint 1;"
NUM_HOGS = 12


@contextlib.asynccontextmanager
async def opened(backend: str, num_hogs: int, compile_time_s: float) -> AsyncIterator[Sandbox]:
    """A sandbox on one CPU that it shares with endless processes, each of a session of its own."""
    config = SandboxSection(backend=backend, slots=1, compile_time_s=compile_time_s)
    async with on_a_busy_cpu(config, num_hogs) as (sandbox, _):
        yield sandbox


def program(language: str, code: str) -> Program:
    if language not in installed():
        pytest.skip(f"no {language} here")
    return Program(installed()[language], code, WIDE)


async def how_it_ended(sandbox: Sandbox, one: Program) -> str:
    try:
        async with asyncio.timeout(120), sandbox.session(one):
            return "compiled"
    except (CompileFailed, CompileStarved) as error:
        return type(error).__name__


@pytest.mark.parametrize("backend", ["local", "runsc"])
async def test_a_compiler_that_others_keep_from_the_cpu_is_no_fault_of_the_candidate(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs more time than it may have. One that waits could have used a CPU as little."""
    monkeypatch.setattr(session, "_PYTHON_COMPILE_TIME_S", 0.2)
    async with opened(backend, NUM_HOGS, compile_time_s=0.2) as sandbox:
        for language, code in (("python", LONG_PYTHON), ("c", LONG_C), ("perl", SLEEPS)):
            assert await how_it_ended(sandbox, program(language, code)) == "CompileStarved", language


@pytest.mark.heavy
@pytest.mark.parametrize("backend", ["local", "runsc"])
async def test_a_compiler_that_gets_its_time_late_compiles(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get a ninth of a CPU, and may take four times their limit. On a busy machine even that may be too little."""
    monkeypatch.setattr(session, "_PYTHON_COMPILE_TIME_S", 2.0)
    async with opened(backend, num_hogs=8, compile_time_s=2.0) as sandbox:
        for language, code in (("python", SHORT_PYTHON), ("c", SHORT_C)):
            assert await how_it_ended(sandbox, program(language, code)) != "CompileFailed", language


SLOW = {  # programs that run while they compile
    "sleeps": SLEEPS,
    "forks children that nobody counts": "BEGIN { $SIG{CHLD} = 'IGNORE'; for (;;) { if (!(fork() // 1))"
    " { my $end = time + 1; while (time < $end) { } exit 0 } select(undef, undef, undef, 0.02); } }",
    "fills the CPU": "BEGIN { fork() for 1..6; for (;;) { } }",
    "continues what is stopped": "BEGIN { for (1..20) { last unless fork() // 1 } for (;;) { kill 'CONT', -1 } }",
}


@pytest.mark.parametrize("backend", ["local", pytest.param("runsc", marks=pytest.mark.heavy)])
async def test_a_program_cannot_pass_for_one_that_others_keep_from_the_cpu(backend: str) -> None:
    """Its own processes are stopped while the share of the CPU is measured. The load may change."""
    async with opened(backend, num_hogs=0, compile_time_s=1.0) as sandbox:
        for name, code in SLOW.items():
            assert await is_found_at_fault(sandbox, code), f"it passed for one that others keep from the CPU: {name}"


async def is_found_at_fault(sandbox: Sandbox, code: str) -> bool:
    """Whether one of four compilations is the program's fault. Skips on a machine that starves one that sleeps."""
    for _ in range(4):
        if await how_it_ended(sandbox, program("perl", code)) == "CompileFailed":
            return True
        if await how_it_ended(sandbox, program("perl", SLEEPS)) == "CompileStarved":
            pytest.skip(f"other work on this machine left less than a quarter of a CPU: load {os.getloadavg()}")
    return False
