"""A process that compares one answer with gold answers by the math-verify library, and ends.

Started by `verifier.mathematics` with a request as JSON on stdin: {"gold": [...], "answer": "..."}; prints
{"right": [true, false, null]}, null for a gold answer that the library cannot read. The answer is hostile: the
process bounds its own memory and CPU before the library is loaded, and nothing of the answer is executed but what
sympy makes of digits, operators and parentheses.
"""

from __future__ import annotations

import json
import resource
import sys

_MEMORY_BYTES = 2 * 1024**3
_FILE_BYTES = 1 << 20


def main() -> None:
    """See the module."""
    request = json.load(sys.stdin)
    seconds = int(request["cpu_time_s"]) + 1
    for kind, most in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    sys.stdout.write(json.dumps({"right": compare(request["gold"], request["answer"])}))


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
