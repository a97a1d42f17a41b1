"""Text files that a Windows editor saved begin with UTF-8's mark: each file that a person gives is read without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nouscoder.broker.redis_address import configured_url
from nouscoder.config import load_config
from nouscoder.data.filters.run import read_recipe
from nouscoder.data.importers.options import prompt_named
from nouscoder.data.importers.rows import file_rows
from nouscoder.data.json_records import read_records
from nouscoder.data.pass_rates import read_pass_rates
from nouscoder.data.problems import read_bodies
from nouscoder.grade_files.entries import read_entries
from nouscoder.http_server.api_keys import ApiKeys, new_api_key
from nouscoder.input_file import read_json_object
from nouscoder.policy_folder.inspection import faults_of
from nouscoder.rpc.verifier_client import verifier_token

MARK = "\ufeff"
PROBLEM = {"problem_id": "a", "prompt": "p", "tests": {"type": "stdin", "cases": [{"input": "1", "output": "2"}]}}
RATE = {"problem_id": "a", "passed": 1, "sampled": 2}


def token_of(file: Path) -> str:
    read = verifier_token(load_config(None, [f"run.verifier_token_file={file}"]))
    assert read is not None
    return read()


def url_of(file: Path) -> str:
    return configured_url(load_config(None, [f"broker.redis_url_file={file}"]).broker)


# Name of the file, what a person wrote, how it is read, what comes of it.
FILES: list[tuple[str, str, Callable[[Path], object], object]] = [
    ("my.toml", '[run]\nname = "x"\n', lambda file: load_config(file).run.name, "x"),
    ("my.json", '{"run": {"name": "x"}}', lambda file: load_config(file).run.name, "x"),
    (
        "filter.toml",
        'name = "f"\ninputs = ["a"]\n[[steps]]\nfilter = "num_tests"\nat_least = 1\n',
        lambda file: read_recipe(file).name,
        "f",
    ),
    ("prompt.txt", "Say {prompt}", lambda file: prompt_named(str(file)), "Say {prompt}"),
    ("problems.jsonl", json.dumps(PROBLEM), lambda file: next(iter(read_bodies(file))).problem_id, "a"),
    ("rows.json", json.dumps([PROBLEM]), lambda file: next(iter(read_records(file))).value, PROBLEM),
    (
        "rows.csv",
        "prompt,tests\nx,y\n",
        lambda file: next(iter(file_rows(file, 0))).value,
        {"prompt": "x", "tests": "y"},
    ),
    ("samples.jsonl", json.dumps(PROBLEM), lambda file: next(iter(read_entries(file, None))).problem_id, "a"),
    ("rates.json", json.dumps([RATE]), lambda file: read_pass_rates(file)["a"].rate, 0.5),
    ("counts.json", json.dumps({"problems": [RATE]}), lambda file: read_pass_rates(file)["a"].rate, 0.5),
    ("values.json", '{"a": 1}', lambda file: read_json_object(file, ValueError), {"a": 1}),
    ("token", "secret\n", token_of, "secret"),
    ("keys", new_api_key("bob")[1] + "\n", lambda file: ApiKeys(file).num_keys, 1),
    ("redis-url", "redis://h:1/0\n", url_of, "redis://h:1/0"),
]


@pytest.mark.parametrize(("name", "text", "read", "value"), FILES, ids=[name for name, *_ in FILES])
def test_a_file_with_the_mark_of_utf8_is_read_as_without_it(
    name: str, text: str, read: Callable[[Path], object], value: object, tmp_path: Path
) -> None:
    for mark in ("", MARK):
        (tmp_path / name).write_text(mark + text, encoding="utf8")
        assert read(tmp_path / name) == value


def test_a_model_whose_configuration_has_the_mark_is_refused_by_the_reason(tmp_path: Path) -> None:
    """Other libraries do not read it either."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text(MARK + '{"model_type": "qwen3"}', encoding="utf8")
    assert "config.json is not a configuration: Unexpected UTF-8 BOM" in faults_of(tmp_path)[0]
