"""Each filter keeps and drops what it says, and a selection is the same whenever it is made again."""

# ruff: noqa: RUF001

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.openai_mock import MockServer, completion, serving
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.config import load_config
from nouscoder.data.filters.duplicates import NearIndex, NgramHasher, jaccard, rows_per_band
from nouscoder.data.filters.run import FILTERS, Selection, import_missing, read_recipe, select
from nouscoder.data.filters.step import CannotFilter
from nouscoder.data.filters.words import words_of
from nouscoder.data.problem_parquet import column, load_problems, read_parquet
from nouscoder.data.problems import ReferencedProblem
from nouscoder.errors import Unusable
from nouscoder.grade_files.answers import GradingTarget

ROOT = Path(__file__).parents[2]

# A search for leaks of an evaluation set.
RECIPE = """name = "leaks"
inputs = ["problems.jsonl"]
[[steps]]
filter = "decontaminate"
against = ["eval.jsonl"]
boilerplate = 100
[[steps]]
filter = "near_duplicates"
against = ["eval.jsonl"]
"""
WORDS = [f"{first}{last}" for first in "bdfgklmnprst" for last in ("a", "ebo", "ila", "omu", "unde", "arik", "ost")]
PHRASE = "The first line of the input has one integer, the number of test cases. Print the answer for each."


def made_up_text(seed: object, length: int = 60) -> str:
    """Words in random order, the same for a seed."""
    return " ".join(random.Random(str(seed)).choices(WORDS, k=length))


def leak(evaluation: Sequence[str], number: int) -> str:
    """A third is equal but for case and punctuation, a third has nine words in a row, a third has one other word."""
    draw = random.Random(number)
    words = evaluation[draw.randrange(len(evaluation))].split()
    match number % 3:
        case 0:
            return ", ".join(words).upper() + "!"
        case 1:
            at = draw.randrange(len(words) - 9)
            excerpt = " ".join(words[at : at + 9])
            return f"{made_up_text(('before', number))} {excerpt} {made_up_text(('after', number))}"
        case _:
            words[draw.randrange(len(words))] = "changed"
            return " ".join(words)


def plant(num_problems: int, num_leaks: int, folder: Path) -> set[str]:
    """Write problems.jsonl and eval.jsonl. Returns the ids of the problems that leak. PHRASE is no leak."""
    own = [made_up_text(("eval", at)) for at in range(400)]
    write_lines(folder / "eval.jsonl", [problem(f"e{at}", f"{text} {PHRASE}") for at, text in enumerate(own)])
    rows = [problem(f"p{at}", f"{made_up_text(at)} {PHRASE}") for at in range(num_problems - num_leaks)]
    rows += [problem(f"leak{at}", leak(own, at)) for at in range(num_leaks)]
    random.Random(1).shuffle(rows)
    write_lines(folder / "problems.jsonl", rows)
    return {f"leak{at}" for at in range(num_leaks)}


def problem(name: str, prompt: str, num_tests: int = 1, **more: Any) -> dict[str, Any]:
    cases = [{"input": f"{name} {at}\n", "output": f"{name} {at}\n"} for at in range(num_tests)]
    return {"problem_id": name, "prompt": prompt, "tests": {"type": "stdin", "cases": cases}, **more}


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chosen(
    folder: Path, rows: Sequence[dict[str, Any]], steps: str, out: str = "out.parquet", name: str = "problems.jsonl"
) -> tuple[list[str], Selection]:
    """The problem ids that are left, and the selection."""
    write_lines(folder / name, rows)
    recipe = folder / f"{out}.toml"
    recipe.write_text(f'name = "test"\ninputs = ["{name}"]\n{steps}')
    selection = select(read_recipe(recipe), folder / out)
    return [item.problem.problem_id for item in read_parquet(folder / out)], selection


