"""The audit log: one line per submission, whatever its result, without programs unless they are configured."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from nouscoder.domain.submission import StdinCase, StdinTests, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.errors import Unusable
from nouscoder.http_server.api_keys import Quota
from nouscoder.verifier.access.caller import Caller, set_caller
from nouscoder.verifier.access.quotas import QuotaExceeded, QuotaGrader, Quotas
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.observe.audit import AuditedGrader, AuditLog
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.fake import FakeSandbox, ended

SECRET = "print('SECRET')"


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def audited(log: AuditLog) -> AuditedGrader:
    sandbox = FakeSandbox({SECRET: lambda stdin: ended(b"SECRET-output")})
    await sandbox.start()
    return AuditedGrader(QuotaGrader(Grader(sandbox, VerifierMetrics(CollectorRegistry())), Quotas()), log)


def submission(code: str = SECRET, language: str = "python") -> Submission:
    return Submission(StdinTests((StdinCase("SECRET-input", "SECRET-output"),) * 2), code, language=language)


async def test_every_submission_leaves_one_audit_line_without_its_source(tmp_path: Path) -> None:
    """The invariant of audit.py."""
    file = tmp_path / "audit.jsonl"
    log = AuditLog(file)
    grader = await audited(log)
    set_caller(Caller("ann", "r-1", Quota(submissions_per_minute=4)))
    assert (await grader.grade(submission())).kind is VerdictKind.ACCEPTED
    with pytest.raises(InvalidSubmission):
        await grader.grade(submission(language="cobol"))
    task = asyncio.ensure_future(grader.grade(submission()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await grader.grade(submission("1"))
    with pytest.raises(QuotaExceeded):
        await grader.grade(submission())
    log.close()
    assert "SECRET" not in file.read_text()
    reported = lines(file)
    assert [(one["verdict"], one["refused"]) for one in reported] == [
        ("accepted", ""),
        (None, "InvalidSubmission"),
        (None, "CancelledError"),
        ("wrong_answer", ""),
        (None, "QuotaExceeded"),
    ]
    first = reported[0]
    assert first.pop("duration_s") > 0
    assert first.pop("time").endswith("Z")
    assert first == {
        "client": "ann",
        "request_id": "r-1",
        "language": "python",
        "num_tests": 2,
        "verdict": "accepted",
        "passed": 2,
        "cached": False,
        "refused": "",
        "source_sha256": hashlib.sha256(SECRET.encode()).hexdigest(),
    }


async def test_the_audit_log_can_hold_programs_and_a_moved_file_is_reopened(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    log = AuditLog(file, with_source=True)
    grader = await audited(log)
    await grader.grade(submission())
    file.rename(tmp_path / "old.jsonl")
    log.reopen()
    await grader.grade(submission("1"))
    log.close()
    assert lines(tmp_path / "old.jsonl")[0]["source"] == SECRET
    assert [one["source"] for one in lines(file)] == ["1"]


def test_an_unwritable_audit_log_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r"none/audit\.jsonl cannot be written: No such file"):
        AuditLog(tmp_path / "none" / "audit.jsonl")
