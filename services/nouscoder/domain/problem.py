"""A problem: its prompt, and the tests that a right program passes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from nouscoder.domain.reasoning import without_reasoning
from nouscoder.domain.submission import (
    LANGUAGES,
    AssertTests,
    CallTests,
    Comparator,
    Limits,
    Prelude,
    Profile,
    Submission,
    Tests,
    TestsReference,
)


@dataclass(frozen=True, slots=True)
class GradingRules:
    """The rules for grading programs of one problem, without the tests.

    `text_is_code`: the policy's completion is the program, so no code is extracted from an answer. `run_all_tests`:
    tests also run after a failure, for soft rewards. A program may be in any of `languages`, at least one. The first is
    meant where an answer names none. The prelude is for programs in Python alone. `libraries` are the modules that a
    program needs beyond Python's standard library.
    """

    limits: Limits = Limits()
    comparator: Comparator = Comparator()
    prelude: Prelude = Prelude.NONE
    profile: Profile = Profile.PROCESS
    text_is_code: bool = False
    run_all_tests: bool = False
    languages: tuple[str, ...] = ("python",)
    libraries: tuple[str, ...] = ()

    def submission(
        self, tests: Tests | TestsReference, text: str, problem_id: str = "", tests_digest: str = ""
    ) -> Submission:
        """A policy's completion as a submission. Failing tests are not shown, so they are not in the run's records."""
        return Submission(
            tests=tests,
            code=without_reasoning(text) if self.text_is_code else None,
            completion=None if self.text_is_code else text,
            limits=self.limits,
            comparator=self.comparator,
            stop_on_first_failure=not self.run_all_tests,
            reveal=False,
            profile=self.profile,
            prelude=self.prelude if "python" in self.languages else Prelude.NONE,
            language=self.languages[0],
            other_languages=() if self.text_is_code else self.languages[1:],
            problem_id=problem_id,
            tests_digest=tests_digest,
            libraries=self.libraries,
        )


@dataclass(frozen=True, slots=True)
class PublicTests:
    """Tests whose expected outputs the policy may see, and the rules for grading by them."""

    tests: Tests
    rules: GradingRules = GradingRules()

    def submission(self, text: str) -> Submission:
        """A policy's completion as a submission. The verdict shows the first test that fails."""
        return replace(self.rules.submission(self.tests, text), reveal=True)


@dataclass(frozen=True, slots=True)
class Problem:
    """One verifiable problem. The policy gets `prompt`; `tests` are hidden from it.

    `public_tests` are examples that the policy may see: environments with feedback run programs on them.

    `prompt_template` is a text with {prompt} that replaces the environment's template, unless it is empty.
    `starter_code` is what a program must begin with, such as the head of a class; empty: none. A program may be in any
    of `languages`, at least one; the first is meant where an answer names none. `libraries` are the modules that a
    program needs beyond Python's standard library: a verifier without them cannot grade it.
    `difficulty`, `source` and `family` come from the data set. They are for statistics and affect no verdict.
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
    public_tests: Tests | None = None
    starter_code: str = ""
    languages: tuple[str, ...] = ("python",)
    libraries: tuple[str, ...] = ()

    @property
    def tests_type(self) -> str:
        """The type of its tests."""
        return self.tests.type

    def grading_rules(self) -> GradingRules:
        """The rules for grading programs of this problem."""
        return GradingRules(
            self.limits,
            self.comparator,
            self.prelude,
            self.profile,
            text_is_code=self.text_is_code,
            languages=self.languages,
            libraries=self.libraries,
        )

    def shown(self) -> PublicTests | None:
        """The public tests with the rules of grading, if there are any."""
        return None if self.public_tests is None else PublicTests(self.public_tests, self.grading_rules())


def language_fault(languages: tuple[str, ...], tests_type: str, profile: Profile, *, text_is_code: bool) -> str:
    """Why tests cannot be run with programs in these languages. Empty: they can."""
    if unknown := [name for name in languages if name not in LANGUAGES]:
        return f"{unknown[0]!r:.40} is no language that the verifier knows: {', '.join(sorted(LANGUAGES))}"
    if len(languages) > 1 and text_is_code:
        return "text_is_code needs one language, because a program alone does not say which it is in"
    if tests_type == AssertTests.type and len(languages) > 1:
        return f"assert tests are in one language, not in {', '.join(languages)}"
    if languages != ("python",) and tests_type == CallTests.type:
        return f"{tests_type} tests need programs in python: in {', '.join(languages)} only whole programs are tested"
    if languages != ("python",) and profile.is_lcb:
        return f"the profile {profile} grades only python"
    return ""


def is_held_out(problem_id: str, share: float) -> bool:
    """Whether this problem is among the `share` of a file's problems that is held out of training.

    It depends on the name alone, so that a problem stays on its side when the file grows.
    """
    digest = hashlib.sha256(problem_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
