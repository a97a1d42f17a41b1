"""The controls: rates of bare process operations; and where the CPU time of a submission of one test goes.

That is shown beside the floor: what a bare loop needs for the same.

The floor is a loop in an interpreter that has imported a slot's modules. It forks into namespaces of the kinds that a
slot makes, maps two users, mounts /proc and /tmp, and forks a process that compiles and runs the program. It has no
filter, no limits, no client, no judge and no large pages (harness/init/zygote.c).

All figures are CPU time (user and system), because the machine may be busy. What kernel threads do later, such as
removing namespaces, is in none of them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from nouscoder.bench.measuring import BenchError
from nouscoder.verifier.harness.isolation import LinuxIsolation
from nouscoder.verifier.harness.zygote import MODULES
from nouscoder.verifier.sandbox.slot import host_is_root

BASE_PYTHON = getattr(sys, "_base_executable", sys.executable)


def rate(action: Callable[[], object], seconds: float) -> float:
    """How many times per second `action` runs in sequence, measured over about `seconds` seconds."""
    num_done, begun = 0, time.perf_counter()
    while (spent_s := time.perf_counter() - begun) < seconds:
        action()
        num_done += 1
    return num_done / spent_s


def bare_spawn() -> None:
    """Start an interpreter that does nothing: the minimum cost of a grader that starts `python` for each test."""
    subprocess.run([BASE_PYTHON, "-IS", "-c", "pass"], check=True)


_FORKS = """
import os, sys, time
end, done, begun = float(sys.argv[1]), 0, time.perf_counter()
while time.perf_counter() - begun < end:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    done += 1
print(done / (time.perf_counter() - begun))
"""


def forks_per_second(seconds: float) -> float:
    """How many times per second a bare interpreter can fork a child that exits at once, and wait for it.

    Measured in a separate process, because a fork copies the page tables of its parent, and those here are large.
    """
    command = [BASE_PYTHON, "-IS", "-c", _FORKS, str(seconds)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


_WARM_FORKS = """
import gc, importlib, os, sys, time
for name in sys.argv[2].split():
    importlib.import_module(name)
