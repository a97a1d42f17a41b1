"""Whether prompts and answers fit into the tokens that a run, its evaluations and its policy allow."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from nouscoder.config import Config, EnvironmentSection
from nouscoder.config.generation import GenerationSection
from nouscoder.data.problem_index import all_held_out, fitting, in_languages, open_index, prompt_lengths
from nouscoder.data.prompt_lengths import are_counted, left_out_sentence, may_be_long
from nouscoder.domain.problem import Problem
from nouscoder.domain.prompt import PromptText
from nouscoder.policy_folder.inspection import context_tokens
from nouscoder.run.asked_of_models import CannotCount, asked_of_models
from nouscoder.run.languages import left_out_sentences

_PROMPT_LIMIT_S = 0.1  # to count one takes some milliseconds
_COUNT = "nouscoder.generation.environments.prompts:count_stdin"
_MANY_PROMPTS = 1000  # take long enough that a person wants to know


def prompt_faults(config: Config) -> Iterator[str]:
    """Counts the tokens of the prompts that have no count yet. So the index leaves out those that are too long."""
    environment, allowed = config.generation.environment, config.problems.too_long_share
    if not are_counted(environment):
        return
    with closing(open_index(config)) as index:
        texts = index.texts()
    held_out = _held_out(config)
    wanted = [*texts.values(), *(PromptText.of(one) for one in held_out)]
    lengths = prompt_lengths(config)
    if missing := lengths.missing(may_be_long(config, wanted)):
        try:
            lengths.plus(_counted(config, missing))
        except CannotCount as error:
            yield f"policy.path: the prompts cannot be written: {error}"
            return
    for key, what, left_out, num_problems, limit in _left_out(config, held_out):
        if len(left_out) > allowed * num_problems:
            said = left_out_sentence(what, left_out, num_problems, limit)
            yield f"{key}: {said}: raise it, shorten the prompts, or raise problems.too_long_share ({allowed:g})"


def _counted(config: Config, texts: Sequence[PromptText]) -> dict[PromptText, int]:
    """The tokens of each prompt, by a process of its own, because it loads transformers. Raises CannotCount."""
    environment = config.generation.environment
    request = {
        "folder": str(config.in_run_folder(config.policy.path)),
        "environment": environment.model_dump(mode="json", include={*EnvironmentSection.model_fields}),
        "texts": texts,
    }
    if len(texts) >= _MANY_PROMPTS:
        sys.stderr.write(f"counting the tokens of {len(texts)} prompts, once for this tokenizer\n")
    answer = asked_of_models(_COUNT, request, _PROMPT_LIMIT_S * len(texts))
    if "fault" in answer:
        raise CannotCount(answer["fault"])
    return dict(zip(texts, answer["counts"], strict=True))


def left_out_lines(config: Config) -> list[str]:
    """What is to be said of problems that are left out, because of their languages or the lengths of their prompts."""
    too_long = [
        left_out_sentence(what, left_out, num_problems, limit).replace(" are too long", " are left out as too long", 1)
        for _, what, left_out, num_problems, limit in _left_out(config, _held_out(config))
        if left_out
    ]
    return [*left_out_sentences(config), *too_long]


def _held_out(config: Config) -> list[Problem]:
    return in_languages(config, all_held_out(config))


def _left_out(config: Config, held_out: Sequence[Problem]) -> Iterator[tuple[str, str, Mapping[str, int], int, str]]:
    """(key, what they are, those that are too long, the number of all, the limit with its key)."""
    with closing(open_index(config)) as index:
        limit = f"generation.max_tokens_total is {config.generation.max_tokens_total}"
        num_problems = len(index.all_ids) - len(index.in_others)
        yield "problems.train", "training problems", index.left_out, num_problems, limit
    if config.evaluation.max_tokens_total:
        limit = f"evaluation.max_tokens_total is {config.evaluation.max_tokens_total}"
    key = "evaluation.problems" if config.evaluation.problems else "problems.held_out"
    yield key, "held-out problems", fitting(config, held_out)[1], len(held_out), limit


def _lengths(config: Config) -> Iterator[tuple[str, str, GenerationSection]]:
    """(key of the new tokens, key of all tokens, generation as it is then), of the training and of evaluations."""
    yield "generation.sampling.max_new_tokens", "generation.max_tokens_total", config.generation
    if config.evaluation.max_tokens_total or config.evaluation.max_new_tokens:
        total = "evaluation" if config.evaluation.max_tokens_total else "generation"
        yield "evaluation.max_new_tokens", f"{total}.max_tokens_total", config.evaluating.generation


def length_faults(config: Config) -> Iterator[str]:
    """Answers that may be as long as prompt and answer together."""
    for new_key, total_key, generation in _lengths(config):
        new_tokens, total = generation.sampling.max_new_tokens, generation.max_tokens_total
        if new_tokens >= total:
            yield f"{new_key} {new_tokens} must be less than {total_key} {total}, which counts the prompt too"


def position_faults(config: Config, positions: int | None) -> Iterator[str]:
    """More tokens than the policy, or yarn with its `positions`, has positions for."""
    folder = config.in_run_folder(config.policy.path)
    where = f"positions of {folder}" if positions is None else "positions that yarn gives"
    if positions is None and folder.is_dir():
        positions = context_tokens(folder)
    totals = {total_key: generation.max_tokens_total for _, total_key, generation in _lengths(config)}
    for key, total in totals.items():
        if positions is not None and total > positions:
            yield f"{key} {total} is more than the {positions} {where}"
