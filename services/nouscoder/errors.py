"""The base classes of errors for people, and how a command ends: one exit code for each kind of fault.

The message of an error is one sentence that names the fault and what to do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """How a command ends, whichever command it is. Numbers above 2 are those of sysexits.h, and 130 is the shells'."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        """One code and what it means, as docs/exit-codes.md says it."""
        code = int.__new__(cls, value)
        code._value_, code.meaning = value, meaning
        return code

    OK = 0, "the work is done"
    NO = (
        1,
        "the work is done and its answer is no: findings, bad lines, a reward that does not rise, a declined question",
    )
    USAGE = 2, "the command was used wrongly: an unknown command or option, or options that do not go together"
    DAMAGED = 65, "a file of a run, of a policy or of a store is damaged or lacks a part"
    UNAVAILABLE = 69, "a service that the command needs does not answer, or has no room"
    FAILED = 70, "the work failed on the way; after a defect of nouscoder the traceback is printed"
    STORAGE = 74, "a disk or a store cannot be read or written"
    IN_USE = 75, "another process holds what is needed: try again when it has ended"
    UNUSABLE = (
        78,
        "what was given cannot be used: a value, a file, a name, a machine; supervisors do not start it again",
    )
    INTERRUPTED = 130, "Ctrl-C or SIGTERM ended it"


class NousCoderError(Exception):
    """Shown as one line, without a traceback. The command ends with `exit_code`."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED


class Unusable(NousCoderError):
    """The process can never work as configured (port in use, no Redis, no namespaces), so a restart is useless."""

    exit_code = ExitCode.UNUSABLE


class WrongUse(Unusable):
    """Options of a command that do not go together."""

    exit_code = ExitCode.USAGE


def first_error(error: BaseException) -> BaseException:
    """The first error in the groups that task groups raise, however deep; `error` itself when it is no group."""
    return first_error(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """The question `: did you mean X?` with the known name X nearest to `wrong`; empty when none is near."""
    found = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.7)
    return f": did you mean {found[0]}?" if found else ""


def for_terminal(text: object) -> str:
    """The text with a question mark for each character that controls a terminal, or turns or hides text."""
    return "".join(one if one.isprintable() or one in "\n\t\xa0\u200d\u3000" else "?" for one in str(text))


def one_line(text: str) -> str:
    """The same in one line."""
    return for_terminal(" ".join(text.split()))


_PLAIN = (
    (r"^Value error, |, unable to parse.*|, got a number with.*| after validation, not \d+", ""),
    (r"^Input should be a valid (?:tuple|list|set|array)", "must be a list"),
    (r"^Input should be a valid string", "must be a text"),
    (r"^Input should be a valid dictionary.*", "must be a table of names and values"),
    (r"^(?:Input|List|String|Value|Tuple|Set|Dictionary) should ", "must "),
)


def plain_fault(message: str) -> str:
    """What pydantic says of a value, in our words: `must be a list`."""
    for said, ours in _PLAIN:
        message = re.sub(said, ours, message)
    return message


def why_unreadable(error: Exception) -> str:
    """Why a file cannot be read, without its name and without Python's words."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8: it is no text, or one of another encoding"
    if isinstance(error, RecursionError):
        return "its values are nested too deeply"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


_IN_URL = re.compile(r"(?<=://)([^\s/@:\"'\\]*):[^\s/\"'\\]*@")  # scheme://USER:PASSWORD@host
_IN_QUERY = re.compile(
    r"([?&](?:password|passwd|token|secret|signature|sig|access_key|api_key)=)[^&\s\"'\\]+", re.IGNORECASE
)


def without_secrets(text: str) -> str:
    """The text with *** in place of each password and token in a URL."""
    if "://" not in text:
        return text
    return _IN_QUERY.sub(r"\1***", _IN_URL.sub(r"\1:***@", text))
