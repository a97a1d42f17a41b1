"""Filters that ask models: what they keep, that each question is asked once, and that no failure is a vote."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.openai_mock import MockServer, completion, serving

from nouscoder.data.asking import ChatQuestion, NotAnswered, ServedModel, ask_all, open_answers
from nouscoder.data.filters.models import JudgeVotes, Vote, near_earlier, vote_of
from nouscoder.data.filters.run import Selection, read_recipe, select
from nouscoder.data.filters.step import CannotFilter
from nouscoder.data.problem_parquet import read_parquet


def chosen(folder: Path, prompts: dict[str, str], steps: str, name: str = "out.parquet") -> Selection:
    """Filter problems with these prompts, by problem id."""
    tests = {"type": "stdin", "cases": [{"input": "", "output": "1"}]}
    rows = [{"problem_id": one, "prompt": prompt, "tests": tests} for one, prompt in prompts.items()]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "r.toml").write_text(f'name = "r"\ninputs = ["problems.jsonl"]\nsteps = [{steps}]')
    return select(read_recipe(folder / "r.toml"), folder / name)


def left(folder: Path, name: str = "out.parquet") -> dict[str, dict[str, str]]:
    """The metadata of the problems that are left."""
    return {item.problem.problem_id: dict(item.metadata) for item in read_parquet(folder / name)}


def judges(*urls: str, more: str = "") -> str:
    named = ", ".join(f'{{url = "{url}", model = "judge-{at}"}}' for at, url in enumerate(urls))
    return f'{{filter = "judge_votes", judges = [{named}]{more}}}'


def votes_for(count: int) -> Any:
    """A judge that votes for each problem `count` times of 16, and one time more for the problem `sound`."""

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        content = request["messages"][0]["content"]
        yes = request["seed"] <= count + ("sound" in content)
        return completion(f"I read `VERDICT: NO` above.\n**Verdict:** {'yes' if yes else 'No'}")

    return answer


def test_nine_of_32_votes_by_two_judges_keep_a_problem(tmp_path: Path) -> None:
    """Each judge has 16 votes: 5 and 4 keep `sound`, 4 and 3 do not keep the other."""
    with serving(MockServer(votes_for(4))) as one, serving(MockServer(votes_for(3))) as other:
        steps = judges(one.url, other.url)
        selection = chosen(tmp_path, {"a": "vague", "b": "sound"}, steps)
        assert left(tmp_path) == {"b": {"judge_votes": "9/32"}}
        assert {len(one.requests), len(other.requests)} == {32}
        assert {request["model"] for request in other.requests} == {"judge-1"}
        assert {request["temperature"] for request in one.requests} == {1.0}
    [counts] = selection.steps
    assert (counts.num_in, counts.num_out, counts.dropped) == (2, 1, {"too few votes": 1})
    assert counts.table == {"votes: yes": 16, "votes: no": 48, "votes: unreadable": 0}


@pytest.mark.parametrize(
    ("answer", "vote"),
    [
        ("VERDICT: YES", Vote.YES),
        ("verdict: no.", Vote.NO),
        ("VERDICT: NO? No: **VERDICT:** `YES`", Vote.YES),
        ("Yes, it is clear.", Vote.UNREADABLE),
        ("VERDICT: YESTERDAY", Vote.UNREADABLE),
        ("", Vote.UNREADABLE),
    ],
)
def test_the_last_verdict_of_an_answer_is_the_vote(answer: str, vote: Vote) -> None:
    assert vote_of(answer) is vote


@pytest.mark.parametrize(
    "cut", [{"content": "<think>\nVERDICT: YES"}, {"content": "VERDICT: YES", "prefill": "<think>\n"}]
)
def test_a_verdict_inside_reasoning_that_was_cut_is_no_vote(tmp_path: Path, cut: dict[str, str]) -> None:
    """Also where the prompt has opened the reasoning, as the server of `serve generation` says."""
    answer = {"choices": [{"message": cut, "finish_reason": "length"}]}
    with serving(MockServer(lambda _: answer)) as mock:
        question = ChatQuestion(ServedModel(url=mock.url, model="m"), {"content": "?", "settings": {}})
        with open_answers(tmp_path / "answers.jsonl") as answers:
            ask_all([question], answers, 1, "judging")
            assert vote_of(answers.get(question.key)["answer"]) is Vote.UNREADABLE


@given(st.dictionaries(st.text(min_size=1), st.lists(st.sampled_from(Vote), min_size=5, max_size=5)))
@settings(max_examples=50)
def test_only_votes_for_a_problem_count(votes: dict[str, list[Vote]]) -> None:
    step = JudgeVotes.model_validate(
        {"filter": "judge_votes", "judges": [{"url": "u", "model": "m"}], "votes": 5, "at_least": 3}
    )
    outcome = step.outcome({name: Counter(own) for name, own in votes.items()})
    assert set(outcome.dropped) == {name for name, own in votes.items() if own.count(Vote.YES) < 3}
    assert sum(outcome.table.values()) == 5 * len(votes)


def test_an_interrupted_selection_goes_on_and_asks_nothing_twice(tmp_path: Path) -> None:
    prompts = {f"p{at}": f"sound {at}" for at in range(6)}
    with serving(MockServer(votes_for(16))) as mock:
        steps = judges(mock.url, more=", votes = 4, at_least = 4, at_once = 2")
        mock.statuses = [200] * 9 + [400] * 2  # both requests in flight are refused
        with pytest.raises(NotAnswered, match=r"HTTP 400.*the other answers are kept: start again"):
            chosen(tmp_path, prompts, steps)
        assert not (tmp_path / "out.parquet").exists()
        answered = len((tmp_path / "out.parquet.evidence" / "judge_votes.jsonl").read_text().splitlines())
        assert 8 <= answered <= 9
    with serving(MockServer(votes_for(16))) as mock:  # at another address: the answers are those of the same model
        first = chosen(tmp_path, prompts, judges(mock.url, more=", votes = 4, at_least = 4, at_once = 2"))
        assert len(mock.requests) == 24 - answered
        assert mock.most_at_once <= 2
    # Everything is in the evidence, so the selection is made again without any server, wherever it was.
    (tmp_path / "out.parquet").unlink()
    again = chosen(tmp_path, prompts, judges("http://127.0.0.1:9/v1", more=", votes = 4, at_least = 4"))
    assert (first.sha256, first.recipe_sha256) == (again.sha256, again.recipe_sha256)
    assert len(left(tmp_path)) == 6


def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    with serving(MockServer(votes_for(16), statuses=[429, 503])) as mock:
        chosen(tmp_path, {"p": "sound"}, judges(mock.url, more=", votes = 2, at_least = 2"))
        assert len(mock.requests) == 4


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (", votes = 8", "at_least 9 is more than votes 8"),
        (', question = "Is it good?"', "question has no {prompt}"),
        (", temperatur = 1.0", "unknown key temperatur: did you mean temperature"),
    ],
)
def test_a_wrong_step_gets_one_sentence(tmp_path: Path, more: str, sentence: str) -> None:
    with pytest.raises(CannotFilter, match=sentence):
        chosen(tmp_path, {"p": "sound"}, judges("http://127.0.0.1:9/v1", more=more))


MEANINGS = {"Add two numbers.": (1, 0, 0.1), "Sum a pair of values.": (2, 0, 0.2), "Sort them.": (0, 1, 0)}


def embedding_step(url: str, more: str = "") -> str:
    return f'{{filter = "embedding_duplicates", embedder = {{url = "{url}", model = "e"}}{more}}}'


def test_a_prompt_in_other_words_is_a_duplicate(tmp_path: Path) -> None:
    prompts = dict(zip("abc", MEANINGS, strict=True))
    with serving(MockServer(embeds=MEANINGS.__getitem__)) as mock:
        selection = chosen(tmp_path, prompts, embedding_step(mock.url))
        assert (len(mock.requests), {request["model"] for request in mock.requests}) == (3, {"e"})
    assert list(left(tmp_path)) == ["a", "c"]
    assert selection.steps[0].dropped == {"near-duplicate": 1}
    [dropped] = (tmp_path / "out.parquet.dropped.jsonl").read_text().splitlines()
    assert json.loads(dropped)["reason"] == "near-duplicate: of a, similarity 1.000"
    (tmp_path / "out.parquet").unlink()
    again = chosen(tmp_path, prompts, embedding_step("http://127.0.0.1:9/v1"))
    assert again.sha256 == selection.sha256


def test_a_prompt_of_an_evaluation_problem_in_other_words_is_dropped(tmp_path: Path) -> None:
    tests = {"type": "stdin", "cases": [{"input": "", "output": "1"}]}
    leaked = {"problem_id": "e", "prompt": "Sum a pair of values.", "tests": tests}
    (tmp_path / "eval.jsonl").write_text(json.dumps(leaked))
    prompts = {"a": "Add two numbers.", "c": "Sort them."}
    with serving(MockServer(embeds=lambda text: MEANINGS[text.removeprefix("query: ")])) as mock:
        steps = embedding_step(mock.url, ', against = ["eval.jsonl"], instruction = "query: "')
        chosen(tmp_path, prompts, steps)
    assert list(left(tmp_path)) == ["c"]


@pytest.mark.parametrize(
    ("embeds", "message"),
    [(lambda text: [1.0] * len(text), "vectors of different lengths"), (lambda text: [], "no usable answer")],
)
def test_a_server_that_gives_no_vectors_drops_no_problem(tmp_path: Path, embeds: Any, message: str) -> None:
    with serving(MockServer(embeds=embeds)) as mock, pytest.raises((CannotFilter, NotAnswered), match=message):
        chosen(tmp_path, {"a": "Add.", "b": "Subtract."}, embedding_step(mock.url))
    assert not (tmp_path / "out.parquet").exists()


@given(st.integers(0, 2**32), st.integers(0, 40), st.integers(1, 300), st.sampled_from([0.5, 0.8, 0.95]))
@settings(max_examples=6, deadline=None)
def test_near_vectors_are_those_of_a_plain_loop(seed: int, num_fixed: int, num_rows: int, threshold: float) -> None:
    """In three dimensions many are near. More rows than a block are compared."""
    vectors = np.random.default_rng(seed).normal(size=(num_fixed + num_rows, 3)).astype(np.float32)
    vectors[random.Random(seed).randrange(len(vectors))] = 0
    found = near_earlier(vectors, num_fixed, threshold)
    lengths = np.linalg.norm(vectors, axis=1)
    kept = list(range(num_fixed))
    for row in range(num_fixed, len(vectors)):
        cosines = {
            other: float(vectors[row] @ vectors[other] / max(lengths[row] * lengths[other], 1e-30)) for other in kept
        }
        best = max(cosines.values(), default=-1.0)
        near = found[row - num_fixed]
        if abs(best - threshold) < 1e-4:  # rounding decides
            best = threshold if near is not None else -1.0
        assert (near is not None) == (best >= threshold)
        if near is None:
            kept.append(row)
        else:
            assert abs(cosines[near[0]] - max(cosines.values())) < 1e-4
