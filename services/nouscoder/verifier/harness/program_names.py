"""Which names are the program's own: what the tests call must come from the program, not from what ran before it.

The prelude (`from math import *` and others) and a setup bring functions such as gcd. A program may use them, and so
may a case, but they are no answer. A name that stood there before is the program's own when the program replaces it,
names it, or has a star import. This module needs the standard library alone: exported Harbor folders run it too.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

_NOTHING = object()


def find_entry_point(namespace: dict[str, Any], name: str, code: types.CodeType) -> Any:
    """The method of `class Solution` with this name, else the function. So LiveCodeBench's grader finds it.

    A star import therefore neither hides a method nor replaces one that the class lacks, and what the prelude brought
    is no function of a program whose `code` neither names it nor has a star import. Raises NameError, AttributeError.
    """
    owner, found = namespace.get("Solution"), namespace.get(name)
    is_own = getattr(found, "__module__", None) == namespace.get("__name__")
    if hasattr(owner, name) or (isinstance(owner, type) and not is_own):
        return getattr(owner(), name)  # type: ignore[misc]
    if name not in namespace or not (is_own or _names(code, name)):
        raise NameError(f"name {name!r} is not defined")
    return found


class ProgramNames:
    """The names of one program. `before` is its namespace as it was before the program's `code` ran."""

    def __init__(self, namespace: dict[str, Any], before: dict[str, Any], code: types.CodeType) -> None:
        self._namespace, self._before, self._code = namespace, before, code

    def is_own(self, name: str) -> bool:
        """Whether the program has made this name, or uses it. A module is no answer."""
        found = self._namespace.get(name, _NOTHING)
        is_thing = found is not _NOTHING and not isinstance(found, types.ModuleType)
        return is_thing and (found is not self._before.get(name, _NOTHING) or _names(self._code, name))

    def is_brought(self, name: str) -> bool:
        """Whether the name is a function or class that another module brought, and that the program leaves alone."""
        found = self._before.get(name)
        is_foreign = callable(found) and getattr(found, "__module__", None) != self._before.get("__name__")
        return is_foreign and found is self._namespace.get(name, _NOTHING) and not _names(self._code, name)

    def require_use(self, case: types.CodeType) -> types.CodeType:
        """The case, which uses a name of the program's own. Raises NameError for one that uses only what was brought.

        What the setup's functions and classes use counts, where the case names them. So does a name in a text, because
        the case may evaluate the text.
        """
        codes, used = [*_nested(case)], set[str]()
        for code in codes:  # which grows
            for name in {*code.co_names} - used:
                used.add(name)
                codes += self._code_of_setup(name)
        brought = next(filter(self.is_brought, sorted(used)), None)
        if brought is not None and not any(map(self.is_own, used)):
            texts = (text for code in codes for text in code.co_consts if isinstance(text, str))
            words = {word for text in texts for word in _words(text)}
            if not any(map(self.is_own, words)):
                raise NameError(f"name {brought!r} is not defined")
        return case

    def _code_of_setup(self, name: str) -> Iterator[types.CodeType]:
        found = self._before.get(name)
        for each in (found, *vars(found).values()) if isinstance(found, type) else (found,):
            if isinstance(each, types.FunctionType) and each.__module__ == self._before["__name__"]:
                yield from _nested(each.__code__)


def _names(code: types.CodeType, name: str) -> bool:
    return name in code.co_names or bool({name, ("*",)} & {*code.co_consts})


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _nested(inner)


def _words(text: str) -> list[str]:
    return "".join(letter if letter.isalnum() or letter == "_" else " " for letter in text).split()
