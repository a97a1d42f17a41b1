"""A candidate's own process, from the fork to the end: confined first, then made to look like `python main.py`.

INVARIANT: no candidate code runs before `confine` has returned, with only descriptors 0, 1, 2 open and, for call
tests, 3 (where the returned value is written; the candidate can write there too, so it is hostile).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the enum-free calls of signal
import atexit
import contextlib
import gc
import io
import json
import marshal
import math
import os
import resource
import signal
import sys
import threading
import types
from typing import Any, NamedTuple

from . import kernel
from .isolation import Isolation

RESULT_FD = 3
CANDIDATE_ID = 1000  # user and group, as seen inside
_SCRIPT = "/tmp/main.py"
_FOLDER = os.path.dirname(__file__)
_NUM_FILES = 512
# Bound here: every attribute looked up in a fresh fork copies a page.
_set_limit, _chdir, _unblock = resource.setrlimit, os.chdir, _signal.pthread_sigmask
_set_groups, _set_users, _INTERRUPT = os.setresgid, os.setresuid, (_signal.SIGINT,)
UNENCODABLE = b"!"  # a result that starts so is not JSON: the value has no JSON form


class Program(NamedTuple):
    """A PROGRAM frame: the code, how to call it, and its limits."""

    code: str
    entry_point: str | None
    cpu_time_s: float
    wall_time_s: float
    memory_bytes: int
    output_bytes: int
    processes: int

    def source(self) -> bytes:
        """What the script file holds; lone surrogates make bytes that do not compile."""
        return self.code.encode("utf-8", "surrogatepass")


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

    __slots__ = ("_address_space", "_cpu", "_file_size", "_processes", "_two_users")

    def __init__(self, program: Program, confinement: Confinement) -> None:
        space = program.memory_bytes + confinement.base_vm_bytes
        seconds = math.ceil(program.cpu_time_s)
        self._address_space = (space, space)
        self._file_size = (program.output_bytes + 1, program.output_bytes + 1)
        self._processes = (program.processes, program.processes)
        # SIGXCPU at the limit (whole seconds are all the kernel has), SIGKILL a second later.
        self._cpu = (seconds, seconds + 1)
        self._two_users = confinement.isolation.two_users

    def confine(self, *, count_cpu: bool = True) -> None:
        """Give up the last rights. Raises OSError. The change of user comes last: init takes it for the proof."""
        limit, r = _set_limit, resource
        limit(r.RLIMIT_AS, self._address_space)
        limit(r.RLIMIT_FSIZE, self._file_size)
        limit(r.RLIMIT_NPROC, self._processes)
        if count_cpu:
            limit(r.RLIMIT_CPU, self._cpu)
        _chdir("/tmp")
        _unblock(_signal.SIG_UNBLOCK, _INTERRUPT)
        if self._two_users:
            _set_groups(CANDIDATE_ID, CANDIDATE_ID, CANDIDATE_ID)
            _set_users(CANDIDATE_ID, CANDIDATE_ID, CANDIDATE_ID)
        else:
            kernel.drop_capabilities()


def count_cpu_from(used_s: float, cpu_time_s: float) -> None:
    """Count the program's CPU time from now: the first process has already used some to compile."""
    soft = math.ceil(used_s + cpu_time_s)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 1))


def compile_source(program: Program) -> types.CodeType:
    """As the interpreter compiles a script."""
    code: types.CodeType = compile(program.source(), _SCRIPT, "exec", dont_inherit=True)
    return code


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


def _buffered(fd: int) -> io.BufferedReader | io.BufferedWriter:
    mode = "r" if fd == 0 else "w"
    raw = io.FileIO(fd, mode, closefd=False)
    raw.name = f"<std{('in', 'out', 'err')[fd]}>"
    return io.BufferedReader(raw) if fd == 0 else io.BufferedWriter(raw)


class Job:
    """The program, ready to be executed by `__main__` as its last act."""

    def __init__(self, code: types.CodeType, namespace: dict[str, Any], entry_point: str | None) -> None:
        self.code = code
        self.namespace = namespace
        self._entry_point = entry_point
        self._arguments = _read_arguments() if entry_point is not None else None

    def call(self) -> None:
        """For call tests: call the entry point and write what it returns."""
        if self._entry_point is None or self._arguments is None:
            return
        function = find_entry_point(self.namespace, self._entry_point)
        value = function(*self._arguments["args"], **self._arguments["kwargs"])
        view = memoryview(encode_value(value))
        while view:
            view = view[os.write(RESULT_FD, view) :]

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


def _read_arguments() -> dict[str, Any]:
    """Call tests: the arguments come on descriptor 0, and the program finds an empty stdin there."""
    chunks = []
    while chunk := os.read(0, 1 << 20):
        chunks.append(chunk)
    os.ftruncate(0, 0)
    os.lseek(0, 0, os.SEEK_SET)
    arguments: dict[str, Any] = json.loads(b"".join(chunks))
    return {"args": arguments.get("args", []), "kwargs": arguments.get("kwargs", {})}


def find_entry_point(namespace: dict[str, Any], entry_point: str) -> Any:
    """Find "f", "Solution.f" and "Solution().f"; a bare name is also looked for in `class Solution`.

    Raises NameError or AttributeError, as the program itself would, when there is no such thing.
    """
    owner, _, name = entry_point.rpartition(".")
    owner = owner.removesuffix("()")
    if not owner and name not in namespace and hasattr(namespace.get("Solution"), name):
        owner = "Solution"
    if not owner:
        if name not in namespace:
            raise NameError(f"name {name!r} is not defined")
        return namespace[name]
    if owner not in namespace:
        raise NameError(f"name {owner!r} is not defined")
    return getattr(namespace[owner](), name)


def encode_value(value: Any) -> bytes:
    """JSON; tuples become lists, arrays (anything with `tolist`) their lists. Else UNENCODABLE and the type's name."""
    try:
        return json.dumps(value, default=_plain).encode()
    except Exception:  # a hostile value may raise anything; no value is a wrong answer, not a crash
        return UNENCODABLE + type(value).__name__.encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"no JSON form: {type(value).__name__}")


def load_code(marshalled: bytes) -> types.CodeType:
    """The code object that the first process of the submission compiled."""
    code: types.CodeType = marshal.loads(marshalled)
    return code
