"""Backend modal, with Modal's real client and a local server that speaks its protobuf: faults, caps, leaks, cost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from prometheus_client import CollectorRegistry
from tests.modal_server import Fault, Faults, ModalServer, modal_server
from tests.redis_process import free_port

from nouscoder.config import ModalSection, SandboxSection, SpillOverSection, VerifierSection
from nouscoder.domain.submission import Limits, StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import (
    SandboxUnavailable,
    SpillOverSandbox,
    open_backends,
)
from nouscoder.verifier.sandbox.modal import cloud, containers

Changed = TypeVar("Changed", SandboxSection, ModalSection)
MODAL = ModalSection(image="example.org/nouscoder-sandbox:1", runtime="vm")
CONFIG = SandboxSection(backend="modal", slots=2, pool_spares=0, pool_start_s=120, modal=MODAL)
SEEN_MINUTE_S = 50.0  # requests of one minute reach the server within less, when the first is late on a busy machine
LIMITS = Limits(wall_time_s=60, cpu_time_s=30, memory_bytes=256 << 20)
PROGRAMS: Mapping[VerdictKind, str] = {
    VerdictKind.ACCEPTED: "print(int(input()) * 2, 'x' * 500)\n",
    VerdictKind.WRONG_ANSWER: "print(int(input()) * 3, 'x' * 500)\n",
    VerdictKind.RUNTIME_ERROR: "print('x' * 500)\nraise SystemExit(1)\n",
    VerdictKind.COMPILE_ERROR: "print(\n",
    VerdictKind.OUTPUT_LIMIT_EXCEEDED: "while True: print('x' * 4096)\n",
    VerdictKind.TIME_LIMIT_EXCEEDED: "while True: pass\n",
}


def changed(section: Changed, **values: object) -> Changed:
    """The section with other values, which are not checked: a container may live for less than Modal allows."""
    return section.model_copy(update=values)


def submission(kind: VerdictKind, number: int = 0) -> Submission:
    """A submission whose right verdict is `kind`. Each is different."""
    cases = tuple(StdinCase(f"{n}\n", f"{2 * n} {'x' * 500}\n") for n in (number + 1, number + 7))
    limits = replace(LIMITS, cpu_time_s=0.3) if kind is VerdictKind.TIME_LIMIT_EXCEEDED else LIMITS
    return Submission(StdinTests(cases), limits=limits, code=f"# {number}\n{PROGRAMS[kind]}")


@dataclass
class Running:
    """A grader whose sandboxes are containers of the server."""

    server: ModalServer
    sandbox: SpillOverSandbox
    grader: Grader
    registry: CollectorRegistry

    async def grade(self, kind: VerdictKind, number: int = 0) -> Verdict:
        return await self.grader.grade(submission(kind, number))


@asynccontextmanager
async def running(
    folder: Path, monkeypatch: pytest.MonkeyPatch, config: SandboxSection = CONFIG, faults: Faults = lambda _: None
) -> AsyncIterator[Running]:
    """Start server, sandbox and grader. At the end no container may be left."""
    async with modal_server(folder, monkeypatch, faults) as server:
        sandbox = open_backends(VerifierSection(sandbox=config, libraries=()))
        try:
            await sandbox.start()
            registry = CollectorRegistry()
            metrics = VerifierMetrics(registry)
            metrics.scraped.backends = lambda: sandbox.uses
            grader = Grader(sandbox, metrics)
            grader.follow(sandbox)
            yield Running(server, sandbox, grader, registry)
        finally:
            await sandbox.close()
        assert not server.containers, "a container is left"


def recover_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten what waits for Modal after a fault."""
    monkeypatch.setattr(containers, "_SWEEP_S", 0.5)
    monkeypatch.setattr(containers, "_LONGEST_PAUSE_S", 1.0)


def check_caps(server: ModalServer, caps: ModalSection) -> None:
    """Check by the server's own account that no cap was ever exceeded."""
    assert server.dollars <= server.most_committed_dollars <= caps.dollars
    assert server.most_containers <= caps.max_containers
    assert server.most_creations_within(SEEN_MINUTE_S) <= caps.creations_per_minute