program = compile("a, b = map(int, input().split())\\nprint(a + b)\\n", "main.py", "exec")
given, printed = os.memfd_create("in"), os.memfd_create("out")
os.write(given, b"1 2\\n")
report = os.dup(1)
os.dup2(given, 0)
os.dup2(printed, 1)
gc.collect()
gc.freeze()
end, done, begun = float(sys.argv[1]), 0, time.perf_counter()
while time.perf_counter() - begun < end:
    os.lseek(0, 0, 0)
    pid = os.fork()
    if not pid:
        exec(program, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0 and os.pread(1, 9, 0) == b"3\\n"
    os.ftruncate(1, 0)
    os.lseek(1, 0, 0)
    done += 1
os.write(report, b"%f" % (done / (time.perf_counter() - begun)))
"""


def warm_forks_per_second(seconds: float) -> float:
    """How many times per second an interpreter with a slot's modules can fork a child that runs a test of this bench.

    The child reads and writes memory files. Nothing isolates it: no namespaces, limits, filter, new user or network. It
    is the bound of a grader whose tests are forks of an interpreter.
    """
    command = [BASE_PYTHON, "-IS", "-c", _WARM_FORKS, str(seconds), MODULES]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


_PATIENCE_S = 120.0  # for a busy machine
_FIRST_USER = 1_999_999_998  # no user of the host and none of a slot


@dataclass(frozen=True, slots=True)
class Floor:
    """CPU time of one turn of the bare loop [ms], by step."""

    namespaces_ms: float
    mounts_ms: float  # and users
    program_ms: float

    @property
    def total_ms(self) -> float:
        """All steps."""
        return self.namespaces_ms + self.mounts_ms + self.program_ms


@dataclass(frozen=True, slots=True)
class SubmissionCost:
    """CPU time for one submission of one test [ms]. `candidate_ms` is the run of the program without compiling."""

    gateway_ms: float
    interpreter_ms: float  # of the warm interpreter: the fork into namespaces
    init_ms: float  # sets up, compiles, forks and cleans
    candidate_ms: float
    client_ms: float
    floor: Floor

    @property
    def service_ms(self) -> float:
        """All of the service, without the client."""
        return self.gateway_ms + self.interpreter_ms + self.init_ms + self.candidate_ms

    @property
    def of_floor(self) -> float:
        """The service's time as a multiple of the floor."""
        return self.service_ms / self.floor.total_ms


def as_lines(cost: SubmissionCost) -> list[str]:
    """The figures as readable lines."""
    floor = cost.floor
    return [
        f"CPU of a one-test submission: {cost.service_ms:.2f} ms = gateway {cost.gateway_ms:.2f} + warm interpreter"
        f" {cost.interpreter_ms:.2f} + init {cost.init_ms:.2f} + candidate {cost.candidate_ms:.2f};"
        f" client {cost.client_ms:.2f}",
        f"floor: {floor.total_ms:.2f} ms = fork into namespaces {floor.namespaces_ms:.2f} + users and mounts"
        f" {floor.mounts_ms:.2f} + the program {floor.program_ms:.2f};"
        f" the service takes {cost.of_floor:.2f}x the floor",
    ]


@dataclass(frozen=True, slots=True)
class SlotClocks:
    """CPU seconds until now of a service with one gateway process and slots on this host."""

    gateway_s: float
    interpreters_s: float
    sandboxes_s: float  # of all processes below the interpreters that have ended

    @staticmethod
    def of(pid: int) -> SlotClocks:
        """Read the clocks of the service `pid`. Its direct children are the warm interpreters."""
        slots = psutil.Process(pid).children()
        ended = [slot.cpu_times() for slot in slots]
        return SlotClocks(
            _cpu_clock_s(pid),
            sum(_cpu_clock_s(slot.pid) for slot in slots),
            sum(times.children_user + times.children_system for times in ended),
        )


def _cpu_clock_s(pid: int) -> float:
    """The CPU time of another process, in nanoseconds: clock_getcpuclockid(3), which Python does not have."""
    return time.clock_gettime(~pid << 3 | 2)


def cost_of(
    before: SlotClocks,
    after: SlotClocks,
    *,
    submissions: int,
    candidates_s: float,
    client_s: float,
    floors: list[Floor],
) -> SubmissionCost:
    """The cost of `submissions` between two readings. `floors` were measured in turn with them."""

    def each_ms(seconds: float) -> float:
        return seconds / submissions * 1e3

    return SubmissionCost(
        gateway_ms=each_ms(after.gateway_s - before.gateway_s),
        interpreter_ms=each_ms(after.interpreters_s - before.interpreters_s),
        init_ms=each_ms(after.sandboxes_s - before.sandboxes_s - candidates_s),
        candidate_ms=each_ms(candidates_s),
        client_ms=each_ms(client_s),
        floor=Floor(
            statistics.median(floor.namespaces_ms for floor in floors),
            statistics.median(floor.mounts_ms for floor in floors),
            statistics.median(floor.program_ms for floor in floors),
        ),
    )


_LOOP = """
import ctypes, gc, importlib, os, platform, resource, sys, time
for name in sys.argv[2].split():
    importlib.import_module(name)
namespaces, id_map = int(sys.argv[3]), sys.argv[4].encode()
libc = ctypes.PyDLL(None)
syscall, mount, clone = libc.syscall, libc.mount, {"x86_64": 56, "aarch64": 220}[platform.machine()]
given, printed = os.memfd_create("in"), os.memfd_create("out")
os.write(given, b"1 2\\n")
result = os.dup(1)
os.dup2(given, 0)
os.dup2(printed, 1)
ready, go = os.pipe()

def admit(pid):
    for name, text in (("setgroups", b"deny"), ("uid_map", id_map), ("gid_map", id_map)):
        fd = os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
        os.write(fd, text)
        os.close(fd)
    os.write(go, b"1")

def set_up():
    os.read(ready, 1)
    if mount(b"proc", b"/proc", b"proc", 14, None) or mount(b"tmpfs", b"/tmp", b"tmpfs", 6, None):
        os._exit(1)

def run():
    pid = syscall(clone, 17, 0, 0, 0, 0)
    if not pid:
        exec(compile("a, b = map(int, input().split())\\nprint(a + b)\\n", "main.py", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    os._exit(os.waitpid(pid, 0)[1])

def turn(mounts, program):
    os.lseek(0, 0, 0)
    pid = syscall(clone, namespaces | 17, 0, 0, 0, 0)
    if not pid:
        mounts and set_up()
        program and run()
        os._exit(0)
    if pid < 0:
        sys.exit("this host makes no namespaces")
    mounts and admit(pid)
    if os.waitpid(pid, 0)[1] or program and os.pread(1, 9, 0) != b"3\\n":
        sys.exit("a sandbox of the floor failed")
    os.ftruncate(1, 0)
    os.lseek(1, 0, 0)

def used_s():
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in both)

def each_ms(*steps):
    turn(*steps)
    done, begun_s, end_s = 0, used_s(), time.perf_counter() + float(sys.argv[1]) / 3
    while not done or time.perf_counter() < end_s:
        turn(*steps)
        done += 1
    return (used_s() - begun_s) / done * 1e3

gc.collect()
gc.freeze()
os.write(result, b"%f %f %f" % (each_ms(False, False), each_ms(True, False), each_ms(True, True)))
"""


def floor(seconds: float) -> Floor:
    """Run the bare loop for about so long. Raises BenchError when this host makes no such namespaces."""
    users = f"0 {_FIRST_USER} 1\n1000 {_FIRST_USER + 1} 1" if host_is_root() else f"0 {os.getuid()} 1"
    command = [BASE_PYTHON, "-IS", "-c", _LOOP, str(seconds), MODULES, str(LinuxIsolation.namespaces), users]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds + _PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise BenchError(f"the floor of a submission was not measured in {seconds + _PATIENCE_S:.0f} s") from None
    if ended.returncode:
        raise BenchError(f"the floor of a submission cannot be measured: {ended.stderr.strip()[-300:]}")
    namespaces_ms, with_mounts_ms, whole_ms = map(float, ended.stdout.split())
    return Floor(namespaces_ms, with_mounts_ms - namespaces_ms, whole_ms - with_mounts_ms)
