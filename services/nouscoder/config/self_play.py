"""The section of `nouscoder self-play`: how problems are proposed and accepted, and how long they are trained on."""

from __future__ import annotations

from pydantic import Field, model_validator

from nouscoder.config.base import Section

_PROMPT = """Below is a programming problem. Write a new one of your own, which is different, about as hard, and \
solved by a program that reads its input and prints its answer. The answer must depend on the input, and there must be \
only one right answer.

Answer in exactly this form:
<question>
the whole problem, with the form of the input and of the output
</question>
<program>
a Python program that solves it
</program>
<inputs>
a JSON list of 5 to 10 different texts, each a whole input
</inputs>

The problem:
{example}"""


class SelfPlaySection(Section):
    """What `nouscoder self-play` does; `nouscoder train` does not read it."""

    rounds: int = Field(4, ge=1, le=49, description="rounds of proposing and training; run.total_batches is their sum")
    proposals: int = Field(
        128, ge=0, description="problems that are proposed in a round, a multiple of broker.group_size; 0: none"
    )
    solutions: int = Field(8, ge=2, description="the solver's samples for each valid proposal: they give its pass rate")
    agree: int = Field(
        2, ge=1, description="samples of the solver that must print what the reference prints; fewer reject a proposal"
    )
    prompt: str = Field(
        _PROMPT,
        min_length=1,
        description="what the proposer is asked; {example} is a problem of the training file or the pool",
    )
    max_new_tokens: int = Field(4096, ge=1, description="of a proposal")
    max_chars: int = Field(
        8000, ge=1, description="characters of a statement, of a program, and of all inputs together, at most"
    )
    min_inputs: int = Field(3, ge=2, description="different inputs of a proposal at least")
    max_inputs: int = Field(10, ge=2, description="inputs of a proposal that are used at most")
    near_duplicate: float = Field(
        0.8,
        ge=0.3,
        le=1,
        description="Jaccard similarity of statements from which a proposal is a near-duplicate of a training problem,"
        " a held-out problem or an earlier proposal",
    )
    proposer_steps: int = Field(
        2, ge=0, description="optimizer steps of the proposer on the proposals of a round; 0: it is not trained"
    )
    pool_size: int = Field(256, ge=1, description="accepted problems that are trained on at most")
    pool_share: float = Field(
        0.5, gt=0, lt=1, description="share of the pool among the problems of a round's training, if there are enough"
    )
    max_age: int = Field(4, ge=1, description="rounds that train on an accepted problem at most")
    solved_at: float = Field(
        0.95, gt=0, le=1, description="a problem leaves the pool when a round's training solves it at this rate"
    )

    @model_validator(mode="after")
    def _enough(self) -> SelfPlaySection:
        if self.agree > self.solutions - 1:
            raise ValueError("agree must be less than solutions: a problem that all samples solve is not accepted")
        if self.max_inputs < self.min_inputs:
            raise ValueError("max_inputs must not be less than min_inputs")
        return self
