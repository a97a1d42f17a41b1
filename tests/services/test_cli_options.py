"""What `nouscoder` says before any command, and its doctor on an installation that only grades."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from nouscoder import __version__
from nouscoder.cli import app
from nouscoder.config import VerifierSection
from nouscoder.doctor import host


def test_the_version_is_printed_without_a_command() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"nouscoder {__version__}\n")


def test_help_names_completion() -> None:
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    assert "--install-completion" in done.output


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The command and all below it, each with its words."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


def test_no_help_text_loses_words_to_markup() -> None:
    """A section of the configuration, such as [sft], is markup to rich, unless a backslash stands before it."""
    tree = list(commands(typer.main.get_command(app)))
    texts = [(path, command.help or "") for path, command in tree]
    texts += [(path, getattr(param, "help", None) or "") for path, command in tree for param in command.params]
    assert len(tree) > 40
    assert len(texts) > 300
    lost = [(path, text) for path, text in texts if Text.from_markup(text).plain != text.replace("\\[", "[")]
    assert not lost
    for words, section in (
        (["sft", "run"], "[sft]"),
        (["self-play"], "[self_play]"),
        (["bench", "learner"], "[learner]"),
    ):
        assert section in CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "300"}).stdout


def test_doctor_of_a_grading_installation_needs_neither_redis_nor_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str, *more: Any) -> importlib.machinery.ModuleSpec | None:
        return None if name in ("redis", "torch") else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    for finding in (host._redis(), host._torch()):
        assert not finding.ok
        assert not finding.needed
        assert "grading does not" in finding.detail


def test_a_service_says_what_it_does_not_serve() -> None:
    said = VerifierSection().not_served(with_broker=False)
    assert said[:2] == ["REST API and playground (--http HOST:PORT)", "jobs (verifier.jobs.folder)"]
    section = VerifierSection.model_validate({"http": "127.0.0.1:0", "jobs": {"folder": "jobs"}})
    assert "rollouts of a broker (--broker)" not in (more := section.not_served(with_broker=True))
    assert not {"REST API and playground (--http HOST:PORT)", "jobs (verifier.jobs.folder)"} & set(more)
