"""A candidate's process after init has confined it. It behaves like `python main.py`, in call tests like `import main`.

INVARIANT: candidate code runs with only descriptors 0, 1 and 2 open, and 3 for call tests. The returned value is
written to 3. The candidate can write there too, so the value is untrusted.
"""

from __future__ import annotations

import _random
import atexit
import contextlib
import gc
import io
import json
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

from . import kernel
from .frames import JUDGE
from .init_library import GO, REPORT, Assignment
from .program_names import ProgramNames, find_entry_point

RESULT_FD = 3
UNENCODABLE = b"!"  # first byte of a result whose value has no JSON form; no JSON starts with it
_SCRIPT = "/tmp/main.py"
_MODULE = "main"
_FOLDER = os.path.dirname(__file__)
_warm_modules: list[str] = []
_CPU_USED = struct.Struct("=d")  # CPU time that compiling took [s]
_MAX_DETAIL_BYTES = 8 * 1024
# Bound here, because every attribute lookup in a fresh fork copies a page.
_seed, _generator = _random.Random.seed, random._inst
_set_native_id = threading.main_thread()._set_native_id  # type: ignore[attr-defined]
# A program may have replaced these when `leave` needs them.
_len, _collect, _set_signal = len, gc.collect, signal.signal
_exit, _kill, _getpid = os._exit, os.kill, os.getpid


def read_arguments() -> dict[str, Any]:
    """Read the arguments from descriptor 0, and leave an empty stdin for the program."""
    chunks = []
    while chunk := os.read(0, 1 << 20):
        chunks.append(chunk)
    os.ftruncate(0, 0)
    os.lseek(0, 0, os.SEEK_SET)
    arguments: dict[str, Any] = json.loads(b"".join(chunks))
    return {"args": arguments.get("args", []), "kwargs": arguments.get("kwargs", {})}


def encode_value(value: Any) -> bytes:
    """The value as JSON, with tuples and arrays (`tolist`) as lists; else UNENCODABLE and the type's name."""
    try:
        return json.dumps(value, default=_plain).encode()
    except Exception:  # an untrusted value may raise anything; that is a wrong answer, not a runtime error
        return UNENCODABLE + type(value).__name__.encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"no JSON form: {type(value).__name__}")


class CompiledPython(NamedTuple):
    """A compiled Python program."""

    prelude: types.CodeType | None
    main: types.CodeType


def remember_modules() -> None:
    """Remember the modules that every candidate finds imported. Called last in the zygote."""
    _warm_modules.extend(sys.modules)


def begin(assignment_bytes: bytes, namespace: dict[str, Any]) -> CandidateJob:
    """Turn the assignment into the job to run. Called in a candidate's process after init has confined it."""
    after_fork()
    assignment = Assignment.unpack(assignment_bytes)
    if assignment.in_dialogue:
        reopen_streams()
    entry_point, _, prelude = assignment.meta.partition(b"\0")
    if assignment.is_first:
        code, args = _compile_first(assignment, prelude.decode("utf-8", "surrogatepass"))
    else:
        code, args = load_code(assignment.body), assignment.args
    arguments = tuple(map(os.fsdecode, args.split(b"\0")[:-1])) if args else ()
    if entry_point:
        be_imported(namespace)
    return CandidateJob(code, namespace, entry_point.decode("utf-8", "surrogatepass") or None, arguments)


def _compile_first(assignment: Assignment, prelude: str) -> tuple[CompiledPython, bytes]:
    """Compile the source, report to init and wait for the first test. Returns the code and the arguments."""
    try:
        code = compile_source(assignment.body, prelude)
    except BaseException as error:  # the compiler raises many types
        import traceback  # imported only here, because most submissions compile

        text = "".join(traceback.format_exception_only(error)).encode("utf-8", "replace")
        _write_all(REPORT, b"E" + text[-_MAX_DETAIL_BYTES:])
        os._exit(1)
    used = resource.getrusage(resource.RUSAGE_SELF)
    used_s = used.ru_utime + used.ru_stime
    count_cpu_from(used_s, assignment.cpu_time_s)
    _write_all(REPORT, b"C" + _CPU_USED.pack(used_s) + dump_code(code))
    os.close(REPORT)
    message = b""
    while chunk := os.read(GO, 1 << 16):
        message += chunk
    os.close(GO)
    if not message:
        os._exit(0)
    return code, message[1:]


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def after_fork() -> None:
    """The part of the interpreter's fork hooks that a program can observe: random seed and the main thread's id."""
    _seed(_generator)  # like random.seed(), from the kernel's randomness
    _set_native_id()


