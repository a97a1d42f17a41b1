"""A process that compares answers with gold answers by the math-verify library. Each comparison runs in a fork.

INVARIANT: untrusted text is parsed in forks only. A fork answers within its limit or is killed.

`judges.mathematics` starts this process. A request is one line, `SECONDS {"gold": [...], "answer": "..."}`. Its answer
is one line: `{"right": [true, false, null]}` (null for a gold answer that the library cannot parse), `{"late": true}`
or `{"failed": STATUS}`. The process ends at the end of its stdin. A fork first limits its own memory and CPU time. It
executes nothing of an answer except what sympy builds from digits, operators and parentheses.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys

_MEMORY_BYTES = 2 * 1024**3
_FILE_BYTES = 1 << 20


def main() -> None:
    """Answer requests until stdin ends."""
    import math_verify  # noqa: F401 - loaded once, before the forks

    for line in sys.stdin.buffer:
        limit, _, request = line.partition(b" ")
        sys.stdout.buffer.write(_answer(request, float(limit)) + b"\n")
        sys.stdout.buffer.flush()


def _answer(request: bytes, limit_s: float) -> bytes:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _compare_in_fork(request, limit_s, write_end)
    os.close(write_end)
    try:
        if not select.select([read_end], [], [], limit_s)[0]:
            return b'{"late": true}'
        with os.fdopen(os.dup(read_end), "rb") as pipe:
            answer = pipe.read()
    finally:
        os.close(read_end)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if answer:
        return answer
    # The fork ran out of CPU time or memory, or the library failed.
    return b'{"late": true}' if os.WIFSIGNALED(status) else json.dumps({"failed": status}).encode()


def _compare_in_fork(request: bytes, limit_s: float, write_end: int) -> None:
    status = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # the answer leaves through `write_end` only
            os.dup2(null, fd)
        for kind, limit in (
            (resource.RLIMIT_AS, _MEMORY_BYTES),
            (resource.RLIMIT_CPU, int(limit_s) + 1),
            (resource.RLIMIT_FSIZE, _FILE_BYTES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (limit, limit))
        asked = json.loads(request)
        os.write(write_end, json.dumps({"right": compare(asked["gold"], asked["answer"])}).encode())
        status = 0
    finally:
        os._exit(status)


def compare(golds: list[str], answer: str) -> list[bool | None]:
    """For each gold answer, whether `answer` equals it; None when the gold answer cannot be parsed."""
    from math_verify import parse, verify

    parsed = parse(answer, parsing_timeout=None)
    right: list[bool | None] = []
    for gold in golds:
        # The library parses a bare expression as LaTeX only inside dollar signs.
        expected = parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", parsing_timeout=None)
        right.append(bool(verify(expected, parsed, timeout_seconds=None)) if expected else None)
    return right


if __name__ == "__main__":
    main()
