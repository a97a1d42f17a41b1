"""What is read from a proposer's answer, and the judgement on it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.config import SelfPlaySection
from nouscoder.self_play.judgement import (
    Judgement,
    Proposal,
    ProposalRejected,
    Rejection,
    check_reference,
    judged,
    proposal_text,
    proposing_prompt,
    read_proposal,
)

BOUNDS = SelfPlaySection()
_RIGHT = (
    "<question>Add one.</question>",
    "<program>\nprint(int(input())+1)\n</program>",
    '<inputs>["1","2","3"]</inputs>',
)
_words = st.lists(
    st.text("abc123 ", min_size=1, max_size=6).map(str.strip).filter(bool), min_size=3, max_size=10, unique=True
)


def answer(*, question: str = _RIGHT[0], program: str = _RIGHT[1], inputs: str = _RIGHT[2]) -> str:
    return "\n".join((question, program, inputs))


@given(st.text("abc .{}'", min_size=1).map(str.strip).filter(bool), _words)
def test_a_written_proposal_is_read_again(statement: str, inputs: list[str]) -> None:
    text = proposal_text(statement, "print(1)", [f"{line}\n" for line in inputs])
    assert read_proposal(text, BOUNDS) == Proposal(statement, "print(1)", tuple(f"{line}\n" for line in inputs))


def test_reasoning_fences_and_several_proposals() -> None:
    fenced = answer(program="<program>\nHere it is:\n```python\nprint(2)\n```\n</program>")
    found = read_proposal(f"<think>hm</think>\n{answer()}\nBetter:\n{fenced}", BOUNDS)
    assert (found.statement, found.program, found.inputs) == ("Add one.", "print(2)", ("1\n", "2\n", "3\n"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", Rejection.NO_PROPOSAL),
        (answer(question="<question> \n</question>"), Rejection.NO_PROPOSAL),
        (answer(program="<program>"), Rejection.NO_PROPOSAL),
        (answer(program="<program>\n</program>"), Rejection.NO_PROPOSAL),
        (answer(inputs="<inputs>1, 2, 3</inputs>"), Rejection.NO_PROPOSAL),
        (answer(inputs="<inputs>[1, 2, 3]</inputs>"), Rejection.NO_PROPOSAL),
        (answer(inputs=f"<inputs>{'[' * 100_000}</inputs>"), Rejection.NO_PROPOSAL),
        (answer(inputs=f"<inputs>{'9' * 10_000}</inputs>"), Rejection.NO_PROPOSAL),
        (answer(inputs='<inputs>["1","1\\n","2"]</inputs>'), Rejection.FEW_INPUTS),
        (answer(question=f"<question>{'a' * 8001}</question>"), Rejection.TOO_LONG),
        (answer(program=f"<program>{'a' * 8001}</program>"), Rejection.TOO_LONG),
        (answer(inputs=f"<inputs>{json.dumps(['a' * 3000, 'b' * 3000, 'c' * 3000])}</inputs>"), Rejection.TOO_LONG),
    ],
    ids=lambda value: value[-30:] if isinstance(value, str) else "",
)
def test_what_is_no_proposal(text: str, reason: Rejection) -> None:
    with pytest.raises(ProposalRejected) as refused:
        read_proposal(text, BOUNDS)
    assert refused.value.reason is reason


@given(st.text())
def test_any_text_is_a_proposal_or_rejected_and_can_be_stored(text: str) -> None:
    try:
        found = read_proposal(text + answer(question=f"<question>{text}?</question>"), BOUNDS)
    except ProposalRejected:
        return
    texts = [found.statement, found.program, *found.inputs, found.problem_id]
    assert [text.encode().decode() for text in texts] == texts


def test_half_of_a_surrogate_pair_becomes_a_mark() -> None:
    found = read_proposal(
        answer(question="<question>a\ud800</question>", inputs='<inputs>["\\ud800","1","2"]</inputs>'),
        BOUNDS,
    )
    assert (found.statement, found.inputs[0]) == ("a?", "?\n")


def test_inputs_after_the_last_that_is_used_are_left_out() -> None:
    assert read_proposal(answer(), SelfPlaySection(min_inputs=2, max_inputs=2)).inputs == ("1\n", "2\n")


def test_the_prompt_shows_the_example_and_no_brace_of_it_counts() -> None:
    assert (
        proposing_prompt("Not this:\n{example}\nbut {x}", " print {0} {example} \n")
        == "Not this:\nprint {0} {example}\nbut {x}"
    )


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        (["1\n", None, "3\n"], Rejection.REFERENCE_FAILS),
        (["yes\n", " yes", "yes\n\n"], Rejection.CONSTANT_OUTPUT),
        (["", "", " \n"], Rejection.CONSTANT_OUTPUT),
    ],
)
def test_a_reference_that_is_not_usable(outputs: list[str | None], reason: Rejection) -> None:
    with pytest.raises(ProposalRejected) as refused:
        check_reference(outputs)
    assert refused.value.reason is reason
    check_reference(["1\n", "", "2"])


_outputs = st.sampled_from([("1", "2"), ("1\n", " 2 "), ("2", "3"), ("3", "4"), ("1", None), (None, None)])


@given(st.lists(_outputs, min_size=2, max_size=12), st.integers(1, 4))
def test_a_judgement_follows_the_votes(solvers: list[tuple[str | None, ...]], agree: int) -> None:
    found = judged(("1", "2"), solvers, agree)
    whole = [tuple(str(one).split()[0] for one in outputs) for outputs in solvers if None not in outputs]
    right = whole.count(("1", "2"))
    others = max(whole.count(("2", "3")), whole.count(("3", "4")))
    assert found.pass_rate == right / len(solvers)
    accepted = agree <= right < len(solvers) and not (others > right and others >= agree)
    assert (found.reason is None) == accepted
    rate = found.pass_rate
    assert found.reward == pytest.approx(4 * rate * (1 - rate) if accepted else 0, abs=1e-12)
    assert 0 <= found.reward <= 1
    if found.reason is Rejection.OTHER_ANSWER:
        assert others > right


def test_a_mistaken_reference_is_outvoted_and_a_problem_that_all_solve_is_not_learnable() -> None:
    right, wrong = ("2", "3"), ("1", "2")
    assert judged(wrong, [right] * 3 + [wrong] * 2, 2).reason is Rejection.OTHER_ANSWER
    assert judged(wrong, [right] * 3 + [wrong] * 3, 2).reason is None, "a tie is not outvoted"
    assert judged(right, [right] * 4, 2).reason is Rejection.ALWAYS_SOLVED
    assert judged(right, [right] + [(None, None)] * 3, 2).reason is Rejection.FEW_AGREE
    assert Judgement(None, "", 0.5).reward == 1
