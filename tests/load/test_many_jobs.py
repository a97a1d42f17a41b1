"""A job of 100,000 submissions, as an evaluator sends it, in the real command with the fake backend."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.redis_process import free_port

COUNT = int(os.environ.get("NOUSCODER_JOB_SUBMISSIONS", "100000"))
STALL_S = 120.0  # without a further result
EACH_BYTES = 500  # allowed for each result: 450 were measured (docs/grading.md)
OTHER_BYTES = 32 << 20  # allowed for everything else: submissions in progress, parts of the body and of the results
VERDICTS = ("accepted", "wrong_answer")


def submissions(count: int) -> Iterator[bytes]:
    """Programs of which the fake backend prints the input, every second one wrong. Each is different."""
    for number in range(count):
        tests = {"type": "stdin", "cases": [{"input": "a", "output": "ab"[number % 2]}]}
        yield json.dumps({"id": f"s{number}", "code": f"echo  # {number}", "tests": tests}).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Service:
    """A running service."""

    process: subprocess.Popen[bytes]
    http: httpx.Client

    def memory_bytes(self, field: str = "VmRSS") -> int:
        """The resident memory; with VmHWM its peak."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition(f"{field}:")[2].split()[0]) << 10

    def state(self, job_id: str) -> dict[str, Any]:
        """The state of a job."""
        state: dict[str, Any] = self.http.get(f"/v1/jobs/{job_id}").raise_for_status().json()
        return state

    def wait(self, job_id: str, count: int) -> int:
        """Wait until the job has so many results, and with all of them has ended. Returns how many it has."""
        seen, changed_s = -1, time.monotonic()
        while (state := self.state(job_id))["done"] < count or (count == COUNT and state["ended_s"] is None):
            assert self.process.poll() is None, "the service has ended"
            if state["done"] > seen:
                seen, changed_s = state["done"], time.monotonic()
            assert time.monotonic() - changed_s < STALL_S, f"no result after the first {seen}"
            time.sleep(0.1)
        return int(state["done"])


@contextmanager
def serving(folder: Path) -> Iterator[Service]:
    """A service that is ready. It is killed at the end."""
    port = free_port()
    command = [sys.executable, "-m", "nouscoder", "serve", "verifier", "--http", f"127.0.0.1:{port}"]
    command += ["--grpc", "127.0.0.1:0", "--set", "verifier.sandbox.backend=fake"]
    command += ["--set", f"verifier.jobs.folder={folder / 'jobs'}"]
    log = (folder / "log").open("ab")
    with log, subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
                wait_until_ready(process, http)
                yield Service(process, http)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(60)


def wait_until_ready(process: subprocess.Popen[bytes], http: httpx.Client) -> None:
    """Wait until the service accepts submissions."""
    end_s = time.monotonic() + 120
    while True:
        assert process.poll() is None, "the service has ended"
        assert time.monotonic() < end_s, "the service does not answer"
        try:
            if http.get("/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_job_of_100000_submissions_survives_a_kill_in_little_memory(tmp_path: Path) -> None:
    """The service is killed in the middle. Every submission has one result, the right one."""
    with serving(tmp_path) as service:
        idle_bytes, begun_s = service.memory_bytes(), time.monotonic()
        headers = {"Content-Type": "application/x-ndjson"}
        sent = service.http.post("/v1/jobs", content=submissions(COUNT), headers=headers)
        assert sent.status_code == 202, sent.text
        job_id, sent_s = sent.json()["id"], time.monotonic() - begun_s
        tenth = service.wait(job_id, COUNT // 10)
        tenth_bytes = service.memory_bytes()
        half = service.wait(job_id, COUNT // 2)
        half_bytes = service.memory_bytes()
        peak_bytes = service.memory_bytes("VmHWM")
    with serving(tmp_path) as service:
        kept, resumed_bytes = service.state(job_id)["done"], service.memory_bytes()
        assert half <= kept < COUNT, "no result is lost, and the kill was in the middle"
        service.wait(job_id, COUNT)
        graded_s = time.monotonic() - begun_s
        counts: Counter[int] = Counter()
        with service.http.stream("GET", f"/v1/jobs/{job_id}/results") as answer:
            for text in answer.iter_lines():
                result = json.loads(text)
                number = int(result["key"])
                assert (result["id"], result["verdict"]) == (f"s{number}", VERDICTS[number % 2])
                counts[number] += 1
        state = service.state(job_id)
        again_peak_bytes = service.memory_bytes("VmHWM")
    each = (half_bytes - tenth_bytes) / (half - tenth)
    print(
        f"\n{COUNT} submissions: sent in {sent_s:.0f} s, graded in {graded_s:.0f} s with a kill after {kept} results;"
        f" memory in MiB: idle {idle_bytes >> 20}, at {tenth} results {tenth_bytes >> 20}, at {half} {half_bytes >> 20}"
        f" ({each:.0f} bytes a result), peak {peak_bytes >> 20}; after the restart {resumed_bytes >> 20}, peak"
        f" {again_peak_bytes >> 20}"
    )
    assert counts == dict.fromkeys(range(COUNT), 1)
    assert (state["state"], state["done"], state["errors"]) == ("finished", COUNT, 0)
    assert max(peak_bytes, again_peak_bytes) <= idle_bytes + EACH_BYTES * COUNT + OTHER_BYTES
