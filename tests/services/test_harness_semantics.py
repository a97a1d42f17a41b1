"""A candidate runs like `python main.py`: ways to read stdin, exits, streams, and call tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from nouscoder.config import SandboxSection
from nouscoder.domain.submission import Limits
from nouscoder.verifier.sandbox import (
    Exit,
    Program,
    RunResult,
    Sandbox,
    SandboxUnavailable,
    open_sandbox,
)
from nouscoder.verifier.sandbox.slot import kill
from nouscoder.verifier.toolchains.languages import registry

pytestmark = pytest.mark.asyncio(loop_scope="module")
PYTHON = registry()["python"]
LIMITS = Limits(wall_time_s=60, cpu_time_s=30, memory_bytes=512 << 20, output_bytes=4 << 20, processes=32)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    made = open_sandbox(SandboxSection(slots=1))
    try:
        await made.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    yield made
    await made.close()


async def run_twice(sandbox: Sandbox, code: str, stdin: bytes = b"", entry_point: str | None = None) -> RunResult:
    """Run twice: the process that compiled and one that was forked later must behave the same."""
    async with sandbox.session(Program(PYTHON, code, LIMITS, entry_point)) as session:
        first, second = await session.run(stdin), await session.run(stdin)
    assert (first.exit, first.exit_code, first.signal) == (second.exit, second.exit_code, second.signal)
    assert (first.stdout, first.result) == (second.stdout, second.result)
    return second


READS_BOTH_LINES = [
    "a = input(); b = input(); print(a, b)",
    "import sys; a, b = sys.stdin; print(a.strip(), b.strip())",
    "import sys; print(*sys.stdin.read().split())",
    "import sys; print(*[s.strip() for s in sys.stdin.readlines()])",
    "import sys; b = sys.stdin.buffer; print(b.readline().decode().strip(), b.readline().decode().strip())",
    "import sys; print(*[s.decode().strip() for s in sys.stdin.buffer.readlines()])",
    "print(*open(0).read().split())",
    "print(*open('/dev/stdin').read().split())",
    "import os; print(*os.read(0, 100).decode().split())",
    "import os, sys; print(*os.read(sys.stdin.fileno(), 100).decode().split())",
    "import io, os; print(*io.BytesIO(os.read(0, os.fstat(0).st_size)).read().decode().split())",
    "a = input(); import sys; print(a, sys.stdin.read().strip())",
    "import sys; input = sys.stdin.readline; print(input().strip(), input().strip())",
    "import fileinput; print(*[s.strip() for s in fileinput.input()])",
    "import subprocess; print(*subprocess.run(['/bin/cat'], capture_output=True).stdout.decode().split())",
]


@pytest.mark.parametrize("code", READS_BOTH_LINES)
async def test_every_way_to_read_stdin(sandbox: Sandbox, code: str) -> None:
    result = await run_twice(sandbox, code, b"one\ntwo\n")
    assert result.stdout == b"one two\n", result.stderr.decode()


PRINTS_OK = [
    "if __name__ == '__main__': print('ok')",
    "def f():\n    global x\n    x = 'ok'\nf(); print(x)",
    "from __future__ import annotations\ndef f(x: Undefined): return x\nprint(f('ok'))",
    "print('ok'); quit()",
    "print('ok'); exit(0)",
    "import sys; print('ok'); sys.exit()",
    "import sys; sys.stdout.write('ok\\n')",
    "import sys; sys.stdout.buffer.write(b'ok\\n')",
    "import os; os.write(1, b'ok\\n')",
    "import atexit; atexit.register(lambda: print('ok'))",
    "import threading; threading.Thread(target=lambda: print('ok')).start()",
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), print('ok'))).start()",
    "class A:\n    def __del__(self): print('ok')\na = A()",
    "class A:\n    def __del__(self): print('ok')\na = A(); a.me = a",
    "out = open(1, 'w'); out.write('ok\\n')",
    "import io, os, sys; sys.stdout = io.TextIOWrapper(open(1, 'wb')); print('ok')",
    "import ctypes; ctypes.CDLL(None).printf(b'ok\\n')",
    "import sys; assert sys.argv == ['main.py'], sys.argv; print('ok')",
    "import sys, __main__; assert __main__.__dict__ is globals(); print('ok')",
    "assert __file__ == '/tmp/main.py' and open(__file__).read().startswith('assert'); print('ok')",
    "import sys; assert sys.getrecursionlimit() == 1000; print('ok')",
    "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\nf(50000); print('ok')",
    "import sys, threading\nsys.setrecursionlimit(10**6); threading.stack_size(64 << 20)\n"
    "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
    "t = threading.Thread(target=lambda: print('ok' if f(100000) else '')); t.start(); t.join()",
    "import multiprocessing as m\nif __name__ == '__main__':\n"
    "    with m.Pool(2) as p: print('ok' * sum(p.map(int, ['1'])))",
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(\"ok\")'])",
    "open('note', 'w').write('ok'); print(open('note').read())",
    "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: str\nprint(P('ok').x)",
    "import pickle\nclass A: pass\npickle.loads(pickle.dumps(A())); print('ok')",
    "import asyncio\nasync def f(): print('ok')\nasyncio.run(f())",
    "import os\nif os.fork() == 0: raise SystemExit\nos.wait(); print('ok')",
    "import math, heapq, bisect, itertools, functools, decimal, fractions, statistics, datetime; print('ok')",
    "import typing, collections.abc, concurrent.futures, inspect, uuid, hashlib, zlib, csv; print('ok')",
    "print(input.__name__ and 'ok')",
    "# -*- coding: utf-8 -*-\nprint('ok')",
    "\ufeffprint('ok')",
    "try:\n    import socket; socket.create_connection(('192.0.2.1', 80), 1)\nexcept OSError: print('ok')",
    "import sys; sys.stderr.write('noise\\n'); print('ok')",
    "import sys; print('ok', file=sys.__stdout__)",
    "import warnings; warnings.warn('noise'); print('ok')",
    "import time; assert time.time() > 1.6e9; print('ok')",
    "import threading as t; assert t.main_thread().native_id == t.get_native_id(); print('ok')",
    "import threading as t; assert t.current_thread() is t.main_thread() and t.active_count() == 1; print('ok')",
    "import os\nos.register_at_fork(after_in_child=lambda: print('ok', flush=True))\n"
    "if os.fork() == 0: os._exit(0)\nos.wait()",
    "import signal, os\nsignal.signal(signal.SIGUSR1, lambda *_: print('ok'))\nos.kill(os.getpid(), signal.SIGUSR1)",
    "open('/dev/stdout', 'w').write('ok\\n')",
    "open('/dev/stderr', 'w').write('noise\\n'); print('ok')",
    "import os; os.system('echo noise > /dev/stderr; echo ok > /dev/stdout')",
    "import subprocess, threading\nt = threading.Thread(target=subprocess.run, args=(['/bin/echo', 'ok'],))\n"
    "t.start(); t.join()",
]


@pytest.mark.parametrize("code", PRINTS_OK)
async def test_ordinary_programs_behave_as_usual(sandbox: Sandbox, code: str) -> None:
    result = await run_twice(sandbox, code)
    assert (result.exit, result.exit_code, result.stdout) == (Exit.EXITED, 0, b"ok\n"), result.stderr.decode()


@pytest.mark.parametrize(
    ("code", "exit_code", "in_stderr"),
    [
        ("1/0", 1, b"ZeroDivisionError"),
        ("import sys; sys.exit(7)", 7, b""),
        ("import sys; sys.exit('bad input')", 1, b"bad input"),
        ("import sys; sys.exit(-1)", 255, b""),
        ("import os; print('lost'); os._exit(0)", 0, b""),
        ("def f(): f()\nf()", 1, b"RecursionError"),
        ("import sys; sys.stdout.close(); print('x')", 1, b"ValueError"),
        ("undefined", 1, b"NameError"),
        ("input(); input()", 1, b"EOFError"),
        ("import sys\nclass W:\n    def write(self, s): pass\n    def flush(self): 1/0\nsys.stdout = W()", 120, b""),
        ("import sys\nsys.excepthook = lambda *a: sys.stderr.write('mine')\n1/0", 1, b"mine"),
        ("import threading\nthreading.Thread(target=lambda: 1/0).start()", 0, b"ZeroDivisionError"),
        ("import atexit; atexit.register(lambda: 1/0)", 0, b"ZeroDivisionError"),
        ("import sys; sys.stdout.write('\\ud800')", 1, b"UnicodeEncodeError"),
    ],
)
async def test_exit_codes_equal_those_of_the_interpreter(
    sandbox: Sandbox, code: str, exit_code: int, in_stderr: bytes
) -> None:
    result = await run_twice(sandbox, code, b"one line\n")
    assert (result.exit, result.exit_code) == (Exit.EXITED, exit_code)
    assert in_stderr in result.stderr


async def test_a_traceback_shows_the_program_and_nothing_of_the_harness(sandbox: Sandbox) -> None:
    result = await run_twice(sandbox, "def f():\n    return 1 / 0\nf()\n")
    assert result.stderr.startswith(b'Traceback (most recent call last):\n  File "/tmp/main.py", line 3')
    assert b"return 1 / 0" in result.stderr
    assert b"harness" not in result.stderr


async def test_uncaught_interrupt_and_abort_are_signals(sandbox: Sandbox) -> None:
    assert (await run_twice(sandbox, "raise KeyboardInterrupt")).signal == 2
    assert (await run_twice(sandbox, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")).signal == 11


async def test_large_input_and_output_are_complete(sandbox: Sandbox) -> None:
    data = b"0123456789abcde\n" * 200_000
    result = await run_twice(sandbox, "import sys; sys.stdout.write(sys.stdin.read())", data)
    assert result.stdout == data


async def test_random_state_differs_between_runs(sandbox: Sandbox) -> None:
    async with sandbox.session(Program(PYTHON, "import random; print(random.random())", LIMITS)) as session:
        assert len({(await session.run(b"")).stdout for _ in range(5)}) == 5


CALLS = [
    ("def f(a, b): return a + b", "f", {"args": [1, 2]}, b"3"),
    ("class Solution:\n    def f(self, a): return a[::-1]", "f", {"args": [[1, 2]]}, b"[2, 1]"),
    ("class Solution:\n    def f(self, a): return (a, (1,))", "f", {"kwargs": {"a": None}}, b"[null, [1]]"),
    ("class Solution:\n    def f(self): return 0.1 + 0.2", "f", {}, b"0.30000000000000004"),
    ("def f(): return float('nan')", "f", {}, b"NaN"),
    ("def f(): return True", "f", {}, b"true"),
    ("def f(): return None", "f", {}, b"null"),
    ("def f(): return {1, 2}", "f", {}, b"!set"),
    ("def f(): return {1: [2]}", "f", {}, b'{"1": [2]}'),
    ("def f():\n    a = []\n    a.append(a)\n    return a", "f", {}, b"!list"),
    ("def f(): return object()", "f", {}, b"!object"),
    ("class E:\n    def __eq__(self, o): return True\ndef f(): return E()", "f", {}, b"!E"),
    ("def f(x=[]):\n    x.append(1)\n    return x", "f", {}, b"[1]"),
    ("import sys\ndef f(): return sys.stdin.read()", "f", {"args": []}, b'""'),
    ("def f(): print('noise'); return 'a\\x00b'", "f", {}, b'"a\\u0000b"'),
]


GUARDS = [
    "n = int(input())\n    print(f(n))",
    "import sys\n    sys.exit(f(3))",
    "exit()",
    "quit()",
    "raise SystemExit('no input')",
    "import unittest\n    class T(unittest.TestCase):\n        def test(self): assert f(1) == 2\n    unittest.main()",
    "import argparse\n    p = argparse.ArgumentParser()\n    p.add_argument('n')\n    p.parse_args()",
    "assert f(1) == 2, 'a wrong example'",
    "while True: pass",
    "import doctest\n    doctest.testmod(raise_on_error=True)\n    1 / 0",
    "print(undefined)",
]


@pytest.mark.parametrize("guarded", GUARDS)
async def test_the_main_guard_does_not_run_in_call_tests(sandbox: Sandbox, guarded: str) -> None:
    code = f"def f(x): return x\nif __name__ == '__main__':\n    {guarded}\n"
    result = await run_twice(sandbox, code, b'{"args": [3]}', "f")
    assert (result.exit, result.exit_code, result.result, result.stdout) == (Exit.EXITED, 0, b"3", b"")


MODULES = [
    "def f(): return [__name__, __import__('main').f is f, __import__('__main__').f is f]",
    "import pickle\nclass A:\n    def g(self): return 1\n"
    "def f(): return [pickle.loads(pickle.dumps(A())).g(), A.__module__]",
    "import copy\ndef f(): return [copy.deepcopy(f) is f, f.__globals__ is globals()]",
    "from multiprocessing import Pool\ndef g(x): return x + 1\ndef f():\n    with Pool(1) as p: return p.map(g, [1])",
    "from concurrent.futures import ProcessPoolExecutor as Pool\ndef g(x): return x + 1\n"
    "def f():\n    with Pool(1) as p: return list(p.map(g, [1]))",
    "import pickle\nfrom enum import Enum\nclass E(Enum): A = 1\n"
    "def f(): return pickle.loads(pickle.dumps(E.A)) is E.A",
    "import inspect, sys\ndef f(): return [inspect.getmodule(f) is sys.modules[__name__], sys.argv, __file__]",
]


DATACLASS = """from __future__ import annotations
from dataclasses import dataclass, field, asdict
import typing
from typing import ClassVar, NamedTuple, TypedDict

