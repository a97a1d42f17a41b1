"""Held-out problems that are training problems: their pass@1 says nothing of new problems.

They are compared by name, and by text: the prompt and the starter code, without regard to case and spaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing

from nouscoder.config import Config
from nouscoder.data.problem_index import all_held_out, open_index
from nouscoder.domain.problem import Problem
from nouscoder.domain.prompt import PromptText


def trained_on(held_out: Sequence[Problem], training: Mapping[str, PromptText]) -> tuple[list[str], list[str]]:
    """The names of the held-out problems that have the name of a training problem, and of those with its text."""
    texts = set(map(_text, training.values()))
    same_text = [one.problem_id for one in held_out if _text(PromptText.of(one)) in texts]
    return [one.problem_id for one in held_out if one.problem_id in training], same_text


def leak_lines(config: Config, earlier: Iterable[Config] = ()) -> list[str]:
    """What is to be said of held-out problems that this run trains on, or one of the stages before it did."""
    training: dict[str, PromptText] = {}
    for each in (*(one for one in earlier if one.run.total_batches), config):
        with closing(open_index(each)) as index:
            asked, texts = set(index.problem_ids), index.texts()
        training |= {name: text for name, text in texts.items() if name in asked}
    held_out = all_held_out(config)
    by_name, by_text = trained_on(held_out, training)
    found = [one.problem_id for one in held_out if one.problem_id in {*by_name, *by_text}]
    return [
        f"warning: {len(found)} of {len(held_out)} held-out problems are training problems, such as {found[0]}"
        f" ({len(by_name)} by name, {len(by_text)} by text): pass@1 on held-out problems counts what is trained on"
        for _ in found[:1]
    ]


def _text(one: PromptText) -> tuple[str, str]:
    return " ".join(one.prompt.split()).casefold(), " ".join(one.starter_code.split()).casefold()
