"""The problems that the service offers to the clients of other projects: those of the file `verifier.problems`.

INVARIANT: no input and no expected output of a hidden test leaves this module: a verdict on hidden tests is returned
without outcomes and first failure. However a program fails a hidden input, it is wrong_answer: the kind of a failure
would tell the input digit by digit. No verdict is internal_error, because a failure of the service raises NotGraded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path

from nouscoder.data.problem_index import IndexedProblem, NotInIndex, ProblemIndex, open_index_of
from nouscoder.domain.prompt import PromptSettings, PromptText
from nouscoder.domain.submission import MathTests, Submission, Tests, language_name
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.errors import NousCoderError
from nouscoder.store.blobs import BlobsUnavailable
from nouscoder.store.case_files import CaseFileBroken
from nouscoder.store.tests import UnknownTests
from nouscoder.store.tests_cache import TestsCache, TestsTooLarge
from nouscoder.verifier.api.streaming import QUEUE_PATIENCE_S, NotGraded, grade_patiently
from nouscoder.verifier.grading.grader import Grading
from nouscoder.verifier.grading.validation import InvalidSubmission

_OF_NO_INPUT = (VerdictKind.ACCEPTED, VerdictKind.COMPILE_ERROR, VerdictKind.NO_CODE)
NO_PROBLEMS = "this service offers no problems: verifier.problems is empty"


class NoSuchProblem(NousCoderError):
    """The service offers no such problem. The message names it."""


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """What a client hands in: a policy's answer with a fenced block, or a program.

    A text without a fence is a program, because clients take the fence away from an answer that is nothing but a block.
    With `is_code` it is one in any case. `language` is that of a program; empty: the problem's first language.
    """

    text: str
    is_code: bool = False
    language: str = ""

    def replacing(self, submission: Submission) -> Submission:
        """The submission with this answer. Raises InvalidSubmission for a language that the problem does not allow."""
        has_fence = "```" in self.text or "~~~" in self.text
        if not self.is_code and (has_fence or isinstance(submission.tests, MathTests)):
            return submission
        language = language_name(self.language) or submission.language
        if language not in submission.languages:
            allowed = ", ".join(submission.languages)
            raise InvalidSubmission("language", f"{self.language!r:.40} is none of this problem's: {allowed}")
        return replace(submission, code=self.text, completion=None, other_languages=()).in_language(language)


class ProblemSet:
    """The offered problems, in the order of their file. Without an index there are none."""

    def __init__(self, index: ProblemIndex | None, grader: Grading, cache: TestsCache) -> None:
        """`grader` is the one that submissions of clients pass, with their quotas. `cache` holds the hidden tests."""
        self._index = index
        self._grader = grader
        self._cache = cache
        self.problem_ids = () if index is None else index.problem_ids

    def problem(self, problem_id: str) -> IndexedProblem:
        """The problem with this id, without its hidden tests. Raises NoSuchProblem."""
        if self._index is None:
            raise NoSuchProblem(NO_PROBLEMS)
        try:
            return self._index.problem(problem_id)
        except NotInIndex:
            raise NoSuchProblem(f"there is no problem {problem_id[:100]!r}") from None

    def at(self, place: int) -> IndexedProblem:
        """The problem at this place of the file, from 0. Raises NoSuchProblem."""
        if not 0 <= place < len(self.problem_ids):
            last = len(self.problem_ids) - 1
            raise NoSuchProblem(NO_PROBLEMS if last < 0 else f"there is no problem {place}: the last is {last}")
        return self.problem(self.problem_ids[place])

    async def public_verdict(
        self, problem: IndexedProblem, answer: SampleAnswer, patience_s: float = QUEUE_PATIENCE_S
    ) -> Verdict | None:
        """What the public tests say, with the first test that fails. None when the problem has no public tests.

        Raises NotGraded, InvalidSubmission, and QueueFull when there is no slot within `patience_s`.
        """
        if problem.public_tests is None:
            return None
        return await self._graded(answer.replacing(problem.public_tests.submission(answer.text)), patience_s)

    async def hidden_verdict(
        self, problem: IndexedProblem, answer: SampleAnswer, patience_s: float = QUEUE_PATIENCE_S
    ) -> Verdict:
        """What the hidden tests say. Raises as `public_verdict` does."""
        async with self._hidden_tests(problem) as tests:
            known = problem.problem_id, problem.tests_digest
            submission = answer.replacing(problem.rules.submission(tests, answer.text, *known))
            verdict = await self._graded(submission, patience_s)
        kind = verdict.kind if verdict.kind in _OF_NO_INPUT else VerdictKind.WRONG_ANSWER
        passed = verdict.passed if kind is VerdictKind.ACCEPTED else 0
        return replace(verdict, kind=kind, passed=passed, graded=verdict.total, detail="", tests=(), first_failure=None)

    @asynccontextmanager
    async def _hidden_tests(self, problem: IndexedProblem) -> AsyncIterator[Tests]:
        """The hidden tests of a problem. Raises NotGraded when they cannot be read now."""
        assert self._index is not None
        try:
            async with self._cache.opened(problem.tests_digest, self._index.tests) as tests:
                yield tests
        except (UnknownTests, TestsTooLarge, CaseFileBroken, BlobsUnavailable, OSError) as error:
            raise NotGraded(f"the tests of {problem.problem_id} cannot be read: {error}") from error

    async def _graded(self, submission: Submission, patience_s: float) -> Verdict:
        verdict = await grade_patiently(self._grader, submission, patience_s=patience_s)
        if verdict.is_ours:
            raise NotGraded(f"the service failed: {verdict.detail}")
        return verdict


def prompt_of(problem: IndexedProblem) -> str:
    """What a policy is asked, in the plain form or in the problem's own template."""
    return PromptSettings().text(PromptText.of(problem))


@asynccontextmanager
async def open_problem_set(file: str, grader: Grading, cache: TestsCache) -> AsyncIterator[ProblemSet]:
    """The problems of `file`; none when it is "". Its index is built first when it is missing, which may take minutes.

    Raises ProblemFileError, Unusable and BlobsUnavailable.
    """
    if not file:
        yield ProblemSet(None, grader, cache)
        return
    with closing(await asyncio.to_thread(open_index_of, Path(file))) as index:
        yield ProblemSet(index, grader, cache)
