"""Which names are the program's own: what the tests call must come from the program, not from what ran before it.

The prelude (`from math import *` and others) and a setup bring functions such as gcd. A program may use them, and so
may a case, but they are no answer. A setup may also import tools of the tests: with `from os.path import exists` a case
looks at what the program has left. What only computes, as gcd, is no such tool. A name that stood there before is the
program's own when the program replaces it, names it, or has a star import. This module needs the standard library
alone: exported Harbor folders run it too.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

_NOTHING = object()
# Modules whose functions see nothing but their arguments.
_COMPUTING = {
    *("bisect", "cmath", "collections", "copy", "decimal", "fractions", "functools", "heapq", "itertools", "math"),
    *("numbers", "operator", "re", "statistics", "string", "typing"),
}


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
    """The names of one program. `before` is its namespace as `setup` left it, before the program's `code` ran."""

    def __init__(
        self, namespace: dict[str, Any], before: dict[str, Any], code: types.CodeType, setup: types.CodeType | None
    ) -> None:
        self._namespace, self._before, self._code = namespace, before, code
        self._tools = set() if setup is None else set(_imported_by_name(setup))

    def is_own(self, name: str) -> bool:
        """Whether the program has made this name, or uses it. A module is no answer."""
        found = self._namespace.get(name, _NOTHING)
        is_thing = found is not _NOTHING and not isinstance(found, types.ModuleType)
        return is_thing and (found is not self._before.get(name, _NOTHING) or _names(self._code, name))

    def is_brought(self, name: str) -> bool:
        """Whether the name is a function or class that another module brought, and that the program leaves alone."""
        found = self._before.get(name)
        is_foreign = callable(found) and getattr(found, "__module__", None) != self._before.get("__name__")
        is_tool = not self._tools.isdisjoint({name, getattr(found, "__name__", name)}) and not _only_computes(found)
        return (
            is_foreign and not is_tool and found is self._namespace.get(name, _NOTHING) and not _names(self._code, name)
        )

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


def _only_computes(function: Any) -> bool:
    module = str(getattr(function, "__module__", ""))
    return module.partition(".")[0].lstrip("_") in _COMPUTING


def _imported_by_name(code: types.CodeType) -> Iterator[str]:
    """Also by a text that the code executes."""
    for each in code.co_consts:
        if isinstance(each, tuple):  # of an import statement
            yield from (name for name in each if isinstance(name, str))
        elif isinstance(each, str) and "exec" in code.co_names:
            try:
                executed = compile(each, "<setup>", "exec")
            except (SyntaxError, ValueError, RecursionError, MemoryError):  # any other text of the setup
                continue
            yield from _imported_by_name(executed)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _nested(inner)


def _words(text: str) -> list[str]:
    return "".join(letter if letter.isalnum() or letter == "_" else " " for letter in text).split()
