"""Ends a process when the process that started it has gone, so that a killed service leaves no engine behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

_TICK_S = 0.5
_THREAD = "parent-watch"


def end_with_parent() -> None:
    """Watch the parent in a thread, if `multiprocessing` started this process. Repeated calls change nothing."""
    watched = any(thread.name == _THREAD for thread in threading.enumerate())
    if multiprocessing.parent_process() is not None and not watched:
        threading.Thread(target=_watch, args=(os.getppid(),), name=_THREAD, daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_TICK_S)
    os.kill(os.getpid(), signal.SIGKILL)  # nobody is left who could close it
