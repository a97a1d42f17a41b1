"""Code inside reasoning has one verdict, whether the policy or the prompt has written the opening tag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_eval import write_problems
from tests.openai_mock import MockServer, serving
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.domain.reasoning import UnknownPrompts, begun_by, opened_by

CODE = "try\n```python\nprint('p0')\n```\n"  # cut inside its reasoning
CLOSED = CODE + "</think>\nDone."


def run(*arguments: object) -> Any:
    answer = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert answer.exit_code == 0, answer.output
    return answer


def test_messages_whose_last_one_begins_the_answer_open_its_reasoning() -> None:
    begun = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>\n"}]
    assert opened_by(begun) == "<think>\n"
    assert opened_by([{"role": "user", "content": "Use <think>"}]) == opened_by([]) == opened_by(None) == ""
    assert begun_by(begun, CODE) == "<think>\n" + CODE
    assert begun_by(begun, "<think>" + CODE) == "<think>" + CODE, "once"


def test_only_completions_that_contradict_their_prompts_are_warned_of() -> None:
    unknown = UnknownPrompts()
    for text in (CLOSED, "<think>" + CODE, "<think>a</think>b"):
        unknown.add(text)
    assert not unknown.warning()
    unknown.add(CODE)
    assert "1 completions close" in unknown.warning()
    assert "1 have no tag" in unknown.warning()


def whole(text: str) -> dict[str, Any]:
    """An answer of a server that does not separate reasoning."""
    return {"choices": [{"message": {"content": text}, "finish_reason": "length"}]}


def graded(folder: Path) -> list[str]:
    return [json.loads(line)["verdict"] for line in (folder / "verdicts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("command", ["eval", "sft sample"])
def test_a_server_whose_template_opens_reasoning_gets_the_verdicts_of_training(command: str, tmp_path: Path) -> None:
    problems, out = write_problems(tmp_path / "problems.jsonl"), tmp_path / "out"
    problems.write_text(problems.read_text().splitlines(keepends=True)[0])
    texts = iter([CODE, CLOSED, CODE, CLOSED])
    with serving(MockServer(lambda _: whole(next(texts)))) as server:
        asked = [*command.split(), problems, "--url", server.url, "--model", "m", "--n", 2, "--at-once", 1]
        kept = (out if command == "eval" else Path(f"{out}.samples")) / "samples.jsonl"
        assert "--prefill '<think>'" in run(*asked, "--out", out).stderr
        assert sorted(graded(kept.parent)) == ["accepted", "no_code"]
        answer = run("eval", problems, "--samples", kept, "--prefill", "<think>", "--out", tmp_path / "again")
        assert "--prefill" not in answer.stderr, "all is known"
        assert graded(tmp_path / "again") == ["no_code", "no_code"]
        other = tmp_path / "other"
        run(*asked, "--prefill", "<think>", "--out", other)
        assert graded(other if command == "eval" else Path(f"{other}.samples")) == ["no_code", "no_code"]
    if command == "sft sample":
        assert {json.loads(line)["completion"][:7] for line in other.read_text().splitlines()} == {"<think>"}


def test_submissions_without_a_prompt_are_warned_of_or_said_by_an_option(tmp_path: Path) -> None:
    file, tests = tmp_path / "file.jsonl", {"type": "stdin", "cases": [{"input": "", "output": "p0\n"}]}
    prompt = [{"role": "assistant", "content": "<think>"}]
    lines = [{"completion": CODE, "prompt": "Print p0.", "tests": tests}, {"completion": CLOSED, "tests": tests}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = run("grade", file)
    assert [json.loads(line)["verdict"] for line in answer.stdout.splitlines()] == ["accepted", "no_code"]
    assert "--prefill '<think>'" in answer.stderr
    answer = run("grade", file, "--prefill", "<think>")
    assert [json.loads(line)["verdict"] for line in answer.stdout.splitlines()] == ["no_code", "no_code"]
    assert "--prefill" not in answer.stderr
    problems = write_problems(tmp_path / "problems.jsonl")
    file.write_text(json.dumps({"task_id": "p0", "completion": CODE, "prompt": prompt}) + "\n")
    answer = run("grade", file, "--problems", problems)
    assert json.loads(answer.stdout.splitlines()[0])["verdict"] == "no_code"
    assert "ends with none of <think>" in str(
        CliRunner().invoke(app, ["grade", str(file), "--prefill", "<b>"]).exception
    )
