"""A process that compares answers with gold answers by the math-verify library, each in a fork of its own.

INVARIANT: hostile text is read in forks only; a fork answers within its limit or is killed.

Started by `verifier.mathematics`. A request is a line, `SECONDS {"gold": [...], "answer": "..."}`; its answer is a
line, `{"right": [true, false, null]}` (null for a gold answer that the library cannot read), `{"late": true}` or
`{"failed": STATUS}`. It ends when its stdin does. A fork bounds its own memory and CPU first, and executes nothing of
an answer but what sympy makes of digits, operators and parentheses.
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
    """See the module."""
    import math_verify  # noqa: F401 - loaded once, for every fork

    for line in sys.stdin.buffer:
        limit, _, request = line.partition(b" ")
        sys.stdout.buffer.write(_answer(request, float(limit)) + b"\n")
        sys.stdout.buffer.flush()


def _answer(request: bytes, limit_s: float) -> bytes:
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        _compare_in_fork(request, limit_s, tell)
    os.close(tell)
    try:
        if not select.select([told], [], [], limit_s)[0]:
            return b'{"late": true}'
        with os.fdopen(os.dup(told), "rb") as said:
            answer = said.read()
    finally:
        os.close(told)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if answer:
        return answer
    # Out of CPU time or memory, or a fault of the library.
    return b'{"late": true}' if os.WIFSIGNALED(status) else json.dumps({"failed": status}).encode()


def _compare_in_fork(request: bytes, limit_s: float, tell: int) -> None:
    status = 1
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # the answer's way out is `tell` alone
            os.dup2(nowhere, fd)
        for kind, most in (
            (resource.RLIMIT_AS, _MEMORY_BYTES),
            (resource.RLIMIT_CPU, int(limit_s) + 1),
            (resource.RLIMIT_FSIZE, _FILE_BYTES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (most, most))
        wanted = json.loads(request)
        os.write(tell, json.dumps({"right": compare(wanted["gold"], wanted["answer"])}).encode())
        status = 0
    finally:
        os._exit(status)


def compare(golds: list[str], answer: str) -> list[bool | None]:
    """For each gold answer whether `answer` is the same, None when the gold answer cannot be read."""
    from math_verify import parse, verify

    given = parse(answer, parsing_timeout=None)
    right: list[bool | None] = []
    for gold in golds:
        # A bare expression is read as LaTeX only inside dollar signs.
        wanted = parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", parsing_timeout=None)
        right.append(bool(verify(wanted, given, timeout_seconds=None)) if wanted else None)
    return right


if __name__ == "__main__":
    main()
