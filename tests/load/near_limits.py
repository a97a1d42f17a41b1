"""Honest submissions near their limits, on the idle machine, beside busy processes and beside hostile clients.

    python -m tests.load.near_limits [--number 300] [--busy 16] [--slots 4] [--hostile] [--seed 0]

--slots is how many the service runs at once beside the busy processes; on the idle machine it is one a core. A program
waits at most nine times its limit for the CPU, so (busy + slots) / cores times 0.82 must stay below ten.
Each is graded once in each round by `nouscoder serve verifier`. The number of those whose verdict differs from that on
the idle machine is printed, with a table by kind, and the exit code is 1 unless it is 0. Needs a machine that is idle.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.busy_cpu import HOG
from tests.load.floods import service
from tests.load.hostile import hostile_mixture

from nouscoder.verifier.toolchains.languages import installed

_LIMIT_S, _LIMIT_BYTES, _LIMIT_OUTPUT = 1.0, 512 << 20, 1 << 16
_UNDER, _OVER = (0.7, 0.82), (1.25, 1.5)
_MOST_S = 900.0
# Each uses S seconds (K milliseconds) of CPU time, sleeps W s, touches M bytes, prints N letters and exits with C.
PROGRAMS = {
    "python": """import sys, time
while time.process_time() < S: pass
time.sleep(W)
kept = bytearray(M)
for at in range(0, M, 4096): kept[at] = 1
print("x" * N, flush=True)
sys.exit(C)
""",
    "c": """#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
int main(void) {
  while (clock() < S * CLOCKS_PER_SEC);
  usleep(W * 1e6);
  volatile char *kept = (volatile char *)malloc(M + 1);
  for (long at = 0; at < M; at += 4096) kept[at] = 1;
  for (long at = 0; at < N; at++) putchar('x');
  puts("");
  return C;
}
""",
    "java": """public class Main {
  public static void main(String[] given) throws Exception {
    if (S > 0) {
      var system = (com.sun.management.OperatingSystemMXBean)
        java.lang.management.ManagementFactory.getOperatingSystemMXBean();
      while (system.getProcessCpuTime() < S * 1e9);
    }
    Thread.sleep((long) (W * 1000));
    byte[][] kept = new byte[64][M / 64];
    for (byte[] one : kept) for (int at = 0; at < one.length; at += 4096) one[at] = 1;
    System.out.println("x".repeat(N));
    System.exit(C);
  }
}
""",
    "javascript": """const used = () => { const one = process.cpuUsage(); return (one.user + one.system) / 1e6 };
while (used() < S);
Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, W * 1000);
const kept = Buffer.alloc(M, 1);
require("fs").writeSync(1, "x".repeat(N) + "\\n");
process.exit(C);
""",
    "go": """package main
import ("fmt"; "os"; "strings"; "syscall"; "time")
func main() {
  for {
    var one syscall.Rusage
    syscall.Getrusage(0, &one)
    if float64(one.Utime.Nano() + one.Stime.Nano()) >= S * 1e9 { break }
  }
  wait := W * 1e9
  time.Sleep(time.Duration(wait))
  kept := make([]byte, M + 1)
  for at := 0; at < M; at += 4096 { kept[at] = 1 }
  fmt.Println(strings.Repeat("x", N))
  os.Exit(C)
}
""",
    "rust": """extern { fn clock() -> i64; }
fn main() {
  unsafe { while (clock() as f64) < S as f64 * 1e6 {} }
  std::thread::sleep(std::time::Duration::from_secs_f64(W as f64));
  let kept = vec![1u8; M];
  std::hint::black_box(&kept);
  println!("{}", "x".repeat(N));
  std::process::exit(C);
}
""",
    "bash": """used=0
