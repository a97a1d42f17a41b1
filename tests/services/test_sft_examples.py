"""Examples of a fine-tuning: their records, and their tokens, which are those that a run gives and samples."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.services.qwen3_tokenizer import qwen3_folder
from tests.services.test_learner_storage import save_batch

from nouscoder.config import InterpreterSection, SftSection, SingleTurnSection
from nouscoder.config.generation import EnvironmentSection
from nouscoder.demo.policy import EOS_ID, CharTokenizer
from nouscoder.domain.rollout import Rollout, Sampling, Task
from nouscoder.domain.verdict import VerdictKind
from nouscoder.errors import Unusable
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.learner.model.synthetic import random_batch
from nouscoder.learner.state.saved_batches import SavedBatches
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, load_tokenizer
from nouscoder.sft.encoder import Encoder
from nouscoder.sft.reading import read_examples
from nouscoder.sft.records import BadExample, example_of

CHARACTERS = CharTokenizer()
TEXT = SingleTurnSection()
TRACE = [{"text": "<python>1+1</python>"}, {"text": "<output>2</output>", "given": True}, {"text": "2"}]


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    """A tokenizer of characters, without a chat template."""
    folder = tmp_path_factory.mktemp("characters")
    CHARACTERS.save(folder)
    (folder / "config.json").write_text("{}")
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    folder = tmp_path_factory.mktemp("qwen3")
    shutil.copytree(qwen3_folder(), folder, dirs_exist_ok=True)
    (folder / "config.json").write_text("{}")
    return load_tokenizer(folder)


def encoded(tokenizer: PolicyTokenizer, record: dict[str, Any], settings: EnvironmentSection = TEXT) -> Rollout:
    return Encoder(tokenizer, settings).encode(example_of(record))


def segments(rollout: Rollout) -> list[tuple[bool, list[int]]]:
    found, start = [], 0
    for segment in rollout.segments:
        found.append((segment.is_sampled, list(rollout.token_ids[start : start + segment.num_tokens])))
        start += segment.num_tokens
    return found


def test_an_answer_ends_with_the_end_token_and_only_it_is_in_the_loss(characters: PolicyTokenizer) -> None:
    rollout = encoded(characters, {"prompt": "Print 1.\n", "completion": "print(1)", "problem_id": "p"})
    assert segments(rollout) == [
        (False, CHARACTERS.encode_prompt("Print 1.\n")),
        (True, [*CHARACTERS.encode("print(1)"), EOS_ID]),
    ]
    assert rollout.problem_id == "p"


def test_a_prompt_is_that_of_a_run_with_the_same_settings(characters: PolicyTokenizer) -> None:
    settings = SingleTurnSection(prompt_template="Solve: {prompt}\n")
    of_run = Prompts(characters, settings)
    for template in ("", "{prompt} Now!"):
        record = {"prompt": "Print 1.", "prompt_template": template, "completion": "1"}
        task = Task("r", "g", "p", "Print 1.", Sampling(), prompt_template=template)
        assert segments(encoded(characters, record, settings))[0] == (False, of_run.prompt_of(task))


def test_outputs_of_tools_are_given_and_carry_no_loss(characters: PolicyTokenizer) -> None:
    rollout = encoded(characters, {"prompt": "1+1\n", "completion": TRACE}, InterpreterSection())
    assert segments(rollout) == [
        (False, CHARACTERS.encode_prompt("1+1\n")),
        (True, [*CHARACTERS.encode("<python>1+1</python>"), EOS_ID]),
        (False, CHARACTERS.encode("\n<output>2</output>\n")),
        (True, [*CHARACTERS.encode("2"), EOS_ID]),
    ]


def test_a_conversation_is_that_of_the_chat_template(qwen3: PolicyTokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "<python>1+1</python>"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    rollout = encoded(qwen3, {"messages": messages})
    # The template writes an answer before a tool's output otherwise than at the end: each is an example of its own.
    first, second = list(Encoder(qwen3, TEXT).encode_all(example_of({"messages": messages})))[::-1]
    assert segments(second) == segments(rollout)
    for found, size in ((first, 3), (second, 5)):
        assert [is_sampled for is_sampled, _ in segments(found)] == [False, True]
        (text,) = qwen3.texts([messages[:size]], None, next_answer=False)
        assert [*found.token_ids, *qwen3.encode_text("\n")] == qwen3.encode_text(text)


def test_a_prompt_and_a_conversation_of_one_message_are_the_same_in_a_chat_template(qwen3: PolicyTokenizer) -> None:
    settings = SingleTurnSection(prompt_as="auto")
    one = encoded(qwen3, {"prompt": "Print 1.", "completion": "print(1)"}, settings)
    other = encoded(qwen3, {"messages": [{"role": "user", "content": "Print 1."}], "completion": "print(1)"}, settings)
    assert segments(one) == segments(other)


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ([], "not a JSON object"),
        ({"completion": "1"}, "either a prompt or messages"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}], "completion": "1"}, "either a prompt or"),
        ({"prompt": "a"}, "completion is missing"),
        ({"prompt": "a", "completion": 1}, "completion"),
        ({"prompt": "a", "completion": [{"text": "b"}, {"text": "c"}]}, "turn 2 of the answer and the one before it"),
        ({"prompt": "a", "completion": [{"text": "b"}, {"text": "c", "given": True}]}, "does not end with an answer"),
        ({"prompt": "a", "completion": [{"text": ""}]}, "turn 1 of the answer is empty"),
        ({"prompt": "a", "prompt_template": "no place", "completion": "1"}, "prompt_template"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "role"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no message before it"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}], "completion": "1"}, "tool_calls"),
        ({"messages": [{"role": "user", "content": "a", "images": [1]}], "completion": "1"}, "unknown field"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "<think>b</think>1", "reasoning_content": "b"},
                ]
            },
            "reasoning_content, and reasoning in its content",
        ),
        ({"prompt": "a", "completion": "1", "verdict": "internal_error"}, "internal_error is no verdict"),
        ({"prompt": "a", "completion": "1", "verdict": "good"}, "verdict"),
    ],
)
def test_a_bad_record_is_refused_with_its_fault(record: Any, fault: str) -> None:
    with pytest.raises(BadExample, match=fault):
        example_of(record)


def test_messages_need_a_chat_template(characters: PolicyTokenizer) -> None:
    with pytest.raises(BadExample, match="no chat template"):
        encoded(characters, {"messages": [{"role": "user", "content": "a"}], "completion": "1"})


def test_a_line_of_samples_is_an_example_of_a_text_policy_only(
    characters: PolicyTokenizer, qwen3: PolicyTokenizer
) -> None:
    line = {"step": 1, "prompt": "Print 1.\n", "program": "print(1)", "verdict": "wrong_answer", "reward": -1.0}
    assert example_of(line).accepted is False
    same = encoded(characters, {"prompt": "Print 1.\n", "completion": "print(1)"})
    assert segments(encoded(characters, line, SingleTurnSection(prompt_template="x{prompt}"))) == segments(same)
    with pytest.raises(BadExample, match="give the run folder instead"):
        encoded(qwen3, line, SingleTurnSection(prompt_as="auto"))


def written(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def record(number: int, **more: Any) -> dict[str, Any]:
    return {"problem_id": f"p{number}", "prompt": f"Print {number}.\n", "completion": f"print({number})", **more}


def test_examples_are_chosen_counted_and_identified(characters: PolicyTokenizer, tmp_path: Path) -> None:
    records = [*map(record, range(50)), record(3), record(60, accepted=False), record(61, completion="x" * 500)]
    files = (written(tmp_path / "a.jsonl", *records),)
    settings = SftSection(train=files, validation_share=0.3)
    found = read_examples(settings, Encoder(characters, TEXT), characters.vocabulary_size, 100, seed=0)
    assert found.dropped == {"repeated": 1, "wrong": 1, "too_long": 1}
    assert len(found.train) + len(found.validation) == 50
    assert found.validation
    again = read_examples(settings, Encoder(characters, TEXT), characters.vocabulary_size, 100, seed=0)
    assert again.digest == found.digest
    written(files[0], *records[1:])
    other = read_examples(settings, Encoder(characters, TEXT), characters.vocabulary_size, 100, seed=0)
    assert other.digest != found.digest


def test_parquet_gives_the_same_examples_as_json_lines(characters: PolicyTokenizer, tmp_path: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    records: list[dict[str, Any]] = [
        record(1, completion=TRACE),
        record(2, completion=[{"text": "print(2)"}], accepted=True),
    ]
    lines = written(tmp_path / "a.jsonl", *records)
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "a.parquet")  # missing fields are null
    digests = {
        read_examples(
            SftSection(train=(file,)), Encoder(characters, TEXT), characters.vocabulary_size, None, seed=0
        ).digest
        for file in (lines, tmp_path / "a.parquet")
    }
    assert len(digests) == 1


def test_fields_that_only_other_rows_of_parquet_have_are_not_taught(qwen3: PolicyTokenizer, tmp_path: Path) -> None:
    """A column has the fields of all its rows: the arguments of each call, the parameters of each tool."""
    import pyarrow as arrow
    from pyarrow import parquet

    rows = []
    for name in "ab":
        function = {"name": name, "parameters": {"properties": {name: {"type": "integer"}}}}
        call = {"type": "function", "function": {"name": name, "arguments": {name: 1}}}
        asked = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        rows.append({"messages": asked, "tools": [{"type": "function", "function": function}]})
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    encoder = Encoder(qwen3, SingleTurnSection(prompt_as="messages"))
    digests = {
        read_examples(SftSection(train=(file,)), encoder, qwen3.vocabulary_size, None, seed=0).digest
        for file in (written(tmp_path / "a.jsonl", *rows), tmp_path / "a.parquet")
    }
    assert len(digests) == 1


async def test_the_saved_rollouts_of_a_run_are_examples(characters: PolicyTokenizer, tmp_path: Path) -> None:
    batch = random_batch(0, seed=1)
    await save_batch(SavedBatches(tmp_path / "run" / "batches", 10), batch)
    settings = SftSection(train=(tmp_path / "run",))
    found = read_examples(settings, Encoder(characters, TEXT), characters.vocabulary_size, None, seed=0)
    right = [graded.rollout for graded in batch.rollouts if graded.verdict.kind is VerdictKind.ACCEPTED]
    assert [segments(rollout) for rollout in found.train] == [segments(rollout) for rollout in right]
    assert found.dropped == {"wrong": len(batch.rollouts) - len(right)}
    with pytest.raises(Unusable, match="another vocabulary"):
        read_examples(settings, Encoder(characters, TEXT), 10, None, seed=0)
    empty = SftSection(train=(tmp_path,))
    with pytest.raises(Unusable, match="not a run folder"):
        read_examples(empty, Encoder(characters, TEXT), characters.vocabulary_size, None, seed=0)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"prompt": "a", "completion": "1"}\n{"prompt"\n', r"a\.jsonl, record 2: not JSON"),
        ('{"prompt": "a"}\n', r"a\.jsonl, record 1: it does not end with an answer"),
        ('{"prompt": "\u00e9", "completion": "1"}\n', r"a\.jsonl, record 1: .*encoded"),
        ('{"prompt": "a", "completion": "1", "accepted": false}\n', "no example is left to train on .1 wrong."),
    ],
)
def test_a_file_without_usable_examples_is_named(
    characters: PolicyTokenizer, tmp_path: Path, text: str, fault: str
) -> None:
    (tmp_path / "a.jsonl").write_text(text, encoding="utf8")
    settings = SftSection(train=(tmp_path / "a.jsonl",))
    with pytest.raises(Unusable, match=fault):
        read_examples(settings, Encoder(characters, TEXT), characters.vocabulary_size, None, seed=0)
