"""Filters by models: by the answers of one to the problems, by the votes of judges, and by embeddings of the prompts.

AceReason-Nemotron drops problems that DeepSeek-R1 answers in fewer than 2,000 tokens, and Klear-Reasoner math problems
of whose answers too few have a final answer. The answers are those of `nouscoder eval`. Skywork-OR1 keeps problems with
9 of 32 votes (arXiv 2505.22312).
"""

from __future__ import annotations

import base64
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, model_validator

from nouscoder.data.asking import ChatQuestion, Question, ServedModel, ask_all, open_answers
from nouscoder.data.filters.duplicates import evaluation_prompts
from nouscoder.data.filters.step import Candidate, CannotFilter, Context, Step, StepOutcome
from nouscoder.data.importers.mathematics import last_box
from nouscoder.data.json_records import checked_records
from nouscoder.formats.body import Body
from nouscoder.openai_server import OpenAIServer
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

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
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
        settings, judges = {"temperature": self.temperature, "max_tokens": self.max_tokens}, self.judges
        return [
            ChatQuestion(
                judges[at % len(judges)], {"content": content, "settings": settings | {"seed": at // len(judges) + 1}}
            )
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


Vector = NDArray[np.float32]

_BLOCK_ROWS = 256  # bounds the memory of similarities: 24 MiB for 24,000 problems


class EmbeddingQuestion(Question):
    """A request of the embedding of a `text`."""

    async def ask(self, server: OpenAIServer) -> dict[str, Any]:
        [vector] = await server.embed(self.served.model, [self.asked["text"]])
        return {"answer": base64.b64encode(np.array(vector, "<f4").tobytes()).decode()}


class EmbeddingDuplicates(Step):
    """Drops a problem whose prompt is near that of an earlier one that is kept, or of an evaluation problem."""

    filter: Literal["embedding_duplicates"]
    embedder: ServedModel = Field(description="the model that embeds: {url, model}")
    threshold: float = Field(0.95, gt=0, le=1, description="cosine similarity from which two prompts are near")
    against: list[str] = Field([], description="problem files of evaluation sets")
    instruction: str = Field("", description="text before each prompt, as some models want it")
    at_once: int = Field(16, ge=1, exclude=True, description="requests at the same time")

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        """See Step. Raises NotAnswered."""
        fixed = [*evaluation_prompts(self.against, context)]
        named = [*fixed, *((one.problem_id, one.asked) for one in candidates)]
        questions = [EmbeddingQuestion(self.embedder, {"text": self.instruction + prompt}) for _, prompt in named]
        with open_answers(context.evidence) as answers:
            ask_all(questions, answers, self.at_once, "embedding")
            vectors = [
                np.frombuffer(base64.b64decode(answers.get(question.key)["answer"]), "<f4").astype(np.float32)
                for question in questions
            ]
        if len({len(vector) for vector in vectors}) > 1:
            raise CannotFilter(f"{self.embedder.model} gave vectors of different lengths; delete {context.evidence}")
        dropped = {}
        found = near_earlier(np.stack(vectors), len(fixed), self.threshold) if vectors else []
        for one, near in zip(candidates, found, strict=True):
            if near is not None:
                dropped[one.problem_id] = f"near-duplicate: of {named[near[0]][0]}, similarity {near[1]:.3f}"
        return StepOutcome(dropped)


def near_earlier(vectors: Vector, num_fixed: int, threshold: float) -> list[tuple[int, float] | None]:
    """For each row after the first `num_fixed`: the nearest earlier row that is kept, if it is near.

    (its number, the cosine similarity), or None; then the row itself is kept. `vectors` [rows, size]; the fixed rows
    are always kept. A vector of zeros is near to nothing.
    """
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    kept = np.zeros(len(unit), dtype=bool)
    kept[:num_fixed] = True
    found: list[tuple[int, float] | None] = []
    for first in range(num_fixed, len(unit), _BLOCK_ROWS):
        block = unit[first : first + _BLOCK_ROWS]
        similarities = block @ unit[: first + len(block)].T
        for row, own in enumerate(similarities, first):
            earlier = np.where(kept[:row], own[:row], -1.0)
            best = int(np.argmax(earlier)) if row else -1
            near = best >= 0 and earlier[best] >= threshold
            kept[row] = not near
            found.append((best, float(earlier[best])) if near else None)
    return found
