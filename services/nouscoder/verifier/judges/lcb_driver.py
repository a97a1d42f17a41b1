"""Runs a Python program inside a sandbox like LiveCodeBench's grader: all tests in one process.

The service never imports this file. A sandbox runs its text, followed by values for PRELUDE, SOURCE and IS_CODE_GEN.
It gets only the inputs and writes one line of JSON per test to descriptor 3. The gateway compares the outputs. It
reproduces the faults of LiveCodeBench's grader on purpose (docs/verdicts.md lists them): the code of a stdin problem
becomes the body of a function, stdin is a text in memory with a few methods replaced, only output through sys.stdout
counts, and the time limit is an alarm that the program can turn off.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
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

PRELUDE = SOURCE = ""  # replaced by assignments after the end of this text
IS_CODE_GEN = False
_REMOVED_FROM_OS = (
    "kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename renames truncate replace"
    " unlink fchmod fchown chmod chown chroot lchflags lchmod lchown getcwd chdir"
)
_REMOVED_MODULES = "ipdb joblib resource psutil tkinter"
_REPORT_FD = 3
_write, _dumps, _now = os.write, json.dumps, time.perf_counter


class TimeoutException(Exception):
    """The time limit has passed. Its name in repr() is how LiveCodeBench detects a timeout."""


def _on_alarm(number: int, frame: object) -> None:
    # LiveCodeBench prints this into the captured output, so a program that catches the exception is wrong.
    if not IS_CODE_GEN:
        print("timeout occured: alarm went off")  # noqa: T201
    raise TimeoutException


def _import_numpy(code: str) -> None:
    """Import numpy where LiveCodeBench's grader does: before the guard, after which it cannot be imported.

    It takes a tenth of a second, so it is left out for programs that import only the standard library.
    """
    try:
        parts = list(ast.walk(ast.parse(code)))
    except Exception:
        return
    names = {alias.name for part in parts if isinstance(part, ast.Import) for alias in part.names}
    names |= {part.module or "" for part in parts if isinstance(part, ast.ImportFrom)}
    if {name.partition(".")[0] for name in names} - sys.stdlib_module_names:
        with contextlib.suppress(Exception):
            importlib.import_module("numpy")


def _apply_guard() -> None:
    """Remove what LiveCodeBench's reliability guard removes."""
    import builtins
    import shutil
    import subprocess

    for name in ("quit", "help"):
        setattr(builtins, name, None)
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in _REMOVED_FROM_OS.split():
        setattr(os, name, None)
    for module, name in ((shutil, "rmtree"), (shutil, "move"), (shutil, "chown"), (subprocess, "Popen")):
        setattr(module, name, None)
    for name in _REMOVED_MODULES.split():
        sys.modules[name] = None  # type: ignore[assignment]


def _report(status: str, output: object, started: float) -> None:
    line = memoryview(_dumps([status, output, _now() - started]).encode() + b"\n")
    while line:
        line = line[_write(_REPORT_FD, line) :]


def _unguarded(code: str) -> str:
    """The code with a final `if __name__ == '__main__'` replaced by its body."""
    try:
        body: Any = ast.parse(code).body
        if isinstance(body[-1], ast.If) and ast.unparse(body[-1].test).strip() == "__name__ == '__main__'":
            return ast.unparse(body[:-1]) + "\n" + ast.unparse(ast.Module(body[-1].body, []))
    except Exception:
        pass
    return code