def count_cpu_from(used_s: float, cpu_time_s: float) -> None:
    """Count the program's CPU time from now, because the first process has used CPU time to compile."""
    soft = math.ceil(used_s + cpu_time_s)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 1))


def compile_source(source: bytes, prelude: str) -> CompiledPython:
    """Compile a script. The prelude is separate, so that it shifts no line numbers and hides no __future__ import."""
    main = compile(source, _SCRIPT, "exec", dont_inherit=True)
    return CompiledPython(compile(prelude, "<prelude>", "exec", dont_inherit=True) if prelude else None, main)


def make_script_surroundings() -> dict[str, Any]:
    """Make the streams, arguments, path and `__main__` of a script. Returns the namespace of `__main__`.

    Called once in the zygote, because a fork is the cheapest way to copy them. The streams are built over seekable
    files, because descriptors 0, 1 and 2 of a candidate are files.
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


def be_imported(namespace: dict[str, Any]) -> None:
    """Give the program the name that it has where others import it, so that its main guard does not run.

    The module is found by both names: pickle, dataclasses and typing look up the name of a class's module.
    """
    namespace["__name__"] = _MODULE
    sys.modules[_MODULE] = sys.modules["__main__"]
    _warm_modules.append(_MODULE)


def reopen_streams() -> None:
    """Replace the streams for a dialogue, whose descriptors 0 and 1 are pipes instead of files."""
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(_buffered(0), "utf-8", "strict")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(_buffered(1), "utf-8", "strict", "\n")  # type: ignore[misc]


def _buffered(fd: int) -> io.BufferedReader | io.BufferedWriter:
    mode = "r" if fd == 0 else "w"
    raw = io.FileIO(fd, mode, closefd=False)
    raw.name = f"<std{('in', 'out', 'err')[fd]}>"
    return io.BufferedReader(raw) if fd == 0 else io.BufferedWriter(raw)


class CandidateJob:
    """The program that `__main__` executes."""

    def __init__(
        self, code: CompiledPython, namespace: dict[str, Any], entry_point: str | None, args: tuple[str, ...] = ()
    ) -> None:
        self.code = code.main
        self.prelude = code.prelude
        self.namespace = namespace
        if args:
            sys.argv += args
        self._entry_point = entry_point
        self._arguments = read_arguments() if entry_point is not None else None
        self._judge: Any = None

    def take_judge(self) -> None:
        """Take a judge's function out of the namespace before the program runs, which could replace it.

        It gets `names`, the ProgramNames of the program that runs next.
        """
        if self._entry_point == JUDGE:
            self._judge = self.namespace.pop(JUDGE)
            self._judge.__globals__["names"] = ProgramNames(self.namespace, {**self.namespace}, self.code, self.prelude)

    def call(self) -> None:
        """For call tests: call the entry point and write its return value. Raises what the candidate's code raises."""
        if self._entry_point is None or self._arguments is None:
            return
        function = self._judge or find_entry_point(self.namespace, self._entry_point, self.code)
        _write_all(RESULT_FD, encode_value(function(*self._arguments["args"], **self._arguments["kwargs"])))

    def failed(self, error: BaseException) -> int:
        """Report an uncaught exception like the interpreter. Returns the exit status (negative: a signal)."""
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
        """Exit like the interpreter, in the same order, but without tearing down the preloaded modules.

        The teardown would cost 5 ms of copied pages. It is visible only in destructors of objects that modules hold.
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
        _collect()
        status = _flush(status)
        if _len(sys.modules) > _len(_warm_modules):  # no preloaded module writes to C streams
            kernel.flush_c_streams()
        if status < 0:
            _set_signal(-status, signal.SIG_DFL)
            _kill(_getpid(), -status)
        _exit(status & 0xFF)


def _flush(status: int) -> int:
    """Flush the standard streams. If that fails, exit status 0 becomes 120, as in CPython."""
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
    print(error.code, file=sys.stderr)  # noqa: T201 - like the interpreter
    return 1


def dump_code(code: CompiledPython) -> bytes:
    """Encode the code for the processes of the later tests."""
    return marshal.dumps(tuple(code))


def load_code(marshalled: bytes) -> CompiledPython:
    """Decode the code that the first process of the submission compiled."""
    return CompiledPython(*marshal.loads(marshalled))
