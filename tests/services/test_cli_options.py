"""What `nouscoder` says before any command, and its doctor on an installation that only grades."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from rich.text import Text
from tests.command_line import nouscoder
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


# Each is refused before anything is read: none of the files is there.
ALONE = [
    ("demo --gpu", "--gpu", "--real"),
    ("train my.toml --pass-rates easy.jsonl", "--pass-rates", "--smoke64"),
    ("train my.toml --smoke-batches 0", "--smoke-batches", "--smoke64"),
    ("train my.toml --json", "--json", "--smoke64"),
    ("grade s.jsonl --token x", "--token", "--server"),
    ("grade s.jsonl --ca x.pem", "--ca", "--server"),
    ("eval p.jsonl --url http://127.0.0.1:1/v1 --model m --token x", "--token", "--verifier"),
    ("eval p.jsonl --url http://127.0.0.1:1/v1 --model m --ca x.pem", "--ca", "--verifier"),
    *(
        (f"eval p.jsonl --samples s.jsonl {one}", one.split()[0], "--url or --policy")
        for one in (
            "--n 8",
            "--temperature 0.6",
            "--top-p 1",
            "--max-tokens 9",
            "--seed 0",
            "--prompt lcb",
            "--extra {}",
            "--at-once 3",
        )
    ),
    ("sft sample p.jsonl --url http://127.0.0.1:1/v1 --model m --out x.jsonl --token x", "--token", "--verifier"),
    ("sft sample p.jsonl --url http://127.0.0.1:1/v1 --model m --out x.jsonl --ca x.pem", "--ca", "--verifier"),
    ("data inspect p.jsonl --rounds 3", "--rounds", "--flaky"),
    ("data inspect p.jsonl --prompt --flaky", "--flaky", "without --prompt"),
    ("data inspect p.jsonl --prompt --json", "--json", "without --prompt"),
    ("data filter f.toml --token x", "--token", "--server"),
    ("data synthesize s.jsonl --url http://127.0.0.1:1/v1 --model m --token x", "--token", "--server"),
    ("bench broker --many 9 --scale 1", "--scale", "without --many"),
    ("bench broker --many 9 --batch 64", "--batch", "without --many"),
    ("bench learner --row-tokens 64", "--row-tokens", "--shape"),
    ("bench learner --rows 3", "--rows", "--shape"),
    ("bench learner --sequences 3", "--sequences", "--shape"),
    ("bench learner --context", "--context", "--shape"),
    ("bench learner --set learner.device=cuda", "--set", "--shape"),
    ("bench learner --shape qwen3-4b --limit 9", "--limit", "--context"),
    ("bench learner --shape qwen3-4b --threads 2", "--threads", "without --shape"),
    ("serve broker --broker", "--broker", "serve verifier"),
    ("serve learner --policy model", "--policy", "serve generation"),
    ("serve broker --http 127.0.0.1:0", "--http", "verifier and generation"),
    ("doctor --image x", "--image", "--cluster"),
    ("doctor --values HERE", "--values", "--cluster"),
    ("doctor --cluster --values HERE --image x", "--image", "without --values"),
    ("doctor --cluster --namespace x", "--namespace", "--values"),
    ("doctor --cluster --release x", "--release", "--values"),
    ("doctor --cluster --chart HERE", "--chart", "--values"),
    ("reward-model eval m --problems p.jsonl", "--problems", "--evaluation"),
    ("reward-model eval m --evaluation e", "--evaluation", "--problems"),
    ("reward-model eval m --pairs p.jsonl --n 3", "--n", "best of n"),
]


@pytest.mark.parametrize(("typed", "option", "needed"), ALONE, ids=[typed for typed, _, _ in ALONE])
def test_an_option_without_the_one_that_it_needs_is_refused(typed: str, option: str, needed: str) -> None:
    answer = nouscoder(*typed.replace("HERE", __file__).split())
    said = " ".join(answer.stderr.replace("\u2502", " ").split())
    assert answer.exit_code == 2, answer.output
    assert f"Invalid value for {option}:" in said, said
    assert "it is for" in said, said
    assert needed in said, said
