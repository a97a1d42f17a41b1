"""Parses the tests of a gRPC message, which may be large: see parsing.py."""

from __future__ import annotations

from nouscoder.domain.submission import Submission, Tests, TestsReference
from nouscoder.formats.json_size import ValueCount
from nouscoder.rpc.tests_convert import tests_from_bytes, weight_of_tests
from nouscoder.verifier.api.parsing import SMALL_WEIGHT, parsed

SMALL_BYTES = SMALL_WEIGHT // 8  # fewer bytes weigh less, because no byte weighs more than 8


async def parsed_tests(data: bytes) -> tuple[Tests | TestsReference, str]:
    """The tests, and their digest if it is known, from the bytes of their message.

    Raises InvalidMessage and InvalidSubmission, which name the field, and what `parsed` raises.
    """
    alone = await parsed(data, submission_of_tests, weigh=weight_of_tests)
    return alone.tests, alone.tests_digest


def submission_of_tests(data: bytes, values: ValueCount) -> Submission:
    """A submission that has only tests, from the bytes of their message."""
    return Submission(tests=tests_from_bytes(data), code="")
