"""Traces of `nouscoder serve verifier` in a real OTLP receiver, and no SDK while tracing is off."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="install the `tracing` extra")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from nouscoder.domain.submission import StdinCase, StdinTests, Submission
from nouscoder.rpc.pairs import SUBMISSION
from nouscoder.v1 import verifier_pb2, verifier_pb2_grpc

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
# Twelve digits: the spans also hold random hexadecimal ids, and in one run of 850 these hold "3333" or "6666".
SECRET_INPUT = 333314159265
CASES = [{"input": f"{number}\n", "output": f"{2 * number}\n"} for number in (11, 222, SECRET_INPUT)]
BODY = {"code": "secret_name = int(input())\nprint(2 * secret_name)", "tests": {"type": "stdin", "cases": CASES}}


@dataclass(frozen=True)
class Span:
    """One received span."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begun_ns: int
    ended_ns: int
    attributes: dict[str, Any]


class Receiver:
    """A collector's OTLP/HTTP port."""

    def __init__(self) -> None:
        self.raw = b""
        self.spans: list[Span] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, body: bytes) -> None:
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for span in (one for scope in resource.scope_spans for one in scope.spans):
                values = {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes}
                ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                self.spans.append(Span(span.name, *ids, span.start_time_unix_nano, span.end_time_unix_nano, values))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def named(self, name: str) -> list[Span]:
        """In the order in which they began: the span of an answered request may end after the next request began."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.begun_ns)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


class Service:
    """`nouscoder serve verifier` with one slot."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self._log = folder / "log"
        command = [sys.executable, "-m", "nouscoder", "serve", "verifier", "--http", "127.0.0.1:0"]
        for setting in ("verifier.sandbox.slots=1", 'verifier.grpc="127.0.0.1:0"', *settings):
            command += ["--set", setting]
        environment = {**os.environ, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment)

    def text(self) -> str:
        return self._log.read_text()

    def address(self, name: str) -> str:
        def listening() -> bool:
            assert self.process.poll() is None, self.text()
            return f'"{name}": "' in self.text()

        until(listening, f"{name} listens")
        return self.text().split(f'"{name}": "')[1].split('"')[0]

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


def until(condition: Callable[[], bool], what: str, limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.fixture
def service(tmp_path: Path, receiver: Receiver) -> Iterator[Service]:
    running = Service(tmp_path, f'verifier.tracing_endpoint="{receiver.url}"')
    yield running
    if running.process.poll() is None:
        running.stop()


def test_spans_of_both_apis_form_one_trace_each_and_hold_no_code(service: Service, receiver: Receiver) -> None:
    url = f"http://{service.address('http')}"
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "X-Request-Id": "mine"}
    assert httpx.post(f"{url}/v1/grade", json=BODY, headers=headers, timeout=60).json()["verdict"] == "accepted"
    assert httpx.post(f"{url}/v1/grade", json=BODY, timeout=60).json()["cached"]
    broken_body = {**BODY, "code": "print("}
    assert httpx.post(f"{url}/v1/grade", json=broken_body, timeout=60).json()["verdict"] == "compile_error"
    assert httpx.get(f"{url}/healthz", timeout=60).status_code == 200
    submission = Submission(StdinTests((StdinCase("4", "5"),)), code="print(4)")
    with grpc.insecure_channel(service.address("grpc")) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        request = verifier_pb2.GradeStreamRequest(submission=SUBMISSION.to(submission))
        answers = stub.GradeStream(request, metadata=(("traceparent", f"00-{'9' * 32}-{SPAN}-01"),), timeout=30)
        assert [answer.WhichOneof("event") for answer in answers] == ["outcome", "verdict"]
    assert service.stop() == 0  # sends what is left

    first, cached, broken = receiver.named("POST /v1/grade")
    assert (first.trace_id, first.parent_id) == (TRACE, SPAN)
    assert first.attributes == {"http.response.status_code": 200, "request_id": "mine"}
    (grade,) = [span for span in receiver.named("grade") if span.trace_id == TRACE]
    assert grade.parent_id == first.span_id
    expected = {"language": "python", "tests_type": "StdinTests", "client": "anonymous", "backend": "local"}
    assert grade.attributes == expected | {"verdict": "accepted", "passed": 3, "total": 3}
    below = [span for span in receiver.spans if span.parent_id == grade.span_id]
    assert sorted(span.name for span in below) == ["queue", "sandbox", "test", "test", "test"]
    assert {span.attributes["index"] for span in below if span.name == "test"} == {0, 1, 2}
    for span in below:
        assert span.trace_id == TRACE
        assert grade.begun_ns <= span.begun_ns <= span.ended_ns <= grade.ended_ns, span.name
        if span.name == "test":
            assert span.attributes["outcome"] == "accepted"
            assert span.attributes["wall_time_s"] > 0
            assert set(span.attributes) == {"index", "outcome", "wall_time_s", "cpu_time_s", "memory_bytes"}

    # Without a traceparent a request starts a new trace; an answer from the cache has no grade span.
    assert cached.parent_id == broken.parent_id == ""
    assert len({first.trace_id, cached.trace_id, broken.trace_id}) == 3
    assert [span for span in receiver.spans if span.trace_id == cached.trace_id] == [cached]
    (refused,) = [span for span in receiver.named("sandbox") if span.trace_id == broken.trace_id]
    assert refused.attributes["error.type"] == "CompileFailed"

    (call,) = receiver.named("/nouscoder.v1.VerifierService/GradeStream")
    assert (call.trace_id, call.parent_id) == ("9" * 32, SPAN)
    (grade,) = [span for span in receiver.named("grade") if span.trace_id == "9" * 32]
    assert (grade.parent_id, grade.attributes["verdict"]) == (call.span_id, "wrong_answer")

    for secret in ("secret_name", str(SECRET_INPUT), str(2 * SECRET_INPUT)):
        assert secret.encode() not in receiver.raw


