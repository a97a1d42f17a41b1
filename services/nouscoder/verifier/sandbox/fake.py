"""The `fake` backend for others' tests: no process is started, results come from a table.

INVARIANT: at most `num_slots` sessions are open at once, in the order they asked, as with every backend.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from nouscoder.verifier.sandbox.base import CompileFailed, Exit, Program, RunResult, SandboxError

Behaviour = Callable[[bytes], RunResult]


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
    """What a program that the table does not know does: print its input."""
    return ended(stdin)


class FakeSandbox:
    """`table` maps a program's code to what its runs give; a behaviour may raise SandboxError.

    Code that does not compile as Python raises CompileFailed, as everywhere; nothing of it is executed.
    """

    name = "fake"

    def __init__(self, table: Mapping[str, Behaviour] | None = None, num_slots: int = 2) -> None:
        self.num_slots = num_slots
        self.num_runs = 0
        self.num_sessions = 0
        self._table = dict(table or {})
        self._slots = asyncio.Semaphore(num_slots)
        self._open = False

    async def start(self) -> None:
        """Open for sessions."""
        self._open = True

    @contextlib.asynccontextmanager
    async def session(self, program: Program) -> AsyncIterator[FakeSession]:
        """See `Sandbox.session`."""
        if not self._open:
            raise SandboxError("the sandbox is not open")
        async with self._slots:
            self.num_sessions += 1
            try:
                compile(program.code, "main.py", "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                raise CompileFailed(f"{type(error).__name__}: {error}") from error
            yield FakeSession(self, self._table.get(program.code, echo))

    async def close(self) -> None:
        """Refuse sessions from now on."""
        self._open = False


class FakeSession:
    """One submission."""

    def __init__(self, sandbox: FakeSandbox, behaviour: Behaviour) -> None:
        self._sandbox = sandbox
        self._behaviour = behaviour

    async def run(self, stdin: bytes) -> RunResult:
        """See `Session.run`."""
        self._sandbox.num_runs += 1
        await asyncio.sleep(0)
        return self._behaviour(stdin)
