"""Which kind of answer an error of Redis is, whatever its version and however the client library dresses it.

Redis says the kind in a first word in capitals, such as OOM. redis-py turns some of these words into exception classes
and strips them from the message; Redis 6 puts those that a script met in the middle of its message.
"""

from __future__ import annotations

import re

from redis import exceptions

# A Redis that is there and cannot serve now: loading its file, running a long script, its disk or memory full, being
# replaced by another, or without its replicas; or one that was restarted or wiped between two commands of one call.
PASSING = frozenset(
    {
        *("LOADING", "BUSY", "MISCONF", "OOM", "READONLY", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED"),
        *("TRYAGAIN", "CLUSTERDOWN", "NOSCRIPT", "NOGROUP"),
    }
)

_BY_TYPE: dict[type[Exception], str] = {
    exceptions.BusyLoadingError: "LOADING",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.MovedError: "MOVED",
    exceptions.AskError: "ASK",
    exceptions.NoPermissionError: "NOPERM",
    exceptions.AuthenticationError: "WRONGPASS",
    exceptions.NoScriptError: "NOSCRIPT",
}
_FIRST_WORD = re.compile(r"([A-Z]{3,}) ")
_IN_SCRIPT = re.compile(r"@user_script: ?\d+: -?([A-Z]{3,}) ")


def kind_of(error: BaseException) -> str:
    """The kind, for example OOM; ERR when it has none."""
    for ancestor in type(error).__mro__:
        if ancestor in _BY_TYPE:
            return _BY_TYPE[ancestor]
    text = str(error)
    found = _IN_SCRIPT.search(text) or _FIRST_WORD.match(text)
    return found[1] if found else "ERR"
