"""A candidate's own process, from the fork to the end: confined first, then made to look like `python main.py`.

INVARIANT: no candidate code runs before `confine` has returned, with only descriptors 0, 1, 2 open and, for call
tests, 3 (where the returned value is written; the candidate can write there too, so it is hostile).
"""

from __future__ import annotations

import _random
import _signal  # type: ignore[import-not-found]  # the enum-free calls of signal
import atexit
import contextlib
import gc
import io
import marshal
import math
import os
import random
import resource
import signal
import sys
import threading
import types
from typing import Any, NamedTuple

from . import calls, kernel
from .isolation import Isolation

CANDIDATE_ID = 1000  # user and group, as seen inside
_SCRIPT = "/tmp/main.py"
_FOLDER = os.path.dirname(__file__)
_NUM_FILES = 512
_COMMAND_SPACE_BYTES = 512 * 1024**2  # libraries, stacks and whatever else a program maps that is not its data
# Bound here: every attribute looked up in a fresh fork copies a page.
_set_limit, _chdir, _unblock = resource.setrlimit, os.chdir, _signal.pthread_sigmask
_seed, _generator = _random.Random.seed, random._inst  # type: ignore[attr-defined]
_set_native_id = threading.main_thread()._set_native_id  # type: ignore[attr-defined]
_set_groups, _set_users, _INTERRUPT = os.setresgid, os.setresuid, (_signal.SIGINT,)


class Program(NamedTuple):
    """A PROGRAM frame: the code, how to run it, and its limits. `run_argv` is None for python."""

    code: str
    prelude: str
    entry_point: str | None
    source_name: str
    compile_argv: list[str] | None
    run_argv: list[str] | None
    compile_time_s: float
    cpu_time_s: float
    wall_time_s: float
    memory_bytes: int
    extra_space_bytes: int
    output_bytes: int
    processes: int

    def source(self) -> bytes:
        """What the script file holds; lone surrogates make bytes that do not compile."""
        return self.code.encode("utf-8", "surrogatepass")


class Compiled(NamedTuple):
    """A python program, ready to be executed."""

    prelude: types.CodeType | None
    main: types.CodeType


class Confinement(NamedTuple):
    """What every candidate of a slot is put under. `base_vm_bytes` is what the interpreter maps before it starts."""

    isolation: Isolation
    filter: Any
    base_vm_bytes: int
    namespace: dict[str, Any]


def confine_session(confinement: Confinement, stream_fds: tuple[int, ...]) -> None:
    """What every process of a submission inherits, init among them: done once, because each costs 0.1 ms a test.

    init keeps its capabilities over its own namespaces; the filter allows it (and so everybody) mount and umount2,
    which the kernel refuses to a process without capabilities.
    """
    os.setpgid(0, 0)
    for fd in stream_fds:
        os.set_inheritable(fd, False)
    for kind, value in (
        (resource.RLIMIT_NOFILE, _NUM_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(kind, (value, value))
    confinement.isolation.give_up_root()
    kernel.forbid_new_privileges()
    kernel.install_filter(confinement.filter)


class TestLimits:
    """The rest, which init cannot take on itself; made once a submission, applied in each test's process."""

    __slots__ = ("_address_space", "_cpu", "_file_size", "_folder", "_processes", "_two_users")

    def __init__(self, program: Program, confinement: Confinement, folder: str = "/tmp") -> None:
        if program.run_argv is None:
            space = program.memory_bytes + confinement.base_vm_bytes
        else:  # a wide bound: what is resident is watched, and an allocation that fails is no proof of use
            space = 2 * program.memory_bytes + program.extra_space_bytes + _COMMAND_SPACE_BYTES
        seconds = math.ceil(program.cpu_time_s)
        self._address_space = (space, space)
        self._file_size = (program.output_bytes + 1, program.output_bytes + 1)
        self._processes = (program.processes, program.processes)
        # SIGXCPU at the limit (whole seconds are all the kernel has), SIGKILL a second later.
        self._cpu = (seconds, seconds + 1)
        self._two_users = confinement.isolation.two_users
        self._folder = folder

    def confine(self, *, count_cpu: bool = True) -> None:
        """Give up the last rights. Raises OSError. The change of user comes last: init takes it for the proof."""
        limit, r = _set_limit, resource
        limit(r.RLIMIT_AS, self._address_space)
        limit(r.RLIMIT_FSIZE, self._file_size)
        limit(r.RLIMIT_NPROC, self._processes)
        if count_cpu:
            limit(r.RLIMIT_CPU, self._cpu)
        _chdir(self._folder)
        _unblock(_signal.SIG_UNBLOCK, _INTERRUPT)
        if self._two_users:
            _set_groups(CANDIDATE_ID, CANDIDATE_ID, CANDIDATE_ID)
            _set_users(CANDIDATE_ID, CANDIDATE_ID, CANDIDATE_ID)
        else:
            kernel.drop_capabilities()


def after_fork() -> None:
    """What the interpreter does after a fork and a program can see: other random numbers, the main thread's id."""
    _seed(_generator)  # what random.seed() comes to, from the kernel's randomness
    _set_native_id()


def count_cpu_from(used_s: float, cpu_time_s: float) -> None:
    """Count the program's CPU time from now: the first process has already used some to compile."""
    soft = math.ceil(used_s + cpu_time_s)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 1))