def every_other(number: int) -> Fault | None:
    """Every second container goes wrong, in each way in turn."""
    return None if number % 2 else list(Fault)[number // 2 % len(Fault)]


async def graded_under_faults(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_gradings: int, seed: int = 5
) -> Running:
    """Grade submissions of every verdict while half of the containers fail, and check everything.

    `dollars` pays for the lifetimes of three containers at once, so it keeps the fourth slot empty all the time.
    """
    recover_quickly(monkeypatch)
    caps = changed(MODAL, max_containers=6, creations_per_minute=40, dollars_per_minute=0.02, dollars=0.5)
    config = changed(CONFIG, slots=4, max_sessions=6, modal=caps)
    chance = random.Random(seed)
    common = (VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER, VerdictKind.RUNTIME_ERROR, VerdictKind.COMPILE_ERROR)
    kinds = [chance.choice(common) for _ in range(num_gradings)]
    for index, kind in enumerate((VerdictKind.OUTPUT_LIMIT_EXCEEDED, VerdictKind.TIME_LIMIT_EXCEEDED)):
        kinds[index :: max(20, num_gradings // 10)] = [kind] * len(kinds[index :: max(20, num_gradings // 10)])
    async with running(folder, monkeypatch, config, every_other) as made:
        grading = asyncio.gather(*(made.grade(kind, number) for number, kind in enumerate(kinds)))
        await until(lambda: made.sandbox.uses["modal"].limited_by == "dollars")
        verdicts = await grading
        dollars = made.sandbox.uses["modal"].dollars
        check_caps(made.server, caps)
        assert dollars >= 0.9 * made.server.dollars, "the gateway's account must not be lower than Modal's"
    got = Counter(verdict.kind for verdict in verdicts)
    wrong = [
        (number, kind, verdict.kind)
        for number, (kind, verdict) in enumerate(zip(kinds, verdicts, strict=True))
        if verdict.kind not in (kind, VerdictKind.INTERNAL_ERROR)
    ]
    print(
        f"\n{num_gradings} gradings: {dict(got)}; wrong {wrong}; {len(made.server.requests)} creations;"
        f" faults {dict(made.server.happened)}; ${made.server.dollars:.5f} by the server, ${dollars:.5f} by the"
        f" gateway, at most ${made.server.most_committed_dollars:.5f} of {caps.dollars} committed;"
        f" at most {made.server.most_creations_within(SEEN_MINUTE_S)} of {caps.creations_per_minute} creations a minute"
    )
    assert not wrong
    assert got[VerdictKind.INTERNAL_ERROR] <= num_gradings // 50, "two faults in a row are rare"
    return made


@pytest.mark.heavy
async def test_no_fault_of_modal_changes_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await graded_under_faults(tmp_path, monkeypatch, 40)
    assert made.server.happened


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "num_gradings", [pytest.param(300, marks=pytest.mark.long), pytest.param(1000, marks=pytest.mark.soak)]
)
async def test_hundreds_of_gradings_under_every_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gradings: int
) -> None:
    made = await graded_under_faults(tmp_path, monkeypatch, num_gradings)
    assert set(made.server.happened) == set(Fault), "every fault must have happened"


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_under_faults_creations_wait_for_the_next_minute_and_no_verdict_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight submissions, each with a container of its own, need more than the four creations of a minute."""
    recover_quickly(monkeypatch)
    caps = changed(MODAL, container_for="submission", creations_per_minute=4)
    kinds = [VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER] * 4
    async with running(tmp_path, monkeypatch, changed(CONFIG, slots=4, modal=caps), every_other) as made:
        grading = asyncio.gather(*(made.grade(kind, number) for number, kind in enumerate(kinds)))
        await until(lambda: made.sandbox.uses["modal"].limited_by == "creations_per_minute")
        assert not grading.done()
        verdicts = await grading
        assert len(made.server.requests) > 2 * caps.creations_per_minute
        check_caps(made.server, caps)
    assert [verdict.kind for verdict in verdicts] == kinds


def is_spent(made: Running, caps: ModalSection) -> bool:
    """Whether no container is left and the money does not pay for another one."""
    use = made.sandbox.uses["modal"]
    left = caps.dollars - use.dollars
    return not made.server.containers and use.limited_by == "dollars" and left < caps.lifetime_s * caps.dollars_a_second


@pytest.mark.heavy
@pytest.mark.timeout(900)
async def test_under_faults_the_money_is_spent_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The money pays for six containers of 20 s. Four clients grade until all of it is spent."""
    recover_quickly(monkeypatch)
    caps = changed(MODAL, lifetime_s=20, creations_per_minute=600, dollars=MODAL.dollars_a_second * 120)
    verdicts: Counter[VerdictKind] = Counter()

    async def client(made: Running, kind: VerdictKind) -> None:
        for number in itertools.count():
            got = (await made.grade(kind, number)).kind
            assert got in (kind, VerdictKind.INTERNAL_ERROR)
            verdicts[got] += 1

    config = changed(CONFIG, slots=4, start_limit_s=5, modal=caps)
    async with running(tmp_path, monkeypatch, config, every_other) as made:
        kinds = (VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER)
        clients = [asyncio.create_task(client(made, kind)) for kind in kinds * 2]
        await until(lambda: is_spent(made, caps), 600)
        assert not any(task.done() for task in clients), "they wait, and get no verdict"
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        spent = made.server.dollars
        check_caps(made.server, caps)
    print(f"${spent:.5f} of {caps.dollars:.5f} spent, {dict(verdicts)}, {len(made.server.requests)} creations")
    assert spent > 0.5 * caps.dollars


@pytest.mark.heavy
@pytest.mark.parametrize(("container_for", "num_containers"), [("pool", 1), ("submission", 3), ("test", 6)])
async def test_a_container_serves_what_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container_for: str, num_containers: int
) -> None:
    config = changed(CONFIG, slots=1, modal=changed(MODAL, container_for=container_for))
    async with running(tmp_path, monkeypatch, config) as made:
        for number in range(3):
            assert (await made.grade(VerdictKind.ACCEPTED, number)).kind is VerdictKind.ACCEPTED
        assert num_containers <= len(made.server.requests) <= num_containers + 1  # the next one may be starting


