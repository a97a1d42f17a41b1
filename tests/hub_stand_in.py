"""A hub with one small model, as `hf download` asks for it: in a thread of a test, or as a pod."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0" * 39 + "1"
FILES = {"config.json": b'{"model_type": "qwen3"}', "model.safetensors": b"weights", "pytorch_model.bin": b"not wanted"}


class Hub(BaseHTTPRequestHandler):
    """What `hf download` asks a hub for. A request without the token is refused."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with the list of files, or with a file."""
        name = self.path.rpartition("/")[2]
        if self.headers.get("Authorization") != "Bearer secret":
            self._answer(401, b"{}")
        elif self.path.startswith("/api/models/someone/model/revision/main"):
            about = {"id": "someone/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            self._answer(200, json.dumps(about).encode())
        elif self.path.startswith(f"/api/models/someone/model/tree/{COMMIT}"):
            listed = [{"type": "file", "path": name, "size": len(body), "oid": ""} for name, body in FILES.items()]
            self._answer(200, json.dumps(listed).encode())
        elif "/resolve/" in self.path and name in FILES:
            self._answer(200, FILES[name])
        else:
            self._answer(404, b"{}")

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@contextmanager
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    ThreadingHTTPServer(("", 8000), Hub).serve_forever()
