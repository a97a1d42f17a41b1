"""The start of a runner's agent: its key, its certificate, its port."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys

try:
    from . import greeting
    from .agent import Agent, Tls
    from .cleanup import log, reap
    from .secure import NoCertificate, own_certificate
except ImportError:  # in the image, where this folder is not a package
    import greeting  # type: ignore[no-redef, import-not-found]
    from agent import Agent, Tls  # type: ignore[no-redef, import-not-found]
    from cleanup import log, reap  # type: ignore[no-redef, import-not-found]
    from secure import NoCertificate, own_certificate  # type: ignore[no-redef, import-not-found]

HOME = "/opt/nouscoder"
_KEY, _KEY_FD = "NOUSCODER_RUNNER_KEY", "NOUSCODER_RUNNER_KEY_FD"


def _restart_without_key(text: str) -> None:
    """Exec this program again with the key in a pipe, because the kernel shows the environment of the first exec."""
    greeting.read_key(text)
    read_end, write_end = os.pipe()
    os.write(write_end, text.encode()[: select.PIPE_BUF])
    os.close(write_end)
    os.set_inheritable(read_end, True)
    os.environ[_KEY_FD] = str(read_end)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _received_key() -> bytes:
    fd = int(os.environ.pop(_KEY_FD, "-1"))
    if fd < 0:
        raise greeting.GreetingError(f"{_KEY} is not set")
    with open(fd, encoding="utf8") as pipe:
        return greeting.read_key(pipe.read())


def _certificate() -> Tls:
    try:
        return own_certificate()
    except NoCertificate as error:
        log(str(error))
        sys.exit(1)


def main() -> None:
    """Serve until killed or idle. The key is not in the environment of this process, which others can read in /proc."""
    if _KEY in os.environ:
        _restart_without_key(os.environ.pop(_KEY))
    key = _received_key()
    port = int(os.environ.pop("NOUSCODER_RUNNER_PORT", str(greeting.DEFAULT_PORT)))
    home = os.environ.pop("NOUSCODER_RUNNER_HOME", HOME)
    idle_s = float(os.environ.pop("NOUSCODER_RUNNER_IDLE_S", "0"))
    kernel = os.environ.pop("NOUSCODER_RUNNER_KERNEL", "gvisor")
    has_tunnel = os.environ.pop("NOUSCODER_RUNNER_TLS", "own") == "tunnel"
    agent = Agent(key, home, kernel, idle_s, None if has_tunnel else _certificate())
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    reap()
    dual = socket.has_dualstack_ipv6()  # the gateway may come by either family
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", port), family=family, backlog=64, dualstack_ipv6=dual) as listener:
        log(f"listening on port {port}")
        agent.serve(listener)
