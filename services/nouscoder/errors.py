"""The base classes of errors for people. The message is one sentence that names the fault and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class NousCoderError(Exception):
    """Shown as one line, without a traceback."""


class Unusable(NousCoderError):
    """The process can never work as configured (port in use, no Redis, no namespaces), so a restart is useless."""


def first_error(error: BaseException) -> BaseException:
    """The first error in the groups that task groups raise, however deep; `error` itself when it is no group."""
    return first_error(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


# The known name that is nearest to an unknown one.


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """The question `: did you mean X?` with the known name X nearest to `wrong`; empty when none is near."""
    found = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f": did you mean {found[0]}?" if found else ""


# Secrets in texts that people and other programs read: logs, messages, pages.

_IN_URL = re.compile(r"(?<=://)([^\s/@:\"'\\]*):[^\s/\"'\\]*@")  # scheme://USER:PASSWORD@host
_IN_QUERY = re.compile(
    r"([?&](?:password|passwd|token|secret|signature|sig|access_key|api_key)=)[^&\s\"'\\]+", re.IGNORECASE
)


def without_secrets(text: str) -> str:
    """The text with *** in place of each password and token in a URL."""
    if "://" not in text:
        return text
    return _IN_QUERY.sub(r"\1***", _IN_URL.sub(r"\1:***@", text))
