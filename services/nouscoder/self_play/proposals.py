"""What a proposer is asked, and the proposal that is read from its answer. Nothing of the answer is executed here.

A proposal is a statement, a reference program and inputs. Expected outputs are no part of it: they are what the
reference prints in the sandbox.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from nouscoder.record_log import key_of
from nouscoder.self_play.judgement import Rejected, Rejection
from nouscoder.verifier.grading.validation import extract_code

EXAMPLE = "{example}"
_PARTS = {name: re.compile(rf"<{name}>(.*?)</{name}>", re.DOTALL) for name in ("question", "program", "inputs")}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a proposal may be. `max_chars` bounds the statement, the program and all inputs together, each [characters].

    `min_inputs` counts different inputs; inputs after the first `max_inputs` are left out.
    """

    max_chars: int = 8000
    min_inputs: int = 3
    max_inputs: int = 10


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


def read_proposal(answer: str, bounds: Bounds) -> Proposal:
    """The proposal in an answer; the last of several. Raises Rejected."""
    text = answer.encode("utf8", "replace").decode()  # half of a surrogate pair is no text
    found = {name: pattern.findall(text) for name, pattern in _PARTS.items()}
    if not all(found.values()):
        missing = next(name for name, parts in found.items() if not parts)
        raise Rejected(Rejection.NO_PROPOSAL, f"the answer has no <{missing}>")
    statement, block = found["question"][-1].strip(), found["program"][-1]
    program = extract_code(block) or block.strip("\n")
    if not statement or not program.strip():
        raise Rejected(Rejection.NO_PROPOSAL, "the question or the program is empty")
    inputs = _inputs(found["inputs"][-1])
    if max(len(statement), len(program), sum(map(len, inputs))) > bounds.max_chars:
        raise Rejected(Rejection.TOO_LONG, f"more than {bounds.max_chars} characters")
    if len(inputs) < bounds.min_inputs:
        raise Rejected(Rejection.FEW_INPUTS, f"{len(inputs)} different inputs")
    return Proposal(statement, program, inputs[: bounds.max_inputs])


def _inputs(text: str) -> tuple[str, ...]:
    """The different inputs of a JSON list, each ending with a newline. Raises Rejected."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise Rejected(Rejection.NO_PROPOSAL, "the inputs are no JSON list of texts")
    texts = (value.encode("utf8", "replace").decode() for value in values)  # JSON can name half of a pair too
    return tuple(dict.fromkeys(value if value.endswith("\n") else f"{value}\n" for value in texts))