while (( used < K )); do
  for one in {1..500}; do :; done
  times > /tmp/used; read user system < /tmp/used
  user=${user#*m}; system=${system#*m}; user=${user%s}; system=${system%s}
  used=$(( 10#${user/./} + 10#${system/./} ))
done
sleep W
head -c M /dev/zero | tail -c M > /dev/null
head -c N /dev/zero | tr '\\0' x; echo
exit C
""",
    "perl": """my ($size, $length) = (M, N);
while (1) { my @used = times; last if $used[0] + $used[1] >= S }
select(undef, undef, undef, W);
my $kept = "x" x $size;
print "x" x $length, "\\n";
exit C;
""",
}
PROGRAMS["cpp"] = PROGRAMS["c"]
PROGRAMS["pypy"] = PROGRAMS["python"]
# What a program of each kind uses of its limits, and the verdict that is right.
_Share = tuple[float, float] | None
KINDS: dict[str, tuple[str, dict[str, _Share], int]] = {
    "CPU time just under": ("accepted", {"cpu": _UNDER}, 0),
    "CPU time just over": ("time_limit_exceeded", {"cpu": _OVER}, 0),
    "sleep just under": ("accepted", {"sleep": _UNDER}, 0),
    "sleep just over": ("time_limit_exceeded", {"sleep": _OVER}, 0),
    "both under": ("accepted", {"cpu": (0.35, 0.4), "sleep": (0.35, 0.4)}, 0),
    "memory just under": ("accepted", {"memory": (0.4, 0.45)}, 0),
    "memory just over": ("memory_limit_exceeded", {"memory": _OVER}, 0),
    "output just under": ("accepted", {"output": _UNDER}, 0),
    "output just over": ("output_limit_exceeded", {"output": _OVER}, 0),
    "late and wrong": ("wrong_answer", {"cpu": _UNDER}, 0),
    "late and exit code 3": ("runtime_error", {"cpu": _UNDER}, 3),
}
_FUNCTION = "import time\ndef f():\n    until = time.process_time() + S\n    while time.process_time() < until: pass\n"
_CHECKER = "import sys\nsys.exit(open(sys.argv[2]).read().split() != ['x'])\n"
_INTERACTOR = "print('go', flush=True)\nraise SystemExit(input() != 'x')\n"
_TALK = "input()\n" + PROGRAMS["python"]


@dataclass
class Honest:
    """One submission, and its verdict in each round."""

    kind: str
    language: str
    truth: str
    body: dict[str, Any]
    verdicts: list[str] = field(default_factory=list)


def filled(program: str, cpu: float = 0, sleep: float = 0, memory: int = 0, output: int = 1, code: int = 0) -> str:
    """A program with its amounts."""
    amounts = {"S": f"{cpu:.3f}", "K": int(cpu * 1000), "W": f"{sleep:.3f}", "M": memory, "N": output, "C": code}
    return re.sub(r"\b[SKWMNC]\b", lambda found: str(amounts[found[0]]), program)


def of_kind(draw: random.Random, kind: str, language: str) -> Honest:
    """A submission of a kind in a language."""
    truth, shares, code = KINDS[kind]
    used = {name: draw.uniform(*share) for name, share in shares.items() if share}
    factor = installed()[language].time_factor
    output = int(used.get("output", 0) * _LIMIT_OUTPUT) or 1
    program = filled(
        PROGRAMS[language],
        used.get("cpu", 0) * _LIMIT_S * factor,
        used.get("sleep", 0) * _LIMIT_S * factor,
        int(used.get("memory", 0) * _LIMIT_BYTES),
        output,
        code,
    )
    wanted = "y" if truth == "wrong_answer" else "x" * output
    tests = {"type": "stdin", "cases": [{"input": "", "output": wanted}]}
    return Honest(kind, language, truth, {"code": program, "language": language, "tests": tests})


def of_another_type(draw: random.Random, number: int) -> Honest:
    """A submission of another type of tests, or without a program that runs."""
    cpu = draw.uniform(*_UNDER)
    tests: dict[str, Any]
    judge = {"language": "python", "code": _CHECKER}
    match number % 6:
        case 0:
            tests = {"type": "call", "entry_point": "f", "cases": [{"args": [], "expected": 1}]}
            return Honest(
                "call", "python", "accepted", {"code": filled(_FUNCTION, cpu) + "    return 1\n", "tests": tests}
            )
        case 1:
            tests = {"type": "assert", "cases": ["assert f() == 2"]}
            return Honest("assert", "python", "wrong_answer", {"code": filled(_FUNCTION, cpu), "tests": tests})
        case 2:
            tests = {"type": "checker", "checker": judge, "cases": [{"input": ""}]}
            return Honest("checker", "python", "accepted", {"code": filled(PROGRAMS["python"], cpu), "tests": tests})
        case 3:
            judge = {"language": "python", "code": _INTERACTOR}
            tests = {"type": "interactive", "interactor": judge, "cases": [{"input": ""}]}
            return Honest("interactive", "python", "accepted", {"code": filled(_TALK, cpu), "tests": tests})
        case 4:
            tests = {"type": "stdin", "cases": [{"input": "", "output": "x"}]}
            body = {"code": "int main( {", "language": "cpp", "tests": tests}
            return Honest("does not compile", "cpp", "compile_error", body)
        case _:
            tests = {"type": "stdin", "cases": [{"input": "", "output": "x"}]}
            return Honest("no code", "python", "no_code", {"completion": "I cannot.", "tests": tests})


def honest(number: int, seed: int) -> list[Honest]:
    """Submissions of all kinds in all languages that are installed, in random order."""
    draw = random.Random(seed)
    languages = sorted(PROGRAMS.keys() & installed())
    pairs = [*itertools.product(KINDS, languages)]
    draw.shuffle(pairs)
    endless = itertools.cycle(pairs)
    made = [of_another_type(draw, at // 10) if at % 10 == 9 else of_kind(draw, *next(endless)) for at in range(number)]
    limits = {"wall_time_s": _LIMIT_S, "cpu_time_s": _LIMIT_S}
    for one in made:
        one.body["limits"] = limits | {"memory_bytes": _LIMIT_BYTES, "output_bytes": _LIMIT_OUTPUT}
    return made


def asked(port: int, body: bytes, source: str) -> dict[str, Any]:
    """The answer to a request of a client with an address. Full queues are waited for."""
    until = time.monotonic() + _MOST_S
    while True:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=_MOST_S, source_address=(source, 0))
        client.request("POST", "/v1/grade", body, {"Content-Type": "application/json"})
        response = client.getresponse()
        answer = json.loads(response.read())
        client.close()
        if response.status == 200:
            return dict(answer)
        if response.status not in (429, 503) or time.monotonic() > until:
            return {"verdict": f"HTTP {response.status}"}
        time.sleep(1)


def grade_all(port: int, ones: Sequence[Honest], tag: str, at_once: int) -> None:
    """Grade all, some at once. The tag makes them new for the service."""

    def grade(one: Honest) -> None:
        language = str(one.body.get("language", "python"))
        mark = "# " if language in ("python", "pypy", "bash", "perl") else "// "
        key = "completion" if "completion" in one.body else "code"
        body = one.body | {key: f"{one.body[key]}\n{mark}{tag}\n"}
        one.verdicts.append(asked(port, json.dumps(body).encode(), "127.0.0.1")["verdict"])

    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(grade, ones))


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Processes that are not the service's, each busy without end."""
    hogs = [subprocess.Popen([sys.executable, "-c", HOG]) for _ in range(number)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


@contextmanager
def hostile(port: int) -> Iterator[None]:
    """Four clients, of another address, whose programs are hostile."""
    ended = threading.Event()

    def attack(seed: int) -> None:
        for sample in itertools.chain.from_iterable(hostile_mixture(60, at) for at in itertools.count(seed, 4)):
            if ended.is_set():
                return
            asked(port, sample.body, "127.0.0.2")

    threads = [threading.Thread(target=attack, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(_MOST_S)


def table(ones: Sequence[Honest], rounds: Sequence[str]) -> int:
    """Print the table by kind and those that differ. Returns how many differ."""
    print(f"\n{'kind':24} number  as expected | " + " | ".join(f"{name}: differ" for name in rounds[1:]))
    for kind in dict.fromkeys(one.kind for one in ones):
        some = [one for one in ones if one.kind == kind]
        right = sum(one.verdicts[0] == one.truth for one in some)
        counts = (sum(one.verdicts[at] != one.verdicts[0] for one in some) for at in range(1, len(rounds)))
        print(f"{kind:24} {len(some):6} {right:12} | " + " | ".join(f"{count:6}" for count in counts))
    differ = [one for one in ones if len(set(one.verdicts)) > 1]
    for one in differ:
        print(f"differs: {one.kind}, {one.language}: {' / '.join(one.verdicts)}")
    for (kind, language, truth, verdict), count in Counter(
        (one.kind, one.language, one.truth, one.verdicts[0]) for one in ones if one.verdicts[0] != one.truth
    ).items():
        print(f"not as expected on the idle machine: {count} of {kind}, {language}: {verdict}, not {truth}")
    print(f"{len(differ)} of {len(ones)} differ")
    return len(differ)


def main() -> int:
    """Grade in each round, and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--number", type=int, default=300)
    options.add_argument("--busy", type=int, default=16)
    options.add_argument("--slots", type=int, default=4)
    options.add_argument("--hostile", action="store_true")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    ones = honest(given.number, given.seed)
    cores = os.cpu_count() or 1
    rounds: list[tuple[str, int, Callable[[int], Any]]] = [
        ("idle", cores, lambda _: busy(0)),
        (f"beside {given.busy} busy processes", given.slots, lambda _: busy(given.busy)),
    ]
    if given.hostile:
        rounds.append(("beside hostile clients", cores, hostile))
    for name, slots, beside in rounds:
        begun = time.monotonic()
        with service(False, slots) as (_, ports), beside(ports["http"]):
            grade_all(ports["http"], ones, name, slots)
        print(f"{name}: {len(ones)} graded in {time.monotonic() - begun:.0f} s", flush=True)
    return min(1, table(ones, [name for name, _, _ in rounds]))


if __name__ == "__main__":
    sys.exit(main())
