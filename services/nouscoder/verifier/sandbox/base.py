"""The seam between grading and isolation: a backend runs one submission's tests and says what each process did.

A backend never sees an expected output, so nothing it runs can leak one. Backends are chosen by configuration in
`nouscoder.verifier.sandbox.open_sandbox`; nobody branches on a backend's type.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from nouscoder.errors import NousCoderError, Unusable
from nouscoder.submission import Limits


class Exit(StrEnum):
    """How the test's process tree ended, as the sandbox saw it; the grader turns it into an outcome."""

    EXITED = "exited"  # by itself; see exit_code
    SIGNALLED = "signalled"  # killed by a signal that we did not send; see signal
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"


@dataclass(frozen=True, slots=True)
class Program:
    """What a submission's tests share. `entry_point` is None for a stdin program.

    With an entry point the harness calls it with the arguments of each run (JSON on `Run.stdin`:
    {"args": [...], "kwargs": {...}}) and returns the result as JSON in `RunResult.result`.
    """

    language: str
    code: str
    limits: Limits
    entry_point: str | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one process run did. Output is raw: comparing is the grader's work.

    `result` is the candidate's returned value as encoded JSON for call tests: None when the process ended without
    returning one, and "!" with the type's name (so not JSON, a wrong answer) when the value has no JSON form. It is
    hostile input like `stdout`. `stderr` is its last 64 KiB; `stdout` is whole, but 64 KiB of it past OUTPUT_LIMIT.
    """

    exit: Exit
    exit_code: int
    signal: int
    wall_time_s: float
    cpu_time_s: float
    memory_bytes: int
    stdout: bytes
    stderr: bytes
    result: bytes | None = None


class SandboxError(NousCoderError):
    """The sandbox failed, not the candidate. The grader retries on another slot, then answers internal_error."""


class SandboxUnavailable(SandboxError, Unusable):
    """The host cannot give the isolation asked for; the message says what is missing and how to get it."""


class CompileFailed(Exception):
    """The candidate's code does not compile: a verdict, not an error of ours. `detail` is the compiler's message."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class Session(Protocol):
    """One submission inside one fresh sandbox. Runs are sequential; each is a fresh process in a clean file system."""

    async def run(self, stdin: bytes) -> RunResult:
        """Run the program once. Raises SandboxError when the sandbox (not the candidate) fails."""
        ...


class Sandbox(Protocol):
    """A pool of `num_slots` sandboxes of one backend."""

    name: str
    num_slots: int

    async def start(self) -> None:
        """Bring the slots up. Raises SandboxUnavailable with one clear sentence."""
        ...

    def session(self, program: Program) -> AbstractAsyncContextManager[Session]:
        """A fresh sandbox for one submission; waits for a free slot; leaving it kills everything inside.

        Raises CompileFailed on entry when the code does not compile, SandboxError when no sandbox could be made.
        """
        ...

    async def close(self) -> None:
        """Kill every process of every slot and wait for them."""
        ...
