"""One submission in one slot, over the frame protocol. Used by every backend whose slots run the harness.

INVARIANT: after an unexpected answer the slot is stopped, and the session raises only SandboxError. After `hold` of a
dialogue has returned None, none of the program's processes runs until the next `say`. What a program itself causes is a
result.

In a dialogue (see frames.py: DIALOGUE, INPUT, OUTPUT, HOLD) a program talks with the gateway, or with the program of
another session. Two slots with a socket to each other connect their programs by pipes, so that no byte passes through
the gateway. Otherwise (two gVisor sandboxes) the gateway copies the output of each to the input of the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from nouscoder.config import SandboxSection
from nouscoder.verifier.harness import frames
from nouscoder.verifier.harness.frames import FrameKind
from nouscoder.verifier.sandbox.base import (
    NO_FILES,
    CompileFailed,
    CompileStarved,
    Exit,
    OutOfMemory,
    Program,
    RunResult,
    SandboxError,
    Session,
    check_run_input,
    longest_run_s,
)
from nouscoder.verifier.sandbox.compile_cache import CompileCache, key_of
from nouscoder.verifier.sandbox.slot import Slot, SlotEnded
from nouscoder.verifier.toolchains.languages import with_memory_limit

_PYTHON_COMPILE_TIME_S = 10.0
_MOST_TIMES = 4.0  # the compile time, in wall time while others have the CPU; as in harness/init/program.c
# What the slot itself may need during a run, in addition to what it holds before: the next sandbox is made meanwhile.
_OWN_CPU_S, _OWN_BYTES = 0.25, 48 * 1024**2
_STEP_BYTES = 16 * 1024**2  # the group's limit changes in steps, so that most runs need no change
_OUT_OF_MEMORY = RunResult(Exit.MEMORY_LIMIT, 0, signal.SIGKILL, 0.0, 0.0, 0, b"", b"")


class SlotSession:
    """One submission in one slot."""

    def __init__(
        self, slot: Slot, program: Program, config: SandboxSection, compiled: CompileCache | None = None
    ) -> None:
        self.slot = slot
        self.program = program
        is_kept = compiled is not None and compiled.keeps and program.language.compile is not None
        self._compiled = compiled if is_kept else None
        self._compiler_output = b""
        self._grace_s = config.grace_s
        self._num_killed = 0
        self._held_bytes = 0  # of the slot's group before the first run
        self._cpu_before_s = 0.0  # of the slot's group before the current run
        self._out_of_memory = False  # the kernel killed the slot's own processes; the next run needs a new one
        self._running = False
        by_exec = program.language.run is not None
        self._compile_time_s = config.compile_time_s if by_exec else _PYTHON_COMPILE_TIME_S

    def begin(self) -> None:
        """Take the slot, which must be usable."""
        has_files = bool(self.program.fetch) or self._compiled is not None
        self.slot.begin(frames.session_bound(self.program.limits.output_bytes, has_files=has_files))

    async def compile(self) -> None:
        """Send the program. Raises CompileFailed, CompileStarved, OutOfMemory, SandboxError."""
        key = key_of(self.program) if self._compiled is not None else None
        known = self._compiled.get(key) if self._compiled is not None and key is not None else None
        payload = self._packed(known and known[1], wants_program=key is not None and known is None)
        try:
            kind, detail = await self._begin(payload)
        except SlotEnded:  # during the previous session or while idle: nothing of this session has run
            await self.slot.ensure_usable()
            self.begin()
            try:
                kind, detail = await self._begin(payload)
            except SandboxError as error:
                await self._blame_memory(error)
                raise
        if kind is FrameKind.COMPILE_FAILED:
            raise CompileFailed(detail.decode("utf-8", "replace"))
        if kind is FrameKind.COMPILE_STARVED:
            raise CompileStarved(f"other work kept the compiler from the CPU in slot {self.slot.index}")
        if kind is not FrameKind.COMPILED:
            await self._refuse(f"answered {kind.name} to a program")
        said, made = await self._unpacked_files(detail)
        self._compiler_output = said if known is None else known[0]
        if self._compiled is not None and key is not None and known is None and made is not None:
            self._compiled.put(key, detail)

    def _packed(self, made: Mapping[str, bytes] | None, *, wants_program: bool) -> bytes:
        """The payload of PROGRAM. `made` is what the compiler made, if the program was compiled before."""
        limits, language = self.program.limits, self.program.language
        program_limits = frames.ProgramLimits(
            compile_time_s=self._compile_time_s,
            cpu_time_s=limits.cpu_time_s,
            wall_time_s=limits.wall_time_s,
            memory_bytes=limits.memory_bytes,
            extra_space_bytes=language.memory_extra_bytes,
            output_bytes=limits.output_bytes,
            processes=limits.processes,
        )
        return frames.pack_program(
            self.program.code.encode("utf-8", "surrogatepass"),  # lone surrogates do not compile
            limits=program_limits,
            entry_point=self.program.entry_point or "",
            prelude=self.program.prelude,
            source_name=language.source_name,
            compile_argv=language.compile if made is None else None,
            run_argv=with_memory_limit(language.run, limits.memory_bytes),
            files=self.program.files,
            made=made or NO_FILES,
            makes_file=self.program.makes_file,
            fetch=self.program.fetch,
            wants_program=wants_program,
        )

    async def _unpacked_files(self, payload: bytes) -> tuple[bytes, Mapping[str, bytes] | None]:
        if not payload:  # Python has no compiler that says or makes something
            return b"", None
        try:
            return frames.unpack_files(payload)
        except ValueError as error:
            await self._refuse(f"sent invalid files: {error}")

    def bound_memory(self) -> None:
        """Bound the memory of the runs to come: what the kernel counts beyond what the slot holds now."""
        self._held_bytes = self.slot.group.held_bytes()

    async def _begin(self, payload: bytes) -> tuple[FrameKind, bytes]:
        """Send the program without waiting for the end of the previous session. Returns the answer."""
        try:
            await self.slot.send(FrameKind.PROGRAM, payload)
            await self.slot.await_ready()
        except SandboxError:
            await self.slot.stop()
            raise
        self._num_killed = self.slot.group.num_killed()
        return await self.receive(_MOST_TIMES * self._compile_time_s)

    async def run(
        self, stdin: bytes, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> RunResult:
        """See `Session.run`. Raises RuntimeError when another run of this session is in progress."""
        check_run_input(self.program, args, files)
        with self._one_at_a_time():
            await self._reopen_if_killed()
            try:
                await self._prepare_run(args, files, len(stdin))
                await self.slot.send(FrameKind.RUN, stdin)
                kind, payload = await self.receive(longest_run_s(self.program.limits))
            except SandboxError as error:
                if await self._is_killed():
                    return _OUT_OF_MEMORY
                await self._blame_memory(error)
                raise
            if kind is not FrameKind.RESULT:
                await self._refuse(f"answered {kind.name} to a run")
            result = await self.to_result(payload)
            if self.program.fetch or self._compiler_output:
                result = replace(result, files=await self._fetched(), compiler_output=self._compiler_output)
            return result

    async def _fetched(self) -> Mapping[str, bytes]:
        """The files that follow a result, if the program has any to fetch."""
        if not self.program.fetch:
            return NO_FILES
        kind, payload = await self.receive(self._compile_time_s)
        _, files = await self._unpacked_files(payload)
        if kind is not FrameKind.FILES or files is None or not files.keys() <= set(self.program.fetch):
            await self._refuse("sent other files than those of the run")
        return files

    def _was_short_of_memory(self) -> bool:
        """Whether the kernel has killed a process of this session because the slot's group ran out of memory."""
        before, self._num_killed = self._num_killed, self.slot.group.num_killed()
        return self._num_killed > before

    async def dialogue_with(
        self, other: Session, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> tuple[RunResult, RunResult]:
        if not isinstance(other, SlotSession):
            raise TypeError("the two sessions of a dialogue are opened together")
        check_run_input(other.program, args, files)
        with self._one_at_a_time(), other._one_at_a_time():
            await self._reopen_if_killed()
            await other._reopen_if_killed()
            try:
                await self._prepare_run((), NO_FILES, 0)
                await other._prepare_run(args, files, 0)
                is_direct = self.slot.has_dialogue_socket and other.slot.has_dialogue_socket
                faults: ExceptionGroup[SandboxError]
                try:
                    return await (_by_pipes(self, other) if is_direct else _by_gateway(self, other))
                except* SandboxError as errors:
                    faults = errors
                raise SandboxError(str(faults.exceptions[0])) from faults
            except SandboxError as error:
                if await self._is_killed():
                    await other._abandon()
                    return _OUT_OF_MEMORY, _OUT_OF_MEMORY
                await self._blame_memory(error)
                raise

    async def start_dialogue(self) -> SlotDialogue:
        """Start the program for `Sandbox.dialogue`. Nothing else runs in this session afterwards."""
        await self._prepare_run((), NO_FILES, 0)
        await self.slot.send(FrameKind.DIALOGUE)
        return SlotDialogue(self)

    async def _is_killed(self) -> bool:
        """After a SandboxError: whether the kernel killed the slot itself, instead of the program, for its memory.

        It counts memory that belongs to no process, such as the buffers of sockets.
        """
        if not self._was_short_of_memory():
            return False
        await self._abandon()
        return True

    async def _blame_memory(self, error: SandboxError) -> None:
        """Raises OutOfMemory instead of `error` when the slot ended together with what it runs on, for its memory."""
        if await self.slot.launch.lacked_memory():
            raise OutOfMemory(f"what slot {self.slot.index} ran on was killed for lack of memory") from error

    async def _abandon(self) -> None:
        await self.slot.stop()
        self._out_of_memory = True

    async def _reopen_if_killed(self) -> None:
        """Start the slot again and compile again, so that the other tests of the submission can run."""
        if self._out_of_memory:
            await self.slot.ensure_usable()
            self.begin()
            await self.compile()
            self.bound_memory()
            self._out_of_memory = False

    async def _prepare_run(self, args: tuple[str, ...], files: Mapping[str, bytes], num_stdin_bytes: int) -> None:
        # Files of the input and the output are memory too, but not the program's. Files in /tmp are.
        moved_bytes = num_stdin_bytes + sum(map(len, files.values())) + self.program.limits.output_bytes
        steps = -(-moved_bytes // _STEP_BYTES)
        allowed = self.program.limits.memory_bytes + steps * _STEP_BYTES
        self.slot.group.limit(memory=self._held_bytes + allowed + _OWN_BYTES)
        self._cpu_before_s = self.slot.group.cpu_s()
        if args or files:
            await self.slot.send(FrameKind.ARGUMENTS, frames.pack_arguments(args, files))

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if self._running:
            raise RuntimeError("runs of one session are sequential")
        self._running = True
        try:
            yield
        finally:
            self._running = False

    async def to_result(self, payload: bytes) -> RunResult:
        """The result in a RESULT frame. Stops the slot and raises SandboxError for an invalid one."""
        try:
            r = frames.unpack_result(payload)
        except ValueError as error:
            await self._refuse(f"sent an invalid result: {error}")
        # The kernel may have killed another process than the one whose end is reported.
        exit_ = Exit.MEMORY_LIMIT if self._was_short_of_memory() else Exit[frames.RunEnd(r.ended).name]
        # The harness does not see the CPU time of processes that nobody waited for.
        group_s = self.slot.group.cpu_s() - self._cpu_before_s - _OWN_CPU_S
        if exit_ in (Exit.EXITED, Exit.SIGNALLED) and group_s > self.program.limits.cpu_time_s:
            exit_ = Exit.TIME_LIMIT
        return RunResult(exit_, *r._replace(cpu_time_s=max(r.cpu_time_s, group_s))[1:])

    async def receive(self, limit_s: float) -> tuple[FrameKind, bytes]:
        """The next frame. Stops the slot and raises SandboxError when none comes in time."""
        try:
            return await self.slot.receive(limit_s + self._grace_s)
        except SandboxError:
            await self.slot.stop()
            raise

    async def _refuse(self, said: str) -> NoReturn:
        """Stop the slot, because of what it said. Raises SandboxError."""
        await self.slot.stop()
        raise SandboxError(f"slot {self.slot.index} {said}")


class SlotDialogue:
    """Implements `Dialogue` for a session whose slot has just been sent DIALOGUE."""

    def __init__(self, session: SlotSession) -> None:
        self._session = session
        self._left_bytes = frames.session_bound(session.program.limits.output_bytes)  # of all output
        self._output_ended = False
        self._result: RunResult | None = None

    async def say(self, data: bytes) -> None:
        await self._send(FrameKind.INPUT, data)

    async def hear(self, limit_s: float) -> bytes | RunResult:
        async with asyncio.timeout(limit_s):
            kind, payload = await self._next(limit_s)
        return payload if kind is FrameKind.OUTPUT or self._result is None else self._result

    async def hold(self) -> RunResult | None:
        await self._send(FrameKind.HOLD)
        kind = FrameKind.OUTPUT
        while kind is FrameKind.OUTPUT:
            kind, _ = await self._next(0.0, FrameKind.HELD)
        return self._result

    async def _send(self, kind: FrameKind, data: bytes = b"") -> None:
        if self._result is not None:
            return
        try:
            await self._session.slot.send(kind, data)
        except SandboxError as error:
            await self._end_or_raise(error)

    async def _next(self, limit_s: float, *expected: FrameKind) -> tuple[FrameKind, bytes]:
        """The next frame: OUTPUT, RESULT (kept in `_result`), or one of `expected`. OUTPUT_END is passed over, once."""
        if self._result is not None:
            return FrameKind.RESULT, b""
        try:
            kind, payload = await self._session.receive(limit_s)
            if kind is FrameKind.OUTPUT_END and not payload and not self._output_ended:
                self._output_ended = True
                kind, payload = await self._session.receive(limit_s)
        except SandboxError as error:
            await self._end_or_raise(error)
            return FrameKind.RESULT, b""
        self._left_bytes -= len(payload)
        if kind is FrameKind.RESULT:
            self._result = await self._session.to_result(payload)
        elif kind not in expected and (kind is not FrameKind.OUTPUT or not payload or self._left_bytes < 0):
            await self._session._refuse(f"answered {kind.name} in a dialogue")
        return kind, payload

    async def _end_or_raise(self, error: SandboxError) -> None:
        """End the dialogue if the program's memory was the cause of `error`, else raise it."""
        if not await self._session._is_killed():
            raise error
        self._result = _OUT_OF_MEMORY


async def _by_pipes(one: SlotSession, other: SlotSession) -> tuple[RunResult, RunResult]:
    nonce = secrets.token_bytes(frames.NONCE_BYTES)
    spare_s = max(0.0, other.program.limits.wall_time_s - one.program.limits.wall_time_s)
    await one.slot.send(FrameKind.DIRECT_DIALOGUE, frames.pack_terms(nonce, is_host=True, spare_s=spare_s))
    await other.slot.send(FrameKind.DIRECT_DIALOGUE, frames.pack_terms(nonce, is_host=False, spare_s=0.0))
    limit_s = spare_s + max(longest_run_s(one.program.limits), longest_run_s(other.program.limits))
    return await _both(_result(one, limit_s), _result(other, limit_s))


async def _result(session: SlotSession, limit_s: float) -> RunResult:
    kind, payload = await session.receive(limit_s)
    if kind is not FrameKind.RESULT:
        await session._refuse(f"answered {kind.name} in a dialogue")
    return await session.to_result(payload)


async def _by_gateway(one: SlotSession, other: SlotSession) -> tuple[RunResult, RunResult]:
    await one.slot.send(FrameKind.DIALOGUE)
    await other.slot.send(FrameKind.DIALOGUE)
    ended: set[SlotSession] = set()
    return await _both(_relay(one, other, ended), _relay(other, one, ended))


async def _both(
    one: Coroutine[Any, Any, RunResult], other: Coroutine[Any, Any, RunResult]
) -> tuple[RunResult, RunResult]:
    async with asyncio.TaskGroup() as group:
        first, second = group.create_task(one), group.create_task(other)
    return first.result(), second.result()


async def _relay(speaker: SlotSession, listener: SlotSession, ended: set[SlotSession]) -> RunResult:
    """Pass the output of `speaker` to `listener` until its program ends. Its slot is trusted with no limit."""
    now_s = asyncio.get_running_loop().time
    limits = speaker.program.limits
    end_s, left_bytes = now_s() + longest_run_s(limits), frames.session_bound(limits.output_bytes)
    speaks = True
    while True:
        kind, payload = await speaker.receive(max(0.0, end_s - now_s()))
        left_bytes -= len(payload)
        if kind is FrameKind.OUTPUT and payload and speaks and left_bytes > 0:
            await listener.slot.send(FrameKind.INPUT, payload)
        elif kind is FrameKind.OUTPUT_END and speaks:
            speaks = False
            await listener.slot.send(FrameKind.INPUT_END)
        elif kind is FrameKind.RESULT:
            result = replace(await speaker.to_result(payload), partner_ended=listener in ended)
            ended.add(speaker)
            if speaks:
                await listener.slot.send(FrameKind.INPUT_END)
            return result
        else:
            await speaker._refuse(f"answered {kind.name} in a dialogue")
