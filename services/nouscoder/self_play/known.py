"""What a round of self-play knows before it begins.

A round takes examples from the training problems and from the pool, and repeats no statement that is known. Held-out
problems are only compared with: no example is one, and no proposal near to one is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from nouscoder.config import Config
from nouscoder.data.filters.duplicates import NearIndex, prompts_of
from nouscoder.data.problem_index import ProblemIndex
from nouscoder.domain.problem import GradingRules, Problem
from nouscoder.domain.submission import StdinTests
from nouscoder.errors import Unusable

_MOST_DRAWN = 200
_SHINGLE = 5  # words in a row that are compared


@dataclass(frozen=True, slots=True)
class KnownProblem:
    """A problem of which a proposal takes the rules of grading, the template, and the end of the prompt."""

    prompt: str
    prompt_template: str
    rules: GradingRules

    def problem(self, problem_id: str, statement: str, tests: StdinTests) -> Problem:
        """A proposed problem like this one."""
        rules = self.rules
        end = self.prompt[len(self.prompt.rstrip()) :]
        return Problem(
            problem_id,
            statement + end,
            tests,
            limits=rules.limits,
            comparator=rules.comparator,
            text_is_code=rules.text_is_code,
            family="self-play",
            prelude=rules.prelude,
            profile=rules.profile,
            prompt_template=self.prompt_template,
            source="self-play",
            libraries=rules.libraries,
        )


class Known:
    """The training problems of the seed file, and the accepted proposals of earlier rounds with those in the pool."""

    def __init__(
        self, config: Config, index: ProblemIndex, accepted: Sequence[Problem], pool: Sequence[str], threshold: float
    ) -> None:
        self._index = index
        self._pooled: Mapping[str, Problem] = {one.problem_id: one for one in accepted if one.problem_id in set(pool)}
        self._drawn_from = [*index.problem_ids, *self._pooled]
        self.statements = NearIndex(threshold, _SHINGLE)
        for path in (config.problems.held_out, config.problems.train):
            for problem_id, prompt in prompts_of(config.in_run_folder(path)):
                self.statements.add(problem_id, prompt)
        for problem in accepted:
            self.statements.add(problem.problem_id, problem.prompt)

    def example(self, random: Random) -> KnownProblem:
        """A training problem or one of the pool. Raises Unusable."""
        for _ in range(_MOST_DRAWN):
            name = random.choice(self._drawn_from)
            if name in self._pooled:
                problem = self._pooled[name]
                return KnownProblem(problem.prompt, problem.prompt_template, problem.grading_rules())
            found = self._index.problem(name)
            with self._index.tests.opened(found.tests_digest) as tests:
                if isinstance(tests, StdinTests):
                    return KnownProblem(found.prompt, found.prompt_template, found.rules)
        raise Unusable(
            f"{_MOST_DRAWN} problems of the training file have no stdin tests, and self-play proposes whole programs"
        )

    def close(self) -> None:
        """Close the index."""
        self._index.close()
