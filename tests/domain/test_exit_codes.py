"""Each kind of fault has one exit code, whichever command meets it, and docs/exit-codes.md says the same."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
from tests.command_line import nouscoder

from nouscoder.atomic_files import FolderInUse, StorageError
from nouscoder.errors import ExitCode, NousCoderError, Unusable
from nouscoder.rpc.channel import PeerUnreachable

command_module = import_module("nouscoder.cli.app")  # nouscoder.cli has an attribute app
DOCUMENT = Path(__file__).parents[2] / "docs" / "exit-codes.md"


@pytest.mark.parametrize(
    "command",
    [
        ("train", "{}"),
        ("sft", "{}"),
        ("self-play", "{}"),
        ("prepare-run", "{}"),
        ("plan", "show", "{}"),
        *(("serve", service, "--config", "{}") for service in ("verifier", "broker", "generation", "learner")),
        *((name, "--config", "{}") for name in ("status", "why-stalled", "pause", "resume", "drain")),
        ("dead-letters", "list", "--config", "{}"),
        ("dead-letters", "--config", "{}"),  # the same; before, it was a wrong use
        ("runs", "list", "--config", "{}"),
        ("grade", "submissions.jsonl", "--config", "{}"),
        ("eval", "problems.jsonl", "--samples", "samples.jsonl", "--config", "{}"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist"),
        ("[run]\nnam = 1\n", "unknown key run.nam"),
        ("[run\n", "cannot be read"),
    ],
    ids=["missing", "unknown-key", "broken"],
)
def test_the_same_wrong_configuration_has_the_same_code_in_every_command(
    command: tuple[str, ...], text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("my.toml").write_text(text)
    ended = nouscoder(*(word.format("my.toml") for word in command))
    assert ended.exit_code == int(ExitCode.UNUSABLE) == 78, ended
    assert said in ended.stderr
    assert ended.stderr.startswith("nouscoder: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        ("export", "runs/nope", "--to", "x"),
        ("report", "runs/nope"),
        ("report", "compare", "runs/nope", "runs/no"),
        ("runs", "rm", "nope", "--yes"),
        ("eval", "compare", "a", "b"),
        ("train", "--recipe", "nope"),
        ("model", "import", "nope.gguf", "--out", "x"),
        ("data", "inspect", "nope.jsonl"),
        ("data", "import", "apps", "nope.jsonl", "--out", "x.jsonl"),
        ("grade", "nope.jsonl"),
    ],
    ids=" ".join,
)
def test_a_name_of_nothing_has_the_same_code_in_every_command(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert nouscoder(*command).exit_code == ExitCode.UNUSABLE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NousCoderError("the training failed"), ExitCode.FAILED),
        (Unusable("the port is taken"), ExitCode.UNUSABLE),
        (PeerUnreachable("the broker does not answer"), ExitCode.UNAVAILABLE),
        (StorageError("x cannot be written: the disk is full"), ExitCode.STORAGE),
        (FolderInUse("another process works in x"), ExitCode.IN_USE),
        (ExceptionGroup("", [ExceptionGroup("", [Unusable("the port is taken")])]), ExitCode.UNUSABLE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_for_people_is_one_line_and_its_kind_decides_the_code(
    error: Exception, code: ExitCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises() -> None:
        raise error

    monkeypatch.setattr(command_module, "app", raises)
    ended = nouscoder()
    assert (ended.exit_code, ended.stderr.count("\n")) == (code, 1)


def test_a_defect_keeps_its_traceback_and_has_the_code_of_failed_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises() -> None:
        raise KeyError("nobody expects this")

    monkeypatch.setattr(command_module, "app", raises)
    ended = nouscoder()
    assert ended.exit_code == ExitCode.FAILED
    assert "Traceback" in ended.stderr


def test_a_wrong_use_of_a_command_is_not_a_wrong_configuration() -> None:
    assert nouscoder("serve", "verifyer").exit_code == int(ExitCode.USAGE) == 2
    assert nouscoder("train").exit_code == ExitCode.USAGE
    assert nouscoder("eval", "problems.jsonl", "--url", "http://127.0.0.1:9").exit_code == ExitCode.USAGE


def test_the_document_and_the_help_list_every_code_with_its_meaning() -> None:
    table = re.findall(r"^\| (\d+) \| `(\w+)` \| (.*?) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert [(int(number), name, means) for number, name, means in table] == [
        (code.value, code.name, code.meaning) for code in ExitCode
    ]
    said = " ".join(nouscoder("--help").stdout.replace("│", " ").split())
    assert all(f"{code.value} {code.name.lower().replace('_', ' ')}" in said for code in ExitCode)
