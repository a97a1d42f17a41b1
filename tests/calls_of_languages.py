"""Which system calls the programs, compilers and init of each language make under the seccomp filter.

usage: strace -f -qq --decode-pids=pidns -o TRACE .venv/bin/pytest tests/services/test_harness_languages.py \
           tests/contract/test_sandbox_contract.py
       .venv/bin/python tests/calls_of_languages.py TRACE
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_CALL = re.compile(r"(\d+) +(?:<\.\.\. (\w+) resumed>.*|(\w+)\(.*)")
_CHILD = re.compile(r"= \d+ /\* (\d+) in strace|= (\d+)$")


def calls_under_the_filter(trace: Path) -> set[str]:
    """The calls in strace's output of all processes with a filter, without those that it refused."""
    filtered: set[str] = set()
    calls: set[str] = set()
    for line in trace.open(errors="replace"):
        if not (found := _CALL.match(line)):
            continue
        process, call = found[1], found[2] or found[3]
        if process in filtered:
            if "EPERM" not in line:
                calls.add(call)
            if call in {"clone", "clone3", "fork", "vfork"} and (child := _CHILD.search(line)):
                filtered.add(child[1] or child[2])
        elif (call == "seccomp" and "SECCOMP_SET_MODE_FILTER" in line) or "PR_SET_SECCOMP" in line:
            filtered.add(process)
    return calls


if __name__ == "__main__":
    print(*sorted(calls_under_the_filter(Path(sys.argv[1]))))
