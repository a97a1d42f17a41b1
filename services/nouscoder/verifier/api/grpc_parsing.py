"""Parses the tests of a gRPC message, which may be large: see parsing.py."""

from __future__ import annotations

from dataclasses import replace

from nouscoder.domain.submission import Submission, TestsReference
from nouscoder.formats.json_size import ValueCount
from nouscoder.rpc.tests_convert import tests_from_bytes, tests_from_text, weight_of_calls
from nouscoder.verifier.api.parsing import parsed

NO_TESTS = TestsReference("")  # of a submission whose tests are parsed apart


async def parsed_tests(data: bytes) -> Submission:
    """A submission that has only tests, from their JSON form. Raises InvalidMessage and what `parsed` raises."""
    return await parsed(data, submission_of_json)


async def parsed_calls(data: bytes) -> Submission:
    """Like `parsed_tests`, from the bytes of the message of call tests, whose values are JSON texts."""
    return await parsed(data, submission_of_message, weigh=weight_of_calls)


def with_tests(submission: Submission, parsed_apart: Submission) -> Submission:
    """A submission with the tests of another one."""
    return replace(submission, tests=parsed_apart.tests, tests_digest=parsed_apart.tests_digest)


def submission_of_json(data: bytes, values: ValueCount) -> Submission:
    """A submission that has only tests, from their JSON form."""
    return Submission(tests=tests_from_text(data), code="")


def submission_of_message(data: bytes, values: ValueCount) -> Submission:
    """A submission that has only tests, from the bytes of their message."""
    return Submission(tests=tests_from_bytes(data), code="")
