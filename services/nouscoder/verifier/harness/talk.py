"""A run in a conversation: its input and output are pipes, and each piece crosses the stream as soon as it is there.

INVARIANT: what a program has said before it ended is sent before its RESULT; what it says beyond its output limit
ends it. All of it is in its RESULT too.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable

from . import candidate, frames
from .candidate import Job
from .files import write_all
from .inbox import Inbox
from .memory import LOOK_EVERY_S
from .run import Plan, Run, RunFailed, SessionEnded, end_all, kill_all

_CHUNK_BYTES = 1 << 16


class Talk(Run):
    """Used once: `start`, then `finish`."""

    def __init__(self, plan: Plan, inbox: Inbox, stream_out: int) -> None:
        super().__init__(plan, inbox)
        self._stream_out = stream_out
        self._child_ends = self._input, self._output = -1, -1
        self._unsent = bytearray()
        self._input_ended = False
        self._num_said = 0
        self._next_look_s = 0.0

    def start(self, stdin: bytes, begin: Callable[[], Job]) -> Job | None:
        """See `Run.start`; `stdin` is what it hears first."""
        child_in, self._input = os.pipe()
        self._output, child_out = os.pipe()
        self._child_ends = child_in, child_out
        self._unsent += stdin

        def begin_talking() -> Job:
            candidate.reopen_streams()
            return begin()

        job = super().start(b"", begin_talking)
        if job is None:
            os.close(child_in)
            os.close(child_out)
            os.set_blocking(self._input, False)
            os.set_blocking(self._output, False)
        return job

    def _wire(self, *extra: int) -> None:
        files = self._files
        self._files = files._replace(stdin=self._child_ends[0], stdout=self._child_ends[1])
        super()._wire(*extra)

    def _await_end(self, deadline_s: float) -> bool:
        fd = os.pidfd_open(self._pid)
        poll = select.poll()
        for number in (fd, self._output, self._inbox.fd):
            poll.register(number, select.POLLIN)
        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                self._set_input(poll)
                ready = dict(poll.poll(min(left_s, LOOK_EVERY_S) * 1000))
                if self._output in ready and not self._pass_on():  # it has closed its output
                    poll.unregister(self._output)
                if self._said_too_much() or self._grew_too_big():
                    return True
                if fd in ready:
                    while self._pass_on():  # what was said last
                        pass
                    return True
                if self._inbox.fd in ready:
                    self._hear()
                if self._input in ready:
                    self._feed()
            return False
        finally:
            for number in (fd, self._output, self._input):
                if number >= 0:
                    os.close(number)

    def _set_input(self, poll: select.poll) -> None:
        """Ask for room in the pipe when there is something to say, and close it when all has been said."""
        if self._input < 0:
            return
        if self._unsent:
            poll.register(self._input, select.POLLOUT)
            return
        with contextlib.suppress(KeyError):
            poll.unregister(self._input)
        if self._input_ended:
            os.close(self._input)
            self._input = -1

    def _feed(self) -> None:
        try:
            del self._unsent[: os.write(self._input, self._unsent)]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it hears no more; that is no fault
            self._unsent.clear()
            self._input_ended = True

    def _hear(self) -> None:
        kind, payload = self._inbox.next()
        if kind is frames.Kind.INPUT:
            if not self._input_ended:
                self._unsent += payload
        elif kind is frames.Kind.INPUT_END:
            self._input_ended = True
        elif kind is frames.Kind.END:
            end_all()
            raise SessionEnded
        else:
            raise RunFailed(f"{kind.name} in a conversation")

    def _pass_on(self) -> bool:
        """One piece of output; False when there is none (now, or ever)."""
        try:
            said = os.read(self._output, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not said or self._said_too_much():
            return False
        self._num_said += len(said)
        write_all(self._files.stdout, said)
        frames.write_frame(self._stream_out, frames.Kind.OUTPUT, said)
        return True

    def _said_too_much(self) -> bool:
        if self._num_said <= self._program.output_bytes:
            return False
        kill_all()
        return True

    def _grew_too_big(self) -> bool:
        now = time.monotonic()
        if now >= self._next_look_s:
            self._next_look_s = now + LOOK_EVERY_S
            self._peak_bytes = max(self._peak_bytes, self._plan.memory.used_bytes())
        return self._peak_bytes > self._program.memory_bytes
