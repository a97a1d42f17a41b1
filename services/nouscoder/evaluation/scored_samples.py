"""The samples of an evaluation's folder with their verdicts, by problem. Reward models read them."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from nouscoder.atomic_files import whole_or_gone
from nouscoder.data.problem_index import open_index_of
from nouscoder.data.problem_parquet import store_beside
from nouscoder.domain.prompt import PromptSettings, PromptText
from nouscoder.domain.verdict import VerdictKind
from nouscoder.errors import Unusable
from nouscoder.evaluation.problems import Window, read_evaluated
from nouscoder.evaluation.samples import answer_of, answer_text, verdict_key
from nouscoder.input_file import regular
from nouscoder.record_log import RecordLog

_NOT_RUN = frozenset({VerdictKind.NO_CODE.value, VerdictKind.COMPILE_ERROR.value})


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample. `score` is the share of tests that it passes; None when grading stopped at its first failure."""

    answer: str
    is_right: bool
    score: float | None


@dataclass(frozen=True, slots=True)
class ScoredProblem:
    """A problem with its samples in the order of their positions. `prompt` is the problem in the plain form."""

    problem_id: str
    prompt: str
    samples: tuple[ScoredSample, ...]

    @property
    def scores(self) -> list[float]:
        """The score of each sample. Raises Unusable when one has none."""
        found = [sample.score for sample in self.samples if sample.score is not None]
        if len(found) < len(self.samples):
            raise Unusable(
                f"not every test was run for the samples of {self.problem_id}: evaluate them with --all-tests, and"
                " under a profile that does not stop at the first failure"
            )
        return found


def scored_problems(problems: Path, folder: Path) -> list[ScoredProblem]:
    """The problems of a file that have samples in an evaluation's folder. Raises Unusable and what reading raises."""
    if not (folder / "verdicts.jsonl").is_file():
        raise Unusable(f"{folder} is not the folder of an evaluation: nouscoder eval makes one")
    with ExitStack() as stack:
        stack.enter_context(whole_or_gone(store_beside(problems)))
        index = stack.enter_context(closing(open_index_of(problems)))
        samples = stack.enter_context(RecordLog(regular(folder) / "samples.jsonl", "finish_reason"))
        verdicts = stack.enter_context(RecordLog(folder / "verdicts.jsonl", "verdict", "passed", "total"))
        known = {one.problem_id: one for one in read_evaluated(problems, index, Window())}
        thorough = {one.problem_id: one for one in read_evaluated(problems, index, Window(), all_tests=True)}
        found: dict[str, dict[int, ScoredSample]] = defaultdict(dict)
        for key in samples:
            sample = samples.get(key)
            name = sample["problem_id"]
            if name not in known:
                continue
            answer = answer_of(sample)
            keys = [verdict_key(one, answer, one.rules.profile) for one in (thorough[name], known[name])]
            graded = next((verdicts.get(one) for one in keys if one in verdicts), None)
            if graded is not None:
                is_right = graded["verdict"] == VerdictKind.ACCEPTED.value
                found[name][sample["position"]] = ScoredSample(answer_text(sample), is_right, _score(graded))
    if not found:
        raise Unusable(f"{folder} has no graded sample of a problem of {problems}")
    return [
        ScoredProblem(
            name,
            PromptSettings().text(PromptText.of(known[name])),
            tuple(own[position] for position in sorted(own)),
        )
        for name, own in sorted(found.items())
    ]


def _score(graded: dict[str, object]) -> float | None:
    if graded["verdict"] in _NOT_RUN:
        return 0.0
    passed, total, ran = (int(str(graded[name])) for name in ("passed", "total", "graded"))
    return passed / total if total and ran == total else None
