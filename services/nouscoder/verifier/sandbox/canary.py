"""The program by which a gateway tests a runner."""

from __future__ import annotations

import secrets
import string


def new_canary() -> tuple[str, bytes, bytes]:
    """A program, its input and the output that it must print.

    It reports whether anything of an earlier submission is left: processes besides init, files besides its own. Names,
    numbers and order are new each time, so that a runner cannot keep the answer to a fixed text.
    """
    value, strangers, files, pid = (f"{secrets.choice(string.ascii_lowercase)}{secrets.token_hex(4)}" for _ in range(4))
    number, factor, more = (secrets.randbelow(1 << 30) for _ in range(3))
    lines = [
        f"{value} = int(input())",
        f'{strangers} = [{pid} for {pid} in os.listdir("/proc") if {pid}.isdigit() and int({pid}) not in (1, me)]',
        f'{files} = sorted(os.listdir("/tmp"))',
    ]
    secrets.SystemRandom().shuffle(lines)
    body = "\n".join(("import os", "me = os.getpid()", *lines))
    code = f"{body}\nprint({value} * {factor} + {more}, {strangers}, {files})\n"
    return code, b"%d\n" % number, f"{number * factor + more} [] ['main.py']\n".encode()
