"""The remote rewards of trainers that need no package of this project.

POST /get_reward is OpenRLHF's (`--reward.remote_url`). It sends `query` (a prompt with its answer), `prompts` and
`labels` (the label of each in the data set, here its tests), and trains with `rewards`. After any status but 2xx it
sends the request again, five times in all, each for 180 s. Then the rollout has no reward and its step fails.

POST /remote_rm is that of Miles (miles-rl 0.0.2) and slime (`--rm-type remote_rm`), whose wire has no place for a
version. They send `response` and `label` (the tests of the data set's row) of each sample, and take the answer as its
reward; `--reward-key` names a field of it. Any status but 2xx raises in the trainer. Miles then leaves out the sample's
group. So a failure of the service never becomes a reward.

INVARIANT: only the answer is graded, never the prompt, which may hold programs too.
"""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from nouscoder.domain.reasoning import begun_by
from nouscoder.domain.reward import reward_of_verdict
from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import Verdict
from nouscoder.formats.body import ListOf
from nouscoder.formats.json_values import GIVEN_TWICE, RepeatedKey, TooManyValues, ValueCount, json_bytes
from nouscoder.http_server.body import read_body, while_connected
from nouscoder.verifier.api.faults import FAULTS
from nouscoder.verifier.api.schema import bodies, body_of, parse_submission, parsed_as
from nouscoder.verifier.api.streaming import judged
from nouscoder.verifier.grading.grader import Grading
from nouscoder.verifier.grading.validation import InvalidSubmission, TooLarge

log = logging.getLogger(__name__)

MAX_QUERIES = 1024
_PATIENCE_S = 120.0  # OpenRLHF gives up after 180 s; the rest is for the grading itself
_REMOTE_RM_PATIENCE_S = 240.0  # Miles gives up after 300 s
_ANCHOR_CHARS = 64
_MOST_PLACES = 16  # of these characters that are tried; a prompt that repeats itself has more
_BROKEN = "\ufffd"


