"""What is said in a rollout: messages, answers of the Python interpreter, and what failed programs are told.

The environment `feedback` of generation and the OpenEnv environment of the verifier give the same feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nouscoder.domain.verdict import Verdict, VerdictKind


class Role(StrEnum):
    """The author of a message, with the names of chat templates."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Message:
    """One message: its author and its text."""

    role: Role
    content: str


class CallEnd(StrEnum):
    """How a call of the interpreter ended. After all but DONE its state is lost: the next call begins with a fresh one.

    DONE: the code has run, or raised an exception. EXITED: it ended the interpreter. The others: it exceeded a limit.
    """

    DONE = "done"
    EXITED = "exited"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"


@dataclass(frozen=True, slots=True)
class InterpreterAnswer:
    """The answer to one call. `output` is what the code printed, with the traceback of an exception; it is clipped."""

    end: CallEnd
    output: str


TURNS = 3  # programs at most, by default
TEXT_CHARS = 600  # of each text in the feedback, by default
_FAULTS = {
    VerdictKind.WRONG_ANSWER: "The output is wrong.",
    VerdictKind.TIME_LIMIT_EXCEEDED: "The program exceeded the time limit.",
    VerdictKind.MEMORY_LIMIT_EXCEEDED: "The program exceeded the memory limit.",
    VerdictKind.OUTPUT_LIMIT_EXCEEDED: "The program printed too much.",
    VerdictKind.RUNTIME_ERROR: "The program failed.",
    VerdictKind.COMPILE_ERROR: "The program does not compile.",
    VerdictKind.NO_CODE: "The answer holds no program.",
}
_REQUEST = "Write the corrected program."


def feedback_on(verdict: Verdict, max_chars: int) -> str:
    """The message about a verdict that is not accepted. Each text in it has at most `max_chars` characters."""
    lines = [_FAULTS[verdict.kind]]
    failure = verdict.first_failure
    if failure is None:
        lines += _labelled("Message", verdict.detail, max_chars)
    else:
        is_wrong = verdict.kind is VerdictKind.WRONG_ANSWER
        start = _start_of_difference(failure.output, failure.expected, max_chars) if is_wrong else 0
        lines += _labelled("Input", failure.input, max_chars)
        lines += _labelled("Expected output", _from(start, failure.expected), max_chars)
        lines += _labelled("Output", _from(start, failure.output), max_chars) if is_wrong else []
        # The end of a traceback says what went wrong.
        lines += _labelled("Errors", failure.stderr.strip()[-max_chars:], max_chars)
    return "\n".join([*lines, _REQUEST])


def _labelled(label: str, text: str, max_chars: int) -> list[str]:
    shown = text.rstrip()
    return [f"{label}:\n{shown if len(shown) <= max_chars else shown[:max_chars] + '...'}"] if shown else []


def _start_of_difference(output: str, expected: str, max_chars: int) -> int:
    """Where to begin so that the first difference is among the next `max_chars` characters."""
    pairs = enumerate(zip(output, expected, strict=False))
    first = next((place for place, (got, wanted) in pairs if got != wanted), min(len(output), len(expected)))
    return 0 if first < max_chars else first - max_chars // 2


def _from(start: int, text: str) -> str:
    return f"...{text[start:]}" if start else text
