"""The guards: each warns of its sign and of nothing else, once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nouscoder.config import GuardsSection
from nouscoder.domain.guards import (
    WINDOW,
    BatchFigures,
    Guard,
    Thresholds,
    ends_in_repetition,
    looks_hard_coded,
    repeated_share,
    warnings,
)
from nouscoder.run.guard_watch import GuardWatch
from nouscoder.run.learning_signal import SamplerMismatch

HEALTHY = BatchFigures(
    entropy=0.3,
    length=100.0,
    repetition_share=0.0,
    hard_coding_share=0.0,
    same_programs=0.2,
    model_reward_correlation=0.5,
    mismatch=0.05,
)
LIMITS = Thresholds(
    entropy_floor=0.05,
    repetition_share=0.1,
    length_drift=2.0,
    hard_coding_share=0.05,
    same_programs=0.9,
    reward_hacking=0.1,
    mismatch=0.1,
    mismatch_stop=0.5,
)


@pytest.mark.parametrize(
    ("figures", "guard"),
    [
        (replace(HEALTHY, entropy=0.04), Guard.ENTROPY_FLOOR),
        (replace(HEALTHY, repetition_share=0.2), Guard.REPETITION),
        (replace(HEALTHY, length=201.0), Guard.LENGTH_DRIFT),
        (replace(HEALTHY, length=49.0), Guard.LENGTH_DRIFT),
        (replace(HEALTHY, hard_coding_share=0.06), Guard.HARD_CODING),
        (replace(HEALTHY, same_programs=0.95), Guard.SAME_PROGRAMS),
        (replace(HEALTHY, model_reward_correlation=0.05), Guard.REWARD_HACKING),
        (replace(HEALTHY, model_reward_correlation=-0.9), Guard.REWARD_HACKING),
        (replace(HEALTHY, mismatch=0.2), Guard.MISMATCH),
    ],
)
def test_each_guard_warns_of_its_own_sign(figures: BatchFigures, guard: Guard) -> None:
    assert set(warnings([HEALTHY] * WINDOW + [figures] * WINDOW, LIMITS)) == {guard}
    assert warnings([figures] * WINDOW + [HEALTHY] * WINDOW, LIMITS).keys() <= {Guard.LENGTH_DRIFT}


def test_nothing_is_said_of_healthy_few_or_missing_figures() -> None:
    assert warnings([HEALTHY] * 40, LIMITS) == {}
    assert warnings([replace(HEALTHY, entropy=0.0)] * (WINDOW - 1), LIMITS) == {}
    assert warnings([BatchFigures(None, None, None, None, None)] * 40, LIMITS) == {}


def test_a_threshold_of_0_turns_a_guard_off() -> None:
    ill = BatchFigures(0.0, 1000.0, 1.0, 1.0, same_programs=1.0, model_reward_correlation=-1.0, mismatch=9.0)
    assert warnings([HEALTHY] * WINDOW + [ill] * WINDOW, Thresholds(0, 0, 0, 0, 0, 0, 0, 0)) == {}
    assert set(warnings([HEALTHY] * WINDOW + [ill] * WINDOW, LIMITS)) == set(Guard)


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=9))
def test_the_repeated_share_counts_what_others_of_the_group_have_written(names: list[str]) -> None:
    texts = [f"Answer {index}.\n```python\n# {index}\n\nprint({name!r})  \n```" for index, name in enumerate(names)]
    assert repeated_share(texts) == (len(names) - len(set(names))) / (len(names) - 1)


def test_a_group_of_one_has_no_repeated_share() -> None:
    assert repeated_share(["print(1)"]) is None
    assert repeated_share(["", ""]) == 1.0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.lists(st.integers(6, 99), max_size=300))
def test_a_loop_at_the_end_is_a_repetition(loop: list[int], before: list[int]) -> None:
    assert ends_in_repetition(before + loop * (600 // len(loop) + 1))


@given(st.integers(64, 1000))
def test_tokens_that_never_repeat_are_none(count: int) -> None:
    assert not ends_in_repetition(range(count))
    assert not ends_in_repetition([7] * 63)  # too short to judge


SOLUTION = """Some thoughts.
```python
n = int(input())
if n == 0:
    print(0)
elif n == 1:
    print(1)
else:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    print(a)
```
"""
CASES = "\n".join(f'if s == "{k}":\n    print("{k * k}")' for k in range(4))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (SOLUTION, False),
        ("class Solution:\n    def f(self, n):\n        return n + 1", False),
        ("print(42)", True),
        (f"```python\ns = input()\n{CASES}\n```", True),
        (f"def f(s):\n{CASES.replace('print(', 'return (')}", True),
        ("", False),
        ("no program at all", False),
        ("```python\nprint(1)\n```\nBetter:\n```python\nprint(int(input()) * 2)\n```", False),
        ("```python\n" + "if " * 50_000, False),
    ],
)
def test_hard_coded_programs_are_distinguished_from_solutions(text: str, found: bool) -> None:
    assert looks_hard_coded(text) is found


def lines(*mismatches: float | None, first: int = 0) -> str:
    """Lines of batches of two steps, of which only the first has fresh rollouts."""
    found = []
    for number, mismatch in enumerate(mismatches, first):
        of_step = {} if mismatch is None else {"mismatch_fresh_abs_mean": mismatch}
        found += [{"batch_id": number, "entropy": 0.5, **of_step}, {"batch_id": number, "entropy": 0.5}]
    return "".join(json.dumps(line) + "\n" for line in found)


def test_a_mismatch_is_said_at_the_first_step_and_a_large_one_ends_the_run(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    watch = GuardWatch(tmp_path, GuardsSection())
    file.write_text(lines(0.046, 0.05, None))
    assert watch.look() == []
    file.write_text(lines(0.046, 0.05, None, 0.2))
    (said,) = watch.look()
    assert said.startswith("warning: mismatch: the learner's log-probabilities")
    assert "by 0.200 nats on average, more than 0.1" in said
    for cause in ("weights", "tokenizer", "chat template", "temperature"):
        assert cause in said
    assert watch.look() == []
    assert watch.standing == [said], "as `nouscoder status` says it"
    file.write_text(lines(0.046, 0.05, None, 0.2, 4.4))
    with pytest.raises(SamplerMismatch, match=r"the run ended: .* by 4.400 nats on average, more than 0.5 .*Mend it"):
        watch.look()
    assert GuardWatch(tmp_path, GuardsSection()).standing[0].startswith("warning: mismatch: ")


def test_a_resumed_run_is_not_ended_by_the_batches_before(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(lines(4.4))
    watch = GuardWatch(tmp_path, GuardsSection())
    assert len(watch.look()) == 1
    file.write_text(lines(4.4, 0.01))
    assert watch.look() == []
    off = GuardWatch(tmp_path, GuardsSection(mismatch=0, mismatch_stop=0))
    file.write_text(lines(4.4, 0.01, 4.4))
    assert off.look() == []


def test_a_warning_is_said_by_name_and_once_until_it_is_over(tmp_path: Path) -> None:
    watch = GuardWatch(tmp_path, GuardsSection())
    file = tmp_path / "metrics.jsonl"
    assert watch.look() == []
    batch = 0

    def add(count: int, entropy: float) -> list[str]:
        nonlocal batch
        with file.open("a") as out:
            for _ in range(count):
                for _step in range(2):
                    out.write(json.dumps({"batch_id": batch, "entropy": entropy, "response_length": 9.0}) + "\n")
                batch += 1
            out.write('{"batch_id": 99')  # a line that is being written
            out.flush()
            said = watch.look()
            out.truncate(file.stat().st_size - len('{"batch_id": 99'))
        return said

    assert add(WINDOW, 0.5) == []
    assert add(WINDOW, 0.0) == ["warning: entropy_floor: the entropy 0.0000 is below 0.01"]
    assert add(1, 0.0) == []
    assert add(WINDOW, 0.5) == []
    assert len(add(WINDOW, 0.0)) == 1
