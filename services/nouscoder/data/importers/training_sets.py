"""Sets made for training: Nemotron's competitive coding, rStar-Coder, SYNTHETIC-2, KodCode, mathematics and reasoning.

Nemotron (nvidia/Nemotron-RL-coding-competitive_coding, and Cascade's data of this layout), JSON lines of NeMo Gym:
responses_create_params {input: [{role, content}]}, verifier_metadata {problem_id, unit_tests {inputs, outputs,
fn_name}}, hash_id, dataset, source. It is judged as there: 10 s a test. Source: NVIDIA-NeMo/Gym,
resources_servers/code_gen (configs/code_gen.yaml).

rStar-Coder (microsoft/rStar-Coder, the parts seed_testcase and synthetic_rl_testcase): question_id, question, inputs,
outputs; seed_testcase also has starter_code, func_name and class_name. Inputs and outputs are lists, or their JSON.

SYNTHETIC-2 and SYNTHETIC-2-RL (PrimeIntellect): problem_id, prompt, verification_info (JSON) and, for each model,
MODEL_avg_reward. The problem_id begins with the type of the task: prime_rl_code has test_cases {inputs, outputs,
fn_name}, verifiable_math has a ground_truth. Source: genesys of PrimeIntellect-ai/prime-rl.

KodCode (KodCode/KodCode-V1 and its SFT parts): question, solution, test, a file of tests for pytest that imports the
module `solution`, and test_info, a list of {function_declaration, ...}. Source: KodCode-AI/kodcode.

For a function, an input is the list of its arguments, or a text with one argument in JSON a line, as in LiveCodeBench.

Math sets: a problem and its answer, compared by math-verify. The fields are those of MATH-500, DeepScaleR, AIME, GSM8K
and DAPO-Math: problem, question or prompt (text, or chat messages), and answer, final_answer, ground_truth,
reward_model.ground_truth or expected_answer. Without any of them, the answer is the last boxed one of `solution`, or
what follows #### (GSM8K).

Generated reasoning tasks, answered by a program that reads nothing and prints the answer: SymBench, BIG-Bench Hard and
Reasoning Gym. A row has a question (question, input or prompt) and the text of its answer (answer or target). BIG-Bench
Hard keeps its rows in `examples` of one object; a row may also be such an object's example.
"""

from __future__ import annotations

import re
from typing import Any

from nouscoder.data.importers import contests
from nouscoder.data.importers.fields import (
    ANSWERS,
    QUESTIONS,
    Reason,
    Rejected,
    Row,
    asked_of,
    at_path,
    decoded,
    facts_of,
    imported_libraries,
    optional_text,
    pairs,
    references,
    stdin_tests,
    text,
    verified_answer,
)
from nouscoder.data.importers.rows import Format, example_rows
from nouscoder.data.problems import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import (
    AssertTests,
    CallTests,
    Limits,
    MathCase,
    MathTests,
    Prelude,
    Profile,
    StdinCase,
    StdinTests,
)
from nouscoder.formats.public_shapes import test_names


