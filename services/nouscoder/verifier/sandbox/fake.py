"""The `fake` backend for tests. It starts no process; a table defines the results.

INVARIANT: at most `num_slots` sessions are open at once, in order of request, as with every backend.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from nouscoder.verifier.sandbox.base import (
    NO_FILES,
    CompileFailed,
    Exit,
    PartnerCompileFailed,
    Program,
    RunResult,
    Sandbox,
    SandboxError,
    Session,
    check_run_input,
)

Behaviour = Callable[[bytes], RunResult]


@dataclass(frozen=True, slots=True)
class RunInput:
    """The input of one run."""

    code: str
    stdin: bytes
    args: tuple[str, ...]
    files: Mapping[str, bytes]


def ended(
    stdout: bytes = b"",
    *,
    exit: Exit = Exit.EXITED,
    exit_code: int = 0,
    signal: int = 0,
    stderr: bytes = b"",
    result: bytes | None = None,
) -> RunResult:
    """A result with plausible measurements."""
    return RunResult(exit, exit_code, signal, 0.001, 0.001, 9_000_000, stdout, stderr, result)


def echo(stdin: bytes) -> RunResult:
    """The behaviour of a program that is not in the table: print the input."""
    return ended(stdin)


class FakeSandbox(Sandbox):
    """`table` maps the code of a program to its behaviour, which may raise SandboxError.

    Python that does not compile raises CompileFailed, as with every backend. No code is executed. `inputs` holds the
    input of every run.
    """

    name = "fake"
    isolation: tuple[str, ...] = ()

    def __init__(self, table: Mapping[str, Behaviour] | None = None, num_slots: int = 2) -> None:
        self.num_slots = num_slots
        self.num_sessions = 0
        self.inputs: list[RunInput] = []
        self._table = dict(table or {})
        self._slots = asyncio.Semaphore(num_slots)
        self._open = False

    @property
    def num_runs(self) -> int:
        """The number of runs so far."""
        return len(self.inputs)

    async def start(self) -> None:
        """Open for sessions."""
        self._open = True

    @contextlib.asynccontextmanager
    async def session(self, program: Program) -> AsyncIterator[FakeSession]:
        if not self._open:
            raise SandboxError("the sandbox is not open")
        async with self._slots:
            self.num_sessions += 1
            yield self._compiled(program)

    @contextlib.asynccontextmanager
    async def with_partners(
        self, program: Program, partner: Program, checker: Program | None = None
    ) -> AsyncIterator[tuple[FakeSession, ...]]:
        async with self.session(program) as first:
            try:
                others = [self._compiled(one) for one in (partner, checker) if one is not None]
            except CompileFailed as failure:
                raise PartnerCompileFailed(failure.detail) from failure
            yield first, *others

    @contextlib.asynccontextmanager
    async def dialogue(self, program: Program) -> AsyncIterator[FakeDialogue]:
        async with self.session(program):
            yield FakeDialogue(self._table.get(program.code, echo))

    def _compiled(self, program: Program) -> FakeSession:
        try:
            if program.language.run is None:
                compile(program.code, "main.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise CompileFailed(f"{type(error).__name__}: {error}") from error
        return FakeSession(self, program, self._table.get(program.code, echo))

    async def close(self) -> None:
        """Refuse sessions from now on."""
        self._open = False


class FakeDialogue:
    """A program that answers each input with what its behaviour prints. It ends when that is not a normal exit."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._heard: asyncio.Queue[bytes | RunResult] = asyncio.Queue()
        self._result: RunResult | None = None
        self.is_held = False

    async def say(self, data: bytes) -> None:
        self.is_held = False
        if self._result is not None:
            return
        result = self._behaviour(data)
        if result.stdout:
            self._heard.put_nowait(result.stdout)
        if result.exit is not Exit.EXITED or result.exit_code:
            self._result = result
            self._heard.put_nowait(result)

    async def hear(self, limit_s: float) -> bytes | RunResult:
        if self._result is not None and self._heard.empty():
            return self._result
        async with asyncio.timeout(limit_s):
            return await self._heard.get()

    async def hold(self) -> RunResult | None:
        self.is_held = True
        while not self._heard.empty():
            self._heard.get_nowait()
        return self._result


class FakeSession:
    """One submission."""

    def __init__(self, sandbox: FakeSandbox, program: Program, behaviour: Behaviour) -> None:
        self._sandbox = sandbox
        self._program = program
        self._behaviour = behaviour

    async def run(
        self, stdin: bytes, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> RunResult:
        check_run_input(self._program, args, files)
        self._sandbox.inputs.append(RunInput(self._program.code, stdin, args, dict(files)))
        await asyncio.sleep(0)
        return self._behaviour(stdin)

    async def dialogue_with(
        self, partner: Session, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> tuple[RunResult, RunResult]:
        """One turn: this program runs with empty input, and the partner gets its output."""
        result = await self.run(b"")
        return result, await partner.run(result.stdout, args=args, files=files)
