"""What becomes of the messages of a chat, and of prompts that a chat template has written, in an import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.services.test_data_import import SUM_ROWS, jsonl
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.data.importers.run import import_files, rejections_of
from nouscoder.data.problem_parquet import read_parquet
from nouscoder.data.problems import save_problems

SYSTEM = {"role": "system", "content": "Never use input()."}
USER = {"role": "user", "content": "Add."}
EARLIER = [{"role": "user", "content": "Print 1."}, {"role": "assistant", "content": "print(1)"}]


def row(name: str, messages: Any) -> dict[str, Any]:
    """A row of a format with these messages."""
    match name:
        case "generic":
            return {"prompt": messages, "tests": SUM_ROWS}
        case "math":
            return {"prompt": messages, "reward_model": {"ground_truth": "3"}}
        case "skywork" | "klear":
            truth = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
            return {"prompt": messages, "reward_model": {"ground_truth": truth}}
        case _:
            tests = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
            asked = {"input": messages}
            return {"responses_create_params": asked, "verifier_metadata": {"unit_tests": tests}}


@pytest.mark.parametrize("name", ["generic", "math", "skywork", "klear", "nemotron"])
def test_no_message_is_lost_and_what_became_of_them_is_said(tmp_path: Path, name: str) -> None:
    parts = [{"type": "input_text", "text": "Never use input()."}]
    given: list[Any] = [
        [SYSTEM, USER],
        [{"role": "developer", "content": parts}, USER],
        json.dumps([SYSTEM, USER]),
        [USER],
        [*EARLIER, USER],
        [USER, {"role": "assistant", "content": "<think>"}],
        [SYSTEM],
        [{"role": "user", "content": "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n"}],
    ]
    file = jsonl(tmp_path / "rows.jsonl", *(row(name, messages) for messages in given))
    summary = import_files(name, [file], tmp_path / "out.parquet")
    prompts = [one.problem.prompt for one in read_parquet(tmp_path / "out.parquet")]
    assert prompts[:-1] == ["Never use input().\n\nAdd."] * 3 + ["Add."]
    assert summary.rejected == {"several_turns": 2, "missing_field": 1}
    details = [line["detail"] for line in rejections_of(Path(summary.rejections))]
    assert "user, assistant, user" in details[0]
    said = summary.text()
    assert "\n3 system messages stand before the user's message in the prompt\n" in said
    assert "\n1 prompts begin with marks of a chat template: " in said


LOST = [
    ({"prompt": f" [\n{json.dumps(SYSTEM)},\n {json.dumps(USER)}]"}, ""),
    ({"prompt": json.dumps([{"from": "human", "value": "Add."}])}, "prompt is a list of records without `role`"),
    ({"prompt": [{"from": "human", "value": "Add."}]}, "prompt is a list of records without `role`"),
    ({"prompt": "Add what the picture shows. <image>", "images": [{"bytes": "iVBOR"}]}, "pictures in images"),
    ({"prompt": "Add.", "images": []}, ""),
    ({"prompt": "Add.", "image": "python:3.11"}, ""),
    (
        {"prompt": [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "Add."}]}]},
        "a part of a message is no text",
    ),
]


@pytest.mark.parametrize(("asked", "reason"), LOST)
def test_what_a_text_cannot_hold_is_rejected_and_not_dropped(
    tmp_path: Path, asked: dict[str, Any], reason: str
) -> None:
    file = jsonl(tmp_path / "rows.jsonl", row("generic", "Add."), row("generic", "") | asked)
    summary = import_files("generic", [file], tmp_path / "out.parquet")
    assert summary.rejected.keys() <= {"missing_field", "needs_files"}
    details = [line["detail"] for line in rejections_of(Path(summary.rejections))] if summary.rejected else [""]
    assert reason in details[0]
    assert summary.problems == 1 + (not reason)
    assert all(one.problem.prompt.endswith("Add.") for one in read_parquet(tmp_path / "out.parquet"))


def test_inspect_counts_prompts_that_a_chat_template_has_written(tmp_path: Path) -> None:
    marked = [row("generic", text) for text in ("[INST] Add. [/INST]", "Add.", "<s><|user|>\nAdd.")]
    import_files("generic", [jsonl(tmp_path / "rows.jsonl", *marked)], tmp_path / "out.parquet")
    save_problems(tmp_path / "own.jsonl", [one.problem for one in read_parquet(tmp_path / "out.parquet")])
    for file in ("out.parquet", "own.jsonl"):
        result = CliRunner().invoke(app, ["data", "inspect", str(tmp_path / file)])
        assert "2 prompts begin with marks of a chat template" in result.output