@pytest.mark.heavy
async def test_a_container_for_a_problem_is_replaced_when_the_problem_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(CONFIG, slots=1, modal=changed(MODAL, container_for="problem"))
    async with running(tmp_path, monkeypatch, config) as made:
        counts = []
        for number, problem_id in enumerate(["a", "a", "b", "b", ""]):
            one = replace(submission(VerdictKind.ACCEPTED, number), problem_id=problem_id)
            assert (await made.grader.grade(one)).kind is VerdictKind.ACCEPTED
            counts.append(len(made.server.requests))
    assert counts == [1, 1, 2, 2, 3]


@pytest.mark.heavy
async def test_a_reached_cap_keeps_submissions_in_the_queue_and_gives_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One container a minute: it is lost, and nothing can take its place."""
    config = changed(CONFIG, slots=1, start_limit_s=5, modal=changed(MODAL, creations_per_minute=1))
    async with running(tmp_path, monkeypatch, config) as made:
        assert (await made.grade(VerdictKind.ACCEPTED)).kind is VerdictKind.ACCEPTED
        (container,) = made.server.containers.values()
        await made.server.end(container)
        await assert_waiting(made, "creations_per_minute")


@pytest.mark.heavy
async def test_without_money_submissions_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The money pays for one container and a half, of 20 s each; what is left is not worth a container."""
    modal = changed(MODAL, lifetime_s=20, dollars=MODAL.dollars_a_second * 30)
    async with running(tmp_path, monkeypatch, changed(CONFIG, slots=1, start_limit_s=5, modal=modal)) as made:
        while made.sandbox.usable_slots:
            async with asyncio.timeout(60):
                verdict = await made.grade(VerdictKind.ACCEPTED)
                if verdict.kind is VerdictKind.INTERNAL_ERROR:
                    break
            assert verdict.kind is VerdictKind.ACCEPTED
        await assert_waiting(made, "dollars")
        assert made.server.dollars <= modal.dollars


