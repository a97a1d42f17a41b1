"""Runs a command in this process as a shell would, with the handler of errors of the real entry point."""

from __future__ import annotations

import io
import logging
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from nouscoder.cli.app import main


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """All that it printed."""
        return self.stdout + self.stderr


def nouscoder(*arguments: object) -> Ended:
    """The end of `nouscoder ARGUMENTS`, run in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with patch.object(sys, "argv", ["nouscoder", *map(str, arguments)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
    return Ended(code, out.getvalue(), err.getvalue())
