"""Parses the submission of a gRPC message. Its tests may be large: see parsing.py."""

from __future__ import annotations

from dataclasses import replace

from nouscoder.domain.submission import Submission
from nouscoder.formats.json_size import TooManyValues, ValueCount
from nouscoder.rpc.faults import InvalidMessage
from nouscoder.rpc.tests_convert import tests_from
from nouscoder.rpc.verdict_convert import submission_from
from nouscoder.v1 import verdict_pb2
from nouscoder.verifier.api.parsing import SMALL_WEIGHT, parsed

_SMALL_BYTES = SMALL_WEIGHT  # fewer bytes have a smaller weight, or are one long number


async def submission_of(message: verdict_pb2.Submission) -> Submission:
    """Protocol -> domain.

    Raises InvalidMessage and InvalidSubmission, which name the field, and what `parsed` raises.
    """
    if message.tests.ByteSize() <= _SMALL_BYTES:
        return submission_from(message)
    alone = await parsed(message.tests.SerializeToString(), submission_of_tests, weigh=_weight)
    return replace(submission_from(message, alone.tests), tests_digest=alone.tests_digest)


def submission_of_tests(data: bytes, values: ValueCount) -> Submission:
    """A submission that has only tests, from the bytes of their message."""
    return Submission(tests=tests_from(verdict_pb2.Tests.FromString(data)), code="")


def _weight(data: bytes) -> int:
    """Of all JSON texts of the tests. Raises InvalidMessage."""
    message, values = verdict_pb2.Tests.FromString(data), ValueCount()
    try:
        values.add(message.json)
        for case in message.call.cases:
            for text in (case.args_json, case.kwargs_json, case.expected_json):
                values.add(text)
    except TooManyValues as error:
        raise InvalidMessage(f"tests: {error}") from None
    return values.weight
