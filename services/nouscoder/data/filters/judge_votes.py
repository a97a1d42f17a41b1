"""Keeps problems that models judge to be sound: Skywork-OR1 keeps those with 9 of 32 votes (arXiv 2505.22312)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from nouscoder.data.asking import ChatQuestion, ServedModel, ask_all, open_answers
from nouscoder.data.filters.step import Candidate, Context, Step, StepOutcome

QUESTION = """Judge whether the following problem can be used to train and test a programmer. It can if its statement \
is clear, complete and consistent, has no missing figure or definition, and determines what a right answer is.

<problem>
{prompt}
</problem>

Give your reasons in a few sentences. Then end with one line, either `VERDICT: YES` or `VERDICT: NO`."""
_VERDICT = re.compile(r"verdict\W+(yes|no)\b", re.IGNORECASE)


class Vote(StrEnum):
    """What a judge says of a problem. UNREADABLE: its answer has no verdict, and counts as no vote for the problem."""

    YES = "yes"
    NO = "no"
    UNREADABLE = "unreadable"


def vote_of(answer: str) -> Vote:
    """The vote in an answer: its last verdict, because a judge may quote the question first."""
    found = _VERDICT.findall(answer)
    return Vote(found[-1].lower()) if found else Vote.UNREADABLE


class JudgeVotes(Step):
    """Keeps a problem if enough of its votes are for it. The judges vote in turn, each time with another seed."""

    filter: Literal["judge_votes"]
    judges: list[ServedModel] = Field(min_length=1, description="models that vote: {url, model}")
    votes: int = Field(32, ge=1, description="of each problem, by all judges together")
    at_least: int = Field(9, ge=1, description="votes for a problem that is kept")
    question: str = Field(QUESTION, description="{prompt} stands for the problem's; asks for `VERDICT: YES` or NO")
    temperature: float = Field(1.0, ge=0, description="of the judges")
    max_tokens: int = Field(2048, ge=1, description="of one answer")
    at_once: int = Field(16, ge=1, exclude=True, description="requests at the same time")

    @model_validator(mode="after")
    def _possible(self) -> JudgeVotes:
        if self.at_least > self.votes:
            raise ValueError(f"at_least {self.at_least} is more than votes {self.votes}")
        if "{prompt}" not in self.question:
            raise ValueError("question has no {prompt}")
        return self

    def questions(self, prompt: str) -> list[ChatQuestion]:
        """What is asked about a problem, one question for each vote."""
        content = self.question.replace("{prompt}", prompt)
        settings = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return [
            ChatQuestion(self.judges[at % len(self.judges)], content, settings | {"seed": at // len(self.judges) + 1})
            for at in range(self.votes)
        ]

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        """See Step. Raises NotAnswered."""
        asked = {one.problem_id: self.questions(one.prompt) for one in candidates}
        with open_answers(context.evidence) as answers:
            ask_all([question for own in asked.values() for question in own], answers, self.at_once, "judging")
            votes = {
                problem_id: Counter(vote_of(answers.get(question.key)["answer"]) for question in own)
                for problem_id, own in asked.items()
            }
        return self.outcome(votes)

    def outcome(self, votes: dict[str, Counter[Vote]]) -> StepOutcome:
        """What the votes of each problem decide."""
        yes = {problem_id: own[Vote.YES] for problem_id, own in votes.items()}
        dropped = {
            problem_id: f"too few votes: {count} of {self.votes}"
            for problem_id, count in yes.items()
            if count < self.at_least
        }
        notes = {problem_id: {"judge_votes": f"{count}/{self.votes}"} for problem_id, count in yes.items()}
        total = sum(votes.values(), Counter[Vote]())
        return StepOutcome(dropped, dict(notes), {f"votes: {vote.value}": total[vote] for vote in Vote})
