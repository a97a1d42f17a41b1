"""No command prints a character that controls a terminal, whoever put it into a name, a file or an answer."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from tests.command_line import nouscoder
from tests.services.test_wrong_inputs import make_home, make_model

from nouscoder.errors import for_terminal, one_line
from nouscoder.logs import Sentences

EVIL = "\x1b]0;t\x07\x1b[2J\x9b31m\r\u202egnp\u2066\x00\ufeff"  # title, clear, C1, carriage return, bidi, NUL, mark
NAME = EVIL.replace("\x00", "")  # no file's name has it
SEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
# Command lines, whose word EVIL stands for the hostile name.
TYPED = [
    "grade EVIL",
    "grade EVIL.jsonl",
    "grade samples.jsonl --problems EVIL",
    "grade evil-samples.jsonl --problems problems.jsonl",
    "grade evil-submissions.jsonl",
    "grade EVIL.jsonl --problems evil-problems.jsonl",
    "data inspect EVIL",
    "data inspect EVIL.jsonl",
    "data inspect evil-problems.jsonl",
    "data inspect evil-problems.jsonl --prompt",
    "data import EVIL apps.jsonl",
    "data import apps EVIL --out x.parquet",
    "data import apps evil-apps.jsonl --out x.parquet",
    "data import kattis EVIL --out y.parquet",
    "data filter EVIL",
    "data filter evil.toml",
    "data export harbor EVIL",
    "sft import EVIL --out z.jsonl",
    "sft import evil-apps.jsonl --out z.jsonl",
    "eval EVIL --samples EVIL",
    "eval problems.jsonl --samples evil-samples.jsonl --out e",
    "eval problems.jsonl --policy EVIL --n 1",
    "eval problems.jsonl --policy evil-model --n 1",
    "eval compare EVIL EVIL",
    "init EVIL problems.jsonl --out new.toml",
    "init evil-model problems.jsonl --out new.toml",
    "init model EVIL --out new.toml",
    "train EVIL",
    "train evil.toml",
    "train evil-key.toml",
    "train my.toml --set EVIL",
    "train my.toml --set run.name=EVIL",
    "train my.toml --set EVIL=1",
    "serve verifier --http EVIL",
    "serve EVIL",
    "status --config EVIL",
    "why-stalled --config evil-key.toml",
    "recipes show EVIL",
    "plan show EVIL",
    "report EVIL",
    "report evil-run",
    "report compare EVIL EVIL",
    "export EVIL --to x",
    "runs rm EVIL --yes",
    "runs",
    "model import EVIL --out x",
    "tokens new EVIL",
    "objectives compare EVIL",
    "reward-model pairs EVIL EVIL --out x.jsonl",
    "doctor EVIL",
    "EVIL",
    "--EVIL",
    "grade a b EVIL",
    "grade samples.jsonl --profile EVIL",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("terminals")
    make_home(home)
    problem = {"task_id": EVIL, "prompt": EVIL, "tests": {"type": "stdin", "cases": [{"input": "", "output": EVIL}]}}
    rows: dict[str, list[object]] = {
        "evil-problems": [problem, problem, {**problem, "task_id": "b", "languages": [EVIL]}, {EVIL: EVIL}],
        "evil-samples": [{"task_id": EVIL, "completion": "x"}, {"task_id": "p1", EVIL: 1}, {"task_id": "p2"}],
        "evil-submissions": [{"id": EVIL, "language": EVIL, "code": "x"}, {EVIL: EVIL}, [EVIL]],
        "evil-apps": [{"problem_id": EVIL, "question": EVIL, "input_output": EVIL}, {EVIL: 1}],
    }
    for name, records in rows.items():
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (home / f"{name}.jsonl").write_text(text)
    (home / f"{NAME}.jsonl").write_text(json.dumps({EVIL: EVIL}, ensure_ascii=False))
    quoted = json.dumps(EVIL)
    (home / "evil.toml").write_text(EVIL)
    (home / "evil-key.toml").write_text(f"{quoted} = 1\n[run]\n{quoted} = {quoted}\nname = {quoted}\n")
    make_model(home / "evil-model", model_type=EVIL, architectures=[EVIL])
    (home / "evil-run").mkdir()
    (home / "evil-run" / "config.toml").write_text(f"[run]\nname = {quoted}\n")
    (home / "runs").mkdir()
    (home / "runs" / NAME).mkdir()
    (home / "runs" / NAME / "config.toml").write_text(f"[run]\nname = {quoted}\n")
    return home


@pytest.mark.parametrize("line", TYPED)
def test_a_command_prints_no_control_character(home: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    ended = nouscoder(*(word.replace("EVIL", NAME) for word in line.split()))
    is_usage = ended.exit_code == 2 and "Usage:" in ended.output  # of what the same person has typed
    output = for_terminal(ended.output) if is_usage else ended.output
    assert SEEN.search(output) is None, ended.output
    assert "Traceback" not in ended.output, ended.output


def test_logs_for_people_and_lines_of_a_terminal_have_no_control_character() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        record = logging.LogRecord("n", logging.WARNING, "", 1, EVIL, (), (type(error), error, error.__traceback__))
    record.reason = EVIL
    assert SEEN.search(Sentences().format(record)) is None
    assert one_line(f"a\n{EVIL}\ud800") == f"a {for_terminal(EVIL.replace(chr(13), ' '))}?"
    assert (
        for_terminal("a\tb\n\u3000\u00e9\U0001f468\u200d\U0001f469") == "a\tb\n\u3000\u00e9\U0001f468\u200d\U0001f469"
    )
