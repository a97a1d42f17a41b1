"""What a person and a program read of one log record: both get its reason and its fields."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from nouscoder.logs import JsonLines, Sentences, show_logs_to_a_person


def record(message: str, level: int = logging.WARNING, **extra: Any) -> logging.LogRecord:
    return logging.getLogger("part").makeRecord("part", level, "file", 1, message, (), None, extra=extra)


def test_a_person_and_a_program_get_the_reason_and_the_fields_of_a_record() -> None:
    fields: dict[str, Any] = {
        "what": "a completion",
        "for_s": 300.0,
        "left_s": None,
        "reason": "HTTP 503: b\x1b[2Jusy\nnow",
    }
    sentence = Sentences().format(record("trying again", **fields))
    assert sentence == "warning: trying again (what=a completion, for_s=300): HTTP 503: b?[2Jusy now"
    line = json.loads(JsonLines("verifier").format(record("trying again", **fields)))
    assert {name: line[name] for name in fields} == fields
    assert Sentences().format(record("plain", logging.ERROR)) == "error: plain"
    assert "s3cret" not in Sentences().format(record("away", reason="redis://u:s3cret@host/0 is away"))


def test_a_persons_lines_go_to_what_stderr_is_when_they_are_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A live panel takes stderr's place after the logs were set up."""
    before = sys.stderr
    sys.stderr = sys.stdout
    try:
        show_logs_to_a_person()
    finally:
        sys.stderr = before
    logging.getLogger("part").info("not shown")
    logging.getLogger("part").warning("no reward", extra={"reason": "tests: Field required"})
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "warning: no reward: tests: Field required\n")


def test_an_error_that_nobody_expects_keeps_its_trace() -> None:
    try:
        raise ZeroDivisionError("no")
    except ZeroDivisionError:
        failed = record("failed")
        failed.exc_info = sys.exc_info()
    lines = Sentences().format(failed).splitlines()
    assert (lines[0], lines[-1]) == ("warning: failed", "ZeroDivisionError: no")