class GetRewardRequest(BaseModel):
    """One request of OpenRLHF. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    query: ListOf[str] = Field(min_length=1, max_length=MAX_QUERIES, description="prompts with their answers")
    prompts: ListOf[str] = Field(description="the prompts alone")
    labels: ListOf[str | dict[str, Any]] = Field(
        description="the tests, or an object with `tests` and other fields of POST /v1/grade; also as JSON text"
    )

    @model_validator(mode="after")
    def _as_many(self) -> GetRewardRequest:
        if not len(self.query) == len(self.prompts) == len(self.labels):
            raise ValueError("query, prompts and labels must have the same length")
        return self

    def submissions(self, values: ValueCount | None = None) -> list[Submission]:
        """The answers as submissions. Raises InvalidSubmission naming the label. See `parse_submission`."""
        values = values or ValueCount.unbounded()
        found = []
        for number, (query, prompt, label) in enumerate(zip(self.query, self.prompts, self.labels, strict=True)):
            try:
                answer = begun_by(prompt, answer_in(query, prompt))
                record = {**request_of_label(label, values), "completion": answer}
                found.append(parse_submission(json_bytes(record), values))
            except InvalidSubmission as error:
                reason = str(error).removeprefix(f"{error.field}: ")
                raise type(error)(f"labels[{number}].{error.field}", reason) from None
        return found


class GetRewardAnswer(BaseModel):
    """Rewards in the order of the queries."""

    rewards: list[float] = Field(description="1 for a right program, -1 for a wrong one")
    scores: list[float] = Field(description="the mean score of the tests, from 0 to 1")
    extra_logs: dict[str, list[float]] = Field(description="values that OpenRLHF logs")


def answer_in(query: str, prompt: str) -> str:
    """The answer after the prompt. A prompt that was too long for the model has lost its begin.

    Raises InvalidSubmission when the query does not begin with the prompt or with an end of it.
    """
    if query.startswith(prompt):
        return query[len(prompt) :]
    shown = query.lstrip(_BROKEN)  # a character that was cut
    begin, at = shown[:_ANCHOR_CHARS], max(0, len(prompt) - len(shown) - 1)
    for _ in range(_MOST_PLACES):
        at = prompt.find(begin, at + 1) if begin else -1
        if at < 0:
            break
        if shown.startswith(prompt[at:]):
            return shown[len(prompt) - at :]
    else:
        common = _longest_end(prompt[at + 1 :], shown)
        if common >= len(begin):
            return shown[common:]
    raise InvalidSubmission("query", "does not begin with its prompt, nor with the end of it")


def _longest_end(text: str, begin: str) -> int:
    """The length of the longest end of `text` with which `begin` begins. Linear in time: Knuth, Morris and Pratt."""
    begin = begin[: len(text)]
    shorter = array("I", bytes(4 * len(begin)))  # of each part of `begin` from its start: the next shorter such end
    for chars, first in ((begin, 1), (text, 0)):
        common = 0
        for at in range(first, len(chars)):
            while common and (common == len(begin) or chars[at] != begin[common]):
                common = shorter[common - 1]
            common += chars[at] == begin[common]
            if first:
                shorter[at] = common
    return common


def rewarded_submissions(body: bytes, values: ValueCount) -> list[Submission]:
    """The answers of a request as submissions. Raises InvalidSubmission naming the invalid field."""
    return parsed_as(GetRewardRequest, body).submissions(values)


async def rewards(grader: Grading, submissions: list[Submission]) -> GetRewardAnswer:
    """The rewards of all answers. Raises InvalidSubmission, QueueFull, and NotGraded for a failure of the service."""
    places = asyncio.Semaphore(2 * grader.num_slots)

    async def verdict(submission: Submission) -> Verdict:
        async with places:
            return await judged(grader, submission, _PATIENCE_S)

    tasks = [asyncio.create_task(verdict(submission)) for submission in submissions]
    try:
        verdicts = await asyncio.gather(*tasks)  # raises the first failure as it is
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    given = [reward_of_verdict(one) for one in verdicts]
    return GetRewardAnswer(
        rewards=given,
        scores=[one.score for one in verdicts],
        extra_logs={"accepted": [float(reward > 0) for reward in given]},
    )


def request_of_label(label: object, values: ValueCount) -> dict[str, Any]:
    """The fields of a request from a label. Raises InvalidSubmission."""
    record: Any = label
    if isinstance(label, str):
        try:
            values.add(label)
            record = json.loads(label)
        except TooManyValues as error:
            raise TooLarge("tests", str(error)) from None
        except RepeatedKey as error:
            raise InvalidSubmission(error.key, GIVEN_TWICE) from None
        except (ValueError, RecursionError):
            raise InvalidSubmission("tests", "is not JSON") from None
    return record if isinstance(record, dict) and "tests" in record else {"tests": record}


def add_get_reward(app: FastAPI, grader: Grading, enter: Callable[[], None], max_body_bytes: int) -> None:
    """Add OpenRLHF's call. `enter` raises when the service drains."""
    described = body_of("GetRewardRequest")

    @app.post("/get_reward", response_model=GetRewardAnswer, responses=FAULTS, openapi_extra=described)
    async def get_reward(request: Request) -> Response:
        """Grade answers as OpenRLHF's remote reward: `labels` are the tests."""
        enter()
        try:
            submissions = await bodies.parsed(await read_body(request, max_body_bytes), rewarded_submissions)
        except InvalidSubmission as error:  # OpenRLHF shows only the status
            log.warning("a request for rewards is refused", extra={"field": error.field, "reason": str(error)})
            raise
        answer = await while_connected(request.receive, rewards(grader, submissions))
        return Response(answer.model_dump_json(), media_type="application/json")


# Miles and slime.


class _Sample(BaseModel):
    """One request. Unknown fields are ignored. The prompt may have opened the response's reasoning."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    response: str
    prompt: Any = None
    label: str | dict[str, Any] | list[Any]


def add_remote_rm(app: FastAPI, grader: Grading, enter: Callable[[], None], max_body_bytes: int) -> None:
    """Add the call of Miles and slime. `enter` raises when the service drains."""

    @app.post("/remote_rm", include_in_schema=False)
    async def remote_rm(request: Request) -> dict[str, Any]:
        """Grade the response of a sample by the tests in its label."""
        enter()
        submission = await bodies.parsed(await read_body(request, max_body_bytes), _sampled_submission)
        verdict = await while_connected(request.receive, judged(grader, submission, _REMOTE_RM_PATIENCE_S))
        reward = reward_of_verdict(verdict)
        return {"reward": reward, "accepted": float(reward > 0), "score": verdict.score, "verdict": verdict.kind}


def _sampled_submission(body: bytes, values: ValueCount) -> Submission:
    """Raises InvalidSubmission naming the invalid field."""
    sample = parsed_as(_Sample, body)
    try:
        answer = begun_by(sample.prompt, sample.response)
        request = {**request_of_label(sample.label, values), "completion": answer}
        return parse_submission(json_bytes(request), values)
    except InvalidSubmission as error:
        raise type(error)(f"label.{error.field}", str(error).removeprefix(f"{error.field}: ")) from None