@dataclass(order=True, slots=True)
class Node:
    kind: ClassVar[str] = "n"
    left: Node | None = None
    items: typing.List[int] = field(default_factory=list)

class Pair(NamedTuple):
    a: Node
    b: int = 2

class Row(TypedDict):
    pair: Pair

def f():
    hints = typing.get_type_hints(Node)
    return [asdict(Node(Node())), hints["items"] == typing.List[int], typing.get_type_hints(Row)["pair"] is Pair]
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (MODULES[0], ["main", True, True]),
        (MODULES[1], [1, "main"]),
        (DATACLASS, [{"left": {"left": None, "items": []}, "items": []}, True, True]),
        (MODULES[2], [True, True]),
        (MODULES[3], [2]),
        (MODULES[4], [2]),
        (MODULES[5], True),
        (MODULES[6], [True, ["main.py"], "/tmp/main.py"]),
    ],
)
async def test_the_module_of_a_called_program_is_found_by_its_name(
    sandbox: Sandbox, code: str, expected: object
) -> None:
    result = await run_twice(sandbox, code, b"{}", "f")
    assert result.exit_code == 0, result.stderr.decode()
    assert json.loads(result.result or b"null") == expected


@pytest.mark.parametrize(("code", "entry_point", "arguments", "expected"), CALLS)
async def test_call_results(
    sandbox: Sandbox, code: str, entry_point: str, arguments: dict[str, object], expected: bytes
) -> None:
    result = await run_twice(sandbox, code, json.dumps(arguments).encode(), entry_point)
    assert result.result == expected, result.stderr.decode()
    assert (result.exit, result.exit_code) == (Exit.EXITED, 0)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("def f(): raise SystemExit(0)", 0),
        ("import os\ndef f(): os._exit(0)", 0),
        ("def g(): return 1", 1),
        ("f = 3", 1),
        ("def f(): return 1 / 0", 1),
    ],
)
async def test_a_call_without_a_result_has_none(sandbox: Sandbox, code: str, exit_code: int) -> None:
    result = await run_twice(sandbox, code, b'{"args": []}', "f")
    assert (result.exit_code, result.result) == (exit_code, None)


