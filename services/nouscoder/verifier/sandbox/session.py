"""One submission in one slot, over the frame protocol. Used by every backend whose slots run the harness.

INVARIANT: after an unexpected answer the slot is stopped, and the session raises only SandboxError.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace

from nouscoder.config import SandboxSection
from nouscoder.verifier.harness import frames
from nouscoder.verifier.harness.frames import Kind
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
)
from nouscoder.verifier.sandbox.compile_cache import CompileCache, key_of
from nouscoder.verifier.sandbox.conversation import Talker, converse
from nouscoder.verifier.sandbox.dialogue import SlotDialogue
from nouscoder.verifier.sandbox.slot import Slot, SlotEnded
from nouscoder.verifier.toolchains.languages import with_memory_limit

_EXITS = {
    frames.Ended.EXITED: Exit.EXITED,
    frames.Ended.SIGNALLED: Exit.SIGNALLED,
    frames.Ended.TIME_LIMIT: Exit.TIME_LIMIT,
    frames.Ended.MEMORY_LIMIT: Exit.MEMORY_LIMIT,
    frames.Ended.OUTPUT_LIMIT: Exit.OUTPUT_LIMIT,
}
_PYTHON_COMPILE_TIME_S = 10.0
_MOST_TIMES = 4.0  # the compile time, in wall time while others have the CPU; as in harness/init/compile_time.c
# What the slot itself may need during a run, in addition to what it holds before: the next sandbox is made meanwhile.
_OWN_CPU_S, _OWN_BYTES = 0.25, 48 * 1024**2
_STEP_BYTES = 16 * 1024**2  # the group's limit changes in steps, so that most runs need no change
_OUT_OF_MEMORY = RunResult(Exit.MEMORY_LIMIT, 0, signal.SIGKILL, 0.0, 0.0, 0, b"", b"")


class SlotSession:
    """One submission in one slot."""

    def __init__(
        self, slot: Slot, program: Program, config: SandboxSection, compiled: CompileCache | None = None
    ) -> None:
        self._slot = slot
        self._compiled = compiled if compiled is not None and compiled.keeps else None
        self._compiler_output = b""
        self._program = program
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
        has_files = bool(self._program.fetch) or (
            self._compiled is not None and self._program.language.compile is not None
        )
        self._slot.begin(frames.session_bound(self._program.limits.output_bytes, has_files=has_files))

    async def compile(self) -> None:
        """Send the program. Raises CompileFailed, CompileStarved, OutOfMemory, SandboxError."""
        limits, language = self._program.limits, self._program.language
        program_limits = frames.ProgramLimits(
            compile_time_s=self._compile_time_s,
            cpu_time_s=limits.cpu_time_s,
            wall_time_s=limits.wall_time_s,
            memory_bytes=limits.memory_bytes,
            extra_space_bytes=language.memory_extra_bytes,
            output_bytes=limits.output_bytes,
            processes=limits.processes,
        )
        key = key_of(self._program) if self._compiled is not None else None
        known = self._compiled.get(key) if self._compiled is not None and key is not None else None
        payload = frames.pack_program(
            self._program.code.encode("utf-8", "surrogatepass"),  # lone surrogates do not compile
            limits=program_limits,
            entry_point=self._program.entry_point or "",
            prelude=self._program.prelude,
            source_name=language.source_name,
            compile_argv=language.compile if known is None else None,
            run_argv=with_memory_limit(language.run, limits.memory_bytes),
            files=self._program.files if known is None else {**self._program.files, **known.files},
            makes_file=self._program.makes_file,
            fetch=self._program.fetch,
            wants_program=key is not None and known is None,
        )
        try:
            kind, detail = await self._begin(payload)
        except SlotEnded:  # during the previous session or while idle: nothing of this session has run
            await self._slot.ensure_usable()
            self.begin()
            try:
                kind, detail = await self._begin(payload)
            except SandboxError as error:
                await self._blame_memory(error)
                raise
        if kind is Kind.COMPILE_FAILED:
            raise CompileFailed(detail.decode("utf-8", "replace"))
        if kind is Kind.COMPILE_STARVED:
            raise CompileStarved(f"other work kept the compiler from the CPU in slot {self._slot.index}")
        if kind is not Kind.COMPILED:
            await self._slot.stop()
            raise SandboxError(f"slot {self._slot.index} answered {kind.name} to a program")
        said, made = await self._unpacked_files(detail)
        self._compiler_output = said if known is None else known.said
        if self._compiled is not None and key is not None and known is None and made is not None:
            self._compiled.put(key, detail)

    async def _unpacked_files(self, payload: bytes) -> tuple[bytes, Mapping[str, bytes] | None]:
        if not payload:  # Python has no compiler that says or makes something
            return b"", None
        try:
            return frames.unpack_files(payload)
        except ValueError as error:
            await self._slot.stop()
            raise SandboxError(f"slot {self._slot.index} sent invalid files: {error}") from error

    def bound_memory(self) -> None:
        """Bound the memory of the runs from now on: what the kernel counts beyond what the slot holds now."""
        self._held_bytes = self._slot.group.held_bytes()
        self._limit_group(0)

    def _limit_group(self, num_input_bytes: int) -> None:
        """Files of the input and the output are memory too, but not the program's. Files in /tmp are."""
        steps = -(-(num_input_bytes + self._program.limits.output_bytes) // _STEP_BYTES)
        allowed = self._program.limits.memory_bytes + steps * _STEP_BYTES
        self._slot.group.limit(memory=self._held_bytes + allowed + _OWN_BYTES)

    async def _begin(self, payload: bytes) -> tuple[Kind, bytes]:
        """Send the program without waiting for the end of the previous session. Returns the answer."""
        try:
            await self._slot.send(Kind.PROGRAM, payload)
            await self._slot.await_ready()
        except SandboxError:
            await self._slot.stop()
            raise
        self._num_killed = self._slot.group.num_killed()
        return await self._receive(_MOST_TIMES * self._compile_time_s)

    async def run(
        self, stdin: bytes, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> RunResult:
        """See `Session.run`. Raises RuntimeError when another run of this session is in progress."""
        check_run_input(self._program, args, files)
        with self._one_at_a_time():
            await self._reopen_if_killed()
            try:
                await self._prepare_run(args, files, len(stdin))
                await self._slot.send(Kind.RUN, stdin)
                kind, payload = await self._receive(self._program.limits.wall_time_s)
            except SandboxError as error:
                if await self._is_killed():
                    return _OUT_OF_MEMORY
                await self._blame_memory(error)
                raise
            if kind is not Kind.RESULT:
                await self._slot.stop()
                raise SandboxError(f"slot {self._slot.index} answered {kind.name} to a run")
            result = await self._to_result(payload)
            if self._program.fetch or self._compiler_output:
                result = replace(result, files=await self._fetched(), compiler_output=self._compiler_output)
            return result

    async def _fetched(self) -> Mapping[str, bytes]:
        """The files that follow a result, if the program has any to fetch."""
        if not self._program.fetch:
            return NO_FILES
        kind, payload = await self._receive(self._compile_time_s)
        _, files = await self._unpacked_files(payload)
        if kind is not Kind.FILES or files is None or not files.keys() <= set(self._program.fetch):
            await self._slot.stop()
            raise SandboxError(f"slot {self._slot.index} sent other files than those of the run")
        return files

    def _was_short_of_memory(self) -> bool:
        """Whether the kernel has killed a process of this session because the slot's group ran out of memory."""
        before, self._num_killed = self._num_killed, self._slot.group.num_killed()
        return self._num_killed > before

    async def converse(
        self, partner: Session, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> tuple[RunResult, RunResult]:
        """See `Session.converse`."""
        if not isinstance(partner, SlotSession):
            raise TypeError("a session converses with the partner of its own pair")
        check_run_input(partner._program, args, files)
        with self._one_at_a_time(), partner._one_at_a_time():
            await self._reopen_if_killed()
            await partner._reopen_if_killed()
            try:
                return await self._talk(partner, args, files)
            except SandboxError as error:
                if await self._is_killed():
                    await partner._abandon()
                    return _OUT_OF_MEMORY, _OUT_OF_MEMORY
                await self._blame_memory(error)
                raise

    async def start_dialogue(self) -> SlotDialogue:
        """Start the program for `Sandbox.dialogue`. Nothing else runs in this session afterwards."""
        await self._prepare_run((), NO_FILES, 0)
        await self._slot.send(Kind.TALK)
        bound = frames.session_bound(self._program.limits.output_bytes)
        return SlotDialogue(self._slot, self._receive, self._to_result, self._result_if_killed, bound)

    async def _result_if_killed(self) -> RunResult | None:
        return _OUT_OF_MEMORY if await self._is_killed() else None

    async def _talk(
        self, partner: SlotSession, args: tuple[str, ...], files: Mapping[str, bytes]
    ) -> tuple[RunResult, RunResult]:
        await self._prepare_run((), NO_FILES, 0)
        await partner._prepare_run(args, files, 0)
        return await converse(self._talker(), partner._talker())

    def _talker(self) -> Talker:
        return Talker(self._slot, self._program.limits, self._receive, self._to_result)

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
        if await self._slot.launch.lacked_memory():
            raise OutOfMemory(f"what slot {self._slot.index} ran on was killed for lack of memory") from error

    async def _abandon(self) -> None:
        await self._slot.stop()
        self._out_of_memory = True

    async def _reopen_if_killed(self) -> None:
        """Start the slot again and compile again, so that the other tests of the submission can run."""
        if self._out_of_memory:
            await self._slot.ensure_usable()
            self.begin()
            await self.compile()
            self.bound_memory()
            self._out_of_memory = False

    async def _prepare_run(self, args: tuple[str, ...], files: Mapping[str, bytes], num_stdin_bytes: int) -> None:
        self._limit_group(num_stdin_bytes + sum(map(len, files.values())))
        self._cpu_before_s = self._slot.group.cpu_s()
        if args or files:
            await self._slot.send(Kind.ARGUMENTS, frames.pack_arguments(args, files))

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if self._running:
            raise RuntimeError("runs of one session are sequential")
        self._running = True
        try:
            yield
        finally:
            self._running = False

    async def _to_result(self, payload: bytes) -> RunResult:
        try:
            r = frames.unpack_result(payload)
        except ValueError as error:
            await self._slot.stop()
            raise SandboxError(f"slot {self._slot.index} sent an invalid result: {error}") from error
        # The kernel may have killed another process than the one whose end is reported.
        exit_ = Exit.MEMORY_LIMIT if self._was_short_of_memory() else _EXITS[frames.Ended(r.ended)]
        # The harness does not see the CPU time of processes that nobody waited for.
        group_s = self._slot.group.cpu_s() - self._cpu_before_s - _OWN_CPU_S
        if exit_ in (Exit.EXITED, Exit.SIGNALLED) and group_s > self._program.limits.cpu_time_s:
            exit_ = Exit.TIME_LIMIT
        cpu_time_s = max(r.cpu_time_s, group_s)
        return RunResult(
            exit_,
            r.exit_code,
            r.signal,
            r.wall_time_s,
            cpu_time_s,
            r.memory_bytes,
            r.stdout,
            r.stderr,
            r.result,
            r.partner_ended,
        )

    async def _receive(self, limit_s: float) -> tuple[Kind, bytes]:
        try:
            return await self._slot.receive(limit_s + self._grace_s)
        except SandboxError:
            await self._slot.stop()
            raise
