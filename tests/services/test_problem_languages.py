"""A problem's languages decide what is asked for, what is a program in an answer, and how it is graded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from tests.scripted_turns import ScriptedSampler
from tests.services.test_verifier_worker import ListBroker, settled, working

from nouscoder.config import Config, ConfigError, EnvironmentSection, VerifierSection, load_config
from nouscoder.config.run import EvaluationSection
from nouscoder.data.importers.run import import_files
from nouscoder.data.problem_index import IndexedProblem, held_out_problems, open_index, open_index_of
from nouscoder.data.problem_parquet import load_problems
from nouscoder.data.problems import save_problems
from nouscoder.domain.lease import Lease, LeasedGrading
from nouscoder.domain.problem import Problem
from nouscoder.domain.reward import RewardTerms, reward_of
from nouscoder.domain.rollout import Rollout, Sampling, Task
from nouscoder.domain.submission import Prelude, StdinCase, StdinTests, Tests
from nouscoder.domain.verdict import VerdictKind
from nouscoder.errors import Unusable
from nouscoder.evaluation import evaluate as evaluating
from nouscoder.evaluation.samples import SamplingSettings
from nouscoder.generation.environments.prompts import SingleTurn
from nouscoder.grade_files.grade_file import FileRequest, grade_file
from nouscoder.policy_folder.tokenizer import PolicyTokenizer
from nouscoder.rpc.pairs import RULES
from nouscoder.rpc.verifier_client import VerifierClient
from nouscoder.run import languages as run_languages
from nouscoder.run import preflight, token_limits
from nouscoder.store.rollout_record import encode_rollout
from nouscoder.verifier.grading.grader import local_grader
from nouscoder.verifier.toolchains.languages import installed, registry

# A row of PrimeIntellect/verifiable-coding-problems, shortened.
CPP_ROW = {
    "source": "codeforces",
    "task_type": "verifiable_code",
    "problem_id": "vcp-cpp",
    "prompt": "Solve the following coding problem using the programming language cpp:\n\nPrint the sum of two numbers.",
    "gold_standard_solution": "```cpp\n#include <iostream>\nint main() { int a, b; std::cin >> a >> b; "
    "std::cout << a + b; }\n```",
    "verification_info": json.dumps(
        {
            "language": "cpp",
            "test_cases": [{"fn_name": None, "input": "1 2\n", "output": "3\n", "type": "stdin_stdout"}],
        }
    ),
}
IN_CPP = CPP_ROW["gold_standard_solution"]
IN_PYTHON = "```python\nprint(sum(map(int, input().split())))\n```"
SUM = StdinTests((StdinCase("1 2\n", "3\n"),))
TOLD = "Write the program in C++, in a block that begins with ```cpp."


class OneProblem(ListBroker):
    """Leases one rollout, whose tests it has."""

    def __init__(self, problem: IndexedProblem, text: str, tests: Tests) -> None:
        super().__init__(())
        rules = RULES.of(RULES.to(problem.rules))
        self.waiting = [LeasedGrading(Lease("l", 5.0, 1), "r", problem.problem_id, text, "", rules)]
        self._tests = tests

    @asynccontextmanager
    async def opened(self, digest: str) -> AsyncIterator[Tests]:
        yield self._tests


async def test_answers_in_the_languages_of_a_problem_are_accepted_in_a_run(
    tmp_path: Path, tokenizer: PolicyTokenizer
) -> None:
    """Import, prompt, rollout, verifier, reward. The row was rejected; before that, the answer was a compile_error."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(CPP_ROW) + "\n")
    import_files("synthetic1", [tmp_path / "rows.jsonl"], tmp_path / "cpp.parquet")
    (imported,) = load_problems(tmp_path / "cpp.parquet")
    problems = [
        imported,
        Problem("both", "Add.", SUM, languages=("cpp", "python"), prelude=Prelude.LCB),
        Problem("python", "Add.", SUM, prelude=Prelude.LCB),
    ]
    save_problems(tmp_path / "problems.jsonl", problems)
    expected = {
        ("vcp-cpp", IN_CPP): VerdictKind.ACCEPTED,
        ("vcp-cpp", IN_PYTHON): VerdictKind.NO_CODE,
        ("both", IN_CPP): VerdictKind.ACCEPTED,
        ("both", f"{IN_CPP}\nOr shorter:\n{IN_PYTHON}"): VerdictKind.ACCEPTED,
        ("both", "```cpp\nprint(1)\n```"): VerdictKind.COMPILE_ERROR,
        ("python", IN_PYTHON): VerdictKind.ACCEPTED,
        ("python", IN_CPP): VerdictKind.NO_CODE,
    }
    found: dict[tuple[str, str], VerdictKind] = {}
    rewards = set()
    with closing(open_index_of(tmp_path / "problems.jsonl")) as index:
        async with local_grader(VerifierSection()) as grader:
            for problem_id, answer in expected:
                problem = index.problem(problem_id)
                rollout, prompt = await sampled(problem, answer, tokenizer)
                assert (TOLD in prompt) == (problem_id == "vcp-cpp")
                broker = OneProblem(problem, rollout.text, SUM)
                async with working(broker, grader):
                    await settled(lambda broker=broker: bool(broker.verdicts))  # type: ignore[misc]
                (verdict,) = broker.verdicts["r"]
                found[problem_id, answer] = verdict.kind
                header, _ = encode_rollout(rollout)
                rewards.add((verdict.kind, reward_of(header, verdict, RewardTerms())))
    assert found == expected
    assert rewards == {
        (VerdictKind.ACCEPTED, 1.0),
        (VerdictKind.NO_CODE, -1.0),
        (VerdictKind.COMPILE_ERROR, -1.0),
    }


