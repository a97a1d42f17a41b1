"""Notices that a gateway process hangs: its event loop, which serves the requests, does not answer its parent.

INVARIANT: only time in which the process could have answered counts as silence. Time in which it waited for a CPU does
not, because on a machine that is busy with candidates that time has no limit. Nor does time in which the parent itself
did not run. So these are silent: a stopped process, one that waits for a lock or a file, and one that computes without
an end, of which only the CPU time counts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a process may be silent. The parent asks every `ask_period_s`."""

    ask_period_s: float = 5.0
    silence_limit_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Thread:
    """What the kernel says about a thread: whether it can run now, its CPU time, and how long it waited for a CPU."""

    is_runnable: bool
    cpu_s: float
    queued_s: float  # without a wait that has not ended


class Asked(Protocol):
    """What `until_hung` needs of a channel."""

    @property
    def num_answers(self) -> int:
        """How often the process has answered."""
        ...

    def ask(self) -> None:
        """Ask the process for an answer."""
        ...


async def until_hung(asked: Asked, look: Callable[[], Thread | None], patience: Patience) -> None:
    """Ask a process until it has been silent for `patience.silence_limit_s`. `look` gives its `main_thread`."""
    silent_s = 0.0
    before = look()
    while silent_s < patience.silence_limit_s:
        num_answers = asked.num_answers
        asked.ask()
        await asyncio.sleep(patience.ask_period_s)
        now = look()
        silent_s += could_answer_s(before, now, patience.ask_period_s)
        if asked.num_answers != num_answers:
            silent_s = 0.0
        before = now


def could_answer_s(before: Thread | None, now: Thread | None, period_s: float) -> float:
    """The part of a period in which a thread could have answered. The whole period when nothing is known of it.

    A thread that can run now may have waited for a CPU since an unknown time, so only its CPU time counts.
    """
    if before is None or now is None:
        return period_s
    able_s = now.cpu_s - before.cpu_s if now.is_runnable else period_s - (now.queued_s - before.queued_s)
    return min(period_s, max(0.0, able_s))


def main_thread(pid: int) -> Thread | None:
    """The thread of a process that runs its event loop. None when the kernel does not tell, or it has ended.

    Without the statistics of the scheduler (`schedstat` has zeros or is absent) the waits for a CPU seem to be 0.
    """
    folder = Path(f"/proc/{pid}/task/{pid}")
    try:
        fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return Thread(fields[0] == "R", (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, _queued_s(folder))


def _queued_s(folder: Path) -> float:
    try:
        return int((folder / "schedstat").read_text().split()[1]) / _NS_PER_S
    except (OSError, IndexError):
        return 0.0
