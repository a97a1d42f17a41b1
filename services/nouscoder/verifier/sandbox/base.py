"""The interface between grading and isolation: a backend runs the tests of a submission and reports each process.

A backend never sees an expected output, so no program can leak one. `nouscoder.verifier.sandbox.open_sandbox` chooses
the backend by the configuration; no other code depends on a backend's type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from nouscoder.domain.submission import Limits
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.verifier.toolchains.languages import Language

NO_FILES: Mapping[str, bytes] = MappingProxyType({})
_MAX_FILE_BYTES = 1 << 29
_MAX_ARGUMENTS_AND_FILES = 256
_MAX_NAME_BYTES = 200


class Exit(StrEnum):
    """How the process tree of a test ended. The grader turns it into an outcome."""

    EXITED = "exited"  # by itself; see exit_code
    SIGNALLED = "signalled"  # killed by a signal that the sandbox did not send; see signal
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"


@dataclass(frozen=True, slots=True)
class Program:
    """A program and what all its runs share. `entry_point` is None for a program that runs as a whole.

    With an entry point, the harness calls it with the arguments of each run (JSON as the run's stdin: {"args": [...],
    "kwargs": {...}}) and returns the result as JSON in `RunResult.result`. `prelude` is Python that runs in the
    program's namespace before the program. Only Python (a language whose `run` is None) supports both. `files` are
    beside the source, read-only, when it is compiled and in every run. With `makes_file`, `RunResult.result` is the
    file `output` that a run leaves in its folder, cut at `limits.output_bytes`. `limits` are enforced unchanged; the
    caller applies the language's `time_factor`. `problem_id` and `since_s` (the time, by time.monotonic, since when the
    submission waits) help a backend to place it; they change no result.
    """

    language: Language
    code: str
    limits: Limits
    entry_point: str | None = None
    prelude: str = ""
    problem_id: str = ""
    since_s: float | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    makes_file: bool = False
    fetch: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for an entry point or a prelude with a language other than Python, and invalid files."""
        _check_files(self.language.source_name, self.files)
        _check_files("", dict.fromkeys(self.fetch, b""))
        if self.language.run is not None and (self.entry_point is not None or self.prelude):
            raise ValueError(f"{self.language.name} programs have no entry point and no prelude: only python has them")


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of one run. The output is raw; the grader compares it.

    For call tests, `result` is the returned value as JSON. It is None when the process did not return a value, and "!"
    with the type's name (not JSON, so a wrong answer) when the value has no JSON form. For a program with `makes_file`
    it is that file, or None when there is none or it is empty. Like `stdout` it is untrusted.
    `stderr` is the last 64 KiB of the stream. `stdout` is complete; after OUTPUT_LIMIT it is the first 64 KiB.
    `partner_ended`: in a dialogue, the partner had ended when this program ended or exceeded a limit. `has_heard`: this
    program had read something that its partner said, or nothing was left to read before the end. `starved_s`: the time
    in which others kept it from the CPU, as far as the kernel tells; `wall_time_s` is without it. `files` are those of
    `Program.fetch` that the run has left in its folder and that are regular; 16 MiB in all. `compiler_output` is the
    beginning of what the compiler said about the program, up to 1900 bytes. A dialogue gives neither.
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
    partner_ended: bool = False
    has_heard: bool = False
    starved_s: float = 0.0
    files: Mapping[str, bytes] = field(default_factory=lambda: NO_FILES)
    compiler_output: bytes = b""


def longest_run_s(limits: Limits) -> float:
    """The longest that a run may take [s], which others may keep from the CPU; as in harness/init/process.c."""
    return limits.wall_time_s + min(9 * limits.wall_time_s, 120.0)


class SandboxError(NousCoderError):
    """The sandbox failed, not the candidate. The grader retries in another slot, then answers internal_error."""


class OutOfMemory(SandboxError):
    """What the sandbox runs on was killed for lack of memory. The grader blames the program at the second time."""


class SandboxUnavailable(SandboxError, Unusable):
    """The host cannot provide the configured isolation. The message says what is missing and how to get it."""