async def sampled(problem: IndexedProblem, answer: str, tokenizer: PolicyTokenizer) -> tuple[Rollout, str]:
    """The rollout with this answer, and the text of its prompt."""
    sampler = ScriptedSampler(answer)
    task = Task(
        *("r", "g", problem.problem_id, problem.prompt, Sampling(max_new_tokens=400)), languages=problem.languages
    )
    rollout = await SingleTurn(tokenizer, EnvironmentSection()).rollout(task, sampler)
    return rollout, tokenizer.decode(sampler.requests[0].prompt_token_ids)


def run_of(tmp_path: Path, train: list[Problem], held_out: list[Problem], *more: str) -> Config:
    save_problems(tmp_path / "train.jsonl", train)
    save_problems(tmp_path / "held_out.jsonl", held_out)
    return load_config(
        None, [f"problems.train={tmp_path}/train.jsonl", f"problems.held_out={tmp_path}/held_out.jsonl", *more]
    )


def in_languages(*languages: tuple[str, ...]) -> list[Problem]:
    return [Problem(f"p{number}", "Add.", SUM, languages=own) for number, own in enumerate(languages)]


TRAIN = in_languages(("python",), ("cpp",), ("rust",), ("cpp", "rust"), ("go",), ("python",))


@pytest.fixture
def without_rust(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has Python, C++ and Ruby."""
    here = dict.fromkeys(["python", "cpp", "ruby"], registry()["python"])
    monkeypatch.setattr(run_languages, "installed", lambda: here)


@pytest.mark.usefixtures("without_rust")
def test_a_local_run_leaves_out_problems_of_languages_that_it_lacks_with_their_number(tmp_path: Path) -> None:
    """Each answer to such a problem was an internal_error, until the rollout was given up."""
    given = run_of(tmp_path, TRAIN, in_languages(("python",), ("rust",)))
    config = run_languages.with_languages(given)
    assert config.problems.languages == ("cpp", "python")
    with closing(open_index(config)) as index:
        assert index.problem_ids == ("p0", "p1", "p5")
        assert dict(index.in_others) == {"p2": ("rust",), "p3": ("cpp", "rust"), "p4": ("go",)}
        assert sorted(index.all_ids) == [one.problem_id for one in TRAIN]
    assert [one.problem_id for one in held_out_problems(config)] == ["p0"]
    assert token_limits.left_out_lines(config) == [
        "3 of 6 training problems are left out: they allow go, rust, and problems.languages is cpp, python",
        "1 of 2 held-out problems are left out: they allow rust, and problems.languages is cpp, python",
    ]
    assert list(preflight._problem_faults(config)) == []
    python = run_of(tmp_path, in_languages(("python",), ("cpp",)), in_languages(("python",)))
    assert run_languages.with_languages(python) is python, "nothing is left out, so nothing is set"
    own = tmp_path / "own.jsonl"
    save_problems(own, in_languages(("rust",), ("python",)))
    python = python.model_copy(update={"evaluation": EvaluationSection(problems=str(own))})
    python.in_run_folder(python.problems.held_out).unlink()
    config = run_languages.with_languages(python)
    assert config.problems.languages == ("cpp", "python")
    assert [one.problem_id for one in held_out_problems(config)] == ["p1"], "those of a file of their own too"


@pytest.mark.usefixtures("without_rust")
def test_a_run_of_which_no_problem_is_left_is_refused(tmp_path: Path) -> None:
    config = run_languages.with_languages(run_of(tmp_path, in_languages(("rust",)), in_languages(("go",))))
    assert list(preflight._problem_faults(config)) == [
        "problems.train: no problem is left to train on: 1 of 1 training problems are left out: they allow rust, and"
        " problems.languages is python; nouscoder doctor says how to get it",
        "problems.held_out: no problem is left to evaluate on: 1 of 1 held-out problems are left out: they allow go,"
        " and problems.languages is python; nouscoder doctor says how to get it",
    ]
    asked = run_of(tmp_path, TRAIN, in_languages(("python",)), 'problems.languages=["python", "Rust"]')
    assert run_languages.with_languages(asked) is asked, "what a person gives stays"
    assert list(preflight._language_faults(asked)) == [
        "problems.languages: rust is not on this machine, and problems need it: nouscoder doctor says how to get it"
    ]
    with pytest.raises(ConfigError, match=r"problems\.languages.*'brainfuck' is none of bash"):
        run_of(tmp_path, TRAIN, [], 'problems.languages=["brainfuck"]')


async def test_a_run_is_refused_whose_verifier_lacks_a_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def languages(self: VerifierClient) -> frozenset[str]:
        asked.append(self.name)
        return frozenset({"python", "cpp"})

    monkeypatch.setattr(VerifierClient, "languages", languages)
    held_out = in_languages(("python",))
    external = run_of(tmp_path, TRAIN, held_out, "run.services=external")
    await run_languages.require_languages(external)
    assert not (tmp_path / "train.jsonl.index").exists(), "building the index is the broker's work"
    open_index(external).close()
    with pytest.raises(Unusable) as refused:
        await run_languages.require_languages(external)
    assert str(refused.value) == (
        "the verifier lacks go, rust, in which 3 of 6 training problems may be answered: install it where candidates"
        ' run, or leave them out with problems.languages = ["cpp", "python"]'
    )
    kept = run_of(tmp_path, TRAIN, held_out, 'problems.languages=["cpp", "python"]')
    await run_languages.require_languages(kept)
    await run_languages.require_languages(run_of(tmp_path, held_out, held_out))
    assert len(asked) == 2, "problems in Python need no question"


def sample(problem_id: str, **fields: str) -> dict[str, str]:
    return {"task_id": problem_id, **fields}


def test_samples_are_graded_and_evaluated_in_their_languages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nouscoder grade --problems` and `nouscoder eval --samples`; each was graded as Python."""
    if "perl" not in installed():
        pytest.skip("no perl here")
    problems = [Problem("both", "Add.", SUM, languages=("perl", "python")), Problem("python", "Add.", SUM)]
    problems.append(Problem("nobody", "Add.", SUM, languages=("r", "python")))
    save_problems(tmp_path / "problems.jsonl", problems)
    perl = "my ($a, $b) = split ' ', <STDIN>; print $a + $b;"
    python = "print(sum(map(int, input().split())))"
    samples = [
        sample("both", code=perl),
        sample("both", code=python, language="Python3"),
        sample("both", completion=f"```py\n{python}\n```"),
        sample("both", completion=f"```\n{perl}\n```"),
        sample("both", code=python),
        sample("both", completion=f"```js\n{python}\n```"),
        sample("python", code=python),
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    config = load_config(None, [])
    monkeypatch.setattr(
        evaluating, "installed", lambda: {name: one for name, one in installed().items() if name != "r"}
    )
    request = FileRequest(tmp_path / "samples.jsonl", tmp_path / "verdicts.jsonl", problems=tmp_path / "problems.jsonl")
    grade_file(request, config)
    verdicts = [json.loads(line)["verdict"] for line in (tmp_path / "verdicts.jsonl").read_text().splitlines()]
    assert [verdict == "accepted" for verdict in verdicts] == [True, True, True, True, False, False, True], verdicts
    assert verdicts[5] == "no_code"
    record = evaluating.evaluate(
        evaluating.EvaluationRequest(
            *(tmp_path / "problems.jsonl", tmp_path / "evaluation", SamplingSettings("")),
            samples=tmp_path / "samples.jsonl",
        ),
        config,
    )
    by_language = {row["name"]: row["value"] for row in record["profiles"]["process"]["by"]["language"]}
    assert by_language == {"perl, python": pytest.approx(4 / 6), "python": 1.0}
    assert "1 of 3 problems are left out: they allow r, which the verifier lacks" in capsys.readouterr().err
