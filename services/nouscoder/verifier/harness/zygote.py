"""The warm interpreter of a slot. It builds the root once and makes fresh namespaces for every submission.

INVARIANT: the zygote never reads a submission, so no data of one submission can reach the processes of the next. One of
its sandboxes owns the stream and one is on standby, so that the namespaces of the next submission are ready.
"""

from __future__ import annotations

import gc
import json
import os
import site
import sys
from typing import NoReturn

from . import frames, kernel, seccomp
from .candidate import Job, begin, make_script_surroundings, remember_modules
from .init_library import Init, ends_the_zygote
from .isolation import Isolation, isolation_of
from .preload import preload
from .settings import SlotSettings

_FRESH, _USED = b"1", b"u"  # the network namespace of the zygote, as in init.h
_THREAD_STACK_BYTES = 8 * 1024**2
_kept: list[object] = []


def main(settings_json: str) -> Job:
    """Serve until the stream closes. Returns only in a candidate's process, with the job that it must run."""
    settings = SlotSettings.from_json(settings_json)
    stream_in, stream_out = _move_stream()
    peer = kernel.move_up(settings.peer)
    try:
        _warm_up(settings)
        isolation = isolation_of(settings)
        filters = tuple(kernel.make_filter(seccomp.build_filter(notifies=notifies)) for notifies in (False, True))
        init = Init(settings, isolation, (stream_in, stream_out, peer), filters)
        isolation.enter()
        namespace = make_script_surroundings()
        hello = json.dumps({"python": sys.version.split()[0], "pid": os.getpid()}).encode()
        frames.write_frame(stream_out, frames.Kind.HELLO, hello)
        _hide_harness()
        gc.collect()
        gc.freeze()
        _kept.extend((settings, isolation, init, hello))  # freeing them would copy pages in every candidate
        if isolation.copies_image:
            init.open_image()
        assignment = _serve(init, isolation)
    except frames.StreamClosed:
        os._exit(0)
    except (OSError, ValueError) as error:
        _give_up(stream_out, str(error))
    try:
        return begin(assignment, namespace)
    except BaseException:  # a failure of the harness just before the program; it is reported as the program's
        os._exit(1)


class _Standby:
    """A sandbox. It is set up at once, and in use from `begin` to the end of its submission."""

    def __init__(self, pid: int, orders: int, report: int) -> None:
        self._pid, self._orders, self._report = pid, orders, report

    def begin(self, network: bytes) -> None:
        """Give it the stream once it is set up. From then on it also exits if the zygote is killed.

        `network` says whether the zygote's network namespace in which it was made is _FRESH or _USED since.
        """
        self._read_report()
        os.write(self._orders, network)
        os.close(self._orders)

    def await_end(self) -> bytes:
        """Wait until it has released the stream. Its namespaces may still be shutting down. Exits if it failed.

        Returns _USED when a program of it has made a socket in the zygote's network namespace, else _FRESH.
        """
        network = self._read_report()
        os.close(self._report)
        return network

    def _read_report(self) -> bytes:
        report = os.read(self._report, 1)
        if not report:
            self.reap()
        return report

    def reap(self) -> None:
        """Wait until all its processes have ended."""
        status = ends_the_zygote(os.waitpid(self._pid, 0)[1])
        if status is not None:
            os._exit(status)


def _serve(init: Init, isolation: Isolation) -> bytes:
    """Returns in a candidate's process only."""
    current = _stand_by(init, isolation)
    last: _Standby | None = None
    network = _FRESH
    while not isinstance(current, bytes):
        current.begin(network)
        following = _stand_by(init, isolation)
        if isinstance(following, bytes):
            return following
        if last is not None:
            last.reap()
        network = current.await_end()
        if network == _USED:
            isolation.renew_network()
        last, current = current, following
    return current


def _stand_by(init: Init, isolation: Isolation) -> _Standby | bytes:
    """Make a sandbox; or, in a candidate's process, its assignment."""
    orders, command = os.pipe()
    report, ready = os.pipe()
    pid = kernel.fork_into(isolation.namespaces)
    if pid == 0:
        os.close(command)
        os.close(report)
        return init.serve(orders, ready)
    os.close(orders)
    os.close(ready)
    isolation.admit(pid)
    os.write(command, b"1")
    return _Standby(pid, command, report)


def _move_stream() -> tuple[int, int]:
    """Move the control stream from descriptors 0 and 1 to numbers that no file of a run gets."""
    stream_in, stream_out = kernel.move_up(0), kernel.move_up(1)
    null = os.open("/dev/null", os.O_RDWR)
    if null != 0:
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
    """Remove this package and ctypes from `sys.modules`: once here, instead of in every candidate."""
    ours = (__name__.partition(".")[0], "ctypes", "_ctypes")
    _kept.extend(sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ours)
    remember_modules()


def _give_up(stream_out: int, reason: str) -> NoReturn:
    try:
        frames.write_frame(stream_out, frames.Kind.FAILED, reason.encode())
    finally:
        os._exit(1)
