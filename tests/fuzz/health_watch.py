"""Measures how long GET /healthz takes beside a control, in a process of its own.

    python tests/fuzz/health_watch.py HOST:PORT PID

The control is a bare asyncio server in another process that answers any request with the same bytes: what delays it
too is the machine, not the service. Both are asked every 50 ms over new connections. A service at work waits longer for
a CPU than an idle server does, so the kernel's own count of that wait is taken too (schedstat of all its threads).
`excess` of a request to the service is its time without that wait and without the longest time of the control within a
second. At the end of stdin it prints one line of JSON: the times [s] and the memory of the process PID [bytes].
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

EVERY_S = 0.05
NEAR_S = 1.0
LIMIT_S = 60.0
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


@dataclass(slots=True)
class Times:
    """(begin, duration, wait of the process `pid` for a CPU) of each request [s], and the number without an answer of
    status 200.
    """

    pid: int = 0
    taken: list[tuple[float, float, float]] = field(default_factory=list)
    num_failed: int = 0

    def most(self) -> float:
        """The longest time."""
        return max((took for _, took, _ in self.taken), default=0.0)

    def most_waited(self) -> float:
        """The longest wait for a CPU."""
        return max((waited for _, _, waited in self.taken), default=0.0)


def waited_s(pid: int) -> float:
    """How long the threads of a process have waited for a CPU, in all."""
    waited_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir() if pid else ():
        with contextlib.suppress(OSError, IndexError):
            waited_ns += int((thread / "schedstat").read_text().split()[1])
    return 1e-9 * waited_ns


def serve_control(address: object) -> None:
    """Serve the control for ever. Sends its port through the pipe."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
            await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        address.send(server.sockets[0].getsockname()[1])  # type: ignore[attr-defined]
        await server.serve_forever()

    asyncio.run(serve())


async def ask(host: str, port: int, times: Times) -> None:
    """One request."""
    begun_s, before_s = time.monotonic(), waited_s(times.pid)
    answer = b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(REQUEST)
            answer = await reader.read()
            writer.close()
    took_s = time.monotonic() - begun_s
    times.taken.append((begun_s, took_s, min(took_s, max(0.0, waited_s(times.pid) - before_s))))
    times.num_failed += not answer.startswith(b"HTTP/1.1 200")


async def ask_again(host: str, port: int, times: Times) -> None:
    """Ask every EVERY_S until cancelled, also while an answer is late."""
    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(ask(host, port, times))
            await asyncio.sleep(EVERY_S)


async def sample_memory(pid: int, into: list[int]) -> None:
    """The resident size each second."""
    while True:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/status").read_text()
            into.append(int(text.split("VmRSS:")[1].split()[0]) * 1024)
        await asyncio.sleep(1)


def excess_s(service: Times, control: Times) -> float:
    """The largest excess."""
    most, first = 0.0, 0
    for begun_s, took_s, waiting_s in service.taken:
        while first < len(control.taken) and sum(control.taken[first][:2]) < begun_s - NEAR_S:
            first += 1
        near = 0.0
        for at_s, other_s, _ in control.taken[first:]:
            if at_s > begun_s + took_s + NEAR_S:
                break
            near = max(near, other_s)
        most = max(most, took_s - near - waiting_s)
    return most


async def main(address: str, pid: int) -> None:
    """Measure until stdin ends."""
    host, _, port = address.rpartition(":")
    here, there = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve_control, args=(there,), daemon=True)
    server.start()
    control_port = here.recv()
    service, control, memory = Times(pid), Times(), list[int]()
    tasks = [
        asyncio.create_task(work)
        for work in (
            ask_again(host, int(port), service),
            ask_again("127.0.0.1", control_port, control),
            sample_memory(pid, memory),
        )
    ]
    await asyncio.to_thread(sys.stdin.buffer.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    server.kill()
    found = {
        "num_requests": len(service.taken),
        "num_failed": service.num_failed,
        "service_most_s": service.most(),
        "service_waited_s": service.most_waited(),
        "control_most_s": control.most(),
        "excess_s": excess_s(service, control),
        "memory_first": memory[0] if memory else 0,
        "memory_most": max(memory, default=0),
        "memory_last": memory[-1] if memory else 0,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
