"""The certificates of all services change on a cluster while a run and clients of both grading APIs go on.

No verdict is lost or wrong, no pod starts again, and new connections get the new certificate.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.certificates import make_certificate, serial, served_serial, trusting
from tests.cluster.conftest import NAME, Release
from tests.cluster.rules import wait_for_data

from nouscoder.client import AsyncClient, Patience
from nouscoder.config import MutualTlsSection
from nouscoder.domain.submission import StdinCase, StdinTests, Submission
from nouscoder.rpc.tls import channel_credentials
from nouscoder.rpc.verifier_client import VerifierClient

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(1800)]

SECRET = "nouscoder-certificates"
SERVICES = ("broker", "verifier", "generation", "learner")
# A small run that lasts longer than the test.
VALUES = f"""
tls: {{enabled: true, existingSecret: {SECRET}}}
config:
  run: {{total_batches: 500}}
  evaluation: {{samples: 1}}
  broker: {{drop_zero_variance: false}}
  demo: {{train_problems: 100, held_out_problems: 4, warm_start_share: 0.1}}
"""
FILES = {"certificate": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
PORTS = {  # Service, port, protocol of each server with certificates
    "REST": ("svc/nouscoder-verifier", 8080, "http/1.1"),
    "gRPC": ("svc/nouscoder-verifier", 50051, "h2"),
    "broker": ("svc/nouscoder-broker", 50052, "h2"),
    "generation": ("svc/nouscoder-generation", 50053, "h2"),
    "learner": ("svc/nouscoder-learner", 50054, "h2"),
}
CLIENTS = ("REST", "gRPC", "new REST", "new gRPC")
PROGRAMS = {"accepted": "print(2 * int(input()))", "wrong_answer": "print(3 * int(input()))"}
# A connection that fails is a lost verdict: nothing may end one here.
AT_ONCE = Patience(unreachable_s=0.0, internal_retries=0)
CHANGE_LIMIT_S = 300.0  # the kubelet's time, and a machine with load
VERDICTS_AFTER = 30  # of each kind of client, with the new certificates

Grade = Callable[[str], Awaitable[str]]


class Load:
    """Clients that grade until `stop`, and what they got."""

    def __init__(self) -> None:
        self.verdicts: Counter[str] = Counter()
        self.stop = False

    async def grade(self, client: str, grade: Grade) -> None:
        """Grade programs, each with another text. Fails at the first wrong or missing verdict."""
        while not self.stop:
            for verdict, code in PROGRAMS.items():
                assert await grade(f"{code}  # {client} {self.verdicts[client]}") == verdict
                self.verdicts[client] += 1


def rest(client: AsyncClient) -> Grade:
    async def grade(code: str) -> str:
        tests = {"type": "stdin", "cases": [{"input": "4", "output": "8"}]}
        return str((await client.grade(code=code, tests=tests))["verdict"])

    return grade


def grpc(client: VerifierClient) -> Grade:
    async def grade(code: str) -> str:
        return (await client.grade(Submission(StdinTests((StdinCase("4", "8"),)), code=code))).kind.value

    return grade


@asynccontextmanager
async def clients(http: int, verifier: int, folder: Path, token: str) -> AsyncIterator[dict[str, Grade]]:
    """Clients of both APIs that keep their connection, and ones that make a connection for each program."""
    section = MutualTlsSection(**{key: str(folder / file) for key, file in FILES.items()})

    def rest_client() -> AsyncClient:
        return AsyncClient(f"https://127.0.0.1:{http}", AT_ONCE, token=token, tls=trusting(folder))

    def grpc_client() -> VerifierClient:
        return VerifierClient(f"127.0.0.1:{verifier}", 0.0, channel_credentials(section), lambda: token)

    async def rest_anew(code: str) -> str:
        async with rest_client() as client:
            return await rest(client)(code)

    async def grpc_anew(code: str) -> str:
        async with grpc_client() as client:
            return await grpc(client)(code)

    async with rest_client() as kept_rest, grpc_client() as kept_grpc:
        yield {"REST": rest(kept_rest), "gRPC": grpc(kept_grpc), "new REST": rest_anew, "new gRPC": grpc_anew}


def committed(release: Release) -> int:
    """The batches of the run, asked for with the certificates of the learner's pod; -1 while nobody answers."""
    inside = ("exec", f"{NAME}-learner-0", "-c", "run", "--", "nouscoder", "status")
    command = ["kubectl", "-n", release.namespace, *inside, "--config", "/etc/nouscoder/config.json", "--json"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if said.returncode:
        return -1
    status: dict[str, Any] = json.loads(said.stdout)
    assert status["balanced"], status
    return int(status["batches_committed"])


def pods_of(release: Release) -> dict[str, tuple[str, int]]:
    """UID -> name and restarts of the services' pods."""
    return {pod.uid: (pod.name, pod.num_restarts) for pod in release.pods() if pod.component in SERVICES}


def install(release: Release, folder: Path) -> tuple[str, ...]:
    """Install the loop with TLS, and wait for a batch. Returns the names in the certificate."""
    hosts = (f"DNS:{NAME}-{service}.{release.namespace}.svc" for service in SERVICES)
    names = (*hosts, "IP:127.0.0.1")
    release.kubectl("create", "secret", "generic", SECRET, *make_certificate(folder, *names))
    (folder / "values.yaml").write_text(VALUES)
    release.install("-f", str(folder / "values.yaml"))
    release.until(lambda: committed(release) >= 1, "a batch over TLS", 900)
    return names


class Change:
    """The renewal of the certificates, while `load` goes on. Blocks, so it runs in a thread."""

    def __init__(self, release: Release, folder: Path, load: Load, served: Callable[[], dict[str, str]]) -> None:
        self.release, self.folder, self.load, self.served = release, folder, load, served
        self.changed_s, self.num_before = 0.0, 0

    def graded(self, num_more: int, what: str) -> None:
        """Wait until each client has so many more verdicts."""
        so_far = Counter(self.load.verdicts)
        self.release.until(
            lambda: all(self.load.verdicts[one] >= so_far[one] + num_more for one in CLIENTS), what, 300, every_s=1
        )

    def make(self, names: tuple[str, ...]) -> None:
        """Replace the Secret and wait for the new serial number, for verdicts, and for batches of the run."""
        self.graded(2, "every client grades")
        made = make_certificate(self.folder, *names)
        words = ("create", "secret", "generic", SECRET, *made, "--dry-run=client", "-o", "json")
        step, began = committed(self.release), time.monotonic()
        self.release.kubectl("replace", "-f", "-", given=self.release.kubectl(*words))
        new = serial(self.folder)
        self.release.until(lambda: set(self.served().values()) == {new}, "the new certificate", CHANGE_LIMIT_S)
        self.changed_s, self.num_before = time.monotonic() - began, self.load.verdicts.total()
        self.graded(VERDICTS_AFTER, "verdicts with the new certificate")
        self.release.until(lambda: committed(self.release) >= step + 2, "two further batches", 300)


async def test_renewed_certificates_cost_no_verdict_and_no_restart(release: Any, tmp_path: Path) -> None:
    names = install(release, tmp_path)
    before, first, load = pods_of(release), serial(tmp_path), Load()
    own = Path(shutil.copytree(tmp_path, tmp_path / "clients"))  # theirs do not change
    with ExitStack() as stack:
        ports = {name: stack.enter_context(release.forward(*where)) for name, (*where, _) in PORTS.items()}

        def served() -> dict[str, str]:
            return {name: served_serial(port, trusting(own), PORTS[name][-1]) for name, port in ports.items()}

        assert set(served().values()) == {first}
        token = release.secret("nouscoder-verifier-tokens", "token")
        change = Change(release, tmp_path, load, served)
        async with clients(ports["REST"], ports["gRPC"], own, token) as grading, asyncio.TaskGroup() as group:
            for client, grade in grading.items():
                group.create_task(load.grade(client, grade))
            try:
                await asyncio.to_thread(change.make, names)
            finally:
                load.stop = True
        last = served()
    print(
        f"\nserial {first} -> {' '.join(set(last.values()))} at {', '.join(last)} after {change.changed_s:.0f} s;"
        f" verdicts, all right: {dict(load.verdicts)}, {change.num_before} of them until then"
    )
    assert set(last.values()) == {serial(tmp_path)} != {first}
    assert pods_of(release) == before


def test_the_alert_on_certificates_has_data_with_tls(release: Any) -> None:
    wait_for_data(release, "--with", "tls")
