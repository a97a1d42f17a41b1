"""Process 1 of a submission's namespaces: sets them up, then serves the frames of that one submission.

INVARIANT: a run starts only when no process but this one lives in the pid namespace and /tmp holds
nothing but what every run of the submission finds there and what this one is given.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the enum-free calls of signal
import fcntl
import json
import os
import resource
from typing import NoReturn

from . import candidate, frames, kernel
from .candidate import Confinement, Job, Program, make_script_surroundings
from .command import Command, build, compile_plan
from .first import FirstRun, Script
from .folder import Folder
from .inbox import Inbox
from .isolation import Isolation
from .memory import MemoryWatch
from .run import Plan, Run, RunFailed, SessionEnded, end_all
from .settings import SlotSettings
from .talk import Talk

EXIT_ENDED = 0
EXIT_STREAM_CLOSED = 3
_EXIT_FAILED = 4
_FIRST_OWN_FD = 64


class Init:
    """Built once in the zygote; `serve` runs in every fork of it."""

    def __init__(
        self, settings: SlotSettings, isolation: Isolation, stream_in: int, stream_out: int, filter_code: bytes
    ) -> None:
        self._isolation = isolation
        self._folder = Folder(settings, isolation)
        self._files_dir = self._proc_fd = self._report = -1
        self._inbox = Inbox(stream_in)
        self._out = stream_out
        with open("/proc/self/statm") as statm:
            vm_pages = int(statm.read().split()[0])
        self._confinement = Confinement(
            isolation=isolation,
            filter=kernel.make_filter(filter_code),
            namespace=make_script_surroundings(),
            base_vm_bytes=vm_pages * resource.getpagesize(),
        )

    def serve(self, orders: int, report: int) -> Job:
        """Settle at the first byte of `orders`, take the stream over at the second, leave it with a byte to `report`.

        Returns only in a candidate's process.
        """
        self._report = _move_up(report)
        try:
            _await_order(orders)  # the zygote has written our id maps
            problem = self._settled()
            _await_order(orders)  # the submission before has ended: the stream is ours
            os.close(orders)
            if problem:
                self._fail(problem)
            frames.write_frame(self._out, frames.Kind.READY)
            return self._session()
        except SessionEnded:
            self._leave()
        except frames.StreamClosed:
            os._exit(EXIT_STREAM_CLOSED)
        except (OSError, RunFailed) as error:
            self._fail(str(error))

    def _settled(self) -> str:
        """Why it cannot; told later, for the stream is still another's."""
        try:
            self._settle()
        except OSError as error:
            return str(error)
        return ""

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
        self._folder.mount()
        candidate.confine_session(self._confinement, (self._inbox.fd, self._out))

    def _session(self) -> Job:
        kind, payload = self._inbox.next()
        if kind is frames.Kind.END:
            self._leave()
        if kind is not frames.Kind.PROGRAM:
            self._fail(f"expected PROGRAM, not {kind.name}")
        program = Program(**json.loads(payload))
        return self._python(program) if program.run_argv is None else self._command(program, program.run_argv)

    def _python(self, program: Program) -> Job:
        self._folder.hold_script(program.source_name, program.source())
        memory = MemoryWatch(self._proc_fd, forked=True)
        plan = Plan(program, self._confinement, self._files_dir, memory)
        first = FirstRun(plan, self._inbox)
        job = first.start_compiling(program.compile_time_s)
        if job is not None:
            return job
        problem, code = first.compiled(program.compile_time_s)
        if problem is not None:
            self._refuse(problem)
        frames.write_frame(self._out, frames.Kind.COMPILED)
        return self._runs(plan, Script(program, self._confinement.namespace, code), first)

    def _command(self, program: Program, run_argv: list[str]) -> Job:
        memory = MemoryWatch(self._proc_fd, forked=False)
        compiling = compile_plan(program, self._confinement, self._files_dir, memory)
        job, problem = build(compiling, self._folder, self._inbox)
        if job is not None:
            return job
        if problem is not None:
            self._refuse(problem)
        frames.write_frame(self._out, frames.Kind.COMPILED)
        plan = Plan(program, self._confinement, self._files_dir, memory)
        return self._runs(plan, Command(run_argv), None)

    def _refuse(self, problem: bytes) -> NoReturn:
        end_all()
        frames.write_frame(self._out, frames.Kind.COMPILE_FAILED, problem)
        self._await_end()

    def _runs(self, plan: Plan, runner: Script | Command, first: FirstRun | None) -> Job:
        given = frames.Given()
        while True:
            kind, payload = self._inbox.next()
            if kind is frames.Kind.GIVEN:
                given = frames.unpack_given(payload)
                continue
            if kind in (frames.Kind.INPUT, frames.Kind.INPUT_END):  # for a conversation that has ended
                continue
            if kind is frames.Kind.END:
                end_all()
                self._leave()
            self._folder.give(given)
            run: Run
            job = None
            if kind is frames.Kind.RUN and first is not None:
                first.release(payload, given.args)
                run = first
            elif kind in (frames.Kind.RUN, frames.Kind.TALK):
                if first is not None:
                    first.drop()
                talks = kind is frames.Kind.TALK
                run = Talk(plan, self._inbox, self._out) if talks else Run(plan, self._inbox)
                job = run.start(payload, runner.beginning(given.args))
            else:
                self._fail(f"expected RUN, not {kind.name}")
            if job is not None:
                return job
            first, given = None, frames.Given()
            result = run.finish()
            self._folder.clean()
            frames.write_frame(self._out, frames.Kind.RESULT, frames.pack_result(result))

    def _await_end(self) -> NoReturn:
        try:
            while self._inbox.next()[0] is not frames.Kind.END:  # a run asked for before the refusal was known
                pass
        except frames.StreamClosed:
            os._exit(EXIT_STREAM_CLOSED)
        self._leave()

    def _leave(self) -> NoReturn:
        """The stream is free as soon as the byte is out; taking the namespaces down takes longer."""
        os.write(self._report, b"1")
        os._exit(EXIT_ENDED)

    def _fail(self, reason: str) -> NoReturn:
        try:
            frames.write_frame(self._out, frames.Kind.FAILED, reason.encode())
        finally:
            os._exit(_EXIT_FAILED)


def _await_order(orders: int) -> None:
    if not os.read(orders, 1):
        os._exit(EXIT_STREAM_CLOSED)  # the zygote is gone


def _move_up(fd: int) -> int:
    """Out of the low numbers, which belong to the files of a run."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN_FD)
    os.close(fd)
    return moved
