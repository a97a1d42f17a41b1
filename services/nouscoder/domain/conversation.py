"""What is said in a rollout: messages of a conversation with a policy, and answers of the Python interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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


# A call of the interpreter that a policy may use while it writes an answer.


class CallEnd(StrEnum):
    """How a call ended. After all but DONE the state is lost, and the next call begins with a fresh interpreter.

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
