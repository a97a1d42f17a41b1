"""The supervisor with real processes: restarts, a bound on restarts with one sentence, and no process left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nouscoder.errors import ExitCode
from nouscoder.logs import Sentences
from nouscoder.run.supervisor import ProcessSpec, ProcessState, SupervisionError, Supervisor


def spec(folder: Path, code: str, *, name: str = "worker", may_end: bool = False) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-IS", "-c", code), folder / f"{name}.log", may_end)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def until(supervisor: Supervisor, condition: Callable[[], bool], limit_s: float) -> None:
    """Wait until `condition` while watching the processes, as the loop of a run does."""
    async with asyncio.timeout(limit_s):
        while not condition():
            supervisor.check()
            await asyncio.sleep(0.2)


async def test_a_killed_process_is_restarted(tmp_path: Path) -> None:
    supervisor = Supervisor(restart_delay_s=0.01)
    worker = supervisor.start(spec(tmp_path, "import time; time.sleep(60)"))
    await until(supervisor, lambda: worker.state is ProcessState.RUNNING, 60)
    first = worker.pid
    os.kill(first, signal.SIGKILL)
    await until(supervisor, lambda: worker.pid != first and worker.state is ProcessState.RUNNING, 60)
    assert worker.num_restarts == 1
    await supervisor.close()
    assert not is_alive(worker.pid)


async def test_a_process_that_always_fails_ends_the_run_with_its_last_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(max_restarts_per_hour=2, restart_delay_s=0.01)
    worker = supervisor.start(spec(tmp_path, "import sys; sys.exit('no luck today')"))
    with pytest.raises(
        SupervisionError, match=r"worker died 3 times within an hour, last with exit code 1.*no luck today"
    ):
        await until(supervisor, lambda: False, 60)
    assert worker.num_restarts == 3
    assert [Sentences().format(each) for each in caplog.records if each.levelname == "WARNING"] == [
        "warning: worker died with exit code 1 and is started again: the last line of"
        f" {tmp_path / 'worker.log'}: no luck today"
    ] * 2
    await supervisor.close()


async def test_deaths_count_for_an_hour_so_a_run_of_weeks_outlives_many(tmp_path: Path) -> None:
    now_s = 0.0

    def twenty_minutes_later() -> float:
        nonlocal now_s
        now_s += 1200.0
        return now_s

    supervisor = Supervisor(max_restarts_per_hour=3, restart_delay_s=0.0, now_s=twenty_minutes_later)
    worker = supervisor.start(spec(tmp_path, "raise SystemExit(1)"))
    await until(supervisor, lambda: worker.num_restarts > 6, 60)
    assert worker.num_restarts > 6, "more than twice as many deaths as an hour may have"
    await supervisor.close()


async def test_an_unusable_process_is_not_restarted(tmp_path: Path) -> None:
    supervisor = Supervisor(restart_delay_s=0.01)
    code = f"import sys; print('the port is taken'); sys.exit({ExitCode.UNUSABLE})"
    worker = supervisor.start(spec(tmp_path, code))
    with pytest.raises(SupervisionError, match=r"worker cannot run here.*the port is taken"):
        await until(supervisor, lambda: False, 60)
    assert worker.num_restarts == 0
    await supervisor.close()


async def test_an_allowed_exit_is_not_restarted(tmp_path: Path) -> None:
    supervisor = Supervisor()
    worker = supervisor.start(spec(tmp_path, "pass", may_end=True))
    await asyncio.wait_for(worker.ended.wait(), 60)
    assert worker.state is ProcessState.ENDED
    await supervisor.close()


async def test_close_kills_a_process_that_ignores_sigterm_and_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        f"if child: open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child}}\\n')\n"
        "time.sleep(60)\n"
    )
    supervisor = Supervisor()
    supervisor.start(spec(tmp_path, code))
    await until(supervisor, lambda: pids.exists() and "\n" in pids.read_text(), 60)
    await supervisor.close(grace_s=0.1)
    both = [int(pid) for pid in pids.read_text().split()]
    assert len(both) == 2
    assert not await alive_after(60, both)


async def alive_after(limit_s: float, pids: list[int]) -> list[int]:
    """Those of the processes that still live when all have ended, or after `limit_s`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while any(is_alive(pid) for pid in pids):
                await asyncio.sleep(0.02)
    return [pid for pid in pids if is_alive(pid)]


async def test_processes_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = f"""
import asyncio, sys
from pathlib import Path
from nouscoder.run.supervisor import ProcessSpec, ProcessState, Supervisor

async def main():
    supervisor = Supervisor()
    command = (sys.executable, "-IS", "-c", "import time; time.sleep(60)")
    worker = supervisor.start(ProcessSpec("worker", command, Path({str(tmp_path / "log")!r})))
    while worker.state is not ProcessState.RUNNING:
        supervisor.check()
        await asyncio.sleep(0.02)
    Path({str(pid_file)!r}).write_text(f"{{worker.pid}}\\n")
    await asyncio.sleep(60)

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        async with asyncio.timeout(60):
            while not (pid_file.exists() and "\n" in pid_file.read_text()):
                await asyncio.sleep(0.02)
    finally:
        parent.kill()
        parent.wait(60)
    assert not await alive_after(60, [int(pid_file.read_text())])
