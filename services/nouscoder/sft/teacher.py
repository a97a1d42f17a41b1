"""`nouscoder sft sample`: answers of a teacher, verified, as examples of supervised fine-tuning.

    problems -> `nouscoder eval` of the teacher in the folder OUT.samples -> OUT, one example a sample with its verdict

The teacher is any server with OpenAI's API: a large model, or the generation service of a run. Every sample is kept,
with whether it was accepted; sft.wrong_below chooses among them later. Sampling and verdicts go on where they stopped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import whole_file, whole_or_gone
from nouscoder.config import Config
from nouscoder.data.problem_index import open_index_of
from nouscoder.data.problem_parquet import store_beside
from nouscoder.domain.prompt import PYTHON
from nouscoder.domain.verdict import VerdictKind
from nouscoder.errors import Unusable
from nouscoder.evaluation.evaluate import EvaluationRequest, evaluate
from nouscoder.evaluation.problems import EvaluatedProblem, read_evaluated
from nouscoder.evaluation.samples import TRUNCATED, answer_of, answer_text, server_jobs, verdict_key
from nouscoder.policy_folder.trained_on import digest_of
from nouscoder.record_log import RecordLog
from nouscoder.run.held_out import taught_lines


@dataclass(frozen=True, slots=True)
class TeacherSamples:
    """What was written. `solved` counts the problems with an accepted answer."""

    file: Path
    problems: int
    solved: int
    examples: int
    accepted: int

    def text(self) -> str:
        """For people."""
        return (
            f"{self.file}: {self.examples} examples of {self.problems} problems, {self.accepted} accepted;"
            f" {self.solved} problems have an accepted one"
        )


def sample_teacher(request: EvaluationRequest, config: Config) -> TeacherSamples:
    """Sample, verify and write the examples to `request.out`, which only an earlier sampling may have made.

    Raises NousCoderError.
    """
    folder = request.out.with_name(request.out.name + ".samples")
    if request.out.exists() and not folder.exists():
        raise Unusable(f"{request.out} exists already, and no sampling made it: give another --out")
    request = replace(request, out=folder, profiles=())
    with ExitStack() as refused:
        refused.enter_context(whole_or_gone(store_beside(request.problems)))
        index = refused.enter_context(closing(open_index_of(request.problems)))
        asked = {name: digest_of(text.prompt, text.starter_code) for name, text in index.texts().items()}
        sys.stderr.writelines(f"{line}\n" for line in taught_lines(config, asked))
        evaluate(request, config)
    records = list(_examples(request))
    out = folder.with_name(folder.name.removesuffix(".samples"))
    with whole_file(out) as file:
        file.writelines(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)
    accepted = [record["problem_id"] for record in records if record["accepted"]]
    problems = {record["problem_id"] for record in records}
    return TeacherSamples(out, len(problems), len(set(accepted)), len(records), len(accepted))


def _examples(request: EvaluationRequest) -> Iterator[dict[str, Any]]:
    """The records, problem by problem. A truncated answer is not accepted, whatever its verdict."""
    with ExitStack() as stack:
        index = stack.enter_context(closing(open_index_of(request.problems)))
        samples = stack.enter_context(RecordLog(request.out / "samples.jsonl", "finish_reason"))
        verdicts = stack.enter_context(RecordLog(request.out / "verdicts.jsonl", "verdict"))
        problems = read_evaluated(request.problems, index, request.window)
        jobs = server_jobs(problems, request.sampling)
        for job in sorted(jobs, key=lambda job: job.problem.problem_id):  # stable: by position within a problem
            sample = samples.get(job.key)
            key = verdict_key(job.problem, answer_of(sample), job.problem.rules.profile)
            is_right = verdicts.get(key)["verdict"] == VerdictKind.ACCEPTED.value
            completion = _completion(sample)
            if completion:
                end = sample["finish_reason"]
                accepted = is_right and end != TRUNCATED
                yield {**_prompt(job.problem), "completion": completion, "finish_reason": end, "accepted": accepted}


def _prompt(problem: EvaluatedProblem) -> dict[str, Any]:
    asked = {name: getattr(problem, name) for name in ("prompt_template", "starter_code", "languages")}
    asked |= {"languages": () if problem.languages == PYTHON else problem.languages}
    asked |= {"tests_type": "" if problem.tests_type == "stdin" else problem.tests_type}
    return {
        "problem_id": problem.problem_id,
        "prompt": problem.prompt,
        **{name: value for name, value in asked.items() if value},
    }


def _completion(sample: dict[str, Any]) -> str:
    """The whole answer. A server that separates the reasoning has cut off its marks."""
    answer = answer_text(sample)
    reasoning = str(sample.get("reasoning", "")).encode("utf8", "replace").decode()
    if not reasoning:
        return answer
    return f"<think>\n{reasoning.strip()}" + (f"\n</think>\n\n{answer}" if answer else "")  # else it was cut off
