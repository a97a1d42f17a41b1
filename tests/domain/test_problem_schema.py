"""`nouscoder data schema`: it accepts what problem files accept, and has an example for each type of tests."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.data.problems import EXAMPLES, ProblemBody
from nouscoder.domain.submission import TEST_TYPES


@pytest.fixture(scope="module")
def printed() -> Any:
    """What the command prints."""
    answer = CliRunner().invoke(app, ["data", "schema"])
    assert answer.exit_code == 0
    return json.loads(answer.output)


def test_there_is_a_valid_example_for_each_type_of_tests(printed: Any) -> None:
    assert printed["examples"] == EXAMPLES
    assert sorted(example["tests"]["type"] for example in EXAMPLES) == sorted(TEST_TYPES)
    validator = jsonschema_rs.validator_for(printed)
    for example in EXAMPLES:
        assert validator.is_valid(example)
        ProblemBody.model_validate_json(json.dumps(example))


@pytest.mark.parametrize(
    "change",
    [{"prompt": 1}, {"promt": "x"}, {"tests": {"type": "stdin", "cases": []}}, {"tests": {"type": "magic"}}],
)
def test_the_schema_refuses_what_a_problem_file_refuses(printed: Any, change: dict[str, Any]) -> None:
    validator = jsonschema_rs.validator_for(printed)
    assert not validator.is_valid(EXAMPLES[0] | change)
    with pytest.raises(ValueError, match="validation error"):
        ProblemBody.model_validate_json(json.dumps(EXAMPLES[0] | change))


def test_every_field_of_a_problem_is_described(printed: Any) -> None:
    silent = [name for name, field in printed["properties"].items() if not field.get("description")]
    assert silent == []
