"""`nouscoder eval`: samples a model on problems, grades the samples, and writes the results.

    problems -> jobs -> samples.jsonl -> verdicts.jsonl -> report.json, report.html
                server or file    this machine or a service

The folder of an evaluation holds these files. The first two are appended to as answers come, so the same command goes
on after an interruption. The last two are made of them at the end, and hold no times.

The model may be a policy folder, which this process serves in the form of OpenAI's API. `generation.engine`, `device`
and `threads` of the configuration choose the engine. The name of the model ends with the digest of its weights, so an
evaluation never takes samples of other weights for its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import lock_file, naming_storage_faults, whole_or_gone, write_whole
from nouscoder.config import Config
from nouscoder.data.problem_index import ProblemIndex, open_index_of
from nouscoder.data.problem_parquet import store_beside
from nouscoder.domain.reasoning import UnknownPrompts
from nouscoder.domain.submission import Profile
from nouscoder.errors import Unusable, WrongUse, for_terminal
from nouscoder.evaluation.outcomes import REPORT, Outcome, ProblemOutcomes, results
from nouscoder.evaluation.problems import (
    EvaluatedProblem,
    NothingToEvaluate,
    Window,
    check_profile,
    check_prompt,
    gradable,
    read_evaluated,
)
from nouscoder.evaluation.samples import (
    TRUNCATED,
    SampleGrading,
    SampleJob,
    Sampler,
    SamplingSettings,
    answer_of,
    answer_text,
    given_jobs,
    sampled,
    server_jobs,
    verdict_key,
)
from nouscoder.evaluation.served_policy import ServedPolicy
from nouscoder.grade_files.answers import GradingTarget, answers_of, library_fault_of
from nouscoder.openai_server import OpenAIServer
from nouscoder.policy_folder.prompt_file import PROMPT_FILE, prompt_json
from nouscoder.policy_folder.trained_on import digest_of, leak_lines, trained_on
from nouscoder.progress_bar import progress_bar
from nouscoder.record_log import RecordLog
from nouscoder.report.evaluation_page import MOST_SHOWN, ShownSample, spread, write_evaluation_report
from nouscoder.rpc.addresses import require_url
from nouscoder.verifier.toolchains.languages import ON_THIS_MACHINE, installed


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """What is evaluated: the server at `url`, the policy `checkpoint`, or `samples`, a file of samples; one is given.

    `profiles`: empty for the one that each problem names. `all_tests`: run every test, also after a
    failure, so that the share of tests that a sample passes is known. `verifier`: the URL of a grading service, None
    for this machine.
    """

    problems: Path
    out: Path
    sampling: SamplingSettings
    url: str = ""
    samples: Path | None = None
    window: Window = Window()
    profiles: tuple[Profile, ...] = ()
    at_once: int = 16
    verifier: str | None = None
    token: str | None = None
    ca: Path | None = None
    all_tests: bool = False
    checkpoint: ServedPolicy | None = None


def evaluate(request: EvaluationRequest, config: Config) -> dict[str, Any]:
    """Evaluate, and answer the record of report.json. Raises NousCoderError."""
    if [bool(request.url), request.samples is not None, request.checkpoint is not None].count(True) != 1:
        raise WrongUse("give one of --url (with --model), --policy and --samples")
    for option, url in (("--url", request.url or None), ("--verifier", request.verifier)):
        if url is not None:
            require_url(url, option)
    if request.checkpoint:
        config = request.checkpoint.runnable(config)
    with ExitStack() as stack:
        files = (request.out / name for name in ("lock", "samples.jsonl", "verdicts.jsonl"))
        with whole_or_gone(*files, store_beside(request.problems)):
            with naming_storage_faults(request.out):
                request.out.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock_file(request.out / "lock", f"another evaluation works in {request.out}"))
            index = stack.enter_context(closing(open_index_of(request.problems)))
            samples = stack.enter_context(RecordLog(request.out / "samples.jsonl", "finish_reason"))
            verdicts = stack.enter_context(RecordLog(request.out / "verdicts.jsonl", "verdict", "passed", "total"))
            problems = read_evaluated(request.problems, index, request.window, all_tests=request.all_tests)
            if request.verifier is None and config.verifier.sandbox.backend in ON_THIS_MACHINE:
                problems, left_out = gradable(problems, installed())
                sys.stderr.write(for_terminal(f"{left_out}\n" if left_out else ""))
            if request.checkpoint:
                texts = {one.problem_id: digest_of(one.prompt, one.starter_code) for one in problems}
                leaks = leak_lines(texts, trained_on(request.checkpoint.folder), "problems")
                sys.stderr.writelines(for_terminal(f"{line}\n") for line in leaks)
            profiles = request.profiles or _own_profile(problems)
            for profile in profiles:
                check_profile(problems, profile)
            if request.samples is not None:
                jobs = given_jobs(request.samples, problems, index.problem_ids, samples, request.sampling.prefill)
            else:
                check_prompt(problems, request.sampling.prompt)
                jobs = server_jobs(problems, request.sampling)
            evaluation = _Evaluation(request, jobs, profiles, samples, verdicts)
            if request.sampling.prompt.date:
                write_whole(request.out / PROMPT_FILE, prompt_json(request.sampling.prompt).encode())
            if request.checkpoint is not None and (asked := evaluation.asked()):
                asyncio.run(request.checkpoint.tokens_needed(asked))
        asyncio.run(evaluation.fill(config, index))
        return evaluation.write()


def _own_profile(problems: Sequence[EvaluatedProblem]) -> tuple[Profile, ...]:
    found = {problem.rules.profile for problem in problems}
    if len(found) > 1:
        raise NothingToEvaluate("the problems have different profiles: give --profile")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """The samples that there must be, the profiles that grade them, and the logs of both."""

    request: EvaluationRequest
    jobs: Sequence[SampleJob]
    profiles: Sequence[Profile]
    samples: RecordLog
    verdicts: RecordLog

    def asked(self) -> list[dict[str, Any]]:
        """A request for each problem of which a sample is missing."""
        problems = {job.problem.problem_id: job.problem for job in self.jobs if job.key not in self.samples}
        return [self.request.sampling.request(problem, 0) for problem in problems.values()]

    async def fill(self, config: Config, index: ProblemIndex) -> None:
        """Sample and grade what is missing."""
        request = self.request
        async with AsyncExitStack() as stack:
            target = GradingTarget(config.verifier, request.verifier, request.token, request.ca)
            answer, grade_at_once = await stack.enter_async_context(answers_of(target, index))
            # Before anything is sampled that could not be graded.
            problems = {job.problem.problem_id: job.problem for job in self.jobs}
            needed = Counter(",".join(one.rules.libraries) for one in problems.values() if one.rules.libraries)
            if fault := await library_fault_of(answer, needed, f"{len(problems)} problems"):
                raise Unusable(f"{self.request.problems}: {fault}")
            sample: Sampler | None = None
            url, key = request.url, ""
            if request.checkpoint is not None and (asked := self.asked()):
                url, key = await stack.enter_async_context(request.checkpoint.serving(config, asked, request.at_once))
            if url:
                server = await stack.enter_async_context(OpenAIServer(url, num_connections=request.at_once, key=key))

                async def sample(job: SampleJob) -> dict[str, Any]:
                    return await sampled(server, request.sampling, job)

            advance = stack.enter_context(progress_bar("evaluating", len(self.jobs)))
            grading = SampleGrading(self.samples, self.verdicts, self.profiles, sample, answer, advance)
            await grading.run(self.jobs, request.at_once, grade_at_once)

    def write(self) -> dict[str, Any]:
        """Write report.json and report.html."""
        request, first = self.request, self.profiles[0].value
        found: dict[str, ProblemOutcomes] = {}
        prompts = UnknownPrompts()
        for job in sorted(self.jobs, key=lambda job: job.position):
            sample = self.samples.get(job.key)
            if "completion" in sample and not sample.get("reasoning"):
                prompts.add(sample["completion"])
            one = found.setdefault(job.problem.problem_id, ProblemOutcomes(job.problem))
            one.samples.append(self._outcome(job))
        sys.stderr.write(for_terminal(prompts.warning()))
        record = {
            "model": request.sampling.model,
            "problem_file": request.problems.name,
            "window": asdict(request.window),
            "sampling": {"file": request.samples.name} if request.samples is not None else asdict(request.sampling),
            **results(list(found.values()), [profile.value for profile in self.profiles]),
        }
        write_whole(request.out / REPORT, (json.dumps(record, indent=1) + "\n").encode())
        chosen = {(one.problem.problem_id, at) for one in found.values() for at in one.examples(first)}
        shown = [job for job in self.jobs if (job.problem.problem_id, job.position) in chosen]
        shown = spread(sorted(shown, key=lambda job: (job.problem.problem_id, job.position)), MOST_SHOWN)
        write_evaluation_report(request.out / "report.html", record, [self._shown(job) for job in shown])
        return record

    def _graded(self, job: SampleJob, profile: Profile) -> dict[str, Any]:
        return self.verdicts.get(verdict_key(job.problem, answer_of(self.samples.get(job.key)), profile))

    def _outcome(self, job: SampleJob) -> Outcome:
        sample = self.samples.get(job.key)
        return Outcome(
            position=job.position,
            num_characters=len(answer_text(sample)) + len(sample.get("reasoning", "")),
            num_tokens=sample.get("num_tokens"),
            is_truncated=sample["finish_reason"] == TRUNCATED,
            verdicts={profile.value: self._graded(job, profile)["verdict"] for profile in self.profiles},
        )

    def _shown(self, job: SampleJob) -> ShownSample:
        sample, verdict = self.samples.get(job.key), self._graded(job, self.profiles[0])
        return ShownSample(
            problem_id=job.problem.problem_id,
            position=job.position,
            prompt=job.problem.prompt,
            reasoning=sample.get("reasoning", ""),
            answer=answer_text(sample),
            verdict=verdict["verdict"],
            detail=f"passed {verdict['passed']} of {verdict['total']} tests",
            is_truncated=sample["finish_reason"] == TRUNCATED,
        )
