"""The remote reward of Miles and slime (`--rm-type remote_rm`), so that they need no package of this project.

They send `response` and `label` (the tests of the data set's row) of each sample, and take the answer as its reward;
`--reward-key` names a field of it. Any status but 2xx raises in the trainer. Miles then leaves out the sample's group,
so a failure of the service never becomes a reward.

INVARIANT: only the response is graded, never the prompt, which may hold programs too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict

from nouscoder.domain.reward import reward_of_verdict
from nouscoder.domain.submission import Submission
from nouscoder.formats.json_values import ValueCount, json_bytes
from nouscoder.http_server.body import read_body, while_connected
from nouscoder.verifier.api.get_reward import request_of_label
from nouscoder.verifier.api.schema import bodies, parse_submission, parsed_as
from nouscoder.verifier.api.streaming import judged
from nouscoder.verifier.grading.grader import Grading
from nouscoder.verifier.grading.validation import InvalidSubmission

VERSION = "0.0.2"  # of miles-rl; its wire has no place for a version
_PATIENCE_S = 240.0  # they give up after 300 s; the rest is for the grading itself


class _Sample(BaseModel):
    """One request. Unknown fields, and the prompt, are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    response: str
    label: str | dict[str, Any] | list[Any]


def add_remote_rm(app: FastAPI, grader: Grading, enter: Callable[[], None], max_body_bytes: int) -> None:
    """Add the call. `enter` raises when the service drains."""

    @app.post("/remote_rm", include_in_schema=False)
    async def remote_rm(request: Request) -> dict[str, Any]:
        """Grade the response of a sample by the tests in its label."""
        enter()
        submission = await bodies.parsed(await read_body(request, max_body_bytes), _submission)
        verdict = await while_connected(request.receive, judged(grader, submission, _PATIENCE_S))
        reward = reward_of_verdict(verdict)
        return {"reward": reward, "accepted": float(reward > 0), "score": verdict.score, "verdict": verdict.kind}


def _submission(body: bytes, values: ValueCount) -> Submission:
    """Raises InvalidSubmission naming the invalid field."""
    sample = parsed_as(_Sample, body)
    try:
        request = {**request_of_label(sample.label, values), "completion": sample.response}
        return parse_submission(json_bytes(request), values)
    except InvalidSubmission as error:
        raise type(error)(f"label.{error.field}", str(error).removeprefix(f"{error.field}: ")) from None
