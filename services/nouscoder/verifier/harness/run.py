"""One test: a fresh process, its files, the wait for its end, and what became of it.

INVARIANT: `finish` returns only after every process of the run is dead and reaped.
"""

from __future__ import annotations

import contextlib
import marshal
import mmap
import os
import resource
import select
import signal
import struct
import time
import traceback
from dataclasses import dataclass

from . import candidate, frames
from .candidate import Confinement, Job, Program

# What the child tells before any candidate code runs: 1 when confined, monotonic start time s, CPU time used so far s.
_STAMP = struct.Struct("=Bdd")
_STDERR_BYTES = 64 * 1024
_FLOOD_BYTES = 64 * 1024
_MAX_DETAIL_BYTES = 8 * 1024
_MEMORY_WORDS = (b"MemoryError", b"std::bad_alloc", b"Cannot allocate memory", b"out of memory")


class RunFailed(Exception):
    """The sandbox could not start the program: ours, not the candidate's."""


class RunAbandoned(Exception):
    """The gateway ended the session in the middle of a run; everything is dead."""


@dataclass(slots=True)
class _Files:
    """Fresh for each run, so nothing of a run's descriptors (offsets, flags, locks) reaches the next."""

    stdin: int
    stdout: int
    stderr: int
    result: int | None

    @staticmethod
    def make(has_result: bool) -> _Files:
        names = ("stdin", "stdout", "stderr")
        fds = [os.memfd_create(name, 0) for name in names]
        return _Files(*fds, os.memfd_create("result", 0) if has_result else None)

    def close(self) -> None:
        for fd in (self.stdin, self.stdout, self.stderr, self.result):
            if fd is not None:
                os.close(fd)


