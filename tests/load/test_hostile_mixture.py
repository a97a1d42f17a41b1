"""Honest submissions among hostile ones get the verdicts of a quiet run, and no program causes an internal error."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry
from tests.attack_corpus import Attack, load_attacks
from tests.load.mixture import Sample, mixture

from nouscoder.config import SandboxSection
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.verifier.api.schema import parse_submission
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import SandboxUnavailable, open_sandbox
from nouscoder.verifier.toolchains.languages import installed

pytestmark = pytest.mark.alone

HOSTILE_SHARE = 0.4
AT_ONCE = 6
FILLED = {"@PROJECT@": "/nowhere", "@PORT@": "9", "@ABSTRACT@": "nobody", "@SOCKET@": "/no/no", "@HOST@": "nowhere"}


@dataclass(slots=True)
class Mixed:
    """The answers of a run."""

    honest: dict[int, tuple[VerdictKind, int, int, int | None]] = field(default_factory=dict)
    hostile: Counter[VerdictKind] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def important(verdict: Verdict) -> tuple[VerdictKind, int, int, int | None]:
    """What must not depend on others."""
    first = verdict.first_failure
    return verdict.kind, verdict.passed, verdict.total, None if first is None else first.index


async def grade_all(grader: Grader, work: list[Sample | Attack], at_once: int) -> Mixed:
    """Grade everything, `at_once` at a time."""
    mixed, waiting = Mixed(), iter(work)

    async def take() -> None:
        for one in waiting:
            if isinstance(one, Sample):
                mixed.honest[one.number] = important(await grader.grade(parse_submission(one.body)))
                continue
            verdict = await grader.grade(one.submission(FILLED))
            mixed.hostile[verdict.kind] += 1
            if verdict.kind is VerdictKind.INTERNAL_ERROR:
                mixed.failures.append(f"{one.name}: {verdict.detail}")

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(take())
    return mixed


def hostile_ones(number: int, backend: str) -> list[Attack]:
    """Programs of the corpus in random order, repeated until there are enough. Those that compile for half a minute
    are left out.
    """
    meant = [
        attack
        for attack in load_attacks().values()
        if not attack.table.get("slow") and attack.language in installed()
        if backend in attack.table.get("backends", (backend,))
    ]
    draw = random.Random(0)
    return [attack for _ in range(number // len(meant) + 1) for attack in draw.sample(meant, len(meant))][:number]


async def compare(number: int, backend: str) -> None:
    """Grade the honest submissions alone, then among the hostile ones."""
    hostile = hostile_ones(round(number * HOSTILE_SHARE), backend)
    honest = mixture(number - len(hostile), frozenset(installed()))
    sandbox = open_sandbox(SandboxSection(backend=backend, slots=2))
    try:
        await sandbox.start()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    try:
        grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
        begun_s = time.monotonic()
        quiet = await grade_all(grader, [*honest], 1)
        quiet_s = time.monotonic() - begun_s
        work: list[Sample | Attack] = [*honest, *hostile]
        random.Random(1).shuffle(work)
        mixed = await grade_all(grader, work, AT_ONCE)
        mixed_s = time.monotonic() - begun_s - quiet_s
    finally:
        await sandbox.close()
    flips = {n: (quiet.honest[n], got) for n, got in mixed.honest.items() if got != quiet.honest[n]}
    wrong = [one.number for one in honest if quiet.honest[one.number][0] != one.truth]
    print(
        f"{backend}: {len(honest)} honest submissions alone in {quiet_s:.0f} s, with {len(hostile)} hostile ones in"
        f" {mixed_s:.0f} s (load {os.getloadavg()[0]:.1f}): {len(flips)} verdicts differ,"
        f" {len(mixed.failures)} internal errors"
    )
    print(f"honest {dict(Counter(one[0].value for one in mixed.honest.values()))}")
    print(f"hostile { ({kind.value: count for kind, count in mixed.hostile.items()}) }")
    assert not wrong
    assert not flips
    assert not mixed.failures, mixed.failures
    assert len(mixed.honest) + mixed.hostile.total() == number


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", ["local", "runsc"])
async def test_a_thousand_honest_and_hostile_submissions(backend: str) -> None:
    await compare(int(os.environ.get("NOUSCODER_MIXED_SUBMISSIONS", "1000")), backend)


@pytest.mark.heavy
async def test_sixty_honest_and_hostile_submissions() -> None:
    await compare(60, "local")