async def assert_waiting(made: Running, cap: str) -> None:
    """Submissions wait, and the metrics say why."""
    tasks = [asyncio.create_task(made.grade(VerdictKind.ACCEPTED, number)) for number in (1, 2)]
    await until(lambda: made.sandbox.usable_slots == 0 and made.sandbox.uses["modal"].limited_by == cap)
    labels = {"backend": "modal", "cap": cap}
    assert made.registry.get_sample_value("nouscoder_verifier_backend_limited", labels) == 1
    await until(lambda: bool(made.registry.get_sample_value("nouscoder_verifier_queue_depth")))
    assert not any(task.done() for task in tasks)
    assert len(made.server.requests) == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_waits_for_this_host_spills_over_to_modal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spill_over = SpillOverSection(backend="modal", slots=1, after_s=0.0)
    config = changed(CONFIG, backend="local", slots=1, spill_over=spill_over)
    kinds = [VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER, VerdictKind.COMPILE_ERROR] * 4
    async with running(tmp_path, monkeypatch, config) as made:
        verdicts = await asyncio.gather(*(made.grade(kind, number) for number, kind in enumerate(kinds)))
        assert [verdict.kind for verdict in verdicts] == kinds
        local, modal = made.sandbox.uses["local"], made.sandbox.uses["modal"]
        assert local.submissions + modal.submissions == len(kinds)
        assert min(local.submissions, modal.submissions) > 0
        labels = {"backend": "modal"}
        assert made.registry.get_sample_value("nouscoder_verifier_backend_sessions_total", labels) == modal.submissions
        scrape = made.registry.get_sample_value  # in a thread of its own, as Prometheus' page does
        dollars = await asyncio.to_thread(scrape, "nouscoder_verifier_backend_dollars_total", labels)
        assert dollars == pytest.approx(made.sandbox.uses["modal"].dollars, rel=0.1)
        assert local.dollars == 0.0 < modal.dollars


@pytest.mark.heavy
async def test_a_container_whose_creation_was_not_confirmed_is_found_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "_SWEEP_S", 0.2)
    config = changed(CONFIG, slots=1)
    unknown: Faults = lambda number: Fault.UNKNOWN if number == 0 else None  # noqa: E731
    async with running(tmp_path, monkeypatch, config, unknown) as made:
        assert (await made.grade(VerdictKind.ACCEPTED)).kind is VerdictKind.ACCEPTED
        await until(lambda: len(made.server.containers) == 1)
        assert "sb-v2-0" not in made.server.containers


@pytest.mark.heavy
async def test_a_container_takes_no_submission_at_the_end_of_its_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(CONFIG, slots=1, modal=changed(MODAL, lifetime_s=4.0))
    async with running(tmp_path, monkeypatch, config) as made:
        for number in range(200):
            assert (await made.grade(VerdictKind.ACCEPTED, number)).kind is VerdictKind.ACCEPTED
            if len(made.server.requests) > 2:
                break
        errors = "nouscoder_verifier_internal_errors_total"
        assert made.registry.get_sample_value(errors, {"cause": "sandbox"}) == 0


