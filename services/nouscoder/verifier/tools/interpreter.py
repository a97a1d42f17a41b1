"""One Python interpreter in a sandbox, whose state lasts from call to call.

INVARIANT: between two calls no process of the interpreter runs. A call that does not end within its limits ends the
interpreter with all its processes; the next call starts another. What the code does is an answer, never an error.

The sandbox is that of every candidate: the code has no network, no file of the host, and nothing of a problem's tests.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from nouscoder.domain.conversation import CallEnd, InterpreterAnswer
from nouscoder.domain.submission import Limits
from nouscoder.verifier.sandbox.base import Dialogue, Exit, Program, RunResult, Sandbox, SandboxError
from nouscoder.verifier.toolchains.languages import installed

_KEPT_BYTES = 32 * 1024  # of an output: so many of its beginning, and as many of its end
_OUTPUT_BYTES = 4 * 1024**2  # of an interpreter's whole life
_PROCESSES = 32
_ENDS = {
    Exit.EXITED: CallEnd.EXITED,
    Exit.SIGNALLED: CallEnd.EXITED,
    Exit.TIME_LIMIT: CallEnd.TIME_LIMIT,
    Exit.MEMORY_LIMIT: CallEnd.MEMORY_LIMIT,
    Exit.OUTPUT_LIMIT: CallEnd.OUTPUT_LIMIT,
}


@dataclass(frozen=True, slots=True)
class InterpreterLimits:
    """The limits of an interpreter. `life_s` bounds its life with the time between calls."""

    call_s: float
    life_s: float
    memory_bytes: int
    open_patience_s: float = 60.0

    def of_program(self) -> Limits:
        """The limits that the sandbox enforces."""
        return Limits(self.life_s, self.life_s, self.memory_bytes, _OUTPUT_BYTES, _PROCESSES)


class Interpreter:
    """Use by one task at a time. `close` ends it."""

    def __init__(self, sandbox: Sandbox, limits: InterpreterLimits) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._dialogue: Dialogue | None = None
        self._stack = AsyncExitStack()

    async def run(self, code: str) -> InterpreterAnswer:
        """Run `code` after all code before. Raises SandboxError when the sandbox fails; the state is then lost."""
        try:
            dialogue = await self._started()
            answer = await self._call(dialogue, code.encode("utf-8", "surrogatepass"))
        except BaseException:
            await self.close()
            raise
        if answer.end is not CallEnd.DONE:
            await self.close()
        return answer

    async def close(self) -> None:
        """End the interpreter with all its processes. A later call starts another."""
        stack, self._stack, self._dialogue = self._stack, AsyncExitStack(), None
        await stack.aclose()

    async def _started(self) -> Dialogue:
        if self._dialogue is None:
            program = Program(installed()["python"], _cells(), self._limits.of_program())
            try:
                async with asyncio.timeout(self._limits.open_patience_s):
                    self._dialogue = await self._stack.enter_async_context(self._sandbox.dialogue(program))
            except TimeoutError:
                raise SandboxError("the sandbox did not start an interpreter in time") from None
        return self._dialogue

    async def _call(self, dialogue: Dialogue, code: bytes) -> InterpreterAnswer:
        mark = b"\0" + secrets.token_hex(16).encode()  # a new one for each call, so that no output ends it by chance
        heard = bytearray()
        try:
            async with asyncio.timeout(self._limits.call_s):
                await dialogue.say(b"%s %d\n%s" % (mark, len(code), code))
                while (at := heard.find(mark)) < 0:
                    part = await dialogue.hear(self._limits.call_s)
                    if isinstance(part, RunResult):
                        return InterpreterAnswer(_ENDS[part.exit], clipped(heard))
                    heard += part
        except TimeoutError:
            return InterpreterAnswer(CallEnd.TIME_LIMIT, clipped(heard))
        result = await dialogue.hold()
        end = CallEnd.DONE if result is None else _ENDS[result.exit]
        return InterpreterAnswer(end, clipped(heard[:at]))


def clipped(output: bytes | bytearray) -> str:
    """The output as text, without the middle of a long one."""
    if len(output) > 2 * _KEPT_BYTES:
        num_left_out = len(output) - 2 * _KEPT_BYTES
        output = b"%s\n[%d bytes left out]\n%s" % (output[:_KEPT_BYTES], num_left_out, output[-_KEPT_BYTES:])
    return output.decode("utf-8", "replace")


@cache
def _cells() -> str:
    return Path(__file__).with_name("cells.py").read_text("utf-8")
