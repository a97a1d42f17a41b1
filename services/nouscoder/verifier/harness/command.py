"""Programs of other languages: compiled once a submission by a confined process, then one exec a test.

INVARIANT: when `build` has returned nothing of the compiler runs any more and the compiled program is read-only.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from typing import NoReturn

from . import frames
from .candidate import Confinement, Job, Program, TestLimits
from .folder import Folder
from .inbox import Inbox
from .memory import MemoryWatch
from .root import PROGRAM_FOLDER
from .run import Plan, Run, RunFailed

_COMPILER_MEMORY_BYTES = 2 * 1024**3
_COMPILER_OUTPUT_BYTES = 128 * 1024**2  # bounds every file that it writes, its messages among them
_COMPILER_PROCESSES = 256
_MAX_DETAIL_BYTES = 1900
_CANNOT_EXEC = 127
_TOO_MUCH = {
    frames.Ended.TIME_LIMIT: b"the compiler took too long",
    frames.Ended.MEMORY_LIMIT: b"the compiler needs too much memory",
    frames.Ended.OUTPUT_LIMIT: b"the compiler writes too much",
}


def compile_plan(program: Program, confinement: Confinement, files_dir: int, memory: MemoryWatch) -> Plan:
    """The compiler as if it were a candidate: confined, limited, watched."""
    compiler = program._replace(
        entry_point=None,
        cpu_time_s=program.compile_time_s,
        wall_time_s=program.compile_time_s,
        memory_bytes=_COMPILER_MEMORY_BYTES,
        extra_space_bytes=1 << 40,
        output_bytes=_COMPILER_OUTPUT_BYTES,
        processes=_COMPILER_PROCESSES,
    )
    limits = TestLimits(compiler, confinement, PROGRAM_FOLDER)
    return Plan(compiler, confinement, files_dir, memory, limits)


def build(plan: Plan, folder: Folder, inbox: Inbox) -> tuple[Job | None, bytes | None]:
    """(a job, in the compiler's process only; why it does not compile or None). Raises RunFailed, SessionEnded."""
    program = plan.program
    folder.open_program(program.source_name, program.source())
    problem = None
    if program.compile_argv is not None:
        if shutil.which(program.compile_argv[0]) is None:
            raise RunFailed(f"there is no {program.compile_argv[0]} inside the sandbox")
        run = Run(plan, inbox)
        job = run.start(b"", Command(program.compile_argv).beginning(()))
        if job is not None:
            return job, None
        problem = _problem(run.finish())
    if problem is None:
        folder.seal_program()
    return None, problem


class Command:
    """A program that runs by exec."""

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv

    def beginning(self, args: tuple[str, ...]) -> Callable[[], Job]:
        """What a forked process does to become a run of it."""
        argv = [*self._argv, *args]

        def begin() -> NoReturn:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by the interpreter; exec would hand that on
                signal.signal(number, signal.SIG_DFL)
            try:
                os.execvp(argv[0], argv)
            except OSError as error:
                os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
            os._exit(_CANNOT_EXEC)

        return begin


def _problem(result: frames.Result) -> bytes | None:
    """None when it compiled, else the beginning of what the compiler said."""
    ended = frames.Ended(result.ended)
    said = result.stderr.strip() or result.stdout.strip()
    if ended is frames.Ended.EXITED and result.exit_code == 0:
        return None
    if ended in _TOO_MUCH:
        said = _TOO_MUCH[ended]
    return said[:_MAX_DETAIL_BYTES] or b"the compiler failed without a word"