RULES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ('filter = "num_tests"\nat_least = 5', problem("good", "A", 5), problem("bad", "B", 4)),
    ('filter = "num_tests"\nat_most = 4', problem("good", "A", 4), problem("bad", "B", 5)),
    ('filter = "tests_size"\nat_most_bytes = 200', problem("good", "A", 2), problem("bad", "B", 20)),
    (
        'filter = "tests_type"\nallowed = ["math"]',
        problem("good", "A") | {"tests": {"type": "math", "cases": [{"expected": "1"}]}},
        problem("bad", "B"),
    ),
    ('filter = "prompt_length"\nat_least_characters = 5', problem("good", "Count."), problem("bad", "Sum")),
    ('filter = "prompt_length"\nat_most_characters = 5', problem("good", "Sum"), problem("bad", "Count.")),
    ('filter = "prompt_script"', problem("good", "Écris la somme: 1 + 2 = x"), problem("bad", "给定两个整数 n")),
    ('filter = "no_urls"', problem("good", "Print www and http."), problem("bad", "See https://x.org/a.")),
    ('filter = "no_images"', problem("good", "An image of f!"), problem("bad", "See ![](a) below.")),
    ('filter = "no_images"', problem("good", "print(x.png_size)"), problem("bad", "See graph-1.png below.")),
    (
        'filter = "metadata"\nkey = "platform"\nallowed = ["atcoder"]\nunknown = "drop"',
        problem("good", "A", metadata={"platform": "atcoder"}),
        problem("bad", "B", metadata={"platform": "leetcode"}),
    ),
    (
        'filter = "dates"\nsince = "2024-08-01"',
        problem("good", "A", metadata={"contest_date": "2024-08-01T00:00:00"}),
        problem("bad", "B", metadata={"contest_date": "2024-07-31 23:59:59"}),
    ),
    (
        'filter = "dates"\nbefore = "2024-08-01"\nkey = "date"\nunknown = "drop"',
        problem("good", "A", metadata={"date": "2024-07-31"}),
        problem("bad", "B", metadata={"contest_date": "2024-07-31"}),
    ),
]


