"""The first test's process of a python submission: it compiles, reports, and waits for its input.

So a submission of one test costs one process, and a compiler that runs wild is as confined as any candidate.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import struct
import time
from collections.abc import Callable
from typing import Any

from . import candidate, kernel
from .candidate import Compiled, Job, Program
from .files import write_all
from .run import Run, RunFailed, end_all

_CPU_USED = struct.Struct("=d")  # CPU time that compiling took [s]
_MAX_DETAIL_BYTES = 8 * 1024


class FirstRun(Run):
    """Used once: `start_compiling`, `compiled`, then `release` and `finish`, or `drop`."""

    _go = _report = -1

    def start_compiling(self, limit_s: float) -> Job | None:
        """Fork the first test's process: it compiles, reports, and waits. Returns a job in that process only."""
        report_out, report_in = os.pipe()
        go_out, go_in = os.pipe()
        self._pid = kernel.fork()
        if self._pid == 0:
            return self._compile_in_child(report_in, go_out, limit_s)
        os.close(report_in)
        os.close(go_out)
        self._report, self._go = report_out, go_in
        return None

    def compiled(self, limit_s: float) -> tuple[bytes | None, bytes]:
        """(why it does not compile or None, the marshalled code). Raises RunFailed."""
        message = self._read_report(time.monotonic() + limit_s)
        os.close(self._report)
        if message[:1] == b"C":
            (self._cpu_before_s,) = _CPU_USED.unpack_from(message, 1)
            return None, message[1 + _CPU_USED.size :]
        if message[:1] == b"F":
            raise RunFailed(message[1:].decode("utf-8", "replace"))
        os.close(self._go)
        self._files.close()
        return message[1:] or b"the compiler ran out of time or memory", b""

    def release(self, stdin: bytes, args: tuple[str, ...]) -> None:
        """Let the compiled process run with this input and these arguments."""
        self._fill_stdin(stdin)
        self._started_s = time.monotonic()
        try:
            write_all(self._go, json.dumps(args).encode())
        except BrokenPipeError as error:
            raise RunFailed("the process ended before it was started") from error
        os.close(self._go)

    def drop(self) -> None:
        """End it unused."""
        os.close(self._go)
        end_all()
        self._files.close()

    def _compile_in_child(self, report_in: int, go_out: int, limit_s: float) -> Job:
        report, go = 4, 5
        try:
            candidate.after_fork()
            self._wire(report_in, go_out)
            seconds = math.ceil(limit_s)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
            self._plan.limits.confine(count_cpu=False)
        except BaseException as error:  # told to the parent
            write_all(report_in, b"F" + repr(error).encode())
            os._exit(1)
        try:
            code = candidate.compile_source(self._program)
        except BaseException as error:  # the compiler raises many kinds
            import traceback  # only here: most submissions compile

            text = "".join(traceback.format_exception_only(error)).encode("utf-8", "replace")
            write_all(report, b"E" + text[-_MAX_DETAIL_BYTES:])
            os._exit(1)
        marshalled = candidate.dump_code(code)
        used = resource.getrusage(resource.RUSAGE_SELF)
        used_s = used.ru_utime + used.ru_stime
        candidate.count_cpu_from(used_s, self._program.cpu_time_s)
        write_all(report, b"C" + _CPU_USED.pack(used_s) + marshalled)
        os.close(report)
        given = b""
        while chunk := os.read(go, 1 << 16):
            given += chunk
        os.close(go)
        if not given:
            os._exit(0)
        return Job(code, self._plan.confinement.namespace, self._program.entry_point, tuple(json.loads(given)))

    def _read_report(self, deadline_s: float) -> bytes:
        poll = select.poll()
        poll.register(self._report, select.POLLIN)
        poll.register(self._inbox.fd, select.POLLIN)
        chunks: list[bytes] = []
        while True:
            ready = dict(poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000))
            if self._report in ready:
                chunk = os.read(self._report, 1 << 20)
                if not chunk:
                    break
                chunks.append(chunk)
            elif self._inbox.fd in ready:
                # The first RUN may already be here; only END and a closed stream matter, and both can wait for that.
                poll.unregister(self._inbox.fd)
            else:
                return b""
        return b"".join(chunks)


class Script:
    """A compiled python program, for the processes after the first: unpacked in init, once, when one is needed."""

    def __init__(self, program: Program, namespace: dict[str, Any], marshalled: bytes) -> None:
        self._entry_point = program.entry_point
        self._namespace = namespace
        self._marshalled = marshalled
        self._code: Compiled | None = None

    def beginning(self, args: tuple[str, ...]) -> Callable[[], Job]:
        """What a forked process does to become a run of it."""
        code = self._code = self._code or candidate.load_code(self._marshalled)
        return lambda: Job(code, self._namespace, self._entry_point, args)
