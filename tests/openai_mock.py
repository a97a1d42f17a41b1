"""A server with OpenAI's API over real HTTP, whose answers a test decides from the requests alone."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class MockServer:
    """Answers chat completions by `answer` and embeddings by `embeds`; at most `limit` requests until `release`.

    A path of which it has no answer is not found.
    """

    answer: Answer | None = None
    embeds: Callable[[str], Sequence[float]] | None = None
    limit: int = sys.maxsize
    release: threading.Event = field(default_factory=threading.Event)
    statuses: list[int] = field(default_factory=list)  # of the first requests, before it answers
    requests: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_at_once: int = 0
    url: str = ""

    def body(self, path: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None for an unknown path."""
        if path == "/v1/chat/completions" and self.answer is not None:
            return self.answer(request)
        if path == "/v1/embeddings" and self.embeds is not None:
            found = [{"index": at, "embedding": list(self.embeds(text))} for at, text in enumerate(request["input"])]
            return {"data": found[::-1]}  # the protocol gives each one its index, so their order is free
        return None


@contextmanager
def serving(mock: MockServer) -> Iterator[MockServer]:
    """Serve until the end of the block."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                mock.requests.append(request)
                mock.running += 1
                mock.most_at_once = max(mock.most_at_once, mock.running)
                held = len(mock.requests) > mock.limit
                status = mock.statuses.pop(0) if mock.statuses else 200
            if held:
                mock.release.wait(120)
            found = mock.body(self.path, request)
            body = json.dumps(found if status == 200 and found is not None else {"error": "as asked"}).encode()
            streams = bool(request.get("stream")) and status == 200 and found is not None
            if streams and found is not None:
                body = streamed(found)
            with lock:
                mock.running -= 1
            self.send_response(status if found is not None else 404)
            self.send_header("content-type", "text/event-stream" if streams else "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keep stderr clean."""

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:  # the client was killed
                self.close_connection = True

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        mock.url = f"http://127.0.0.1:{server.server_port}/v1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield mock
        mock.release.set()
        server.shutdown()


def completion(text: str, finish_reason: str = "stop") -> dict[str, Any]:
    """The body of an answer."""
    message = {"role": "assistant", "content": text, "reasoning_content": "Let me think."}
    return {
        "choices": [{"message": message, "finish_reason": finish_reason}],
        "usage": {"completion_tokens": len(text)},
    }


def streamed(answer: dict[str, Any]) -> bytes:
    """The answer as server-sent events: its message, its end, its usage."""
    head = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    (choice,) = answer["choices"]
    deltas: list[dict[str, Any]] = [{"delta": choice["message"], "finish_reason": None}]
    deltas.append({"delta": {}, "finish_reason": choice["finish_reason"]})
    events: list[dict[str, Any]] = [head | {"choices": [{"index": 0} | delta]} for delta in deltas]
    events.append(head | {"choices": [], "usage": {"prompt_tokens": 1, "total_tokens": 2} | answer["usage"]})
    return b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n"
