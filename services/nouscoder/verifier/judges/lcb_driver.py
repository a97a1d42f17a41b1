"""Runs a python program inside a sandbox as LiveCodeBench's grader does: every test in one process, by hand.

This file is never imported by the service: its text, followed by values for PRELUDE and SOURCE, is what a sandbox runs.
It is given the inputs alone and writes a line of JSON a test to descriptor 3; comparing is done elsewhere.
It has the faults of the grader that it stands for on purpose (docs/verdicts.md lists them): the code of a stdin problem
becomes the body of a function, stdin is a text in memory with a few methods replaced, only what goes through sys.stdout
counts, and the time limit is an alarm that the program can turn off.
"""

from __future__ import annotations

import ast
import io
import json
import os
import signal
import sys
import time
import types
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any
from unittest.mock import mock_open, patch

PRELUDE = SOURCE = ""  # given their values at the end
_GONE_FROM_OS = (
    "kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename renames truncate replace"
    " unlink fchmod fchown chmod chown chroot lchflags lchmod lchown getcwd chdir"
)
_GONE_MODULES = "ipdb joblib resource psutil tkinter"
_REPORT_FD = 3
_write, _dumps, _now = os.write, json.dumps, time.perf_counter


class TimeoutException(Exception):
    """Its name, in repr(), is what makes a failure a time-out."""


def _on_alarm(number: int, frame: object) -> None:
    raise TimeoutException


def _take_away() -> None:
    """What LiveCodeBench's guard takes from the program."""
    import builtins
    import shutil
    import subprocess

    for name in ("quit", "help"):
        setattr(builtins, name, None)
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in _GONE_FROM_OS.split():
        setattr(os, name, None)
    for module, name in ((shutil, "rmtree"), (shutil, "move"), (shutil, "chown"), (subprocess, "Popen")):
        setattr(module, name, None)
    for name in _GONE_MODULES.split():
        sys.modules[name] = None  # type: ignore[assignment]


def _say(status: str, output: object, started: float) -> None:
    line = memoryview(_dumps([status, output, _now() - started]).encode() + b"\n")
    while line:
        line = line[_write(_REPORT_FD, line) :]


def _unguarded(code: str) -> str:
    """Without a last `if __name__ == '__main__'`, whose body stays."""
    try:
        body: Any = ast.parse(code).body
        if isinstance(body[-1], ast.If) and ast.unparse(body[-1].test).strip() == "__name__ == '__main__'":
            return ast.unparse(body[:-1]) + "\n" + ast.unparse(ast.Module(body[-1].body, []))
    except Exception:
        pass
    return code


def _as_function(code: str) -> str:
    """The imports, then everything else as the body of a function."""
    try:
        body: Any = ast.parse(code).body
        imports: Any = [part for part in body if isinstance(part, ast.Import | ast.ImportFrom)]
        rest = [part for part in body if not isinstance(part, ast.Import | ast.ImportFrom)]
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        function = ast.FunctionDef("wrapped_function", nothing, rest, [], lineno=-1)
        return PRELUDE + "\n" + ast.unparse(imports) + "\n" + ast.unparse(function)
    except Exception:
        return code


def _load(code: str, limit_s: int) -> Any:
    signal.alarm(limit_s)
    try:
        module = types.ModuleType("tmp_sol", "")
        exec(code, module.__dict__)  # noqa: S102 - this is what a sandbox is for
        return module.Solution() if "class Solution" in code else module
    finally:
        signal.alarm(0)


class _Buffer:
    """sys.stdin.buffer: every read is the whole, every line the first."""

    def __init__(self, given: str) -> None:
        self._given = given.encode("utf-8")

    def read(self, *_: object) -> bytes:
        return self._given

    def readline(self, *_: object) -> bytes:
        return self._given.split(b"\n")[0] + b"\n"


class _Stdin:
    """sys.stdin: `read` and `readlines` begin anew each time, and it cannot be iterated."""

    def __init__(self, given: str) -> None:
        self._given = given
        self._text = io.StringIO(given)
        self.buffer = _Buffer(given)

    def read(self, *_: object) -> str:
        return self._given

    def readline(self, *size: Any) -> str:
        return self._text.readline(*size)

    def readlines(self, *_: object) -> list[str]:
        return self._given.split("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text, name)


def _speak(method: Callable[[], object], given: str) -> None:
    """Call the program with its stdin in memory.

    A program that has bound the real sys.stdin (`from sys import stdin`) finds other readers there: its lines lose
    their ends.
    """
    lines = iter(given.split("\n"))
    real = sys.stdin
    readers: dict[str, Any] = {
        "read": lambda *_: given,
        "readlines": lambda *_: given.split("\n"),
        "readline": lambda *_: next(lines),
    }
    try:
        with patch.multiple(real, **readers), patch("builtins.open", mock_open(read_data=given)):
            sys.stdin = _Stdin(given)
            method()
    except SystemExit:
        pass
    finally:
        sys.stdin = real


def _stdio_test(method: Callable[[], object], given: str) -> str:
    real = sys.stdout
    captured: Any = io.StringIO()
    sys.stdout = captured
    captured.close = lambda _: 1  # closing it therefore fails, as it does there
    try:
        _speak(method, given)
    finally:
        sys.stdout = real
    return str(captured.getvalue())


def _call_test(method: Callable[..., object], given: list[Any]) -> object:
    value = method(*given)
    return _encoded(list(value) if isinstance(value, tuple) else value, 0)


def _encoded(value: Any, depth: int) -> object:
    """A value that may equal a JSON value as that; anything else as something that nothing equals."""
    kind: Any = type(value)
    if value is None or isinstance(value, bool):
        return value
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _encoded(value.item(), depth + 1)
    plain: Any
    for plain in (int, float, str):
        if isinstance(value, plain) and kind.__eq__ is plain.__eq__:
            return plain(value)
    if isinstance(value, list) and kind.__eq__ is list.__eq__ and depth < 400:
        return [_encoded(item, depth + 1) for item in value]
    as_dict = (dict.__eq__, Counter.__eq__, OrderedDict.__eq__)
    if isinstance(value, dict) and kind.__eq__ in as_dict and depth < 400 and all(type(k) is str for k in value):
        return {key: _encoded(item, depth + 1) for key, item in value.items()}
    return {"\0": kind.__name__}


def _failed(error: Exception, started: float) -> None:
    late = "timeoutexception" in repr(error).lower()
    _say("late" if late else "error", repr(error)[:500], started)


def lcb_grade(entry_point: str | None, inputs: list[Any], limit_s: int) -> None:
    """A line a test: ["ok", output, seconds], or ["late" | "error", why, seconds], after which nothing more comes."""
    signal.signal(signal.SIGALRM, _on_alarm)
    sys.set_int_max_str_digits(50000)
    _take_away()
    signal.alarm(limit_s)
    started = _now()
    try:
        if entry_point is None:
            method = _load(_as_function(_unguarded(SOURCE)), limit_s).wrapped_function
        else:
            method = getattr(_load(PRELUDE + "\n\n" + SOURCE, limit_s), entry_point)
    except Exception as error:
        # Not told apart by its kind: a time-out while loading is an error there too.
        _say("error", repr(error)[:500], started)
        return
    one_test: Callable[..., object] = _stdio_test if entry_point is None else _call_test
    for given in inputs:
        started = _now()
        signal.alarm(limit_s)
        try:
            output = one_test(method, given)
        except Exception as error:
            signal.alarm(0)
            _failed(error, started)
            return
        finally:
            signal.alarm(0)
        _say("ok", output, started)
