r"""Runs cells of Python inside a sandbox, one after another in one namespace, like a notebook.

The service never imports this file. A sandbox runs its text. It reads `MARK LENGTH\n` and a cell from descriptor 0,
runs the cell, and writes what it prints to descriptor 1, followed by MARK. The value of a last expression is printed
too. An exception ends the cell and prints its traceback; the namespace stays. A cell can read MARK and write it itself.
That only ends its own call.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import sys
import traceback
import types
from typing import Any, BinaryIO

_MAX_FRAMES = 12  # of a traceback, the innermost ones
_write, _flush_errors = os.write, (OSError, ValueError, AttributeError)


def main() -> None:
    """Run cells until the input ends."""
    cells = os.fdopen(os.dup(0), "rb")
    # What a cell reads is empty, and what it prints is one stream in the order of printing.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(1, 2)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    number = 0
    while (cell := _next_cell(cells)) is not None:
        mark, source = cell
        number += 1
        run_cell(source, f"<cell {number}>", module.__dict__)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(*_flush_errors):
                stream.flush()
        _write(1, mark)


def _next_cell(cells: BinaryIO) -> tuple[bytes, str] | None:
    mark, _, length = cells.readline().partition(b" ")
    if not length:
        return None
    return mark, cells.read(int(length)).decode("utf-8", "surrogatepass")


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> None:
    """Run one cell in `namespace`. Prints what it raises, except SystemExit, which ends the cell only."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), namespace)  # noqa: S102 - this file exists to run cells
        if isinstance(last, ast.Expr):
            code = compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
            value = eval(code, namespace)  # noqa: S307
            if value is not None:
                print(repr(value))  # noqa: T201 - like a notebook
    except SystemExit:
        return
    except BaseException as error:
        _print_error(error, name)


def _print_error(error: BaseException, name: str) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    try:
        lines = traceback.format_exception(type(error), error, trace, limit=-_MAX_FRAMES)
        sys.stdout.write("".join(lines))
    except BaseException:  # the exception's own methods may raise anything
        sys.stdout.write(f"{type(error).__name__}\n")


if __name__ == "__main__":
    main()