def compile_source(program: Program) -> Compiled:
    """As the interpreter compiles a script; the prelude apart, so that it shifts no line and hides no __future__."""
    main = compile(program.source(), _SCRIPT, "exec", dont_inherit=True)
    prelude = compile(program.prelude, "<prelude>", "exec", dont_inherit=True) if program.prelude else None
    return Compiled(prelude, main)


def make_script_surroundings() -> dict[str, Any]:
    """Streams, arguments, path and a fresh `__main__` as a script finds them; returns its namespace.

    Called once, in the zygote: a fork is the cheapest way to make them fresh again. The streams are built over
    seekable files, as they will be in the candidate, where descriptors 0, 1 and 2 are its own files.
    """
    saved = [os.dup(fd) for fd in range(3)]
    with_seek = os.memfd_create("stream")
    for fd in range(3):
        os.dup2(with_seek, fd)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(_buffered(0), "utf-8", "strict")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(_buffered(1), "utf-8", "strict", "\n")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(  # type: ignore[misc]
        _buffered(2), "utf-8", "backslashreplace", "\n", line_buffering=True
    )
    for fd, kept in enumerate(saved):
        os.dup2(kept, fd)
        os.close(kept)
    os.close(with_seek)
    sys.argv = sys.orig_argv = ["main.py"]
    sys.path.insert(0, "/tmp")
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=_SCRIPT, __cached__=None, __annotations__={}, __builtins__=sys.modules["builtins"])
    sys.modules["__main__"] = main
    return main.__dict__


def reopen_streams() -> None:
    """For a conversation: descriptors 0 and 1 are pipes, and the streams made in the zygote take them for files."""
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(_buffered(0), "utf-8", "strict")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(_buffered(1), "utf-8", "strict", "\n")  # type: ignore[misc]


def _buffered(fd: int) -> io.BufferedReader | io.BufferedWriter:
    mode = "r" if fd == 0 else "w"
    raw = io.FileIO(fd, mode, closefd=False)
    raw.name = f"<std{('in', 'out', 'err')[fd]}>"
    return io.BufferedReader(raw) if fd == 0 else io.BufferedWriter(raw)


class Job:
    """The program, ready to be executed by `__main__` as its last act."""

    def __init__(
        self, code: Compiled, namespace: dict[str, Any], entry_point: str | None, args: tuple[str, ...] = ()
    ) -> None:
        self.code = code.main
        self.prelude = code.prelude
        self.namespace = namespace
        if args:
            sys.argv += args
        self._entry_point = entry_point
        self._arguments = calls.read_arguments() if entry_point is not None else None

    def call(self) -> None:
        """For call tests: call the entry point and write what it returns."""
        if self._entry_point is None or self._arguments is None:
            return
        calls.call(self.namespace, self._entry_point, self._arguments)

    def failed(self, error: BaseException) -> int:
        """Report an uncaught exception as the interpreter does; returns the exit status (negative: a signal)."""
        if isinstance(error, SystemExit):
            return _exit_status(error)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_FOLDER):
            trace = trace.tb_next
        with contextlib.suppress(Exception):  # reported when the streams are flushed at the end
            sys.stdout.flush()
        try:
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        except SystemExit as another:
            return _exit_status(another)
        except BaseException:  # a broken hook must not hide the failure
            sys.__excepthook__(type(error), error, trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1

    def leave(self, status: int) -> None:
        """The interpreter's exit, in its order, without tearing down the modules it shares with every other run.

        That last part costs 5 ms of copied pages and shows only in destructors of objects that modules hold.
        """
        if threading._shutdown_locks or threading._threading_atexits or atexit._ncallbacks():  # type: ignore[attr-defined]
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        status = _flush(status)
        namespace = self.namespace
        for private in (True, False):
            for name in list(namespace):
                if name != "__builtins__" and (name[:1] == "_" and name[1:2] != "_") is private:
                    namespace[name] = None
        sys.stdout, sys.stderr, sys.stdin = sys.__stdout__, sys.__stderr__, sys.__stdin__
        gc.collect()
        status = _flush(status)
        kernel.flush_c_streams()
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(status & 0xFF)


def _flush(status: int) -> int:
    """Flush the standard streams; output that cannot be written makes an otherwise good exit 120, as in CPython."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:  # a candidate's stream may raise anything
            status = status or 120
    return status


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    return 1


def dump_code(code: Compiled) -> bytes:
    """For the processes of the later tests."""
    return marshal.dumps(tuple(code))


def load_code(marshalled: bytes) -> Compiled:
    """What the first process of the submission compiled."""
    return Compiled(*marshal.loads(marshalled))
