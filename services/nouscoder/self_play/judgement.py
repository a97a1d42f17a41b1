"""What a proposer is asked, the proposal in its answer, and whether it is accepted, with what reward. Pure.

The outputs of a program are one text for each input; None where it failed. Two outputs are equal when their words are.

A proposal is a statement, a reference program and inputs. Expected outputs are no part of it: they are what the
reference prints in the sandbox.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from nouscoder.config import SelfPlaySection
from nouscoder.domain.curriculum import potential
from nouscoder.record_log import key_of
from nouscoder.verifier.grading.extract import extract_code

Outputs = Sequence[str | None]


class Rejection(StrEnum):
    """Why a proposal is not accepted."""

    NO_PROPOSAL = "no proposal"
    TOO_LONG = "too long"
    FEW_INPUTS = "too few inputs"
    NEAR_DUPLICATE = "near-duplicate"
    REFERENCE_FAILS = "the reference fails"
    CONSTANT_OUTPUT = "the output is always the same"
    NOT_DETERMINISTIC = "not deterministic"
    OTHER_ANSWER = "the solvers agree on another answer"
    FEW_AGREE = "too few solvers agree"
    ALWAYS_SOLVED = "always solved"


class ProposalRejected(Exception):
    """A proposal is not accepted. The text says why in detail."""

    def __init__(self, reason: Rejection, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of one proposal. `reason` is None when it is accepted.

    `pass_rate` is the share of the solver's samples that print what the reference prints; None when nobody tried.
    """

    reason: Rejection | None
    detail: str = ""
    pass_rate: float | None = None

    @property
    def reward(self) -> float:
        """The proposer's reward: learnability 4p(1 - p) of an accepted problem, from 0 to 1, else 0."""
        return potential(self.pass_rate) if self.reason is None and self.pass_rate is not None else 0.0


def check_reference(outputs: Outputs) -> None:
    """Raises ProposalRejected unless the reference printed something for each input, and not the same for all."""
    failed = sum(output is None for output in outputs)
    if failed:
        raise ProposalRejected(Rejection.REFERENCE_FAILS, f"on {failed} of {len(outputs)} inputs")
    if len(set(_words(outputs))) < 2:
        raise ProposalRejected(Rejection.CONSTANT_OUTPUT, f"on {len(outputs)} inputs")


def judged(reference: Outputs, solvers: Sequence[Outputs], agree: int) -> Judgement:
    """The judgement on a valid reference by independent samples of the solver.

    The reference's answer must be the most frequent one among the samples without a failure, with at least `agree`
    samples, and some sample must fail to give it.
    """
    wanted = _words(reference)
    answers = Counter(_words(outputs) for outputs in solvers if None not in outputs)
    agreeing = answers[wanted]
    rate = agreeing / len(solvers)
    others = max((count for answer, count in answers.items() if answer != wanted), default=0)
    if others > agreeing and others >= agree:
        detail = f"{others} of {len(solvers)} give another answer, {agreeing} that of the reference"
        return Judgement(Rejection.OTHER_ANSWER, detail, rate)
    if agreeing < agree:
        return Judgement(Rejection.FEW_AGREE, f"{agreeing} of {len(solvers)}", rate)
    if agreeing == len(solvers):
        return Judgement(Rejection.ALWAYS_SOLVED, f"by all {len(solvers)}", rate)
    return Judgement(None, "", rate)


def _words(outputs: Outputs) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple((output or "").split()) for output in outputs)


EXAMPLE = "{example}"
_PARTS = {name: re.compile(rf"<{name}>(.*?)</{name}>", re.DOTALL) for name in ("question", "program", "inputs")}


@dataclass(frozen=True, slots=True)
class Proposal:
    """A problem as a policy proposed it."""

    statement: str
    program: str
    inputs: tuple[str, ...]

    @property
    def problem_id(self) -> str:
        """The same for equal proposals."""
        return f"self-play-{key_of([self.statement, self.program, self.inputs])[:16]}"


def proposal_text(statement: str, program: str, inputs: list[str]) -> str:
    """The answer that `read_proposal` reads."""
    given = json.dumps([line.removesuffix("\n") for line in inputs], separators=(",", ":"))
    return f"<question>{statement}</question>\n<program>\n{program}\n</program>\n<inputs>{given}</inputs>"


def proposing_prompt(template: str, example: str) -> str:
    """What the proposer is asked. `example` is the statement of a problem that the policy trains on."""
    return template.replace(EXAMPLE, example.strip())


def read_proposal(answer: str, bounds: SelfPlaySection) -> Proposal:
    """The proposal in an answer; the last of several. Raises ProposalRejected."""
    text = answer.encode("utf8", "replace").decode()  # half of a surrogate pair is no text
    found = {name: pattern.findall(text) for name, pattern in _PARTS.items()}
    if not all(found.values()):
        missing = next(name for name, parts in found.items() if not parts)
        raise ProposalRejected(Rejection.NO_PROPOSAL, f"the answer has no <{missing}>")
    statement, block = found["question"][-1].strip(), found["program"][-1]
    program = extract_code(block) or block.strip("\n")
    if not statement or not program.strip():
        raise ProposalRejected(Rejection.NO_PROPOSAL, "the question or the program is empty")
    # The different inputs of a JSON list, each ending with a newline.
    try:
        values = json.loads(found["inputs"][-1])
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ProposalRejected(Rejection.NO_PROPOSAL, "the inputs are no JSON list of texts")
    texts = (value.encode("utf8", "replace").decode() for value in values)  # JSON can name half of a pair too
    inputs = tuple(dict.fromkeys(value if value.endswith("\n") else f"{value}\n" for value in texts))
    if max(len(statement), len(program), sum(map(len, inputs))) > bounds.max_chars:
        raise ProposalRejected(Rejection.TOO_LONG, f"more than {bounds.max_chars} characters")
    if len(inputs) < bounds.min_inputs:
        raise ProposalRejected(Rejection.FEW_INPUTS, f"{len(inputs)} different inputs")
    return Proposal(statement, program, inputs[: bounds.max_inputs])
