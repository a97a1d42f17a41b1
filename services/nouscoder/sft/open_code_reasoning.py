"""`nouscoder sft import`: rows of OpenCodeReasoning become examples.

A row of nvidia/OpenCodeReasoning-2 has question, r1_generation, pass_rate (-1: unknown), judgement (right, wrong),
question_id, dataset, split and index; one of nvidia/OpenCodeReasoning has input and output in their place. Where the
question is "-", it is the text of the row `index` of another data set, which is given as well. Source:
NVIDIA/NeMo-Skills, recipes/opencodereasoning/scripts/prepare_questions.py.

INVARIANT: each row is an example or is counted as rejected for one reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nouscoder.atomic_files import naming_storage_faults, whole_or_gone
from nouscoder.data.bounded_files import created
from nouscoder.data.importers.fields import Reason, Rejected, Row, optional_text, text
from nouscoder.data.importers.judged_sets import codeforces_statement
from nouscoder.data.importers.rows import HubRows, file_rows
from nouscoder.data.importers.run import Source, source_named
from nouscoder.data.json_records import SourceRow
from nouscoder.errors import Unusable, did_you_mean

# What the text of a question is, by the name in the column `dataset`.
_STATEMENTS: dict[str, Callable[[Row], str]] = {
    "taco": lambda row: text(row, "question"),
    "apps": lambda row: text(row, "question"),
    "code_contests": lambda row: text(row, "description"),
    "open-r1/codeforces": codeforces_statement,
}
_ELSEWHERE = "-"


@dataclass(frozen=True, slots=True)
class ImportedExamples:
    """The result. `rejected` counts the rows by reason."""

    file: str
    examples: int
    rejected: dict[str, int]

    def text(self) -> str:
        """The counts for people."""
        rows = [("examples", self.examples), ("rejected rows", sum(self.rejected.values()))]
        rows += [(f"  {reason}", count) for reason, count in sorted(self.rejected.items(), key=lambda one: -one[1])]
        return "\n".join([f"{self.file}:", *(f"{name:<24}{count:>12}" for name, count in rows)])


def import_examples(files: Sequence[str], out: Path, questions: Sequence[str] = ()) -> ImportedExamples:
    """Write the examples of these files. `questions` are texts such as taco/train=FILE. Raises Unusable."""
    if out.exists():
        raise Unusable(f"{out} exists already: give another --out, or delete it")
    known = _questions(questions)
    counts: Counter[Reason] = Counter()
    num_examples = 0
    temporary = out.with_name(f"{out.name}.part")
    with whole_or_gone(temporary), naming_storage_faults(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with created(temporary, out.name) as file:
            for row in (row for name in files for row in _rows(source_named(name))):
                try:
                    file.write(json.dumps(_example(row, known)).encode() + b"\n")
                    num_examples += 1
                except Rejected as error:
                    counts[error.reason] += 1
        if not num_examples:
            why = ", ".join(f"{count} {reason.value}" for reason, count in counts.items())
            raise Unusable(f"no row is an example ({why or 'there is no row'})")
        temporary.replace(out)
    return ImportedExamples(str(out), num_examples, {reason.value: count for reason, count in counts.items()})


def _rows(source: Source) -> Iterator[SourceRow]:
    return source.rows(0) if isinstance(source, HubRows) else file_rows(source, 0)


def _questions(given: Sequence[str]) -> dict[tuple[str, str, int], str]:
    """The texts by dataset, split and index. Several files of a split are counted through, in the order given."""
    found: dict[tuple[str, str, int], str] = {}
    next_index: Counter[tuple[str, str]] = Counter()
    for one in given:
        name, _, place = one.partition("=")
        dataset, _, split = name.rpartition("/")
        if dataset not in _STATEMENTS or not place:
            form = "DATASET/SPLIT=FILE, such as taco/train=taco.parquet"
            raise Unusable(
                f"--questions {one:.100} is not {form}{did_you_mean(dataset, _STATEMENTS)}"
                f" (known data sets: {', '.join(_STATEMENTS)})"
            )
        for row in _rows(source_named(place)):
            index = next_index[dataset, split]
            next_index[dataset, split] += 1
            try:
                found[dataset, split, index] = _STATEMENTS[dataset](row.value)
            except (Rejected, AttributeError, KeyError, TypeError):
                continue  # an example of this question is rejected
    return found


def _example(row: SourceRow, questions: dict[tuple[str, str, int], str]) -> dict[str, object]:
    """The example of a row. Raises Rejected."""
    if row.fault:
        raise Rejected(Reason.NOT_JSON, row.fault)
    value = row.value
    if not isinstance(value, dict):
        raise Rejected(Reason.MALFORMED, "the row is not a record")
    answer = optional_text(value, "r1_generation", "output")
    if not answer:
        raise Rejected(Reason.NO_ANSWER, "the row has no answer")
    dataset, split, index = (optional_text(value, name) for name in ("dataset", "split", "index"))
    question = optional_text(value, "question", "input")
    if question == _ELSEWHERE:
        question = questions.get((dataset, split, int(index) if index.isdecimal() else -1), "")
    if not question:
        raise Rejected(Reason.MISSING_FIELD, f"the question of {dataset}/{split}, row {index}, is not given")
    example: dict[str, object] = {
        "problem_id": optional_text(value, "question_id") or "/".join(filter(None, (dataset, split, index))),
        "prompt": question,
        "completion": answer,
    }
    accepted = _accepted(value)
    return example if accepted is None else {**example, "accepted": accepted}


def _accepted(row: Row) -> bool | None:
    """Whether the answer is right, by the tests where there are any, else by the judgement of a model."""
    try:
        pass_rate = float(optional_text(row, "pass_rate"))
    except ValueError:
        pass_rate = -1.0
    if 0 <= pass_rate <= 1:
        return pass_rate == 1
    return {"right": True, "wrong": False}.get(optional_text(row, "judgement").strip().lower())
