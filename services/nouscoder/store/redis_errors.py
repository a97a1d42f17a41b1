"""The kind of an error of Redis, such as OOM.

Redis sends the kind as the first word of the message, in capitals. redis-py turns some kinds into exception classes and
removes the word. For an error inside a script, Redis 6 puts the word in the middle of the message.
"""

from __future__ import annotations

import re

from redis import exceptions

# Redis answers but cannot serve now: it loads its file, runs a long script, its disk or memory is full, another one
# replaces it, it lacks its replicas, or it was restarted or wiped between two commands of one call.
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
