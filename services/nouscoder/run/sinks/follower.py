"""The sinks of a run: one process each, so that no sink can stall or end the run.

`python -m nouscoder.run.sinks.follower NAME RUN_FOLDER` copies metrics.jsonl to one sink. It reads the file as the
learner writes it. When its standard input ends, it copies what is left and exits. It can fail or hang without an effect
on the run.

The last evaluations of a run come into lines that were copied before (run/evaluation_files.py). The sink gets them
at the end.

INVARIANT: the sink gets each step once, in order of steps, also over restarts of the process: it begins after the last
step that the sink says it has. After a failure the record is tried again, at most MAX_FAILURES times in a row.
status.json of the sink says how many records were written and how many tries failed.

INVARIANT: at the end the run waits at most `_CLOSE_LIMIT_S` seconds for all sinks together; then those left are killed.
What they did not write is in metrics.jsonl, and a resumed run writes it. A sink that ended early is reported once.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import write_whole
from nouscoder.config import Config, ConfigError, load_config
from nouscoder.input_file import json_object
from nouscoder.logs import configure_logs
from nouscoder.run.folder import RunFolder
from nouscoder.run.sinks.targets import Sink, missing_packages, open_sink, scalars_of, sink_folder
from nouscoder.run.supervisor import PARENT_DEATH

log = logging.getLogger(__name__)


class MetricsTail:
    """The place in one file, whose last line the learner may be writing.

    After a restarted learner has removed lines, the whole file is read again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0

    def new_records(self) -> list[dict[str, Any]]:
        """The whole lines that were added, without those that a crash has torn: the learner repairs them."""
        try:
            with self._file.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [record for text in whole.splitlines() if isinstance(record := _parsed(text), dict)]


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


MAX_FAILURES = 20
STATUS = "status.json"
_LOOK_EVERY_S = 1.0
_MAX_WAIT_S = 30.0


@dataclass
class SinkStatus:
    """`last_step` is the last one that the sink has. `written` and `failures` count in this process."""

    last_step: int = 0
    written: int = 0
    failures: int = 0


class SinkFailed(Exception):
    """Too many tries in a row failed."""


class Follower:
    """Copies records to a sink. `wait(seconds)` returns whether the run has ended."""

    def __init__(self, sink: Sink, run: Path, status_file: Path, wait: Callable[[float], bool]) -> None:
        self._sink = sink
        self._metrics = run / "metrics.jsonl"
        self._tail = MetricsTail(self._metrics)
        self._evaluated: set[int] = set()  # the policy versions whose evaluation was in a line
        self._status_file = status_file
        self._wait = wait
        self._failures_in_row = 0
        self.status = SinkStatus()

    def run(self) -> None:
        """Copy until the run has ended and nothing is left. Raises SinkFailed."""
        self._try("open", self._open)
        ended = False
        while True:
            records = self._tail.new_records()
            for record in records:
                self._try("write", partial(self._write, record))
            if records:
                self._try("flush", self._sink.flush)
                self._save()
            elif ended:
                break
            ended = self._wait(_LOOK_EVERY_S) or ended
        self._amend()
        self._try("close", self._sink.close)
        self._save()

    def _open(self) -> None:
        self.status.last_step = self._sink.open()

    def _write(self, record: dict[str, Any]) -> None:
        """Give the sink a record that it does not have yet."""
        step = int(record["step"])
        if "evaluation" in record:
            self._evaluated.add(record["evaluation"]["policy_version"])
        if step <= self.status.last_step:
            return
        self._sink.write(step, float(record.get("time", 0.0)), scalars_of(record))
        self.status.last_step = step
        self.status.written += 1

    def _amend(self) -> None:
        """Give the sink the evaluations that came into lines after these were copied."""
        for record in MetricsTail(self._metrics).new_records():
            figures = record.get("evaluation", {})
            if figures.get("policy_version", -1) in {-1, *self._evaluated}:
                continue
            scalars = scalars_of({"evaluation": figures})
            self._try("amend", partial(self._sink.amend, int(record["step"]), float(record.get("time", 0.0)), scalars))

    def _try(self, what: str, work: Callable[[], None]) -> None:
        """Do it, again after each failure and a pause that doubles. Raises SinkFailed after MAX_FAILURES in a row."""
        while True:
            try:
                work()
            except Exception as error:  # a tool's client may raise anything
                self._failures_in_row += 1
                self.status.failures += 1
                self._save()
                log.warning("the sink failed", extra={"what": what, "reason": repr(error)})
                if self._failures_in_row >= MAX_FAILURES:
                    raise SinkFailed(f"{what}: {error}") from error
                self._wait(min(_MAX_WAIT_S, 0.1 * 2.0**self._failures_in_row))
            else:
                self._failures_in_row = 0
                return

    def _save(self) -> None:
        write_whole(self._status_file, json.dumps(asdict(self.status)).encode())


def _stdin_ended(limit_s: float) -> bool:
    """Wait until standard input ends, at most `limit_s` seconds. Returns whether it has."""
    ready, _, _ = select.select([sys.stdin], [], [], limit_s)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


def main(name: str, run: Path) -> int:
    """Copy the metrics of the run to the sink. Returns the exit code."""
    configure_logs(f"sink-{name}")
    config: Config = load_config(run / "config.toml")
    folder = sink_folder(run, name)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        Follower(open_sink(name, config, folder), run, folder / STATUS, _stdin_ended).run()
    except SinkFailed as error:
        log.error("the sink is given up; the run goes on", extra={"reason": str(error)})
        return 1
    return 0


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
        with (self._folder.logs / f"sink-{name}.log").open("ab") as output:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True, bufsize=0
            )

    def _counts(self, name: str) -> str:
        """What its status says, in words."""
        log_file = self._folder.logs / f"sink-{name}.log"
        if not (status := json_object(sink_folder(self._folder.path, name) / STATUS)):
            return f" (see {log_file})"
        return f" (last step {status['last_step']}, {status['failures']} failures; see {log_file})"


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