class CompileStarved(SandboxError):
    """Other work on the machine kept the compiler from the CPU. It says nothing about the candidate's code."""


class CompileFailed(Exception):
    """The candidate's code does not compile. This gives a verdict. `detail` is the compiler's message."""

    wall_time_s = 0.0  # of compiling, if the caller has measured it

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class PartnerCompileFailed(CompileFailed):
    """The partner of a program (a checker or an interactor) does not compile. The tests are invalid."""


class Dialogue(Protocol):
    """A running program and its caller. All calls raise SandboxError when the sandbox (not the program) fails."""

    async def say(self, data: bytes) -> None:
        """Send input to the program, and let it continue if it is held. A program that has ended drops it."""

    async def hear(self, limit_s: float) -> bytes | RunResult:
        """The next output of the program, or its result when it has ended.

        Raises TimeoutError after `limit_s` seconds. The dialogue can then only be left.
        """

    async def hold(self) -> RunResult | None:
        """Stop every process of the program until the next `say`, and drop output that was not heard.

        Returns the result if the program has ended, else None.
        """


class Session(Protocol):
    """One submission in one fresh sandbox. Runs are sequential; each is a fresh process in a clean file system."""

    async def run(
        self, stdin: bytes, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> RunResult:
        """Run the program once, with `args` after its name and `files` (plain names) read-only in its folder.

        Raises SandboxError when the sandbox (not the candidate) fails, and ValueError for what `check_run_input`
        refuses.
        """

    async def dialogue_with(
        self, partner: Session, *, args: tuple[str, ...] = (), files: Mapping[str, bytes] = NO_FILES
    ) -> tuple[RunResult, RunResult]:
        """Run this program and `partner`'s together. The output of each is the input of the other.

        `partner` is the second session of the same `Sandbox.with_partners`; `args` and `files` are for the partner. If
        one program exits or closes its output, the input of the other ends. The results (this one's, the partner's)
        hold the complete output of each. Both have their own limits. The wall time of the partner counts from the start
        of the dialogue. In backend local, that of this program omits the time in which it waited for an answer that
        came, and its partner's CPU time while it waits for one; together at most the time by which the partner's wall
        time limit exceeds its own. Raises what `run` raises.
        """


@dataclass(frozen=True, slots=True)
class BackendUse:
    """What one backend has, and has done since the start of the service. Empty for what it does not have."""

    submissions: int = 0
    seconds: float = 0.0  # of its slots, in use by a submission
    dollars: float = 0.0  # by the configured prices
    limited_by: str = ""  # the cap that keeps it from growing now
    runner_starts: tuple[int, float] = (0, 0.0)  # runners that became reachable; seconds from their creation until then
    compile_cache: tuple[int, int, int] = (0, 0, 0)  # programs found, programs compiled, bytes on the disk
    runners: Mapping[str, int] = field(default_factory=dict)  # by state
    replacements: Mapping[str, int] = field(default_factory=dict)  # runners replaced, by reason


class Sandbox(Protocol):
    """A pool of `num_slots` sandboxes of one backend."""

    name: str
    num_slots: int

    @property
    def use(self) -> BackendUse:
        """What the backend has and has done, as far as it counts that itself: not the submissions."""
        return BackendUse()

    @property
    def usable_slots(self) -> int:
        """The slots that can run a submission now: fewer where a slot does not always have a pod to run on."""
        return self.num_slots

    def watch_slots(self, changed: Callable[[], None]) -> None:
        """Call `changed` after each change of `usable_slots`."""
        return

    def demand(self, submissions: int) -> None:
        """From now on so many submissions wait or run. The backend may grow and shrink with it."""
        return

    @property
    def isolation(self) -> tuple[str, ...]:
        """The layers of isolation between a candidate and the host, once started. Shown in Capabilities."""

    async def start(self) -> None:
        """Start the slots. Raises SandboxUnavailable with one clear sentence."""

    def session(self, program: Program) -> AbstractAsyncContextManager[Session]:
        """A fresh sandbox for one submission. Waits for a free slot. Leaving the context kills everything inside.

        Raises CompileFailed on entry when the code does not compile, SandboxError when no sandbox could be made.
        """

    def with_partners(
        self, program: Program, partner: Program, checker: Program | None = None
    ) -> AbstractAsyncContextManager[tuple[Session, ...]]:
        """Like `session`, with a second fresh sandbox for a checker or an interactor.

        With `checker` there is a third one, for the checker of what an interactor has written. They share nothing. Only
        the first one is a slot of the pool, so all together need one slot like a session, and cannot deadlock. Raises
        PartnerCompileFailed on entry when a partner does not compile.
        """

    def dialogue(self, program: Program) -> AbstractAsyncContextManager[Dialogue]:
        """Like `session`, with one run of the program that talks with the caller.

        The limits are those of one run. Its wall time counts from the start, also while it is held. Leaving the context
        ends the program.
        """

    async def close(self) -> None:
        """Kill every process of every slot and wait for them."""


class Cap(StrEnum):
    """What keeps a backend that costs money from growing: the label of a metric."""

    CONTAINERS = "containers"
    CREATIONS = "creations_per_minute"
    DOLLARS_PER_MINUTE = "dollars_per_minute"
    DOLLARS = "dollars"


def check_run_input(program: Program, args: tuple[str, ...], files: Mapping[str, bytes]) -> None:
    """Raises ValueError for invalid arguments or files: NUL characters, names that are paths or taken, or too many."""
    if len(args) > _MAX_ARGUMENTS_AND_FILES or len(files) > _MAX_ARGUMENTS_AND_FILES:
        raise ValueError(f"a run takes at most {_MAX_ARGUMENTS_AND_FILES} arguments and as many files")
    if any("\0" in arg for arg in args):
        raise ValueError("an argument must not hold a NUL character")
    if not program.files.keys().isdisjoint(files):
        raise ValueError("a file of a run has the name of a file of the program")
    _check_files(program.language.source_name, files)


def _check_files(source_name: str, files: Mapping[str, bytes]) -> None:
    """Raises ValueError."""
    if not files:
        return
    if len(files) > _MAX_ARGUMENTS_AND_FILES:
        raise ValueError(f"there may be at most {_MAX_ARGUMENTS_AND_FILES} files")
    for name in files:
        num_bytes = len(name.encode("utf8", "surrogatepass"))
        taken = name in ("", ".", "..", source_name)
        if taken or "/" in name or "\0" in name or num_bytes > _MAX_NAME_BYTES:
            raise ValueError(f"{name!r:.60} cannot be the name of a file")
    if sum(map(len, files.values())) > _MAX_FILE_BYTES:
        raise ValueError(f"the files hold at most {_MAX_FILE_BYTES} bytes in total")


class SandboxDecorator(Sandbox):
    """Forwards everything to `inner`. A subclass overrides `session` or `with_partners`."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner
        self.name = inner.name
        self.num_slots = inner.num_slots

    @property
    def use(self) -> BackendUse:
        """See `Sandbox`."""
        return self._inner.use

    @property
    def usable_slots(self) -> int:
        """See `Sandbox`."""
        return self._inner.usable_slots

    def watch_slots(self, changed: Callable[[], None]) -> None:
        """See `Sandbox`."""
        self._inner.watch_slots(changed)

    def demand(self, submissions: int) -> None:
        """See `Sandbox`."""
        self._inner.demand(submissions)

    @property
    def isolation(self) -> tuple[str, ...]:
        """See `Sandbox`."""
        return self._inner.isolation

    async def start(self) -> None:
        """See `Sandbox`."""
        await self._inner.start()

    def session(self, program: Program) -> AbstractAsyncContextManager[Session]:
        """See `Sandbox`."""
        return self._inner.session(program)

    def with_partners(
        self, program: Program, partner: Program, checker: Program | None = None
    ) -> AbstractAsyncContextManager[tuple[Session, ...]]:
        """See `Sandbox`."""
        return self._inner.with_partners(program, partner, checker)

    def dialogue(self, program: Program) -> AbstractAsyncContextManager[Dialogue]:
        """See `Sandbox`."""
        return self._inner.dialogue(program)

    async def close(self) -> None:
        """See `Sandbox`."""
        await self._inner.close()