@pytest.mark.parametrize(
    ("step", "good", "bad"), RULES, ids=[f"{at}-{rule[1]['prompt']}" for at, rule in enumerate(RULES)]
)
def test_a_rule_keeps_the_good_problem_and_drops_the_bad_one(
    tmp_path: Path, step: str, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    left, selection = chosen(tmp_path, [bad, good], f"[[steps]]\n{step}")
    assert left == ["good"]
    [counts] = selection.steps
    assert (counts.num_in, counts.num_out, sum(counts.dropped.values())) == (2, 1, 1)


@pytest.mark.parametrize("size", [500, pytest.param(20_000, marks=pytest.mark.soak)])
def test_exactly_the_planted_leaks_are_found(tmp_path: Path, size: int) -> None:
    wanted = plant(size, 50, tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    select(read_recipe(tmp_path / "recipe.toml"), tmp_path / "out.parquet")
    left = set(column(tmp_path / "out.parquet", "problem_id"))
    searched = {problem.problem_id for problem in load_problems(tmp_path / "problems.jsonl")}
    assert len(searched) == size
    assert searched - left == wanted


def test_a_dropped_problem_says_which_words_it_shares(tmp_path: Path) -> None:
    write_lines(tmp_path / "eval.jsonl", [problem("e7", "one two three four five six seven eight nine ten")])
    rows = [problem("leak", "x one TWO three four-five six seven eight nine"), problem("near", made_up_text(1))]
    left, _ = chosen(tmp_path, rows, '[[steps]]\nfilter = "decontaminate"\nagainst = ["eval.jsonl"]')
    assert left == ["near"]
    [dropped] = map(json.loads, (tmp_path / "out.parquet.dropped.jsonl").read_text().splitlines())
    assert dropped["step"] == "1 decontaminate"
    assert dropped["reason"] == "9 equal words: eval.jsonl: e7 has 'one two three four five six seven eight nine'"


def test_eight_equal_words_are_no_leak(tmp_path: Path) -> None:
    write_lines(tmp_path / "eval.jsonl", [problem("e", "one two three four five six seven eight nine")])
    rows = [problem("kept", "one two three four five six seven eight ten")]
    assert chosen(tmp_path, rows, '[[steps]]\nfilter = "decontaminate"\nagainst = ["eval.jsonl"]')[0] == ["kept"]


def test_the_first_of_equal_prompts_is_kept(tmp_path: Path) -> None:
    rows = [problem("a", "Add two numbers."), problem("b", "add  two numbers"), problem("c", "Add three numbers.")]
    assert chosen(tmp_path, rows, '[[steps]]\nfilter = "exact_duplicates"')[0] == ["a", "c"]


def test_equal_prompts_with_other_starter_code_are_no_duplicates(tmp_path: Path) -> None:
    codes = {"a": "def add(a, b):", "b": "def mul(a, b):", "c": "def add(a,  b):\n", "d": ""}
    rows = [problem(name, "Complete the function.", starter_code=code) for name, code in codes.items()]
    assert chosen(tmp_path, rows, '[[steps]]\nfilter = "exact_duplicates"')[0] == ["a", "b"]


@pytest.mark.parametrize("step", ["exact_duplicates", "near_duplicates", "decontaminate"])
def test_a_question_in_the_starter_code_is_compared_as_one_in_the_prompt(tmp_path: Path, step: str) -> None:
    """MultiPL-E's problems have one prompt, and the question in the comment before the function."""
    asked = {name: f"# {made_up_text(name)}\nf() {{" for name in ("own", "held", "leak")}
    rows = [problem(name, "Complete this function.", starter_code=code) for name, code in asked.items()]
    rows[2]["starter_code"] = asked["held"]
    write_lines(tmp_path / "eval.jsonl", [problem("e", "Complete this function.", starter_code=asked["held"])])
    against = "" if step == "exact_duplicates" else 'against = ["eval.jsonl"]'
    left, _ = chosen(tmp_path, rows, f'[[steps]]\nfilter = "{step}"\n{against}')
    assert left == (["own"] if against else ["own", "held"])


def test_near_duplicates_are_those_of_the_exact_similarity() -> None:
    draw = random.Random(5)
    texts = []
    for group in range(60):
        words = made_up_text(group, 80).split()
        for _ in range(5):
            changed = [draw.choice(WORDS) if draw.random() < draw.choice((0.01, 0.05)) else word for word in words]
            texts.append(" ".join(changed))
    index, hasher, wrong = NearIndex(0.8, 5), NgramHasher(5), 0
    kept: list[set[int]] = []
    for name, one in enumerate(texts):
        shingles = sorted(set(hasher(words_of(one)).tolist()))
        similar = [other for other in kept if len(set(shingles) & other) / len(set(shingles) | other) >= 0.8]
        found = index.add(str(name), one)
        wrong += (found is not None) != bool(similar)
        if found is None:
            kept.append(set(shingles))
    assert 60 <= len(kept) < 300  # some were near, some were not
    assert wrong == 0


def test_the_bands_miss_fewer_than_one_pair_in_a_thousand_at_the_threshold() -> None:
    for threshold in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0):
        assert (1 - threshold ** rows_per_band(threshold)) ** 32 <= 1e-3


def test_jaccard_of_sorted_arrays() -> None:
    hashes = NgramHasher(1)(["a", "b", "c", "d"])
    hashes.sort()
    assert jaccard(hashes[:3], hashes[1:]) == 0.5


def rates(folder: Path, counts: dict[str, tuple[int, int]]) -> None:
    lines = [{"problem_id": name, "passed": passed, "sampled": sampled} for name, (passed, sampled) in counts.items()]
    write_lines(folder / "rates.jsonl", lines)


COUNTS = {"never": (0, 8), "hard": (1, 8), "half": (4, 8), "easy": (7, 8), "always": (8, 8)}
ALL = [problem(name, name) for name in (*COUNTS, "unknown")]


@pytest.mark.parametrize(
    ("bounds", "left"),
    [
        ("above = 0\nbelow = 1", ["hard", "half", "easy"]),
        ("below = 1\nunknown = 'keep'", ["never", "hard", "half", "easy", "unknown"]),
        ("at_most = 0.5", ["never", "hard", "half"]),
        ("above = 0.5", ["easy", "always"]),
        ("k = 8\nat_least = 1", ["hard", "half", "easy", "always"]),
    ],
)
def test_pass_rates_are_in_the_bounds(tmp_path: Path, bounds: str, left: list[str]) -> None:
    rates(tmp_path, COUNTS)
    steps = f'[[steps]]\nfilter = "pass_rate"\nfile = "rates.jsonl"\n{bounds}'
    assert chosen(tmp_path, ALL, steps.replace("above = 0\n", "above = 0.0\n").replace("= 1\n", "= 1.0\n"))[0] == left


def test_the_table_of_difficulty_and_the_pass_rates_are_recorded(tmp_path: Path) -> None:
    rates(tmp_path, COUNTS)
    steps = '[[steps]]\nfilter = "pass_rate"\nfile = "rates.jsonl"\nabove = 0.0'
    _, selection = chosen(tmp_path, ALL, steps)
    assert list(selection.steps[0].table.values()) == [1, 1, 1, 0, 1, 1]
    items = {item.problem.problem_id: item.metadata for item in read_parquet(tmp_path / "out.parquet")}
    assert items["hard"] == {"pass_rate": "1/8"}


def test_potential_is_highest_where_half_of_the_rollouts_pass(tmp_path: Path) -> None:
    rates(tmp_path, {f"p{passed}": (passed, 8) for passed in range(9)} | {"q4": (4, 8)})
    rows = [problem(name, name) for name in (*(f"p{passed}" for passed in range(9)), "q4")]
    steps = '[[steps]]\nfilter = "potential"\nfile = "rates.jsonl"\nshare = 0.4'
    left, _ = chosen(tmp_path, rows, steps)
    assert left == ["p3", "p4", "p5", "q4"]
    items = {item.problem.problem_id: item.metadata for item in read_parquet(tmp_path / "out.parquet")}
    assert items["p4"] == {"potential": "1.0000", "potential_quartile": "1"}


def test_the_hardest_share_has_the_lowest_pass_rates(tmp_path: Path) -> None:
    """AceCoder trains on the hardest 25 % of its problems."""
    names = [f"p{number}" for number in range(8)]
    rates(tmp_path, {name: (number, 8) for number, name in enumerate(names)})
    rows = [problem(name, name) for name in reversed(names)]
    left, _ = chosen(tmp_path, rows, '[[steps]]\nfilter = "hardest"\nfile = "rates.jsonl"\nshare = 0.25')
    assert left == ["p1", "p0"]


def test_answers_of_an_evaluation_choose_by_their_length_and_by_how_many_parse(tmp_path: Path) -> None:
    """AceReason drops problems with short answers of a strong model; Klear those whose answers do not parse."""
    program, math = "```python\nprint(1)\n```", {"type": "math", "cases": [{"expected": "1"}]}
    samples = [
        {"problem_id": "short", "completion": program, "num_tokens": 1000},
        {"problem_id": "short", "completion": program, "num_tokens": 2999},
        {"problem_id": "long", "completion": program, "num_tokens": 2000},
        {"problem_id": "unclear", "completion": "I think so.", "num_tokens": 5000},
        {"problem_id": "unclear", "code": "print(1)", "num_tokens": 5000, "finish_reason": "stop"},
        {"problem_id": "boxed", "completion": "So \\boxed{\\frac{1}{2}}.", "num_tokens": 5000},
        {"problem_id": "open", "completion": "So \\boxed{1", "num_tokens": 5000},
    ]
    write_lines(tmp_path / "samples.jsonl", samples)
    rows = [problem(name, name) for name in ("short", "long", "unclear", "none")]
    rows += [problem(name, name) | {"tests": math} for name in ("boxed", "open")]
    step = '[[steps]]\nfilter = "answers"\nfile = "samples.jsonl"\n'
    assert chosen(tmp_path, rows, step + "at_least_tokens = 2000")[0] == ["long", "unclear", "boxed", "open"]
    assert chosen(tmp_path, rows, step + "parse_share = 0.6", "b.parquet")[0] == ["short", "long", "boxed"]
    assert chosen(tmp_path, rows, step + 'at_most_tokens = 2000\nunknown = "keep"', "c.parquet")[0] == [
        *("short", "long", "none")
    ]


def test_the_smoke_subset_is_64_learnable_problems_of_a_seed(tmp_path: Path) -> None:
    names = [f"p{number}" for number in range(300)]
    rates(tmp_path, {name: (number % 9, 8) for number, name in enumerate(names)})
    rows = [problem(name, name) for name in names]
    steps = (
        '[[steps]]\nfilter = "pass_rate"\nfile = "rates.jsonl"\nabove = 0.0\nbelow = 1.0\n'
        '[[steps]]\nfilter = "sample"\ncount = 64\nseed = '
    )
    one, _ = chosen(tmp_path, rows, steps + "1", "one.parquet")
    again, _ = chosen(tmp_path, rows[::-1], steps + "1", "again.parquet")
    other, _ = chosen(tmp_path, rows, steps + "2", "other.parquet")
    assert len(one) == 64
    assert all(int(name[1:]) % 9 not in (0, 8) for name in one)
    assert set(one) == set(again) != set(other)


def test_a_selection_has_the_same_hash_again_and_another_one_for_other_problems(tmp_path: Path) -> None:
    rows = [problem(f"p{at}", made_up_text(at), at % 8 + 1, references=["print(1)"]) for at in range(40)]
    steps = '[[steps]]\nfilter = "num_tests"\nat_least = 5'
    (tmp_path / "other").mkdir()
    one = chosen(tmp_path, rows, steps)[1]
    again = chosen(tmp_path / "other", rows, steps)[1]
    more = chosen(tmp_path, rows, steps.replace("5", "6"), "more.parquet")[1]
    from_parquet = tmp_path / "parquet.toml"
    from_parquet.write_text(f'name = "test"\ninputs = ["out.parquet"]\n{steps}')
    second = select(read_recipe(from_parquet), tmp_path / "second.parquet", str(tmp_path / "store"))
    assert one.sha256 == again.sha256 == second.sha256 != more.sha256
    assert one.recipe_sha256 == again.recipe_sha256 != more.recipe_sha256
    record = json.loads((tmp_path / "out.parquet.selection.json").read_text())
    assert (record["sha256"], record["problems"], record["steps"][0]["num_in"]) == (one.sha256, 20, 40)
    assert read_all(tmp_path / "out.parquet") == read_all(tmp_path / "second.parquet")
    assert len(load_problems(tmp_path / "second.parquet")) == 20
    assert not list(tmp_path.glob("*.part"))


def read_all(path: Path) -> list[ReferencedProblem]:
    return list(read_parquet(path))


def test_each_problem_is_kept_or_dropped_by_one_step(tmp_path: Path) -> None:
    rows = [problem(f"p{at}", made_up_text(at, 4 + at % 3), at % 8 + 1) for at in range(60)]
    steps = (
        '[[steps]]\nfilter = "num_tests"\nat_least = 4\n[[steps]]\nfilter = "prompt_length"\nat_most_characters = 18'
    )
    left, selection = chosen(tmp_path, rows, steps)
    dropped = [json.loads(line)["problem_id"] for line in (tmp_path / "out.parquet.dropped.jsonl").open()]
    assert sorted([*left, *dropped]) == sorted(row["problem_id"] for row in rows)
    assert [(step.num_in, step.num_out) for step in selection.steps] == [
        (60, selection.steps[1].num_in),
        (selection.steps[1].num_in, len(left)),
    ]
    assert 0 < len(left) < selection.steps[1].num_in < 60


def test_tests_are_never_all_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a parquet file no test is read at all, so no number of tests can fill the memory."""
    rows = [problem(f"p{at}", made_up_text(at), 3) for at in range(20)]
    chosen(tmp_path, rows, '[[steps]]\nfilter = "num_tests"')
    recipe = tmp_path / "again.toml"
    recipe.write_text('name = "a"\ninputs = ["out.parquet"]\n[[steps]]\nfilter = "exact_duplicates"')

    def no_case(*_: object) -> None:
        raise AssertionError("a test was read")

    monkeypatch.setattr("nouscoder.store.case_files.CaseFile.case", no_case)
    assert select(read_recipe(recipe), tmp_path / "again.parquet").problems == 20


WRONG = [
    ("inputs = []", "inputs"),
    ('steps = [{filter = "num_test", at_least = 5}]', "'num_test' is not a filter: did you mean num_tests?"),
    (
        'steps = [{filter = "num_tests", atleast = 5}]',
        "step 1 (num_tests): unknown key atleast: did you mean at_least?",
    ),
    ('steps = [{filter = "decontaminate"}]', "step 1 (decontaminate): against is missing"),
    ('steps = [{filter = "decontaminate", against = ["none.jsonl"]}]', "there is no file"),
    ('steps = [{filter = "pass_rate", file = "rates.jsonl"}]', "give above, below, at_least or at_most"),
    ('steps = [{filter = "sample", count = 0}]', "step 1 (sample): count: must be greater than or equal to 1"),
    ("steps = [", "cannot be read"),
]


@pytest.mark.parametrize(("line", "sentence"), WRONG)
def test_a_wrong_recipe_gets_one_clear_sentence(tmp_path: Path, line: str, sentence: str) -> None:
    write_lines(tmp_path / "problems.jsonl", ALL)
    lines = {"name": 'name = "x"', "inputs": 'inputs = ["problems.jsonl"]', "steps": 'steps = [{filter = "no_urls"}]'}
    lines[line.partition(" ")[0]] = line
    (tmp_path / "recipe.toml").write_text("\n".join(lines.values()))
    answer = CliRunner().invoke(
        app, ["data", "filter", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "o.parquet")]
    )
    assert isinstance(answer.exception, CannotFilter)
    assert sentence in str(answer.exception)
    assert not (tmp_path / "o.parquet").exists()


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ('{"problem_id": "half", "passed": 9, "sampled": 8}', "record 1: passed 9 is more than sampled 8"),
        ('{"problem_id": "half", "sampled": 8}', "record 1: passed: Field required"),
        ('{"problem_id": "stranger", "passed": 1, "sampled": 8}', "has none of the problems"),
    ],
)
def test_a_wrong_file_of_pass_rates_gets_one_clear_sentence(tmp_path: Path, lines: str, sentence: str) -> None:
    (tmp_path / "rates.jsonl").write_text(lines)
    with pytest.raises(Unusable, match=sentence):
        chosen(tmp_path, ALL, '[[steps]]\nfilter = "pass_rate"\nfile = "rates.jsonl"\nbelow = 1.0')
    assert not list(tmp_path.glob("out.parquet*")) or [*tmp_path.glob("out.parquet*")] == [
        tmp_path / "out.parquet.toml"
    ]


def test_the_same_name_twice_and_an_empty_selection_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ALL)
    (tmp_path / "r.toml").write_text('name = "r"\ninputs = ["a.jsonl", "a.jsonl"]\nsteps = [{filter = "no_urls"}]')
    with pytest.raises(CannotFilter, match="'never' is in the inputs twice"):
        select(read_recipe(tmp_path / "r.toml"), tmp_path / "r.parquet")
    with pytest.raises(CannotFilter, match="no problem is left: num_tests 6 -> 0"):
        chosen(tmp_path, ALL, '[[steps]]\nfilter = "num_tests"\nat_least = 2')


def test_the_command_prints_counts_and_hash(tmp_path: Path) -> None:
    write_lines(tmp_path / "problems.jsonl", [problem("a", "A", 5), problem("b", "B", 2)])
    recipe = tmp_path / "r.toml"
    recipe.write_text('name = "five"\ninputs = ["problems.jsonl"]\nsteps = [{filter = "num_tests", at_least = 5}]')
    answer = CliRunner().invoke(app, ["data", "filter", str(recipe), "--out", str(tmp_path / "o.parquet")])
    assert answer.exit_code == 0, answer.output
    lines = answer.stdout.splitlines()
    assert lines[2].split() == ["num_tests", "2", "1"]
    assert lines[3].split() == ["too", "few", "tests", "-1"]
    record = json.loads((tmp_path / "o.parquet.selection.json").read_text())
    assert lines[-1] == f"{tmp_path / 'o.parquet'}: 1 problems, 5 tests, sha256 {record['sha256']}"


def test_the_document_names_every_filter() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf8")
    names = [kind.model_fields["filter"].annotation.__args__[0] for kind in FILTERS]  # type: ignore[union-attr]
    assert [name for name in names if f"`{name}`" not in text] == []


PUBLISHED = {
    "deepcoder": ["num_tests", "references_pass", "exact_duplicates", "near_duplicates"],
    "klear-reasoner": ["exact_duplicates", "decontaminate", "num_tests"],
    "skywork-or1": [
        *("no_urls", "no_images", "exact_duplicates", "embedding_duplicates"),
        *("references_pass", "pass_rate", "judge_votes"),
    ],
    "acecoder": ["num_tests", "hardest"],
    "acereason": ["decontaminate", "tests_type", "pass_rate"],
    "acereason-7b": ["pass_rate"],
    "acereason-math": ["no_images", "prompt_script", "pass_rate", "answers"],
    "nemotron-cascade": ["tests_type", "decontaminate", "pass_rate", "pass_rate"],
    "nouscoder": ["decontaminate", "pass_rate"],
    "skywork-or1-7b": ["pass_rate"],
    "skywork-or1-32b": ["pass_rate"],
    "nouscoder-smoke": ["pass_rate", "pass_rate", "sample"],
}


def unlike_vector(text: str) -> list[float]:
    source = random.Random(text)
    return [source.gauss(0, 1) for _ in range(32)]


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "data").glob("*.toml")), ids=lambda file: file.stem)
def test_a_published_selection_is_made_from_files_of_its_names(tmp_path: Path, file: Path) -> None:
    names = [f"p{number}" for number in range(8)]
    tree = tomllib.loads(file.read_text())
    named = [*tree["inputs"], *(name for step in tree["steps"] for name in step.get("against", ()))]
    for at, name in enumerate(dict.fromkeys(named)):
        noted = {step["metadata"]: "5/16" for step in tree["steps"] if "metadata" in step}
        about = {"references": ["print(input())"], "metadata": noted}
        rows = [problem(f"{at}-{one}", made_up_text((at, one)), 20, **about) for one in names]
        write_lines(tmp_path / "rows.jsonl", rows)
        copy = tmp_path / "copy.toml"
        copy.write_text('name = "x"\ninputs = ["rows.jsonl"]\nsteps = [{filter = "num_tests"}]')
        select(read_recipe(copy), tmp_path / name)
    for step in tree["steps"]:
        if "file" in step:
            counts = {f"0-{name}": number * 5 % 17 for number, name in enumerate(names)}
            measured = {"sampled": 16, "completion": "print(1)", "num_tokens": 3000}
            lines = [{"problem_id": name, "passed": count, **measured} for name, count in counts.items()]
            (tmp_path / step["file"]).parent.mkdir(exist_ok=True)
            write_lines(tmp_path / step["file"], lines)
    section = load_config(None, ['verifier.sandbox.backend="fake"']).verifier
    mock = MockServer(lambda request: completion("VERDICT: YES"), embeds=unlike_vector)
    with serving(mock):
        copy.write_text(re.sub(r"http://127.0.0.1:800\d/v1", mock.url, file.read_text()))
        recipe = read_recipe(copy, tmp_path)
        selection = select(recipe, tmp_path / "out.parquet", grading=GradingTarget(section))
    assert [step.filter for step in recipe.steps] == PUBLISHED[file.stem]
    assert 0 < selection.problems <= selection.steps[0].num_in


def test_every_published_selection_is_tested() -> None:
    assert {file.stem for file in (ROOT / "configs" / "data").glob("*.toml")} == set(PUBLISHED)


def test_a_file_that_was_imported_otherwise_is_not_taken_for_the_recipes(tmp_path: Path) -> None:
    row = {"question": "Add.", "input_output": json.dumps({"inputs": ["1"], "outputs": ["2"]}), "difficulty": "easy"}
    write_lines(tmp_path / "apps.jsonl", [{"problem_id": 1, **row}, {"problem_id": 2, **row}])
    recipe = tmp_path / "recipe.toml"
    text = (
        'name = "x"\ninputs = ["p.parquet"]\n[[steps]]\nfilter = "num_tests"\nat_least = 1\n'
        '[imports."p.parquet"]\nformat = "apps"\nfiles = ["apps.jsonl"]\n'
    )
    recipe.write_text(text)
    assert len(list(import_missing(read_recipe(recipe)))) == 1
    assert list(import_missing(read_recipe(recipe))) == []
    recipe.write_text(text + "max_tests = 2\n")
    with pytest.raises(CannotFilter, match=r"p.parquet was imported without max_tests, and .* with max_tests 2"):
        list(import_missing(read_recipe(recipe)))


def test_the_dropped_problems_are_written_also_when_none_is_left(tmp_path: Path) -> None:
    write_lines(tmp_path / "eval.jsonl", [problem("e", "Print a + b.")])
    step = '[[steps]]\nfilter = "decontaminate"\nagainst = ["eval.jsonl"]'
    with pytest.raises(CannotFilter, match=r"decontaminate 1 -> 0; .*dropped\.jsonl has .* equal prompt: eval\.jsonl"):
        chosen(tmp_path, [problem("a", "print a+b")], step)
    [dropped] = map(json.loads, (tmp_path / "out.parquet.dropped.jsonl").read_text().splitlines())
    assert dropped["problem_id"] == "a"


@pytest.mark.parametrize(("num_equal", "is_said"), [(2, False), (3, True)])
def test_a_step_that_drops_more_than_a_fifth_is_said(tmp_path: Path, num_equal: int, is_said: bool) -> None:
    rows = [problem(str(number), f"Print {max(number, num_equal)}.") for number in range(10)]
    text = chosen(tmp_path, rows, '[[steps]]\nfilter = "exact_duplicates"')[1].text()
    assert ("more than 20% are dropped" in text) == is_said


def test_an_equation_with_other_signs_is_no_leak(tmp_path: Path) -> None:
    held = ["Solve x^2 - 5x - 6 = 0 for the larger root.", "题目：给定长度为n的整数数组，请计算最大和。谢谢"]
    write_lines(tmp_path / "eval.jsonl", [problem(f"h{at}", prompt) for at, prompt in enumerate(held)])
    rows = [
        problem("math", "Solve x^2 - 5x + 6 = 0 for the larger root."),
        problem("zh", "给定长度为n的整数数组，请计算最大和。"),
    ]
    left, _ = chosen(tmp_path, rows, '[[steps]]\nfilter = "decontaminate"\nagainst = ["eval.jsonl"]')
    assert left == ["math"]
