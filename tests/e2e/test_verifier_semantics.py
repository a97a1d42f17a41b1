"""The `process` profile gives the verdict that a program would get in a shell (research/grading.md, section 2).

Grades programs that in-process graders judge wrongly, with the real `local` sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from nouscoder.config import load_config
from nouscoder.domain.submission import CallCase, CallTests, JsonValue, Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import open_sandbox, with_libraries

OK, WRONG = VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER
ERROR, LATE = VerdictKind.RUNTIME_ERROR, VerdictKind.TIME_LIMIT_EXCEEDED
LIMITS = Limits(wall_time_s=5.0, cpu_time_s=3.0)

# name: (program, stdin, expected output, verdict)
STDIN = {
    "buffer.readline twice": ("import sys\nr=sys.stdin.buffer.readline\nprint(int(r())+int(r()))", "1\n2\n", "3", OK),
    "buffer.readlines": ("import sys\nprint(sum(map(int,sys.stdin.buffer.readlines())))", "1\n2\n", "3", OK),
    "stdout.buffer.write": ("import sys\nsys.stdout.buffer.write(b'3')", "", "3", OK),
    "iterating stdin": ("import sys\nprint(sum(int(x) for x in sys.stdin))", "1\n2\n", "3", OK),
    "open(0)": ("print(sum(map(int,open(0).read().split())))", "1\n2\n", "3", OK),
    "input then read": ("import sys\na=int(input())\nprint(a+int(sys.stdin.read()))", "1\n2\n", "3", OK),
    "global": ("x=1\ndef f():\n    global x\n    x+=2\nf()\nprint(x)", "", "3", OK),
    "main guard not last": ("def f():\n    print(3)\nif __name__=='__main__':\n    f()\ny=1", "", "3", OK),
    "from __future__": ("from __future__ import annotations\nprint(3)", "", "3", OK),
    "quit": ("print(3)\nquit()", "", "3", OK),
    "fileno": ("import os,sys\nos.write(sys.stdout.fileno(),os.read(sys.stdin.fileno(),9))", "3", "3", OK),
    "atexit": ("import atexit\natexit.register(lambda: print(3))", "", "3", OK),
    "unjoined thread": (
        "import threading,time\ndef f():\n    time.sleep(.05)\n    print(3)\nthreading.Thread(target=f).start()",
        "",
        "3",
        OK,
    ),
    "double inner spaces": ("print('a  b')", "", "a b", OK),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and 1+f(n-1)\nprint(f(50000))",
        "",
        "50000",
        OK,
    ),
    "sortedcontainers": ("from sortedcontainers import SortedList\nprint(SortedList([3])[0])", "", "3", OK),
    "exit code after the right output": ("import sys\nprint(3)\nsys.exit(1)", "", "3", ERROR),
    "import that a prelude would supply": ("print(math.floor(3.2))", "", "3", ERROR),
    "alarm(0)": (
        "import signal\nsignal.alarm(0)\nsignal.signal(signal.SIGXCPU,signal.SIG_IGN)\nwhile 1: pass",
        "",
        "3",
        LATE,
    ),
    "killing itself": ("import os\nprint(3,flush=True)\nos.kill(os.getpid(),9)", "", "3", ERROR),
    "sleeping": ("import time\ntime.sleep(60)", "", "3", LATE),
    "nothing": ("", "", "3", WRONG),
    "nothing wanted": ("", "", "", OK),
}

# name: (program defining f, [(args, expected)], verdict)
CALLS: dict[str, tuple[str, Sequence[tuple[list[JsonValue], JsonValue]], VerdictKind]] = {
    "nested tuples": ("def f(a): return (a,[a,(1,2)])", [([1], [1, [1, [1, 2]]])], OK),
    "rounding": ("def f(): return 0.1+0.2", [([], 0.3)], OK),
    "mutable default": ("def f(a,kept=[]):\n    kept.append(a)\n    return kept", [([1], [1]), ([2], [2])], OK),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and 1+f(n-1)",
        [([30000], 30000)],
        OK,
    ),
    "printing meanwhile": ("class Solution:\n    def f(self,n):\n        print('x')\n        return n", [([3], 3)], OK),
    "1 is not True": ("def f(): return True", [([], 1)], WRONG),
    "1 is 1.0": ("def f(): return 1.0", [([], 1)], OK),
    "equal to everything": ("class E:\n    def __eq__(s,o): return True\ndef f(): return E()", [([], 1)], WRONG),
    "exit mid-call": ("import os\ndef f(): os._exit(0)", [([], None)], ERROR),
    "no such function": ("def g(): return 1", [([], 1)], ERROR),
    "endless": ("def f():\n    while 1: pass", [([], 1)], LATE),
    "NaN": ("def f(): return float('nan')", [([], 1.0)], WRONG),
}


def submissions() -> dict[str, tuple[Submission, VerdictKind]]:
    """The table as submissions."""
    table = {
        f"stdin: {name}": (Submission(StdinTests((StdinCase(given, wanted),)), code, limits=LIMITS), truth)
        for name, (code, given, wanted, truth) in STDIN.items()
    }
    for name, (code, pairs, truth) in CALLS.items():
        cases = tuple(CallCase(tuple(args), {}, expected) for args, expected in pairs)
        table[f"call: {name}"] = (Submission(CallTests("f", cases), code, limits=LIMITS), truth)
    return table


async def test_programs_that_in_process_graders_get_wrong_get_the_right_verdict() -> None:
    table = submissions()
    async with AsyncExitStack() as stack:
        sandbox = open_sandbox(with_libraries(load_config(None).verifier))
        stack.push_async_callback(sandbox.close)
        await sandbox.start()
        grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
        verdicts = await asyncio.gather(*(grader.grade(submission) for submission, _ in table.values()))
    pairs: list[tuple[str, VerdictKind, Verdict]] = [
        (name, truth, verdict) for (name, (_, truth)), verdict in zip(table.items(), verdicts, strict=True)
    ]
    assert not [(name, verdict) for name, truth, verdict in pairs if verdict.kind is not truth]
    assert len(pairs) == len(STDIN) + len(CALLS)
