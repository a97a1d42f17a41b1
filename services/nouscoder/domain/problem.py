"""A problem: what the policy is asked, and what a program must do to be right."""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.domain.submission import Comparator, Limits, Prelude, Profile, Submission, Tests, TestsReference


@dataclass(frozen=True, slots=True)
class GradingRules:
    """How programs for one problem are graded, all but the tests themselves.

    `text_is_code`: the policy's completion is the program itself, so nothing has to be extracted from an answer.
    `run_all_tests`: tests are run after a failure too, for soft rewards.
    """

    limits: Limits = Limits()
    comparator: Comparator = Comparator()
    prelude: Prelude = Prelude.NONE
    profile: Profile = Profile.PROCESS
    text_is_code: bool = False
    run_all_tests: bool = False

    def submission(
        self, tests: Tests | TestsReference, text: str, problem_id: str = "", tests_digest: str = ""
    ) -> Submission:
        """A policy's completion as a submission. Failing tests are not shown: they stay out of the run's records."""
        return Submission(
            tests=tests,
            code=text if self.text_is_code else None,
            completion=None if self.text_is_code else text,
            limits=self.limits,
            comparator=self.comparator,
            stop_on_first_failure=not self.run_all_tests,
            reveal=False,
            profile=self.profile,
            prelude=self.prelude,
            problem_id=problem_id,
            tests_digest=tests_digest,
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """One verifiable problem. `prompt` is what the policy is asked; `tests` are hidden from it.

    `prompt_template` is a text with {prompt} in it that is used in place of the environment's own; empty takes that.
    `difficulty`, `source` and `family` are the data set's words: they are for statistics and change no verdict.
    """

    problem_id: str
    prompt: str
    tests: Tests
    limits: Limits = Limits()
    comparator: Comparator = Comparator()
    text_is_code: bool = False
    family: str = ""
    prelude: Prelude = Prelude.NONE
    profile: Profile = Profile.PROCESS
    prompt_template: str = ""
    difficulty: str = ""
    source: str = ""

    def grading_rules(self, run_all_tests: bool = False) -> GradingRules:
        """How programs for this problem are graded."""
        return GradingRules(self.limits, self.comparator, self.prelude, self.profile, self.text_is_code, run_all_tests)
