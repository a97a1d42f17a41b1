"""Demonstrations of proposals: they can be read again, fit in the limits, and are no part of an ordinary demo."""

from __future__ import annotations

from random import Random

from nouscoder.config import load_config
from nouscoder.config.recipe import recipe_path
from nouscoder.demo.demonstrations import MOST_CHARS, PROPOSING_PROMPT, can_be_proposed, proposed
from nouscoder.demo.policy import CharTokenizer
from nouscoder.demo.problems import Split, problems
from nouscoder.demo.warmstart import WarmStartBudget, demonstration_batches
from nouscoder.self_play.judgement import read_proposal

TRAIN = problems(Split.TRAIN, 124, seed=0)  # two of each family


def test_a_demonstration_is_a_proposal_of_its_problem_within_the_limits_of_the_configuration() -> None:
    config = load_config(recipe_path("demo-self-play"))
    section = config.self_play
    some = [problem for problem in TRAIN if can_be_proposed(problem)]
    assert len({problem.family for problem in some}) > 50
    for problem in some:
        text = proposed(problem, Random(1), noise=0.0)
        found = read_proposal(text, section)
        assert (found.statement, found.program) == (problem.statement, problem.program)
        assert set(found.inputs) <= {case.input for case in problem.tests}
        assert len(CharTokenizer().encode(text)) <= MOST_CHARS < section.max_new_tokens
    assert section.prompt == PROPOSING_PROMPT
    assert config.generation.max_tokens_total >= len(PROPOSING_PROMPT) + 1 + section.max_new_tokens


def test_the_share_of_proposals_among_the_demonstrations() -> None:
    budget = WarmStartBudget(excerpt_steps=1, clean_steps=20, noisy_steps=20, proposal_share=0.3)
    prompt = CharTokenizer().encode_prompt(PROPOSING_PROMPT)
    whole = [example for batch in demonstration_batches(TRAIN, seed=0, budget=budget)[1:] for example in batch]
    num_proposals = sum(list(example.prompt_token_ids) == prompt for example in whole)
    assert 0.2 < num_proposals / len(whole) < 0.33
    without = WarmStartBudget(excerpt_steps=1, clean_steps=2, noisy_steps=2)
    examples = [example for batch in demonstration_batches(TRAIN, seed=0, budget=without) for example in batch]
    assert all(list(example.prompt_token_ids) != prompt for example in examples)
