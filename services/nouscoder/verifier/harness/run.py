"""One test: a fresh process, its files, the wait for its end, and what became of it.

INVARIANT: `finish` returns only after every process of the run is dead and reaped.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable

from . import frames, kernel
from .candidate import CANDIDATE_ID, Confinement, Job, Program, TestLimits, after_fork
from .files import Files, read_all, write_all
from .inbox import Inbox
from .memory import LOOK_EVERY_S, MemoryWatch

_ALL_FDS = 1 << 20
_STDERR_BYTES = 64 * 1024
_KILL_EVERY_S = 0.0005
_FLOOD_BYTES = 64 * 1024
_MEMORY_WORDS = (b"MemoryError", b"std::bad_alloc", b"Cannot allocate memory", b"out of memory", b"OutOfMemoryError")


_kept: list[object] = []


class RunFailed(Exception):
    """The sandbox could not start the program: ours, not the candidate's."""


class SessionEnded(Exception):
    """The gateway's END has been read in the middle of a run; everything is dead."""


class Plan:
    """What the runs of one submission share."""

    def __init__(
        self,
        program: Program,
        confinement: Confinement,
        files_dir: int,
        memory: MemoryWatch,
        limits: TestLimits | None = None,
    ) -> None:
        self.program = program
        self.files_dir = files_dir
        self.memory = memory
        self.confinement = confinement
        self.limits = limits or TestLimits(program, confinement)
        self.isolation = confinement.isolation

    def was_confined(self, pid: int) -> bool:
        """Whether the dead process `pid` had come to change its user, the last step before candidate code."""
        if not self.isolation.two_users:
            return True
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return info is not None and info.si_uid == CANDIDATE_ID


class Run:
    """Used once: `start`, then `finish`."""

    def __init__(self, plan: Plan, inbox: Inbox) -> None:
        self._plan = plan
        self._program = plan.program
        self._inbox = inbox
        self._files = Files.make(plan.isolation, plan.files_dir, plan.program.entry_point is not None)
        self._pid = 0
        self._started_s = 0.0
        self._cpu_before_s = 0.0
        self._peak_bytes = 0
        self._usage = resource.getrusage(resource.RUSAGE_CHILDREN)

    def start(self, stdin: bytes, begin: Callable[[], Job]) -> Job | None:
        """Fork a process, confine it and let it `begin`. Returns a job in that process only."""
        self._fill_stdin(stdin)
        self._started_s = time.monotonic()
        self._pid = kernel.fork()
        if self._pid == 0:
            try:
                _kept.append(sys._getframe())
                after_fork()
                self._wire()
                self._plan.limits.confine()
                return begin()
            except BaseException:  # our user id on the dead process tells the parent
                os._exit(1)
        return None

    def finish(self) -> frames.Result:
        """Wait for the end, kill what is left, and say what happened. Raises SessionEnded, RunFailed."""
        in_time = self._await_end(self._started_s + self._program.wall_time_s)
        too_big = self._peak_bytes > self._program.memory_bytes
        wall_s = time.monotonic() - self._started_s
        if not in_time or too_big:
            kill_all()
        confined = self._plan.was_confined(self._pid)
        _, status, usage = os.wait4(self._pid, 0)
        memory_bytes = max(max(usage.ru_maxrss, end_all()) * 1024, self._peak_bytes)
        if not confined and in_time and not too_big:
            raise RunFailed("a test's process could not be confined")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        before = self._usage
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime - self._cpu_before_s
        return self._judge(status, in_time, wall_s, max(0.0, cpu_s), memory_bytes)

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
        stdout = read_all(files.stdout, min(sizes[0], kept))
        result = None
        if files.result is not None:
            result = read_all(files.result, min(os.fstat(files.result).st_size, limit)) or None
        files.close()
        return frames.Result(ended, max(code, 0), max(-code, 0), wall_s, cpu_s, memory_bytes, stdout, stderr, result)

    def _wire(self, *extra: int) -> None:
        """Descriptors 0, 1, 2, then 3 (result), then `extra` from 4; everything else closed."""
        files = self._files
        os.dup2(files.stdin, 0)
        os.dup2(files.stdout, 1)
        os.dup2(files.stderr, 2)
        first_free = 3
        if files.result is not None:
            os.dup2(files.result, 3)
            first_free = 4
        for number, fd in enumerate(extra, 4):
            os.dup2(fd, number)
        if extra:
            os.closerange(first_free, 4)
            first_free = 4 + len(extra)
        os.closerange(first_free, _ALL_FDS)

    def _fill_stdin(self, stdin: bytes) -> None:
        write_all(self._files.stdin, stdin)
        os.lseek(self._files.stdin, 0, os.SEEK_SET)

    def _await_end(self, deadline_s: float) -> bool:
        """False when the time is over; True when the process ended by itself or holds too much memory.

        Raises SessionEnded when the gateway wants no answer; frames of a run to come are kept for it.
        """
        fd = os.pidfd_open(self._pid)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(self._inbox.fd, select.POLLIN)
        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                ready = [number for number, _ in poll.poll(min(left_s, LOOK_EVERY_S) * 1000)]
                if fd in ready:
                    return True
                if ready:
                    if not self._inbox.keep_early():
                        end_all()
                        raise SessionEnded
                    continue
                self._peak_bytes = max(self._peak_bytes, self._plan.memory.used_bytes())
                if self._peak_bytes > self._program.memory_bytes:
                    return True
            return False
        finally:
            os.close(fd)


def end_all() -> int:
    """Kill and reap every other process of this pid namespace; returns their peak resident size [KiB].

    Killed again while any is left: gVisor does not kill a namespace at one stroke, so a fork can slip through.
    """
    peak_kib = 0
    kill_all()
    while True:
        try:
            pid, _, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return peak_kib
        peak_kib = max(peak_kib, usage.ru_maxrss)
        if pid == 0:
            time.sleep(_KILL_EVERY_S)
            kill_all()


def kill_all() -> None:
    """Kill every other process of this pid namespace."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def _says_no_memory(stderr: bytes) -> bool:
    last_line = stderr.rstrip().rpartition(b"\n")[2]
    return any(word in last_line for word in _MEMORY_WORDS)