async def test_the_request_bounds_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What limits cost and network is in the request itself, so that it holds when the gateway is dead."""
    async with running(tmp_path, monkeypatch, changed(CONFIG, slots=1)) as made:
        (request,) = made.server.requests
        definition = request.definition
        resources = definition.resources
        assert (definition.timeout_secs, definition.idle_timeout_secs, definition.runtime) == (3600, 600, "vm")
        assert (resources.milli_cpu, resources.milli_cpu_max) == (1000, 1000)
        assert (resources.memory_mb, resources.memory_mb_max) == (2048, 2048)
        assert definition.network_access.network_access_type == definition.network_access.ALLOWLIST
        assert not definition.network_access.allowed_cidrs
        assert [(port.port, port.unencrypted) for port in definition.open_ports.ports] == [(7070, False)]
        assert not definition.secret_ids  # the key is sent to the container only


@pytest.mark.heavy  # Modal's client reads every file of the context
async def test_the_image_is_that_of_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dockerfile = Path(__file__).parents[2] / "deploy" / "images" / "sandbox" / "Dockerfile"
    monkeypatch.chdir(dockerfile.parents[3])
    config = changed(CONFIG, slots=1, modal=changed(MODAL, image="", dockerfile=str(dockerfile)))
    async with running(tmp_path, monkeypatch, config) as made:
        first, last = made.server.images[0], made.server.images[-1]
        assert list(last.dockerfile_commands)[-2:] == ["USER 0", "ENTRYPOINT []"]
        assert list(first.dockerfile_commands) == dockerfile.read_text().split("\n")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"MODAL_TOKEN_ID": ""}, "MODAL_TOKEN_ID"),
        ({"MODAL_TOKEN_SECRET": "as-wrong"}, "AuthError"),
        ({"MODAL_SERVER_URL": "http://127.0.0.1:9"}, "did not answer"),
    ],
)
async def test_a_start_without_access_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(cloud, "_LOGIN_LIMIT_S", 2.0)
    async with modal_server(tmp_path, monkeypatch):
        for name, value in changed.items():
            monkeypatch.setitem(os.environ, name, value)
        sandbox = open_backends(VerifierSection(sandbox=CONFIG, libraries=()))
        with pytest.raises(SandboxUnavailable, match=said):
            await sandbox.start()
        await sandbox.close()


async def test_a_missing_image_is_named() -> None:
    with pytest.raises(SandboxUnavailable, match=r"verifier\.sandbox\.modal\.image"):
        await open_backends(VerifierSection(sandbox=changed(CONFIG, modal=ModalSection()), libraries=())).start()


@pytest.mark.heavy
async def test_the_service_grades_in_containers_and_says_what_they_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that people start, with its REST API and its metrics page, until SIGTERM."""
    http, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    settings = {"http": http, "metrics": metrics, "grpc": "127.0.0.1:0", "sandbox.backend": "modal"}
    settings |= {"sandbox.slots": "2", "sandbox.modal.image": MODAL.image, "sandbox.modal.runtime": "vm"}
    arguments = [word for key, value in settings.items() for word in ("--set", f"verifier.{key}={value}")]
    async with modal_server(tmp_path, monkeypatch) as server, httpx.AsyncClient(timeout=60) as client:
        command = (sys.executable, "-m", "nouscoder", "serve", "verifier", *arguments)
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        try:
            await until_ready(client, f"http://{http}/readyz")
            for answer, verdict in (("3", "accepted"), ("4", "wrong_answer")):
                tests = {"type": "stdin", "cases": [{"input": "", "output": answer}]}
                graded = await client.post(f"http://{http}/v1/grade", json={"code": "print(3)", "tests": tests})
                assert (graded.json()["verdict"], graded.json()["backend"]) == (verdict, "modal")
            page = (await client.get(f"http://{metrics}/metrics")).text
            dollars = re.search(r'^nouscoder_verifier_backend_dollars_total{backend="modal"} (\S+)$', page, re.M)
            assert dollars is not None
            assert float(dollars[1]) > 0
            assert server.containers
        finally:
            process.terminate()
            async with asyncio.timeout(120):
                assert await process.wait() == 0
        assert not server.containers


async def until_ready(client: httpx.AsyncClient, url: str) -> None:
    """Wait until the service answers 200."""
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(url)).status_code == 200:
                    return
            await asyncio.sleep(0.1)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(SandboxUnavailable, match=r"pip install .*\[modal\]"):
        open_backends(VerifierSection(sandbox=CONFIG, libraries=()))


async def until(holds: Callable[[], bool], limit_s: float = 120) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(limit_s):
        while not holds():
            await asyncio.sleep(0.02)
