"""The seam between grading and isolation: a backend runs one submission's tests and says what each process did.

A backend never sees an expected output, so nothing it runs can leak one. Backends are chosen by configuration in
`nouscoder.verifier.sandbox.open_sandbox`; nobody branches on a backend's type.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from nouscoder.domain.submission import Limits
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.verifier.toolchains.languages import Language

NO_FILES: Mapping[str, bytes] = MappingProxyType({})
_MAX_GIVEN_BYTES = 1 << 29
_MAX_GIVEN = 256
_MAX_NAME_BYTES = 200


class Exit(StrEnum):
    """How the test's process tree ended, as the sandbox saw it; the grader turns it into an outcome."""

    EXITED = "exited"  # by itself; see exit_code
    SIGNALLED = "signalled"  # killed by a signal that we did not send; see signal
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"


@dataclass(frozen=True, slots=True)
class Program:
    """What a submission's tests share. `entry_point` is None for a program that is run as a whole.

    With an entry point the harness calls it with the arguments of each run (JSON as the run's stdin:
    {"args": [...], "kwargs": {...}}) and returns the result as JSON in `RunResult.result`. `prelude` is Python that
    is executed in the program's namespace before it. Both are python's alone (a language whose `run` is None).
    `limits` are applied as they stand: the language's `time_factor` is the caller's to apply.
    """

    language: Language
    code: str
    limits: Limits
    entry_point: str | None = None
    prelude: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError when another language is asked to do what only python does."""
        if self.language.run is not None and (self.entry_point is not None or self.prelude):
            raise ValueError(f"{self.language.name} programs have no entry point and no prelude: only python does")


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


class PartnerCompileFailed(CompileFailed):
    """The partner of a pair (a checker, an interactor) does not compile: the fault of who sent the tests."""


class Session(Protocol):
    """One submission inside one fresh sandbox. Runs are sequential; each is a fresh process in a clean file system."""

    async def run(
        self, stdin: bytes, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> RunResult:
        """Run the program once, with `args` after its name and `files` (plain names) read-only in its folder.

        Raises SandboxError when the sandbox (not the candidate) fails, ValueError for what `check_given` refuses.
        """
        ...

    async def converse(
        self, partner: Session, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> tuple[RunResult, RunResult]:
        """Run this program and `partner`'s at once, the output of each being the input of the other.

        `partner` is the second session of the same `Sandbox.pair`; `args` and `files` are the partner's. Each is told
        of the other's end by end of input. The results (this one's, the partner's) hold all that each has said. Both
        run under their own limits, wall time counting from the start of the conversation. Raises as `run` does.
        """
        ...


class Sandbox(Protocol):
    """A pool of `num_slots` sandboxes of one backend. `isolation` names the layers in force once it has started."""

    name: str
    num_slots: int

    @property
    def isolation(self) -> tuple[str, ...]:
        """For people and for Capabilities: what stands between a candidate and the host, layer by layer."""
        ...

    @property
    def runners(self) -> Mapping[str, int]:
        """How many runner pods are in each state; empty where a slot is no pod."""
        ...

    @property
    def replacements(self) -> Mapping[str, int]:
        """How many runner pods were replaced since the start, by reason; empty where a slot is no pod."""
        ...

    async def start(self) -> None:
        """Bring the slots up. Raises SandboxUnavailable with one clear sentence."""
        ...

    def session(self, program: Program) -> AbstractAsyncContextManager[Session]:
        """A fresh sandbox for one submission; waits for a free slot; leaving it kills everything inside.

        Raises CompileFailed on entry when the code does not compile, SandboxError when no sandbox could be made.
        """
        ...

    def pair(self, program: Program, partner: Program) -> AbstractAsyncContextManager[tuple[Session, Session]]:
        """As `session`, with a second fresh sandbox beside it for a checker or an interactor.

        The two share nothing. The second one is no slot of the pool: pairs wait for one slot each, as sessions do, and
        can never wait for one another. Raises PartnerCompileFailed on entry when the partner does not compile.
        """
        ...

    async def close(self) -> None:
        """Kill every process of every slot and wait for them."""
        ...


def check_given(program: Program, args: tuple[str, ...], files: Mapping[str, bytes]) -> None:
    """Raises ValueError for arguments or files that no run can be given: a name that is a path or is taken, NUL."""
    if len(args) > _MAX_GIVEN or len(files) > _MAX_GIVEN:
        raise ValueError(f"a run is given at most {_MAX_GIVEN} arguments and files")
    if any("\0" in arg for arg in args):
        raise ValueError("an argument must not hold a NUL character")
    for name in files:
        num_bytes = len(name.encode("utf8", "surrogatepass"))
        taken = name in ("", ".", "..", program.language.source_name)
        if taken or "/" in name or "\0" in name or num_bytes > _MAX_NAME_BYTES:
            raise ValueError(f"{name!r:.60} cannot be the name of a file of a run")
    if sum(map(len, files.values())) > _MAX_GIVEN_BYTES:
        raise ValueError(f"the files of a run hold at most {_MAX_GIVEN_BYTES} bytes together")
