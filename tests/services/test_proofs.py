"""Submissions that need the same proof at the same time: one makes it, and the others get its result."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from nouscoder.config import SandboxSection, VerifierSection
from nouscoder.domain.submission import (
    CallCase,
    CallTests,
    CheckerTests,
    JudgeProgram,
    StdinCase,
    Submission,
)
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.grader import local_grader
from nouscoder.verifier.grading.proofs import Proofs
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.sandbox.base import SandboxError


class Proof:
    """A proof that ends when it is told. Each attempt takes the next of `ends`, None for success."""

    def __init__(self, *ends: Exception | None) -> None:
        self._ends = list(ends)
        self.attempts = 0
        self.may_end = asyncio.Event()

    async def __call__(self) -> None:
        self.attempts += 1
        await self.may_end.wait()
        if end := self._ends.pop(0):
            raise end


async def required(proofs: Proofs, proof: Proof, times: int) -> list[BaseException | None]:
    """What `times` simultaneous calls raise."""
    calls = [asyncio.create_task(proofs.require(b"key", proof)) for _ in range(times)]
    await asyncio.sleep(0)
    proof.may_end.set()
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_a_success_is_made_once_and_remembered() -> None:
    proofs, proof = Proofs(), Proof(None)
    assert await required(proofs, proof, 8) == [None] * 8
    assert await required(proofs, proof, 2) == [None] * 2
    assert proof.attempts == 1


async def test_a_refusal_is_told_to_all_who_waited_and_is_not_remembered() -> None:
    refused = InvalidSubmission("tests.setup", "fails")
    proofs, proof = Proofs(), Proof(refused, None)
    assert await required(proofs, proof, 8) == [refused] * 8
    assert await required(proofs, proof, 1) == [None]
    assert proof.attempts == 2


async def test_a_fault_of_the_sandbox_reaches_only_the_submission_that_had_it() -> None:
    fault = SandboxError("gone")
    proof = Proof(fault, fault, None)
    assert await required(Proofs(), proof, 4) == [fault, fault, None, None]
    assert proof.attempts == 3


async def test_another_makes_the_proof_when_a_client_leaves() -> None:
    proofs, proof = Proofs(), Proof(None)
    first, second = (asyncio.create_task(proofs.require(b"key", proof)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    proof.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert proof.attempts == 2


async def test_a_waiting_client_that_leaves_ends_no_proof() -> None:
    proofs, proof = Proofs(), Proof(None)
    first, second = (asyncio.create_task(proofs.require(b"key", proof)) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    proof.may_end.set()
    await first
    assert proof.attempts == 1


async def test_of_more_than_a_few_thousand_the_oldest_is_forgotten() -> None:
    proofs, proof = Proofs(), Proof(*[None] * 4098)
    proof.may_end.set()
    for number in range(4097):
        await proofs.require(b"%d" % number, proof)
    await proofs.require(b"1", proof)
    assert proof.attempts == 4097
    await proofs.require(b"0", proof)
    assert proof.attempts == 4098


CALL = Submission(
    code="def f(x):\n    return x",
    tests=CallTests(entry_point="f", cases=(CallCase(args=(1,), expected=1),), setup="import time\ntime.sleep(0.3)"),
)
OF_CODE = Submission(
    code="def f(x):\n    return x",
    tests=CheckerTests(
        (StdinCase("", "def f(x):\n    return x"),),
        JudgeProgram("import time\ntime.sleep(0.3)", "python"),
        of_code=True,
    ),
)


@pytest.mark.parametrize("submission", [CALL, OF_CODE], ids=["setup", "checker of code"])
async def test_samples_of_a_new_problem_share_a_proof(submission: Submission) -> None:
    async def sessions_of_proofs(samples: int) -> int:
        async with local_grader(VerifierSection(sandbox=SandboxSection(slots=4))) as grader:
            opened = Mock(side_effect=grader._sandbox.session)
            grader._sandbox.session = opened  # type: ignore[method-assign]
            for _ in range(2):
                verdicts = await asyncio.gather(*(grader.grade(submission) for _ in range(samples)))
                assert {verdict.kind for verdict in verdicts} == {VerdictKind.ACCEPTED}
            return opened.call_count - 2 * samples

    assert await sessions_of_proofs(samples=1) == await sessions_of_proofs(samples=4) == 1
