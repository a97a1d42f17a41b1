"""The tests of Atropos' code environment: `{"input", "output", "fn_name"}` in, booleans out.

It takes the place of `run_test.remote.aio` in environments/code_execution_server of Atropos.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from nouscoder.client.adapters import score_of
from nouscoder.client.async_client import AsyncClient
from nouscoder.client.records import Rules


async def run_test(
    client: AsyncClient, test_cases: Mapping[str, Any], code: str, **rules: Unpack[Rules]
) -> tuple[list[bool], dict[str, Any]]:
    """(whether each test that ran is right, what the environment logs). All are true exactly for a right program.

    `test_cases` is {"tests": {"input": [...], "output": [...], "fn_name": ...}}. Raises GradingFailed when there is no
    verdict: leave the rollout out, by returning None in its place.
    """
    answer = await client.grade(code=code, tests=test_cases["tests"], **rules)
    score_of(answer)
    return [test["outcome"] == "accepted" for test in answer["tests"]] or [False], {
        "error_message": "" if answer["verdict"] == "accepted" else answer["verdict"],
        "first_failure": answer["first_failure"],
    }
