"""Floods of the grading service, with and without tokens: how long /healthz takes beside each, and what it holds.

    python -m tests.load.floods [SECONDS of each] [part of a name]

Each flood has a process of its own, against `nouscoder serve verifier` with and without tokens. /healthz is
asked every 20 ms over new connections, on the health port (its own thread) and on the clients' port, and so is a bare
asyncio server, the control. A table of milliseconds and MiB is printed: what the service held before, at most, and 3 s
after the flood.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fuzz.health_watch import serve_control

LINES = b"Host: localhost\r\nAuthorization: Bearer t0ken\r\n"
BARE = b"Host: localhost\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack("!BHBBI", 0, 0, 4, 0, 0)
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_Until = Callable[[], bool]


def connected(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=2)
    made.settimeout(0.5)
    return made


def keep_sending(port: int, more: _Until, first: bytes, again: bytes, reads: bool, at_once: int = 4) -> None:
    """Send `first`, then `again` without end, over a few connections; those that were ended are opened anew."""
    ones: list[socket.socket] = []
    while more():
        while len(ones) < at_once and more():
            try:
                ones.append(one := connected(port))
                one.sendall(first)
                one.setblocking(False)
            except OSError:
                time.sleep(0.01)
        for one in [*ones]:
            try:
                if reads:
                    with contextlib.suppress(BlockingIOError):
                        while one.recv(1 << 16):
                            pass
                one.send(again)
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:
                ones.remove(one)
                one.close()


def hold(port: int, more: _Until, sent: bytes, number: int) -> None:
    """Many connections that send once and then nothing."""
    ones: list[socket.socket] = []
    while more():
        with contextlib.suppress(OSError):
            if len(ones) < number:
                ones.append(connected(port))
                ones[-1].sendall(sent)
                continue
        time.sleep(0.05)


def churn(port: int, more: _Until) -> None:
    """Connections that are opened and closed."""
    while more():
        with contextlib.suppress(OSError):
            connected(port).close()


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack("!I", len(body))[1:] + struct.pack("!BBI", kind, flags, stream) + body


def field(name: bytes, value: bytes) -> bytes:
    size = bytes([127]) + bytes([(len(value) - 127) & 127 | 128, (len(value) - 127) >> 7]) if len(value) > 126 else b""
    return b"\x00" + bytes([len(name)]) + name + (size or bytes([len(value)])) + value


HEAD = field(b":method", b"POST") + field(b":scheme", b"http") + field(b":authority", b"localhost")
HEAD += field(b"te", b"trailers") + field(b"content-type", b"application/grpc")


def head_of(method: bytes) -> bytes:
    return HEAD + field(b":path", method)


GRADE, WATCH = head_of(b"/nouscoder.v1.VerifierService/Grade"), head_of(b"/grpc.health.v1.Health/Watch")


def streams(port: int, more: _Until, head: bytes, reset: bool, ended: bytes) -> None:
    """HEADERS of new streams, and what follows."""
    while more():
        with contextlib.suppress(OSError):
            one, stream = connected(port), 1
            one.sendall(PREFACE)
            while more() and stream < 1 << 30:
                parts = []
                for _ in range(50):
                    parts += [frame(1, 4, stream, head), ended and frame(0, 1, stream, ended)]
                    parts.append(frame(3, 0, stream, struct.pack("!I", 8)) if reset else b"")
                    stream += 2
                one.sendall(b"".join(parts))
                with contextlib.suppress(TimeoutError, BlockingIOError):
                    one.setblocking(False)
                    one.recv(1 << 20)
                one.settimeout(0.5)


def ws(again: bytes, first: bytes = b"") -> Callable[[int, _Until, bytes], None]:
    def flood(port: int, more: _Until, lines: bytes) -> None:
        hands = b"GET /openenv/ws HTTP/1.1\r\n" + lines + b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
        hands += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        keep_sending(port, more, hands + first, again, reads=True)

    return flood


def masked(opcode: int, body: bytes, *, fin: bool = True) -> bytes:
    return bytes([opcode | 128 * fin, 128 | len(body)]) + bytes(4) + body


def post(path: bytes, body: bytes, size: int = -1) -> Callable[[bytes], bytes]:
    length = b"Content-Length: %d\r\n\r\n" % (len(body) if size < 0 else size)
    return lambda lines: b"POST " + path + b" HTTP/1.1\r\n" + lines + length + body


def again(make: Callable[[bytes], bytes], at_once: int = 4) -> Callable[[int, _Until, bytes], None]:
    return lambda port, more, lines: keep_sending(port, more, b"", make(lines), True, at_once)


def framed(kind: int, stream: int, body: bytes) -> Callable[[int, _Until, bytes], None]:
    """Frames of one kind without end, on a connection with one open call."""
    first = PREFACE + frame(1, 4, 1, GRADE)
    return lambda port, more, _: keep_sending(port, more, first, frame(kind, 0, stream, body) * 1000, True)


AGGREGATE = b'{"verify_responses":[' + b",".join([b'{"reward":1,"_ng_task_index":7}'] * 90_000) + b"]}"
TASKS = b'{"verify_responses":[' + b",".join(b'{"reward":1,"_ng_task_index":%d}' % n for n in range(90_000)) + b"]}"
REPEATED = json.dumps({"query": ["a" * 3_000_000 + "b"], "prompts": ["b" + "a" * 4_000_000], "labels": ["{}"]}).encode()
CHUNKED = b"POST /v1/grade HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\n"
BATCH = b"\n" * (1 << 20)
HTTP: dict[str, Callable[[int, _Until, bytes], None]] = {
    "idle connections": lambda port, more, _: hold(port, more, b"", 3000),
    "connections opened and closed": lambda port, more, _: churn(port, more),
    "heads that never end": lambda port, more, _: hold(port, more, b"GET / HTTP/1.1\r\nX: ", 1000),
    "endless head": lambda port, more, _: keep_sending(port, more, b"GET / HTTP/1.1\r\n", b"X: " + b"y" * 16000, False),
    "garbage": lambda port, more, _: keep_sending(port, more, b"", os.urandom(65536), True),
    "pipelined health": again(lambda _: b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000),
    "pipelined pages, not read": lambda port, more, _: keep_sending(
        port, more, b"", b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100, False, 20
    ),
    "pipelined without an answer": again(lambda lines: (b"GET /nothing HTTP/1.1\r\n" + lines + b"\r\n") * 1000),
    "bodies that do not arrive": lambda port, more, lines: hold(
        port, more, post(b"/verify", b"{", 8 << 20)(lines), 200
    ),
    "chunks of one byte": lambda port, more, lines: keep_sending(
        port, more, CHUNKED % lines, b"1\r\n{\r\n" * 10_000, False
    ),
    "aggregate": again(post(b"/aggregate_metrics", AGGREGATE)),
    "aggregate of tasks": again(post(b"/aggregate_metrics", TASKS)),
    "aggregate of blanks": again(post(b"/aggregate_metrics", b'{"verify_responses":[{"reward":1' + b" " * (30 << 20))),
    "get_reward": again(post(b"/get_reward", REPEATED), 2),
    "batch of blank lines": again(post(b"/v1/grade/batch", BATCH)),
    "mcp of deep lists": again(post(b"/mcp", b"[" * 400_000)),
    "reward of many digits": again(
        post(b"/aggregate_metrics", b'{"verify_responses":[{"reward":%s}]}' % (b"9" * 4000))
    ),
    "tests that do not arrive": lambda port, more, lines: hold(
        port, more, b"PUT /v1/tests HTTP/1.1\r\n" + lines + b"Content-Length: 99999999\r\n\r\n{", 200
    ),
    "jobs that do not arrive": lambda port, more, lines: hold(port, more, post(b"/v1/jobs", b"{", 8 << 20)(lines), 200),
    "a foreign origin": again(lambda lines: b"POST /v1/grade HTTP/1.1\r\nOrigin: http://[\r\n" + lines + b"\r\n"),
    "websocket pings": ws(masked(9, b"") * 2000),
    "websocket fragments": ws(masked(0, b"", fin=False) * 1000, masked(1, b"", fin=False)),
    "websocket messages": ws(masked(1, b"{}") * 1000),
}
GRPC: dict[str, Callable[[int, _Until, bytes], None]] = {
    "grpc idle connections": lambda port, more, _: hold(port, more, PREFACE, 1000),
    "grpc continuation": lambda port, more, _: keep_sending(
        port, more, PREFACE + frame(1, 0, 1, GRADE), frame(9, 0, 1, field(b"x", b"y" * 16000)) * 4, True
    ),
    "grpc opened streams": lambda port, more, _: streams(port, more, GRADE, False, b""),
    "grpc streams reset": lambda port, more, _: streams(port, more, GRADE, True, b""),
    "grpc watched health": lambda port, more, _: streams(port, more, WATCH, False, bytes(5)),
    "grpc streams that the server resets": lambda port, more, _: streams(port, more, GRADE, False, bytes(5) * 2),
    "grpc answers not read": lambda port, more, _: keep_sending(
        port,
        more,
        PREFACE + frame(4, 0, 0, struct.pack("!HI", 4, 0)),  # no window
        b"".join(frame(1, 4, n, WATCH) + frame(0, 1, n, bytes(5)) for n in range(1, 201, 2)),
        False,
    ),
    "grpc settings": framed(4, 0, b""),
    "grpc priorities": framed(2, 1, struct.pack("!IB", 0, 1)),
    "grpc windows": framed(8, 0, struct.pack("!I", 1)),
    "grpc empty frames": framed(0, 1, b""),
    "grpc messages that never end": lambda port, more, _: keep_sending(
        port,
        more,
        PREFACE + frame(1, 4, 1, GRADE) + frame(0, 0, 1, struct.pack("!BI", 0, 60 << 20)),
        frame(0, 0, 1, bytes(16_000)),
        True,
        40,
    ),
    "grpc sizes of the table": lambda port, more, _: keep_sending(
        port, more, PREFACE + frame(1, 0, 1, HEAD), frame(9, 0, 1, b"\x20" * 16000), True
    ),
    "grpc fields without a name": lambda port, more, _: keep_sending(
        port, more, PREFACE + frame(1, 0, 1, HEAD), frame(9, 0, 1, bytes(3) * 5000), True
    ),
    "grpc pings": lambda port, more, _: keep_sending(port, more, PREFACE, frame(6, 0, 0, bytes(8)) * 1000, True),
}


def flood(act: Callable[[int, _Until, bytes], None], port: int, seconds: float, lines: bytes) -> None:
    until = time.monotonic() + seconds
    act(port, lambda: time.monotonic() < until, lines)


async def ask(port: int, taken: list[float]) -> None:
    begun = time.monotonic()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            answer = await reader.read()
            writer.close()
            if answer.startswith(b"HTTP/1.1 200"):
                taken.append(1000 * (time.monotonic() - begun))
                return
    taken.append(20_000)


def mib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4 // 1024


async def measured(ports: list[int], pid: int, seconds: float) -> tuple[list[list[float]], int]:
    """The times of each port, and the most memory."""
    taken: list[list[float]] = [[] for _ in ports]
    most, until = 0, time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < until:
            for port, into in zip(ports, taken, strict=True):
                group.create_task(ask(port, into))
            most = max(most, mib(pid))
            await asyncio.sleep(0.02)
    return taken, most


@contextmanager
def service(tokens: bool, slots: int = 1, settings: Iterable[str] = ()) -> Iterator[tuple[int, dict[str, int]]]:
    with tempfile.TemporaryDirectory(prefix="floods-") as name:
        problems = Path(__file__).resolve().parents[2] / "examples"
        known = sorted(problems.rglob("*.jsonl"))
        command = [
            sys.executable,
            "-m",
            "nouscoder",
            "serve",
            "verifier",
            "--http",
            "127.0.0.1:0",
            "--grpc",
            "127.0.0.1:0",
        ]
        command += ["--set", "verifier.health=127.0.0.1:0", "--set", f"verifier.sandbox.slots={slots}"]
        command += ["--set", f'verifier.problems="{known[0]}"'] if known else []
        command += [word for setting in settings for word in ("--set", setting)]
        if tokens:
            file = Path(name) / "tokens"
            file.write_text(f"floods:{hashlib.sha256(b't0ken').hexdigest()}\n")
            file.chmod(0o600)
            command += ["--set", f"verifier.tokens_file={file}"]
        with (Path(name) / "log").open("wb") as log:
            process = subprocess.Popen(command, stderr=log)
        try:
            yield process.pid, addresses(Path(name) / "log", process)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def addresses(log: Path, process: subprocess.Popen[bytes]) -> dict[str, int]:
    ports: dict[str, int] = {}
    until = time.monotonic() + 90
    while len(ports) < 3 and time.monotonic() < until and process.poll() is None:
        for line in log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                ports |= {key: int(said[key].rpartition(":")[2]) for key in ("http", "health", "grpc") if key in said}
        time.sleep(0.1)
    assert len(ports) == 3, log.read_text()[-2000:]
    return ports


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def main(seconds: float, wanted: str) -> None:
    """Measure and print."""
    here, there = multiprocessing.Pipe()
    control = multiprocessing.Process(target=serve_control, args=(there,), daemon=True)
    control.start()
    control_port = here.recv()
    print(
        "of /healthz: control p50 p99 | health port p50 p99 worst, ratio of p99 | clients' port p50 p99 worst | MiB",
        flush=True,
    )
    for tokens in (False, True):
        print(f"\n{'with' if tokens else 'without'} tokens")
        for name, act in (HTTP | GRPC).items():
            if wanted not in name:
                continue
            with service(tokens) as (pid, ports):
                before, port = mib(pid), ports["grpc" if name in GRPC else "http"]
                for lines in (LINES, BARE) if tokens and name not in GRPC else (BARE,):
                    work = multiprocessing.Process(target=flood, args=(act, port, seconds, lines), daemon=True)
                    work.start()
                    watched = [control_port, ports["health"], ports["http"]]
                    taken, most = asyncio.run(measured(watched, pid, seconds))
                    work.join(5)
                    work.kill()
                    time.sleep(3)
                    calm, apart, same = ([percentile(one, share) for share in (0.5, 0.99, 1)] for one in taken)
                    shown = name + (" (no token sent)" if tokens and lines == BARE else "")
                    print(
                        f"{shown:44} {calm[0]:5.0f} {calm[1]:5.0f} | {apart[0]:5.0f} {apart[1]:5.0f} {apart[2]:6.0f}"
                        f" x{apart[1] / max(1, calm[1]):<5.1f}| {same[0]:5.0f} {same[1]:5.0f} {same[2]:6.0f} |"
                        f" {before:4} {most:4} {mib(pid):4}",
                        flush=True,
                    )
    control.kill()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 8, sys.argv[2] if len(sys.argv) > 2 else "")
