"""Submissions of hostile clients: programs that try to take more than their share, or to end the service's own parts.

Each may get any verdict except accepted and internal_error: a candidate must not cause a failure of the service.
"""

from __future__ import annotations

import json
import random

from tests.load.mixture import Sample

_SHORT = {"wall_time_s": 0.5, "cpu_time_s": 0.5, "memory_bytes": 1 << 27, "processes": 64}
_SPIN = "while True: pass\n"
_PROGRAMS = (
    "import os\nfor _ in range(60):\n    try:\n        if os.fork() == 0:\n            os.setsid()\n            break\n"
    "    except OSError: pass\n" + _SPIN,
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n",
    "import time\ntime.sleep(0.53)  # just beyond the limit, where a run is repeated alone\nprint('late')\n",
    "import threading\nwhile True: threading.Thread(target=iter, args=(int, 1)).start()\n",
    "kept = []\nwhile True: kept.append(bytearray(1 << 22))\n",
    "import mmap, os\nfor _ in range(8):\n    m = mmap.mmap(-1, 1 << 26)\n    if os.fork() == 0: break\n"
    "for at in range(0, 1 << 26, 4096): m[at] = 1\n" + _SPIN,
    "import socket\nkept = []\nwhile True:\n    pair = socket.socketpair()\n    kept += pair\n"
    "    pair[0].setblocking(False)\n    try:\n        while True: pair[0].send(bytes(1 << 16))\n"
    "    except OSError: pass\n",
    "import os\nwhile True: os.write(1, b'x' * 65536)\n",
    "number = 0\nwhile True:\n    number += 1\n    open(f'/tmp/{number}', 'wb').write(bytes(1 << 20))\n",
    "import os, signal\nfor pid in (1, -1):\n    for one in (9, 19, 15):\n        try: os.kill(pid, one)\n"
    "        except OSError: pass\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n" + _SPIN,
    "import os\nos.write(2, b'e' * 900_000)\nfor fd in range(3, 99):\n    try: os.write(fd, bytes(range(256)) * 99)\n"
    "    except OSError: pass\nos.kill(os.getpid(), 11)\n",
    "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        "
    + _SPIN
    + "    os._exit(0)\nos._exit(1)\n",
)
_INTERACTOR = {"language": "python", "code": "print(41, flush=True)\nraise SystemExit(int(input()) != 42)\n"}
_TALKERS = (
    "import os\nwhile True: os.write(1, b'9' * 65536)\n",
    "import os\nfor fd in range(3): os.close(fd)\n" + _SPIN,
    "print('no number', flush=True)\n",
)


def hostile_mixture(num_samples: int, seed: int = 0) -> list[Sample]:
    """`num_samples` different hostile submissions in random order. Their `truth` is empty."""
    draw = random.Random(seed)
    made = []
    for number in range(num_samples):
        which = number % (len(_PROGRAMS) + len(_TALKERS))
        talks = which >= len(_PROGRAMS)
        code = _TALKERS[which - len(_PROGRAMS)] if talks else _PROGRAMS[which]
        tests: dict[str, object] = {"type": "stdin", "cases": [{"input": "", "output": "right"}] * 2}
        if talks:
            tests = {"type": "interactive", "cases": [{"input": ""}], "interactor": _INTERACTOR}
        body = {"code": f"{code}# {seed}-{number}\n", "tests": tests, "limits": _SHORT}
        made.append(Sample(number, "", json.dumps(body).encode()))
    draw.shuffle(made)
    return made
