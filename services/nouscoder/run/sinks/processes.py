"""The sinks of a run: one process each (follower.py), so that no sink can stall or end the run.

INVARIANT: at the end the run waits at most `_CLOSE_LIMIT_S` seconds for all sinks together; then those left are killed.
What they did not write is in metrics.jsonl, and a resumed run writes it. A sink that ended early is reported once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nouscoder.config import Config, ConfigError
from nouscoder.run.folder import RunFolder
from nouscoder.run.sinks.follower import STATUS
from nouscoder.run.sinks.targets import missing_packages, sink_folder
from nouscoder.run.supervisor import PARENT_DEATH

_CLOSE_LIMIT_S = 20.0


class Sinks:
    """The processes of a run's sinks, by name."""

    def __init__(self, folder: RunFolder, names: tuple[str, ...]) -> None:
        self._folder = folder
        self._processes = {name: self._start(name) for name in names}

    def look(self) -> list[str]:
        """A warning for each sink that has ended since the last look."""
        ended = [name for name, process in self._processes.items() if process.poll() is not None]
        for name in ended:
            del self._processes[name]
        return [f"warning: sink {name} has ended, and the run goes on{self._counts(name)}" for name in ended]

    def close(self) -> list[str]:
        """Let the sinks write what is left. A warning for each one that was not in time or failed."""
        until = time.monotonic() + _CLOSE_LIMIT_S
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        late = []
        for name, process in self._processes.items():
            try:
                code = process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code:
                late.append(f"warning: sink {name} does not have every step{self._counts(name)}")
        return late

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        follower = [sys.executable, "-m", "nouscoder.run.sinks.follower", name, str(self._folder.path)]
        command = [sys.executable, "-IS", str(PARENT_DEATH), str(os.getpid()), *follower]
        with (self._folder.logs / f"sink-{name}.log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True, bufsize=0
            )

    def _counts(self, name: str) -> str:
        """What its status says, in words."""
        log = self._folder.logs / f"sink-{name}.log"
        try:
            status = json.loads((sink_folder(self._folder.path, name) / STATUS).read_text())
        except (OSError, ValueError):
            return f" (see {log})"
        return f" (last step {status['last_step']}, {status['failures']} failures; see {log})"


@contextmanager
def open_sinks(folder: RunFolder, config: Config, say: Callable[[str], None]) -> Iterator[Sinks]:
    """The sinks of run.sinks inside the context. Raises ConfigError when a package is not installed."""
    if faults := missing_packages(config):
        raise ConfigError("\n".join(faults))
    sinks = Sinks(folder, config.run.sinks)
    try:
        yield sinks
    finally:
        for warning in sinks.close():
            say(warning)