def _as_function(code: str) -> str:
    """The code as its imports followed by a function that holds everything else."""
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
        # This file's own __future__ imports are not for the program.
        exec(compile(code, "<string>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102
        return module.Solution() if "class Solution" in code else module
    finally:
        signal.alarm(0)


class _Buffer:
    """sys.stdin.buffer: every `read` returns the whole input, every `readline` the first line."""

    def __init__(self, text: str) -> None:
        self._data = text.encode("utf-8")

    def read(self, *_: object) -> bytes:
        return self._data

    def readline(self, *_: object) -> bytes:
        return self._data.split(b"\n")[0] + b"\n"


class _Stdin:
    """sys.stdin: `read` and `readlines` start at the beginning each time, and it is not iterable."""

    def __init__(self, text: str) -> None:
        self._whole = text
        self._text = io.StringIO(text)
        self.buffer = _Buffer(text)

    def read(self, *_: object) -> str:
        return self._whole

    def readline(self, *size: Any) -> str:
        return self._text.readline(*size)

    def readlines(self, *_: object) -> list[str]:
        return self._whole.split("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._text, name)


def _call_with_stdin(method: Callable[[], object], text: str) -> None:
    """Call the program with its stdin in memory.

    A program that has bound the real sys.stdin (`from sys import stdin`) gets replaced readers there, which return
    lines without their line ends.
    """
    lines = iter(text.split("\n"))
    real = sys.stdin
    readers: dict[str, Any] = {
        "read": lambda *_: text,
        "readlines": lambda *_: text.split("\n"),
        "readline": lambda *_: next(lines),
    }
    try:
        with patch.multiple(real, **readers), patch("builtins.open", mock_open(read_data=text)):
            sys.stdin = _Stdin(text)
            method()
    except SystemExit:
        pass
    finally:
        sys.stdin = real


def _stdio_test(method: Callable[[], object], text: str) -> str:
    real = sys.stdout
    captured: Any = io.StringIO()
    sys.stdout = captured
    captured.close = lambda _: 1  # closing it raises TypeError, as in LiveCodeBench
    try:
        _call_with_stdin(method, text)
    finally:
        sys.stdout = real
    return str(captured.getvalue())


def _call_test(method: Callable[..., object], arguments: list[Any]) -> object:
    value = method(*arguments)
    return _encoded(list(value) if isinstance(value, tuple) else value, 0)


def _encoded(value: Any, depth: int) -> object:
    """A value that can equal a JSON value becomes that value; any other becomes one that equals nothing."""
    kind: Any = type(value)
    if value is None or isinstance(value, bool):
        return value
    if hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _encoded(value.item(), depth + 1)
    plain: Any
    for plain in (int, float, str):
        if isinstance(value, plain) and kind.__eq__ is plain.__eq__:
            return plain(value)
    lists = (list.__eq__, tuple.__eq__) if IS_CODE_GEN else (list.__eq__,)
    if isinstance(value, list | tuple) and kind.__eq__ in lists and depth < 400:
        return [_encoded(item, depth + 1) for item in value]
    if IS_CODE_GEN and isinstance(value, dict) and all(type(k) in (str, int, float, bool, type(None)) for k in value):
        value = {key if type(key) is str else _dumps(key): item for key, item in value.items()}
    as_dict = (dict.__eq__, Counter.__eq__, OrderedDict.__eq__)
    if isinstance(value, dict) and kind.__eq__ in as_dict and depth < 400 and all(type(k) is str for k in value):
        return {key: _encoded(item, depth + 1) for key, item in value.items()}
    if IS_CODE_GEN and not depth and not isinstance(value, list | tuple | dict):
        with contextlib.suppress(Exception):
            return float(value)
    return {"\0": kind.__name__}


def _failed(error: Exception, started: float) -> None:
    late = "timeoutexception" in repr(error).lower()
    _report("late" if late else "error", repr(error)[:500], started)


def lcb_grade(entry_point: str | None, inputs: list[Any], limit_s: int) -> None:
    """Write one line per test: ["ok", output, seconds], or a last line ["late" | "error", reason, seconds]."""
    signal.signal(signal.SIGALRM, _on_alarm)
    sys.set_int_max_str_digits(50000)
    _import_numpy(SOURCE)
    _apply_guard()
    signal.alarm(limit_s)
    started = _now()
    try:
        if entry_point is None:
            method = _load(_as_function(_unguarded(SOURCE)), limit_s).wrapped_function
        else:
            method = getattr(_load(PRELUDE + "\n\n" + SOURCE, limit_s), entry_point)
    except Exception as error:
        # A timeout while loading is an error too, as in LiveCodeBench.
        _report("error", repr(error)[:500], started)
        return
    one_test: Callable[..., object] = _stdio_test if entry_point is None else _call_test
    for test_input in inputs:
        started = _now()
        signal.alarm(limit_s)
        try:
            output = one_test(method, test_input)
        except Exception as error:
            signal.alarm(0)
            _failed(error, started)
            return
        finally:
            signal.alarm(0)
        _report("ok", output, started)