class Run:
    """Used once: `start_compiling`, `compiled`, `release`, `finish`, or `start`, `finish`."""

    def __init__(self, program: Program, confinement: Confinement, stream_in: int) -> None:
        self._program = program
        self._confinement = confinement
        self._stream_in = stream_in
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._files = _Files.make(program.entry_point is not None)
        self._pid = 0
        self._go = self._report = -1
        self._started_s = 0.0
        self._usage = resource.getrusage(resource.RUSAGE_CHILDREN)

    def start_compiling(self, limit_s: float) -> Job | None:
        """Fork the first test's process: it compiles, reports, and waits. Returns a job in that process only."""
        report_out, report_in = os.pipe()
        go_out, go_in = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            return self._compile_in_child(report_in, go_out, limit_s)
        os.close(report_in)
        os.close(go_out)
        self._report, self._go = report_out, go_in
        return None

    def compiled(self, limit_s: float) -> tuple[bytes | None, bytes]:
        """(why it does not compile or None, the marshalled code). Raises RunAbandoned, RunFailed."""
        message = self._read_report(time.monotonic() + limit_s)
        os.close(self._report)
        if message[:1] == b"C":
            return None, message[1:]
        if message[:1] == b"F":
            raise RunFailed(message[1:].decode("utf-8", "replace"))
        os.close(self._go)
        self._files.close()
        self._page.close()
        return message[1:] or b"the compiler ran out of time or memory", b""

    def release(self, stdin: bytes) -> None:
        """Let the compiled first process run with this input."""
        self._fill_stdin(stdin)
        self._started_s = time.monotonic()
        try:
            os.write(self._go, b"1")
        except BrokenPipeError as error:
            raise RunFailed("the process ended before it was started") from error
        os.close(self._go)

    def start(self, stdin: bytes, marshalled: bytes) -> Job | None:
        """Fork a process for compiled code. Returns a job in that process only."""
        self._fill_stdin(stdin)
        self._started_s = time.monotonic()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._wire(())
                candidate.confine(self._program, self._confinement)
                return self._enter(candidate.load_code(marshalled))
            except BaseException:  # noqa: BLE001 - the missing stamp tells the parent
                os._exit(1)
        return None

    def finish(self) -> frames.Result:
        """Wait for the end, kill what is left, and say what happened. Raises RunAbandoned, RunFailed."""
        in_time = self._await_end(self._started_s + self._program.wall_time_s)
        ended_s = time.monotonic()
        if not in_time:
            _kill_all()
        _, status, usage = os.wait4(self._pid, 0)
        memory_bytes = max(usage.ru_maxrss, end_all()) * 1024
        confined, started_s, cpu_before_s = _STAMP.unpack_from(self._page)
        self._page.close()
        if not confined and in_time:
            raise RunFailed("a test's process could not be confined")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - self._usage.ru_utime - self._usage.ru_stime - cpu_before_s
        return self._judge(
            status, in_time, max(0.0, ended_s - (started_s or self._started_s)), max(0.0, cpu_s), memory_bytes
        )

    def _judge(self, status: int, in_time: bool, wall_s: float, cpu_s: float, memory_bytes: int) -> frames.Result:
        files, limit = self._files, self._program.output_bytes
        code = os.waitstatus_to_exitcode(status)
        sizes = os.fstat(files.stdout).st_size, os.fstat(files.stderr).st_size
        stderr = os.pread(files.stderr, _STDERR_BYTES, max(0, sizes[1] - _STDERR_BYTES))
        if max(sizes) > limit or code == -signal.SIGXFSZ:
            ended = frames.Ended.OUTPUT_LIMIT
        elif not in_time or code == -signal.SIGXCPU or cpu_s > self._program.cpu_time_s:
            ended = frames.Ended.TIME_LIMIT
        elif memory_bytes > self._program.memory_bytes or (code != 0 and _says_no_memory(stderr)):
            ended = frames.Ended.MEMORY_LIMIT
        else:
            ended = frames.Ended.SIGNALLED if code < 0 else frames.Ended.EXITED
        kept = _FLOOD_BYTES if ended is frames.Ended.OUTPUT_LIMIT else limit
        stdout = _read_all(files.stdout, min(sizes[0], kept))
        result = None
        if files.result is not None:
            result = _read_all(files.result, min(os.fstat(files.result).st_size, limit)) or None
        files.close()
        return frames.Result(
            ended, max(code, 0), max(-code, 0), wall_s, cpu_s, memory_bytes, stdout, stderr, result
        )

    # In the child ------------------------------------------------------------------------------------------------

    def _compile_in_child(self, report_in: int, go_out: int, limit_s: float) -> Job:
        report, go = 4, 5
        try:
            self._wire((report_in, go_out))
            candidate.confine(self._program, self._confinement)
            seconds = int(limit_s) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        except BaseException as error:  # noqa: BLE001 - told to the parent
            os.write(report, b"F" + str(error).encode())
            os._exit(1)
        try:
            code = candidate.compile_source(self._program)
        except BaseException as error:  # noqa: BLE001 - the compiler raises many kinds
            text = "".join(traceback.format_exception_only(error)).encode("utf-8", "replace")
            os.write(report, b"E" + text[-_MAX_DETAIL_BYTES:])
            os._exit(1)
        _write_all(report, b"C" + marshal.dumps(code))
        os.close(report)
        os.read(go, 1)
        os.close(go)
        return self._enter(code)

    def _wire(self, extra: tuple[int, ...]) -> None:
        """Descriptors 0, 1, 2, 3 (result), then `extra` from 4; everything else closed."""
        files = self._files
        targets = [files.stdin, files.stdout, files.stderr, files.result if files.result is not None else files.stdin]
        targets += extra
        for number, fd in enumerate(targets):
            os.dup2(fd, number)
        first = len(targets) if extra else (3 if files.result is None else 4)
        os.closerange(first, 1 << 20)
        if files.result is None and extra:
            os.close(3)

    def _enter(self, code: object) -> Job:
        """The last step before the candidate's code: stamp the page and let go of it."""
        namespace = candidate.look_like_a_script()
        job = Job(code, namespace, self._program.entry_point)  # type: ignore[arg-type]
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = used.ru_utime + used.ru_stime
        candidate.limit_cpu(cpu_s, self._program.cpu_time_s)
        _STAMP.pack_into(self._page, 0, 1, time.monotonic(), cpu_s)
        self._page.close()
        return job

    # In init ----------------------------------------------------------------------------------------------------

    def _fill_stdin(self, stdin: bytes) -> None:
        _write_all(self._files.stdin, stdin)
        os.lseek(self._files.stdin, 0, os.SEEK_SET)

    def _read_report(self, deadline_s: float) -> bytes:
        poll = select.poll()
        poll.register(self._report, select.POLLIN)
        poll.register(self._stream_in, select.POLLIN)
        chunks: list[bytes] = []
        while True:
            ready = dict(poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000))
            if self._report in ready:
                chunk = os.read(self._report, 1 << 20)
                if not chunk:
                    break
                chunks.append(chunk)
            elif self._stream_in in ready:
                # The first RUN may already be here; only END and a closed stream matter, and both can wait for that.
                poll.unregister(self._stream_in)
            else:
                return b""
        return b"".join(chunks)

    def _await_end(self, deadline_s: float) -> bool:
        """True when the process ended by itself in time. Raises RunAbandoned when the gateway wants no answer."""
        fd = os.pidfd_open(self._pid)
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.register(self._stream_in, select.POLLIN)
            ready = dict(poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000))
        finally:
            os.close(fd)
        if self._stream_in in ready and fd not in ready:
            end_all()
            raise RunAbandoned
        return fd in ready


def end_all() -> int:
    """Kill and reap every other process of this pid namespace; returns their peak resident size [KiB]."""
    peak_kib = 0
    _kill_all()
    while True:
        try:
            peak_kib = max(peak_kib, os.wait4(-1, 0)[2].ru_maxrss)
        except ChildProcessError:
            return peak_kib


def _kill_all() -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def _says_no_memory(stderr: bytes) -> bool:
    last_line = stderr.rstrip().rpartition(b"\n")[2]
    return any(word in last_line for word in _MEMORY_WORDS)


def _read_all(fd: int, num_bytes: int) -> bytes:
    chunks, offset = [], 0
    while offset < num_bytes:
        chunk = os.pread(fd, num_bytes - offset, offset)
        if not chunk:
            break
        chunks.append(chunk)
        offset += len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
