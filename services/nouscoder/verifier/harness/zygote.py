"""A slot's warm interpreter: builds the root once, then gives every submission a fresh set of namespaces.

INVARIANT: the zygote never reads a submission, so nothing of one can reach the processes of the next.
It makes the next sandbox as soon as the last one ends, so a submission finds its namespaces ready.
"""

from __future__ import annotations

import gc
import json
import os
import site
import sys
from typing import NoReturn

from . import frames, kernel, seccomp
from .candidate import Job
from .init import EXIT_ENDED, EXIT_STREAM_CLOSED, Init
from .isolation import Isolation, isolation_of
from .preload import preload
from .settings import SlotSettings

_CONTROL_FD = 64
_THREAD_STACK_BYTES = 8 * 1024**2
_kept: list[object] = []


def main(settings_json: str) -> Job:
    """Serve until the stream closes. Returns only in a candidate's process, with what it must run."""
    settings = SlotSettings.from_json(settings_json)
    stream_in, stream_out = _move_stream()
    try:
        _warm_up(settings)
        isolation = isolation_of(settings)
        isolation.enter()
        init = Init(settings, isolation, stream_in, stream_out, seccomp.build_filter())
        hello = json.dumps({"python": sys.version.split()[0], "pid": os.getpid()}).encode()
        frames.write_frame(stream_out, frames.Kind.HELLO, hello)
        _hide_harness()
        gc.collect()
        gc.freeze()
        return _serve(init, isolation)
    except frames.StreamClosed:
        os._exit(0)
    except (OSError, ValueError) as error:
        _give_up(stream_out, str(error))


def _serve(init: Init, isolation: Isolation) -> Job:
    while True:
        release, hold = os.pipe()
        pid = kernel.fork_into(isolation.namespaces)
        if pid == 0:
            os.close(hold)
            return init.serve(release)
        os.close(release)
        isolation.admit(pid)
        os.write(hold, b"1")
        os.close(hold)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == EXIT_STREAM_CLOSED:
            os._exit(0)
        if status != EXIT_ENDED:
            os._exit(1)


def _move_stream() -> tuple[int, int]:
    """Take the control stream off descriptors 0 and 1, to numbers that no file of a run gets."""
    import fcntl

    stream_in = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _CONTROL_FD)
    stream_out = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, _CONTROL_FD)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    if null > 2:
        os.close(null)
    return stream_in, stream_out


def _warm_up(settings: SlotSettings) -> None:
    sys.path.extend(settings.site_packages)
    preload(settings.preload)
    site.setquit()
    site.setcopyright()
    site.sethelper()
    kernel.default_thread_stack(_THREAD_STACK_BYTES)


def _hide_harness() -> None:
    """Take this package out of `sys.modules` while it is cheap: here, once, and not in every candidate."""
    package = __name__.partition(".")[0]
    _kept.extend(sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == package)


def _give_up(stream_out: int, reason: str) -> NoReturn:
    try:
        frames.write_frame(stream_out, frames.Kind.FAILED, reason.encode())
    finally:
        os._exit(1)
