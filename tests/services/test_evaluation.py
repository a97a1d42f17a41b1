"""pass@1 through real channels: a generation service with a scripted engine, and a scripted verifier."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from nouscoder.demo.policy import CharTokenizer
from nouscoder.domain.estimates import USUAL_K
from nouscoder.domain.policy import PolicyManifest, Shard
from nouscoder.domain.problem import GradingRules, Problem, PublicTests
from nouscoder.domain.rollout import Sampling
from nouscoder.domain.submission import StdinCase, StdinTests
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.evaluation import pass_at_1
from nouscoder.evaluation.pass_at_1 import Evaluation, EvaluationError, ProblemResult, evaluate, evaluation_tasks
from nouscoder.generation.engines.base import SampleRequest
from nouscoder.generation.engines.fake import FakeEngine
from nouscoder.generation.engines.stepped import SteppedEngine
from nouscoder.generation.environments.prompts import SingleTurn
from nouscoder.generation.metrics import GenerationMetrics
from nouscoder.generation.rollouts import Rollouts
from nouscoder.generation.servicer import STATUS_CODES, GenerationServicer
from nouscoder.generation.weights.policies import Policies
from nouscoder.rpc.channel import PeerError, PeerUnreachable
from nouscoder.rpc.generation_client import GenerationClient, PolicyReplaced
from nouscoder.rpc.pairs import SUBMISSION, VERDICT
from nouscoder.rpc.server import MAX_MESSAGE_BYTES
from nouscoder.rpc.status_codes import StatusCodes
from nouscoder.rpc.verifier_client import VerifierClient
from nouscoder.run.evaluation import evaluation_record
from nouscoder.run.evaluation_files import recorded_evaluations
from nouscoder.v1 import generation_pb2_grpc, verifier_pb2, verifier_pb2_grpc


def problem(number: int, family: str = "sums") -> Problem:
    tests = StdinTests((StdinCase("1\n", f"{number}\n"),))
    return Problem(f"p{number}", f"problem {number}", tests, text_is_code=True, family=family)


def script(request: SampleRequest) -> list[int]:
    """Right on every sample of even problems and on the first sample of p1, otherwise wrong."""
    number = int(request.request_id.split("/")[1][1:])
    right = number % 2 == 0 or request.request_id == "evaluation/p1/0"
    return CharTokenizer().encode(f"print({number})" if right else "print('?')")


@dataclass
class ScriptedVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Accepts a program that prints the expected number. Fails a configured number of times."""

    fail: Counter[str] = field(default_factory=Counter)
    full: int = 0
    num_calls: int = 0

    async def Grade(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.num_calls += 1
        if self.full:
            self.full -= 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        submission = SUBMISSION.of(request.submission)
        assert isinstance(submission.tests, StdinTests)
        expected = submission.tests.cases[0].output.strip()
        if self.fail[expected]:
            self.fail[expected] -= 1
            kind = VerdictKind.INTERNAL_ERROR
        else:
            right = submission.code == f"print({expected})"
            kind = VerdictKind.ACCEPTED if right else VerdictKind.WRONG_ANSWER
        return verifier_pb2.GradeResponse(
            verdict=VERDICT.to(Verdict(kind, 0, 1, 1, 0.0, "scripted", detail="scripted failure"))
        )

    def GradeStream(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    def GradeBatch(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    def Interpret(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def Capabilities(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError


@dataclass
class Services:
    generation: str
    verifier: str
    grader: ScriptedVerifier
    policies: Policies
    folder: Path
    engine: SteppedEngine

    async def measure(
        self,
        problems: list[Problem],
        samples: int = 2,
        manifest: PolicyManifest | None = None,
        pin_limit_s: float = 60.0,
    ) -> Evaluation:
        self.scripted: list[tuple[int, int]] = []
        return await evaluate(
            problems,
            GenerationClient(self.generation),
            VerifierClient(self.verifier),
            samples=samples,
            sampling=Sampling(max_new_tokens=30, seed=5),
            manifest=manifest,
            pin_limit_s=pin_limit_s,
            progress=lambda done, total: self.scripted.append((done, total)),
        )

    async def publish(self, version: int) -> None:
        await self.policies.update(self.manifest(version))

    def manifest(self, version: int) -> PolicyManifest:
        """The manifest of a policy whose files are written."""
        data = (8).to_bytes(8, "little") + b"weights" + bytes([version])
        path = self.folder / f"{version}.safetensors"
        path.write_bytes(data)
        shard = Shard(path.name, hashlib.sha256(data).hexdigest(), len(data))
        return PolicyManifest(version, version, str(self.folder), (shard,))


@pytest.fixture
async def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, single_turn: SingleTurn) -> AsyncIterator[Services]:
    for name in ("_WHILE_AWAY", "_AFTER_INTERNAL_ERRORS"):
        monkeypatch.setattr(pass_at_1, name, replace(getattr(pass_at_1, name), wait_s=0.01))
    grader = ScriptedVerifier()
    async with AsyncExitStack() as stack:
        step_engine = FakeEngine(max_running=4, max_tokens_total=200, script=script)
        engine = await stack.enter_async_context(SteppedEngine(step_engine, GenerationMetrics()))
        policies = Policies(engine)
        service = GenerationServicer(engine, Rollouts(single_turn, engine, policies), policies)
        generation = grpc.aio.server(interceptors=[StatusCodes(STATUS_CODES, ["nouscoder.v1.GenerationService"])])
        verifier = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, generation)
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(grader, verifier)
        addresses = []
        for server in (generation, verifier):
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            stack.push_async_callback(server.stop, 0.5)
        yield Services(addresses[0], addresses[1], grader, policies, tmp_path, engine)


async def test_pass_at_1_is_the_mean_over_problems_of_the_accepted_share(services: Services) -> None:
    await services.publish(3)
    problems = [problem(0), problem(1), problem(2, "lists"), replace(problem(3, "lists"), languages=("python", "r"))]
    evaluation = await services.measure(problems)
    assert [result.num_accepted for result in evaluation.problems] == [2, 1, 2, 0]
    assert evaluation.pass_at_1 == pytest.approx((1 + 0.5 + 1 + 0) / 4)
    # The values 1, 0.5, 1, 0 have the mean 0.625 and the squares 0.140625 + 0.015625 + 0.140625 + 0.390625 around it.
    assert evaluation.standard_error == pytest.approx((0.6875 / 3) ** 0.5 / 2)
    assert evaluation.by_family == {"sums": pytest.approx(0.75), "lists": pytest.approx(0.5)}
    assert evaluation.by_language == {"python": pytest.approx(2.5 / 3), "python, r": 0.0}
    assert (evaluation.num_problems, evaluation.num_rollouts, evaluation.policy_version) == (4, 8, 3)
    assert [sample.problem_id for sample in evaluation.samples] == ["p0", "p1", "p2", "p3"]
    assert evaluation.samples[0].program == "print(0)"
    assert evaluation.samples[0].verdict == "accepted"
    assert evaluation.samples[3].verdict == "wrong_answer"
    assert services.scripted == [(done, 8) for done in range(1, 9)]
    tokens = [result.num_tokens for result in evaluation.problems]
    assert evaluation.mean_tokens == sum(tokens) / 8
    assert min(tokens) > 0
    assert evaluation.truncated_share == 0


def measured(samples: int, *accepted: int) -> Evaluation:
    """An evaluation with so many accepted of the samples of each problem."""
    results = (ProblemResult(f"p{at}", "sums", passed, samples, 2, 100) for at, passed in enumerate(accepted))
    return Evaluation(3, tuple(results), ())


def test_more_samples_tell_how_exact_pass_at_1_is_and_pass_at_k() -> None:
    one, many = measured(1, 1, 0, 1, 0), measured(16, 8, 8, 16, 0)
    assert (one.pass_at_1, many.pass_at_1) == (0.5, 0.5)
    # Both errors over problems are large: other problems have other pass rates.
    assert one.standard_error == pytest.approx((1 / 3) ** 0.5 / 2)
    assert many.standard_error == pytest.approx((1 / 6) ** 0.5 / 2)
    # On the same problems only the samples differ: 2 of the 4 problems are uncertain, each by 0.25 / 15.
    assert one.sampling_error is None
    assert many.sampling_error == pytest.approx((2 * 0.25 / 15) ** 0.5 / 4)
    assert one.pass_at_k == {1: 0.5}
    assert [*many.pass_at_k] == [1, *(k for k in USUAL_K if 1 < k < 16), 16]
    assert many.pass_at_k[16] == 0.75, "three of four problems are solved at least once"
    assert many.truncated_share == 8 / 64
    assert many.mean_tokens == 400 / 64


def test_a_recorded_evaluation_has_each_problem_and_is_a_file_of_pass_rates(tmp_path: Path) -> None:
    sampling = Sampling(temperature=0.6, top_p=0.95, max_new_tokens=40, seed=5)
    record = evaluation_record(measured(16, 8, 16), sampling, 64)
    assert record["problems"][0] == {"problem_id": "p0", "passed": 8, "sampled": 16, "truncated": 2, "tokens": 100}
    assert record["sampling"] == {**asdict(sampling), "max_tokens_total": 64}
    assert (record["pass_at_1"], record["pass_at_k"]["16"], record["policy_version"]) == (0.75, 1.0, 3)
    # What an earlier release wrote stays readable.
    old = {"pass_at_1": 0.5, "standard_error": None, "policy_version": 0, "num_problems": 1, "num_rollouts": 2}
    (tmp_path / "evaluation_before.json").write_text(json.dumps(old))
    (tmp_path / "evaluation_after.json").write_text(json.dumps(record))
    assert [(each.policy_version, each.pass_at_1) for each in recorded_evaluations(tmp_path)] == [(0, 0.5), (3, 0.75)]


async def test_an_evaluation_that_is_larger_than_a_message_is_asked_for_in_parts(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """454 problems with 16 samples each and 10 KiB of public tests are 73 MiB, and a message has 64 MiB at most."""
    shown = PublicTests(StdinTests((StdinCase("1" * 10_240, "1\n"),)), GradingRules())
    task = evaluation_tasks([problem(0)], 1, Sampling())[0]
    every = [replace(task, public_tests=shown)] * (454 * 16)
    parts = pass_at_1._parts(every)
    sizes = [sum(len(one.prompt) + 10_240 for one in part) for part in parts]
    assert sum(sizes) > MAX_MESSAGE_BYTES > 2 * max(sizes) - 1
    assert sum(map(len, parts)) == len(every)
    await services.publish(0)
    monkeypatch.setattr(pass_at_1, "_MOST_REQUEST_BYTES", 100)
    evaluation = await services.measure([problem(number) for number in range(4)], manifest=services.manifest(0))
    assert [result.num_accepted for result in evaluation.problems] == [2, 1, 2, 0], "as in one call"


async def test_an_internal_error_is_graded_again(services: Services) -> None:
    await services.publish(0)
    services.grader.fail["2"] = 3
    evaluation = await services.measure([problem(2)], samples=1)
    assert evaluation.pass_at_1 == 1.0
    assert services.grader.num_calls == 4


async def test_a_repeated_internal_error_is_an_error_and_not_a_0(services: Services) -> None:
    await services.publish(0)
    services.grader.fail["2"] = 1000
    with pytest.raises(EvaluationError, match=r"evaluation/p2/0 could not be graded: internal_error.*scripted failure"):
        await services.measure([problem(0), problem(2), problem(4)], samples=1)


async def test_a_full_verifier_is_retried(services: Services) -> None:
    await services.publish(0)
    services.grader.full = 5
    assert (await services.measure([problem(0)], samples=2)).pass_at_1 == 1.0
    assert services.grader.num_calls == 7


async def test_a_service_without_a_policy_is_retried_for_a_limited_time(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_at_1, "_WHILE_AWAY", replace(pass_at_1._WHILE_AWAY, for_s=0.1))
    with pytest.raises(PeerUnreachable, match="no policy"):
        await services.measure([problem(0)])


async def test_a_prompt_that_cannot_be_sampled_is_an_error_that_names_it(services: Services) -> None:
    await services.publish(0)
    long = Problem("p8", "x" * 500, problem(8).tests, text_is_code=True)
    with pytest.raises(PeerError, match="evaluation/p8/0"):
        await services.measure([problem(0), long])


async def pinned(services: Services) -> None:
    """Wait until an evaluation keeps its policy in use."""
    async with asyncio.timeout(60):
        while not services.policies.is_pinned:
            await asyncio.sleep(0.01)


async def test_the_policy_stays_the_same_until_an_evaluation_is_sampled_and_is_replaced_then(
    services: Services,
) -> None:
    await services.publish(1)
    await services.engine.pause(60)
    measuring = asyncio.create_task(services.measure([problem(0), problem(1)], manifest=services.manifest(1)))
    await pinned(services)
    publishing = asyncio.create_task(services.publish(2))
    await asyncio.wait({publishing}, timeout=0.3)
    assert not publishing.done()
    await services.engine.resume()
    assert (await measuring).policy_version == 1
    await publishing
    assert services.policies.current == services.manifest(2)


async def test_a_pin_that_ends_at_its_limit_fails_the_evaluation_and_lets_the_policy_go(services: Services) -> None:
    await services.publish(1)
    await services.engine.pause(60)
    measuring = asyncio.create_task(services.measure([problem(0)], manifest=services.manifest(1), pin_limit_s=0.2))
    await pinned(services)
    await services.publish(2)
    await services.engine.resume()
    with pytest.raises(EvaluationError, match=r"the policy changed while it was measured: versions \[2\]"):
        await measuring


async def test_an_evaluation_that_is_cancelled_lets_the_policy_go(services: Services) -> None:
    await services.publish(1)
    await services.engine.pause(60)
    measuring = asyncio.create_task(services.measure([problem(0)], manifest=services.manifest(1)))
    await pinned(services)
    measuring.cancel()
    await asyncio.gather(measuring, return_exceptions=True)
    async with asyncio.timeout(60):
        await services.publish(2)
    assert services.policies.current == services.manifest(2)
    assert not services.policies.is_pinned


async def test_a_policy_that_was_replaced_is_not_measured(services: Services) -> None:
    await services.publish(2)
    with pytest.raises(PolicyReplaced, match="version 2"):
        await services.measure([problem(0)], manifest=services.manifest(1))
    assert not services.policies.is_pinned


async def test_an_empty_list_of_problems_is_an_error(services: Services) -> None:
    with pytest.raises(EvaluationError, match="no problem"):
        await services.measure([])


def test_seeds_depend_on_the_run_the_problem_and_the_position() -> None:
    def seeds(seed: int) -> list[int]:
        tasks = evaluation_tasks([problem(0), problem(1)], 3, Sampling(seed=seed))
        return [task.sampling.seed for task in tasks]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 12
