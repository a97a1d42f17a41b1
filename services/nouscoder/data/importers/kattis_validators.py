"""Output validators of Kattis packages as checkers and interactors with testlib's exit codes.

A validator is called as `validator input answer feedback_folder < output`, or talks over stdin and stdout. It exits
with 42 (right) or 43 (wrong). A checker is called as `checker input output answer` and exits with 0 or 1. Code before
the validator's own translates arguments and exit codes; every other exit becomes 3, the judge's own failure.
"""

from __future__ import annotations

import re
from pathlib import Path

from nouscoder.data.importers.rejection import Reason, Rejected
from nouscoder.domain.submission import JudgeProgram

_PYTHON = """import os, sys, tempfile
_input, _output, _answer = sys.argv[1:4]
sys.argv = ["validator", _input, _answer, tempfile.mkdtemp() + "/", *{flags!r}]
if {is_checker}:
    os.dup2(os.open(_output, os.O_RDONLY), 0)
try:
    exec(compile({source!r}, "validator", "exec"), {{"__name__": "__main__"}})
    _status = 3
except SystemExit as _end:
    _status = _end.code
sys.stdout.flush()
sys.exit({{42: 0, 43: 1}}.get(_status, 3))
"""

# The constructor runs before main and before every other constructor. The child goes on to the validator's main.
_CPP = """#include <cstdlib>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>
__attribute__((constructor(101))) static void nouscoder_translate(int argc, char **argv) {{
    static char feedback[] = "/tmp/feedbackXXXXXX\\0";
    if (argc != 4 || !mkdtemp(feedback)) _exit(3);
    feedback[sizeof feedback - 2] = '/';
    pid_t child = fork();
    if (child < 0) _exit(3);
    if (child > 0) {{
        int status = 0;
        if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) _exit(3);
        _exit(WEXITSTATUS(status) == 42 ? 0 : WEXITSTATUS(status) == 43 ? 1 : 3);
    }}
    if ({is_checker} && dup2(open(argv[2], O_RDONLY), 0) < 0) _exit(3);
    argv[2] = argv[3];
    argv[3] = feedback;
}}
"""
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def validator_of(folder: Path, flags: list[str], *, is_interactive: bool) -> JudgeProgram:
    """The package's validator. Raises Rejected for one in another language, or of several programs."""
    files = [
        file
        for name in ("output_validators", "output_validator")
        for file in sorted((folder / name).rglob("*"))
        if file.suffix in (".py", ".cpp", ".cc")
    ]
    if len(files) != 1:
        raise Rejected(Reason.UNSUPPORTED, f"{len(files)} validator programs in Python or C++, not one")
    source = files[0].read_text(encoding="utf8")
    if files[0].suffix == ".py":
        code = _PYTHON.format(flags=flags, source=source, is_checker=not is_interactive)
        return JudgeProgram(code, "python")
    if flags:
        raise Rejected(Reason.UNSUPPORTED, "flags for a validator in C++")
    is_checker = "false" if is_interactive else "true"
    return JudgeProgram(_CPP.format(is_checker=is_checker) + _with_headers(files[0], source, set()), "cpp")


def _with_headers(file: Path, source: str, seen: set[Path]) -> str:
    """The source with the package's own headers in place of their includes."""

    def header(found: re.Match[str]) -> str:
        path = (file.parent / found[1]).resolve()
        if path in seen or not path.is_relative_to(file.parent.resolve()) or not path.is_file():
            return "" if path in seen else found[0]
        seen.add(path)
        return _with_headers(path, path.read_text(encoding="utf8"), seen)

    return _INCLUDE.sub(header, source)
