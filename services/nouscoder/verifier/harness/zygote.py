"""The warm interpreter of a slot. It builds the root once and makes fresh namespaces for every submission.

INVARIANT: the zygote never reads a submission, so no data of one submission can reach the processes of the next. One of
its sandboxes owns the stream and one is on standby, so that the namespaces of the next submission are ready.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import site
import stat
import sys
from typing import NoReturn

from . import frames, kernel, seccomp
from .candidate import CandidateJob, begin, compile_source, dump_code, make_script_surroundings, remember_modules
from .frames import SlotSettings
from .init_library import Assignment, Init
from .isolation import isolation_of

# Those that short programs use most, imported before any candidate runs. Each makes every fork slower (about 10 us).
# One that is not here costs its import in every program.
MODULES = (
    "math collections heapq bisect itertools functools string re random operator copy io os time "
    "typing datetime decimal fractions json threading queue array struct statistics "
    "marshal atexit select signal resource"
)
_THREAD_STACK_BYTES = 8 * 1024**2
_REHEARSED = b"""
import sys
from collections import defaultdict

def largest(values: list[int]) -> list[str]:
    found = defaultdict(int)
    for index, value in enumerate(sorted(values)):
        found[value] = max(found[value], index)
    return [str(value) for value in found if found[value] >= 0]

a, b = map(int, input().split())
print(a + b)
lines = sys.stdin.read().split("\\n")
print(*largest([int(word) for line in lines for word in line.split()]), sep=" ")
print(f"{a / b:.3f}", len(lines), range(a)[0], end="\\n")
"""
_kept: list[object] = []


def _join(groups: tuple[str, ...]) -> None:
    """Join control groups; 0 is the process that writes it. Where that is not allowed only the harness bounds a run."""
    for path in groups:
        with contextlib.suppress(OSError), open(path, "w") as file:
            file.write("0")


def main(settings_json: str) -> CandidateJob:
    """Serve until the stream closes. Returns only in a candidate's process, with the job that it must run."""
    settings = SlotSettings.from_json(settings_json)
    _join(settings.groups)
    stream_in, stream_out = _move_stream()
    peer = kernel.move_up(settings.peer)
    try:
        _warm_up(settings)
        isolation = isolation_of(settings)
        filters = tuple(kernel.make_filter(seccomp.build_filter(notifies=notifies)) for notifies in (False, True))
        init = Init(settings, isolation, (stream_in, stream_out, peer), filters)
        isolation.enter()
        for folder in settings.site_packages:
            _require_readable(folder, by_others=isolation.two_users)
        namespace = make_script_surroundings()
        hello = json.dumps({"python": sys.version.split()[0], "pid": os.getpid()}).encode()
        frames.write_frame(stream_out, frames.FrameKind.HELLO, hello)
        _rehearse(namespace)
        _hide_harness()
        gc.collect()
        gc.freeze()
        if isolation.has_large_pages:
            init.use_large_pages()
        _kept.extend((settings, isolation, init, hello))  # freeing them would copy pages in every candidate
        if isolation.copies_image:
            init.open_image()
        assignment = init.serve()
    except frames.StreamClosed:
        os._exit(0)
    except (OSError, ValueError) as error:
        _give_up(stream_out, str(error))
    try:
        return begin(assignment, namespace)
    except BaseException:  # a failure of the harness just before the program; it is reported as the program's
        os._exit(1)


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


def _require_readable(folder: str, *, by_others: bool) -> None:
    """Raises OSError for a folder that candidates do not see or may not read: a right program would fail without it."""
    needed = 0o005 if by_others else 0o500
    with os.scandir(folder) as entries:
        modules = [entry.path for entry in entries]
    files = (f"{path}/__init__.py" for path in modules)
    paths = [folder, *modules, *(path for path in files if os.path.exists(path))]
    for path in paths:
        mode = os.stat(path).st_mode
        rights = needed if stat.S_ISDIR(mode) else needed & 0o444
        if mode & rights != rights:
            raise OSError(f"candidates may not read {path}")
    if not modules:
        raise OSError(f"candidates find nothing in {folder}")


def preload(extra: tuple[str, ...] = ()) -> None:
    """Import the modules. `extra` are modules of the configured site folders. Raises ImportError for a missing one."""
    for name in (*MODULES.split(), *extra):
        importlib.import_module(name)


def _rehearse(namespace: dict[str, object]) -> None:
    """Run a program once as candidates do, with streams of its own.

    What the interpreter does for the first time only, such as filling its caches of names and methods, is then done
    here. A candidate would copy 30 more pages (of 290) for it.
    """
    streams = sys.stdin, sys.stdout
    job = begin(Assignment(1.0, False, False, b"\0", b"", dump_code(compile_source(_REHEARSED, ""))).pack(), namespace)
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"1 2\n3\n"), "utf-8", "strict")
    sys.stdout = io.TextIOWrapper(io.BytesIO(), "utf-8", "strict", "\n")
    exec(job.code, {"__name__": "__main__"})  # noqa: S102
    sys.stdin, sys.stdout = streams


def _hide_harness() -> None:
    """Remove this package and ctypes from `sys.modules`: once here, instead of in every candidate."""
    ours = (__name__.partition(".")[0], "ctypes", "_ctypes")
    _kept.extend(sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ours)
    remember_modules()


def _give_up(stream_out: int, reason: str) -> NoReturn:
    try:
        frames.write_frame(stream_out, frames.FrameKind.FAILED, reason.encode())
    finally:
        os._exit(1)
