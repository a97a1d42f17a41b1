"""The demo's problems: right programs pass, wrong ones fail, and the two splits are disjoint."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from random import Random

import pytest

from nouscoder.demo.demonstrations import OWN_MISTAKES, SHARED_MISTAKES, demonstrate, excerpt, places
from nouscoder.demo.family import Family, fill
from nouscoder.demo.policy import CharTokenizer
from nouscoder.demo.problems import FAMILIES, DemoProblem, Split, build, instances, problems, prompt_of


def printed(program: str, text: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The output of the program for this input, run in this process; None when it raises."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    try:
        with redirect_stdout(out):
            exec(compile(program, "program", "exec"), {"__name__": "__main__"})  # noqa: S102 - our own programs
    except Exception:
        return None
    return out.getvalue()


def passes(program: str, problem: DemoProblem, monkeypatch: pytest.MonkeyPatch) -> bool:
    outputs = (printed(program, case.input, monkeypatch) for case in problem.tests)
    return all(
        out is not None and out.split() == case.output.split() for out, case in zip(outputs, problem.tests, strict=True)
    )


def samples(family: Family, seed: int) -> list[DemoProblem]:
    chosen = [family.space[0], family.space[-1], *Random(seed).sample(family.space, 3)]
    return [build(family, parameters, seed=seed) for parameters in chosen]


MISTAKES = SHARED_MISTAKES + OWN_MISTAKES
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@each_family
def test_the_program_passes_the_tests_of_an_independent_oracle(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (0, 1):
        for problem in samples(family, seed):
            assert len(problem.tests) >= 10
            assert len({case.input for case in problem.tests}) == len(problem.tests)
            assert passes(problem.program, problem, monkeypatch), problem


@each_family
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_wrong_variants_and_every_kind_of_mistake_fail_some_test(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    for problem in samples(family, seed=3):
        random = Random(7)
        mistaken = [text for mistake in MISTAKES for text in (mistake(problem, random), mistake(problem, random))]
        wrong = {text for text in mistaken if text is not None} | set(problem.wrong_programs)
        assert len(wrong) >= 4
        for program in sorted(wrong):
            assert not passes(program, problem, monkeypatch), (problem.problem_id, program)


def test_there_are_at_least_forty_families_with_distinct_names_and_statements() -> None:
    assert len(FAMILIES) >= 40
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    assert len({family.statement for family in FAMILIES}) == len(FAMILIES)


def test_no_instance_and_no_statement_is_in_both_splits() -> None:
    ids: dict[Split, set[str]] = {}
    statements: dict[Split, set[str]] = {}
    for split in Split:
        pairs = [(family, parameters) for family in FAMILIES for parameters in instances(family, split)]
        ids[split] = {f"{family.name}/{parameters}" for family, parameters in pairs}
        statements[split] = {fill(family.statement, parameters) for family, parameters in pairs}
        assert len(ids[split]) == len(statements[split]) == len(pairs)
    assert not ids[Split.TRAIN] & ids[Split.HELD_OUT]
    assert not statements[Split.TRAIN] & statements[Split.HELD_OUT]
    total = sum(len(set(family.space)) for family in FAMILIES)
    assert len(ids[Split.TRAIN]) + len(ids[Split.HELD_OUT]) == total


def test_every_family_is_in_both_splits_of_a_run() -> None:
    names = {family.name for family in FAMILIES}
    assert {problem.family for problem in problems(Split.TRAIN, 300, seed=0)} == names
    held_out = problems(Split.HELD_OUT, 200, seed=0)
    assert {problem.family for problem in held_out} == names
    assert len({problem.problem_id for problem in held_out}) == 200


def test_problems_depend_only_on_the_seed() -> None:
    first = problems(Split.TRAIN, 70, seed=5)
    assert first == problems(Split.TRAIN, 70, seed=5)
    assert first != problems(Split.TRAIN, 70, seed=6)


def test_a_request_for_more_problems_than_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="held_out split has"):
        problems(Split.HELD_OUT, 100_000, seed=0)


def test_texts_are_short_and_in_the_vocabulary() -> None:
    tokenizer = CharTokenizer()
    for family in FAMILIES:
        for parameters in (family.space[0], family.space[-1]):
            problem = build(family, parameters, seed=0)
            assert len(problem.statement) <= 60
            assert len(problem.program) <= 70
            assert prompt_of(problem) == problem.statement + "\n"
            assert tokenizer.decode(tokenizer.encode(prompt_of(problem) + problem.program))


def test_the_share_of_wrong_demonstrations_is_the_noise_probability() -> None:
    random = Random(0)
    drawn = random.choices(problems(Split.TRAIN, 200, seed=0), k=4000)
    right = sum(demonstrate(problem, random, noise=0.6) == problem.program for problem in drawn)
    assert abs(right / 4000 - 0.4) < 4 * (0.4 * 0.6 / 4000) ** 0.5
    assert all(demonstrate(problem, random, noise=0.0) == problem.program for problem in drawn[:50])
    assert all(demonstrate(problem, random, noise=1.0) != problem.program for problem in drawn[:500])


def test_an_excerpt_has_a_parameter_on_both_sides_and_a_wide_one_is_complete() -> None:
    random = Random(0)
    for problem in problems(Split.TRAIN, 120, seed=0):
        prompt, program, _ = excerpt(problem, 0, random)
        assert prompt == program + "\n"
        assert program in map(str, problem.parameters)
        whole = [excerpt(problem, 10_000, random) for _ in range(3)]
        assert (prompt_of(problem), problem.program, True) in whole


def test_places_are_positions_in_the_filled_template() -> None:
    assert places("n*{a}+{b}.", (12, 345)) == [("a", 2, 4), ("b", 5, 8)]
