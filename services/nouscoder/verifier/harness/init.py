"""Process 1 of a submission's namespaces: sets them up, then serves the frames of that one submission.

INVARIANT: a run starts only when no process but this one lives in the pid namespace and /tmp holds main.py alone.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the enum-free calls of signal
import fcntl
import json
import os
import resource
from types import CodeType
from typing import NoReturn

from . import candidate, frames, kernel
from .candidate import Confinement, Job, Program, make_script_surroundings
from .isolation import Isolation
from .memory import MemoryWatch
from .run import Plan, Run, RunAbandoned, RunFailed, end_all
from .settings import SlotSettings

EXIT_ENDED = 0
EXIT_STREAM_CLOSED = 3
_EXIT_FAILED = 4
_FIRST_OWN_FD = 64
_SCRIPT = "/tmp/main.py"


class Init:
    """Built once in the zygote; `serve` runs in every fork of it."""

    def __init__(
        self, settings: SlotSettings, isolation: Isolation, stream_in: int, stream_out: int, filter_code: bytes
    ) -> None:
        self._settings = settings
        self._isolation = isolation
        self._files_dir = self._proc_fd = -1
        self._in = stream_in
        self._out = stream_out
        self._two_users = isolation.two_users
        with open("/proc/self/statm") as statm:
            vm_pages = int(statm.read().split()[0])
        self._confinement = Confinement(
            isolation=isolation,
            filter=kernel.make_filter(filter_code),
            namespace=make_script_surroundings(),
            base_vm_bytes=vm_pages * resource.getpagesize(),
        )

    def serve(self, release: int) -> Job:
        """Returns only in a candidate's process."""
        try:
            os.read(release, 1)  # the zygote has written our id maps
            os.close(release)
            self._settle()
            frames.write_frame(self._out, frames.Kind.READY)
            return self._session()
        except RunAbandoned:
            self._await_end()
        except frames.StreamClosed:
            os._exit(EXIT_STREAM_CLOSED)
        except (OSError, RunFailed) as error:
            self._fail(str(error))

    def _settle(self) -> None:
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGINT,))
        kernel.die_with_parent()
        kernel.forbid_inspection()
        self._proc_fd = _move_up(self._isolation.show_processes())
        # Files of the runs live in a tmpfs that the candidate's /tmp then hides; only this descriptor leads there.
        kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=700")
        self._files_dir = _move_up(os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY))
        self._mount_tmp()
        candidate.confine_session(self._confinement, (self._in, self._out))

    def _mount_tmp(self) -> None:
        options = f"size={self._settings.tmp_bytes},nr_inodes={self._settings.tmp_inodes},mode=1777"
        kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)

    def _session(self) -> Job:
        kind, payload = frames.read_frame(self._in)
        if kind is frames.Kind.END:
            os._exit(EXIT_ENDED)
        if kind is not frames.Kind.PROGRAM:
            self._fail(f"expected PROGRAM, not {kind.name}")
        program = Program(**json.loads(payload))
        self._write_script(program)
        plan = Plan(program, self._confinement, self._files_dir, MemoryWatch(self._proc_fd))
        run = Run(plan, self._in)
        job = run.start_compiling(self._settings.compile_time_s)
        if job is not None:
            return job
        problem, code = run.compiled(self._settings.compile_time_s)
        if problem is not None:
            end_all()
            frames.write_frame(self._out, frames.Kind.COMPILE_FAILED, problem)
            return self._await_end()
        frames.write_frame(self._out, frames.Kind.COMPILED)
        return self._runs(plan, run, code)

    def _runs(self, plan: Plan, first: Run, marshalled: bytes) -> Job:
        run: Run | None = first
        code: CodeType | None = None
        while True:
            kind, stdin = frames.read_frame(self._in)
            if kind is frames.Kind.END:
                end_all()
                os._exit(EXIT_ENDED)
            if kind is not frames.Kind.RUN:
                self._fail(f"expected RUN, not {kind.name}")
            if run is None:
                code = code or candidate.load_code(marshalled)
                run = Run(plan, self._in)
                job = run.start(stdin, code)
                if job is not None:
                    return job
            else:
                run.release(stdin)
            result = run.finish()
            run = None
            self._clean(plan.program)
            frames.write_frame(self._out, frames.Kind.RESULT, frames.pack_result(result))

    def _clean(self, program: Program) -> None:
        """A fresh /tmp when the run left anything there; always when it ran as our own user."""
        if self._two_users and os.listdir("/tmp") == ["main.py"]:
            return
        kernel.unmount("/tmp")
        self._mount_tmp()
        self._write_script(program)

    def _write_script(self, program: Program) -> None:
        fd = os.open(_SCRIPT, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
        os.write(fd, program.source())
        os.close(fd)

    def _await_end(self) -> NoReturn:
        try:
            frames.read_frame(self._in)
        except frames.StreamClosed:
            os._exit(EXIT_STREAM_CLOSED)
        os._exit(EXIT_ENDED)

    def _fail(self, reason: str) -> NoReturn:
        try:
            frames.write_frame(self._out, frames.Kind.FAILED, reason.encode())
        finally:
            os._exit(_EXIT_FAILED)


def _move_up(fd: int) -> int:
    """Out of the low numbers, which belong to the files of a run."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD)
    os.close(fd)
    return moved
