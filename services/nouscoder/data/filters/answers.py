"""Filters by the answers of a model: how long they are, and how many of them can be graded at all.

AceReason-Nemotron drops problems that DeepSeek-R1 answers in fewer than 2,000 tokens, and Klear-Reasoner math problems
of whose answers too few have a final answer. The answers are those of `nouscoder eval`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from nouscoder.data.filters.step import Candidate, CannotFilter, Context, Step, StepOutcome
from nouscoder.data.importers.answers import last_box
from nouscoder.data.json_records import checked_records
from nouscoder.formats.body import Body
from nouscoder.verifier.grading.extract import extract_code


class AnswerBody(Body):
    """A record of the file samples.jsonl of an evaluation. It has a completion, or a program as `code`."""

    model_config = ConfigDict(extra="ignore")

    problem_id: str = Field(min_length=1)
    completion: str = ""
    code: str = ""
    num_tokens: int = Field(ge=0)

    def parses(self, tests_type: str) -> bool:
        """Whether it has a program, or for a problem of mathematics a final answer in a box."""
        if tests_type == "math":
            return last_box(self.completion) != ""
        return bool(self.code) or extract_code(self.completion) is not None


class Answers(Step):
    """Keeps problems whose answers have a mean length, and a share with a program or final answer, in these bounds."""

    filter: Literal["answers"]
    file: str = Field(description="samples.jsonl of an evaluation")
    at_least_tokens: int = Field(0, ge=0, description="of the mean over the answers; AceReason-Nemotron 2000")
    at_most_tokens: int | None = Field(None, ge=0)
    parse_share: float = Field(0.0, ge=0, le=1, description="least share of the answers that parse")
    unknown: Literal["keep", "drop"] = Field("drop", description="problems without an answer")

    @model_validator(mode="after")
    def _some_bound(self) -> Answers:
        if not self.at_least_tokens and self.at_most_tokens is None and not self.parse_share:
            raise ValueError("give at_least_tokens, at_most_tokens or parse_share")
        return self

    def files(self) -> tuple[str, ...]:
        """See Step."""
        return (self.file,)

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        """See Step."""
        types = {one.problem_id: str(one.record.values["tests_type"]) for one in candidates}
        found: dict[str, list[tuple[int, bool]]] = defaultdict(list)
        for answer in checked_records(context.folder / self.file, AnswerBody):
            if answer.problem_id in types:
                found[answer.problem_id].append((answer.num_tokens, answer.parses(types[answer.problem_id])))
        if candidates and not found:
            raise CannotFilter(
                f"{self.file} has no answer of the problems: are its problem ids those of this selection?"
            )
        reasons = {one.problem_id: self._reason(found.get(one.problem_id)) for one in candidates}
        return StepOutcome({problem_id: reason for problem_id, reason in reasons.items() if reason})

    def _reason(self, answers: list[tuple[int, bool]] | None) -> str:
        if answers is None:
            return "unknown: no answer" if self.unknown == "drop" else ""
        mean = sum(tokens for tokens, _ in answers) / len(answers)
        parsed = sum(parses for _, parses in answers)
        if mean < self.at_least_tokens:
            return f"short answers: {mean:.0f} tokens"
        if self.at_most_tokens is not None and mean > self.at_most_tokens:
            return f"long answers: {mean:.0f} tokens"
        return f"answers do not parse: {parsed} of {len(answers)}" if parsed < self.parse_share * len(answers) else ""
