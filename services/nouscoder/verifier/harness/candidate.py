"""A candidate's own process, from the moment init has confined it to the end: made to look like `python main.py`.

INVARIANT: candidate code runs with only descriptors 0, 1, 2 open and, for call tests, 3 (where the returned value is
written; the candidate can write there too, so it is hostile).
"""

from __future__ import annotations

import _random
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
import struct
import sys
import threading
import types
from typing import Any, NamedTuple

from . import calls, kernel
from .init_library import GO, REPORT, Assignment

_SCRIPT = "/tmp/main.py"
_FOLDER = os.path.dirname(__file__)
_warm_modules: list[str] = []
_CPU_USED = struct.Struct("=d")  # CPU time that compiling took [s]
_MAX_DETAIL_BYTES = 8 * 1024
# Bound here: every attribute looked up in a fresh fork copies a page.
_seed, _generator = _random.Random.seed, random._inst
_set_native_id = threading.main_thread()._set_native_id  # type: ignore[attr-defined]
_len = len  # a program may have replaced it when `leave` needs it


class Compiled(NamedTuple):
    """A python program, ready to be executed."""

    prelude: types.CodeType | None
    main: types.CodeType


def remember_modules() -> None:
    """In the zygote, last: what every candidate finds imported."""
    _warm_modules.extend(sys.modules)


def begin(assignment_bytes: bytes, namespace: dict[str, Any]) -> Job:
    """In a candidate's process, confined by init: turns the assignment into the program to run."""
    after_fork()
    assignment = Assignment.unpack(assignment_bytes)
    if assignment.talks:
        reopen_streams()
    entry_point, _, prelude = assignment.meta.partition(b"\0")
    if assignment.is_first:
        code, args = _compile_first(assignment, prelude.decode("utf-8", "surrogatepass"))
    else:
        code, args = load_code(assignment.body), assignment.args
    given = tuple(map(os.fsdecode, args.split(b"\0")[:-1])) if args else ()
    return Job(code, namespace, entry_point.decode("utf-8", "surrogatepass") or None, given)


def _compile_first(assignment: Assignment, prelude: str) -> tuple[Compiled, bytes]:
    """Compile, report, and wait for the input to be there: the code and the arguments."""
    try:
        code = compile_source(assignment.body, prelude)
    except BaseException as error:  # the compiler raises many kinds
        import traceback  # only here: most submissions compile

        text = "".join(traceback.format_exception_only(error)).encode("utf-8", "replace")
        _write_all(REPORT, b"E" + text[-_MAX_DETAIL_BYTES:])
        os._exit(1)
    used = resource.getrusage(resource.RUSAGE_SELF)
    used_s = used.ru_utime + used.ru_stime
    count_cpu_from(used_s, assignment.cpu_time_s)
    _write_all(REPORT, b"C" + _CPU_USED.pack(used_s) + dump_code(code))
    os.close(REPORT)
    given = b""
    while chunk := os.read(GO, 1 << 16):
        given += chunk
    os.close(GO)
    if not given:
        os._exit(0)
    return code, given[1:]


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def after_fork() -> None:
    """What the interpreter does after a fork and a program can see: other random numbers, the main thread's id."""
    _seed(_generator)  # what random.seed() comes to, from the kernel's randomness
    _set_native_id()


def count_cpu_from(used_s: float, cpu_time_s: float) -> None:
    """Count the program's CPU time from now: the first process has already used some to compile."""
    soft = math.ceil(used_s + cpu_time_s)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 1))


def compile_source(source: bytes, prelude: str) -> Compiled:
    """As the interpreter compiles a script; the prelude apart, so that it shifts no line and hides no __future__."""
    main = compile(source, _SCRIPT, "exec", dont_inherit=True)
    return Compiled(compile(prelude, "<prelude>", "exec", dont_inherit=True) if prelude else None, main)


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
        if _len(threading._active) > 1 or threading._limbo or threading._threading_atexits or atexit._ncallbacks():  # type: ignore[attr-defined]
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        status = _flush(status)
        namespace = self.namespace
        for private in (True, False):
            for name in [*namespace]:
                if name != "__builtins__" and (name[:1] == "_" and name[1:2] != "_") is private:
                    namespace[name] = None
        sys.stdout, sys.stderr, sys.stdin = sys.__stdout__, sys.__stderr__, sys.__stdin__
        gc.collect()
        status = _flush(status)
        if _len(sys.modules) > _len(_warm_modules):  # none of those writes to C streams
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