async def test_a_program_may_replace_what_the_interpreter_needs_to_exit(sandbox: Sandbox) -> None:
    code = "import gc, os, signal\nos._exit = os.kill = os.getpid = gc.collect = signal.signal = None\nprint(1)"
    result = await run_twice(sandbox, code)
    assert (result.exit_code, result.stdout) == (0, b"1\n"), result.stderr.decode()


async def test_a_modified_json_module_affects_only_its_own_result(sandbox: Sandbox) -> None:
    code = "import json\njson.dumps = lambda *a, **k: '4'\ndef f(): return 5"
    assert (
        await run_twice(sandbox, code, b"{}", "f")
    ).result == b"4"  # the gateway still compares it with the expected value


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.004, 0.006, 0.008, 0.012, 0.02])
async def test_a_run_cancelled_at_any_time_leaves_the_slot_usable(sandbox: Sandbox, after_s: float) -> None:
    async def flood() -> None:
        async with sandbox.session(Program(PYTHON, "print('x' * 4_000_000)", LIMITS)) as session:
            for _ in range(50):
                await session.run(b"")

    task = asyncio.create_task(flood())
    await asyncio.sleep(after_s)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert (await run_twice(sandbox, "print(input())", b"next\n")).stdout == b"next\n"


async def test_a_process_with_much_unread_output_can_be_killed_and_waited_for() -> None:
    """asyncio stops reading a pipe when its buffer is full, and would then wait for the end of the pipe for ever."""
    talks = [sys.executable, "-c", "print('x' * 10_000_000)"]
    process = await asyncio.create_subprocess_exec(*talks, stdout=asyncio.subprocess.PIPE, limit=1 << 16)
    assert process.stdout is not None
    await process.stdout.readexactly(1)
    await _until_paused(process.stdout)
    await kill(process, limit_s=10.0)
    assert process.returncode == -signal.SIGKILL


async def _until_paused(stdout: asyncio.StreamReader) -> None:
    async with asyncio.timeout(60):
        while len(stdout._buffer) <= 1 << 17:  # type: ignore[attr-defined]
            await asyncio.sleep(0.005)
