"""One gateway process: `python -m nouscoder.verifier.processes.child DESCRIPTOR`, with a pickled Order as stdin."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import sys
from dataclasses import dataclass

from nouscoder.config import Config
from nouscoder.errors import Unusable
from nouscoder.logs import configure_logs
from nouscoder.verifier.processes.shares import Place


@dataclass(frozen=True, slots=True)
class Order:
    """What a process does. `config` has its share of slots and bounds."""

    config: Config
    with_broker: bool
    place: Place


def main() -> int:
    """Serve until SIGTERM or the end of the parent. Returns the exit code."""
    order: Order = pickle.load(sys.stdin.buffer)
    channel = socket.socket(fileno=int(sys.argv[1]))
    configure_logs("verifier")
    import uvloop

    from nouscoder.verifier.service import serve

    parent = os.getppid()
    try:
        uvloop.run(serve(order.config, order.with_broker, order.place, channel))
    except Unusable as error:
        sys.stderr.write(f"nouscoder: {error}\n")
        return os.EX_CONFIG
    finally:
        if os.getppid() != parent:  # it was killed, and could not remove what all have shared
            shutil.rmtree(order.place.folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