def read_nemotron(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. The prompt is the messages, as published, with their instructions."""
    question, facts = asked_of(row.get("responses_create_params") or {}, "input")
    about = row.get("verifier_metadata") or {}
    tests = decoded(about.get("unit_tests") or row.get("unit_tests") or {})
    problem = Problem(
        problem_id=optional_text(row, "hash_id") or optional_text(about, "problem_id") or f"nemotron-{number}",
        prompt=question,
        tests=_tests(tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")),
        limits=Limits(wall_time_s=10.0, cpu_time_s=10.0),
        prelude=Prelude.LCB,
        profile=Profile.CODE_GEN,
        source="nemotron",
        family=optional_text(row, "source", "dataset"),
    )
    return ReferencedProblem(problem, metadata=facts)


def _tests(inputs: Any, outputs: Any, function: Any) -> StdinTests | CallTests:
    found = pairs(decoded(inputs), decoded(outputs))
    if not function:
        return stdin_tests(found)
    if all(isinstance(value, str) for pair in found for value in pair):
        cases = [{"input": given, "output": wanted, "testtype": "functional"} for given, wanted in found]
        return contests.lcb_tests(cases, {"func_name": str(function)})
    given, wanted = zip(*found, strict=True)
    return contests.tests_of({"inputs": list(given), "outputs": list(wanted), "fn_name": function})


def read_rstar_coder(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. Only methods of `class Solution` can be called."""
    if (owner := optional_text(row, "class_name")) not in ("", "Solution"):
        raise Rejected(Reason.UNSUPPORTED, f"the tests call methods of class {owner:.60}")
    problem = Problem(
        problem_id=optional_text(row, "question_id") or f"rstar-{number}",
        prompt=text(row, "question"),
        tests=_tests(row.get("inputs"), row.get("outputs"), optional_text(row, "func_name")),
        prelude=Prelude.LCB,
        starter_code=optional_text(row, "starter_code"),
        source="rstar_coder",
        family=optional_text(row, "test_case_type"),
    )
    return ReferencedProblem(problem)


_TASK = re.compile(r"(?P<type>.+)_\d+")
_REWARD = "_avg_reward"


def read_synthetic2(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. The models' mean rewards go to the metadata."""
    problem_id = optional_text(row, "problem_id") or f"synthetic2-{number}"
    named = _TASK.fullmatch(problem_id)
    kind = optional_text(row, "task_type") or (named["type"] if named else "")
    info = decoded(row.get("verification_info") or "{}")
    if not isinstance(info, dict):
        raise Rejected(Reason.UNREADABLE_TESTS, "verification_info is not a record")
    problem = Problem(
        problem_id=problem_id,
        prompt=text(row, "prompt"),
        tests=_verified_by(info, kind),
        prelude=Prelude.LCB if "test_cases" in info else Prelude.NONE,
        source="synthetic2",
        family=kind,
    )
    return ReferencedProblem(problem, metadata=facts_of(row, *(name for name in row if name.endswith(_REWARD))))


def _verified_by(info: dict[str, Any], kind: str) -> StdinTests | CallTests | MathTests:
    if "test_cases" in info:
        cases = decoded(info["test_cases"])
        if isinstance(cases, dict):
            return _tests(cases.get("inputs"), cases.get("outputs"), cases.get("fn_name"))
        return contests.case_tests(cases)
    if kind != "verifiable_math":
        raise Rejected(Reason.NOT_VERIFIABLE, f"a task of the type {kind or 'unknown':.60}")
    return verified_answer(info)


_MODULE = "solution"
_FACTS = ("subset", "style", "gpt_pass_percentage", "r1_pass_percentage", "r1_correctness")


def pytest_tests(code: str) -> AssertTests:
    """The test functions of a file for pytest, which imports the program as `solution`. Raises Rejected."""
    if _MODULE not in imported_libraries([code]):
        raise Rejected(Reason.UNREADABLE_TESTS, f"the tests do not import the module {_MODULE}")
    cases = tuple(test_names(code))
    if not cases:
        raise Rejected(Reason.NO_TESTS, "there is no test function")
    return AssertTests(cases, code, _MODULE)


def read_kodcode(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. Each test function is a case, which pytest runs."""
    about = decoded(row.get("test_info") or [])
    heads = [optional_text(one, "function_declaration") for one in about if isinstance(one, dict)]
    problem = Problem(
        problem_id=optional_text(row, "question_id") or f"kodcode-{number}",
        prompt=text(row, "question"),
        tests=pytest_tests(text(row, "test", "test_code")),
        difficulty=optional_text(row, "gpt_difficulty"),
        starter_code="\n\n".join(filter(None, heads)),
        source="kodcode",
        family=optional_text(row, "subset"),
    )
    return ReferencedProblem(problem, references(row.get("solution")), facts_of(row, *_FACTS))


# Mathematics and reasoning.

ANSWER_TEMPLATE = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{}."
_ANSWERS = ("answer", "final_answer", "ground_truth", "expected_answer", "Answer", "reward_model.ground_truth")
_MAX_ANSWER = 4000


def read_math(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row."""
    answer = _answer(row).strip()
    if not answer:
        raise Rejected(Reason.NO_ANSWER, "no field holds an answer, and the solution has no box")
    if len(answer) > _MAX_ANSWER:
        raise Rejected(Reason.TOO_LARGE, f"the answer has {len(answer)} characters")
    question, facts = asked_of(row, "problem", "question", "Problem", "prompt")
    problem = Problem(
        problem_id=optional_text(row, "unique_id", "problem_id", "id", "ID") or f"math-{number}",
        prompt=question,
        tests=MathTests((MathCase(answer),)),
        prompt_template=ANSWER_TEMPLATE,
        difficulty=optional_text(row, "level", "difficulty"),
        source=optional_text(row, "source", "data_source") or "math",
        family=optional_text(row, "subject", "type"),
    )
    return ReferencedProblem(problem, metadata=facts)


def _answer(row: Row) -> str:
    found = ""
    for name in _ANSWERS:
        value = at_path(row, name)
        match value:
            case [only]:  # OlympiadBench, Minerva
                value = only
        found = optional_text({name: value}, name)
        if found:
            break
        if not (value is None or value == [] or isinstance(value, str | float)):
            raise Rejected(Reason.NO_ANSWER, f"{name} is not one answer: {value!r:.60}")
    solution = optional_text(row, "solution", "Solution")
    if "####" in (said := found or solution):  # GSM8K, also with the answer in the solution alone
        return said.rpartition("####")[2].replace(",", "")
    return found or last_box(solution)


def last_box(solution: str) -> str:
    """What is inside the last box of LaTeX; empty when there is none, or its braces do not match."""
    begin = solution.rfind("\\boxed{")
    if begin < 0:
        return ""
    depth, begin = 1, begin + len("\\boxed{")
    for at in range(begin, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[at], 0)
        if depth == 0:
            return solution[begin:at]
    return ""


_REASONING_TEMPLATE = "{prompt}\n\nWrite a Python program that finds the answer and prints only the answer."


def read_reasoning(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row."""
    answer = optional_text(row, *ANSWERS)
    if not answer:
        raise Rejected(Reason.NO_ANSWER, "neither answer nor target has a value")
    problem = Problem(
        problem_id=optional_text(row, "id") or f"reasoning-{number}",
        prompt=text(row, *QUESTIONS),
        tests=StdinTests((StdinCase("", answer),)),
        prompt_template=_REASONING_TEMPLATE,
        source="reasoning",
        family=_kind(row.get("metadata")) or optional_text(row, "task", "dataset"),
    )
    return ReferencedProblem(problem)


def _kind(metadata: object) -> str:
    """The generator that Reasoning Gym names in a record or its JSON; empty where there is none."""
    try:
        about = decoded(metadata)
    except Rejected:
        return ""
    return optional_text(about, "source_dataset") if isinstance(about, dict) else ""


FORMATS = {
    "nemotron": Format(read_nemotron, "Nemotron-RL competitive coding, data of NeMo Gym"),
    "rstar_coder": Format(read_rstar_coder, "rStar-Coder, seed_testcase and synthetic_rl_testcase"),
    "synthetic2": Format(read_synthetic2, "PrimeIntellect SYNTHETIC-2 and SYNTHETIC-2-RL"),
    "kodcode": Format(read_kodcode, "KodCode-V1, tests for pytest"),
    "math": Format(read_math, "math sets: MATH-500, DeepScaleR, AIME, GSM8K, DAPO-Math"),
    "reasoning": Format(read_reasoning, "SymBench, BIG-Bench Hard, Reasoning Gym", example_rows),
}