def test_latency_histograms_name_the_traces_of_their_requests(service: Service) -> None:
    """As Prometheus scrapes them: in OpenMetrics, from the port of metrics and from that of the API."""
    url = f"http://{service.address('http')}"
    untraced = {"traceparent": f"00-{'8' * 32}-{SPAN}-00"}
    assert httpx.post(f"{url}/v1/grade", json={**BODY, "code": "print(1)"}, headers=untraced, timeout=60).is_success
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    assert httpx.post(f"{url}/v1/grade", json=BODY, headers=headers, timeout=60).json()["verdict"] == "accepted"
    for page in (f"{url}/metrics", f"http://{service.address('metrics')}/metrics"):
        scraped = httpx.get(page, headers={"Accept": "application/openmetrics-text;version=1.0.0"}, timeout=60)
        assert scraped.headers["content-type"].startswith("application/openmetrics-text")
        found: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(scraped.text):  # type: ignore[no-untyped-call]
            for sample in family.samples:
                if sample.exemplar is not None:
                    assert sample.exemplar.value <= float(sample.labels["le"])
                    found.setdefault(family.name, set()).add(sample.exemplar.labels["trace_id"])
        # A request that its caller does not sample leaves no trace, and so no exemplar.
        histograms = ("submission_duration_seconds", "test_duration_seconds")
        assert found == {f"nouscoder_verifier_{name}": {TRACE} for name in histograms}
        plain = httpx.get(page, timeout=60)
        assert plain.headers["content-type"].startswith("text/plain")
        assert TRACE not in plain.text


def test_a_missing_receiver_delays_no_request(tmp_path: Path) -> None:
    service = Service(tmp_path, 'verifier.tracing_endpoint="http://127.0.0.1:9"')
    url = f"http://{service.address('http')}"
    assert httpx.post(f"{url}/v1/grade", json=BODY, timeout=60).json()["verdict"] == "accepted"
    assert service.stop() == 0


def test_an_invalid_endpoint_is_refused_with_its_name(tmp_path: Path) -> None:
    service = Service(tmp_path, 'verifier.tracing_endpoint="collector:4318"')
    assert service.process.wait(60) == 78
    assert "verifier.tracing_endpoint: 'collector:4318' is not an http address" in service.text()


def test_the_sdk_is_not_loaded_while_tracing_is_off() -> None:
    script = """
import asyncio, contextlib, json, sys
from nouscoder.verifier import process
from nouscoder.verifier.observe.tracing import open_tracing
async def main():
    async with contextlib.AsyncExitStack() as stack:
        assert open_tracing("", stack) is None
asyncio.run(main())
heavy = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto", "requests")
print(json.dumps([name for name in sys.modules if name.startswith(heavy)]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == []
