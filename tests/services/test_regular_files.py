"""A named pipe, a socket or a device as an input file is refused at once, by every command and option that reads one.

Pipes that are open already, `<(command)` and /dev/stdin, are read as they were.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.command_line import nouscoder
from tests.services.test_wrong_inputs import make_home, make_model

from nouscoder.cli.app import app
from nouscoder.data.bounded_files import opened
from nouscoder.data.importers.formats import read_referenced
from nouscoder.data.packages import packages_at
from nouscoder.errors import Unusable
from nouscoder.input_file import NoRegularFile, regular

TYPED = [
    "grade fifo.jsonl",
    "grade samples.jsonl --problems fifo.jsonl",
    "grade samples.jsonl --problems fifo.parquet",
    "grade samples.jsonl --problems problems.jsonl --server http://127.0.0.1:1 --ca fifo.pem",
    "data inspect fifo.jsonl",
    "data inspect fifo.parquet",
    "data inspect problems.jsonl --prompt --set policy.path=fifo-model",
    "data import apps fifo.jsonl --out x.parquet",
    "data import apps fifo.parquet --out x.parquet",
    "data import kattis fifo.zip --out x.parquet",
    "data import apps apps.jsonl --out x.parquet --prompt fifo.txt",
    "data export harbor fifo.jsonl",
    "data filter fifo.toml",
    "data synthesize fifo.jsonl --url http://127.0.0.1:1/v1 --model m",
    "sft import fifo.jsonl --out x.jsonl",
    "sft import fifo.parquet --out x.jsonl",
    "sft sample fifo.jsonl --url http://127.0.0.1:1/v1 --model m --out x.jsonl",
    "eval fifo.jsonl --samples samples.jsonl",
    "eval problems.jsonl --samples fifo.jsonl",
    "eval problems.jsonl --policy fifo-model --n 1",
    "eval compare fifo.json fifo.json",
    "init model fifo.jsonl --out new.toml",
    "init fifo-model problems.jsonl --out new.toml",
    "train fifo.toml",
    "train fifo.json",
    "train my.toml --set problems.train=fifo.jsonl",
    "train my.toml --set evaluation.problems=fifo.jsonl",
    "train my.toml --set policy.path=fifo-model",
    "train my.toml --set run.verifier_token_file=fifo.txt",
    "train my.toml --set tls.certificate=fifo.pem --set tls.key=fifo.pem --set tls.ca=fifo.pem",
    "train my.toml --set broker.redis_url_file=fifo.txt",
    "train my.toml --set broker.curriculum.name=pass_rates --set broker.curriculum.pass_rates=fifo.jsonl",
    "serve verifier --config fifo.toml",
    "serve verifier --set verifier.tokens_file=fifo.txt",
    "serve verifier --set verifier.problems=fifo.jsonl",
    "serve verifier --set verifier.tls.certificate=fifo.pem --set verifier.tls.key=fifo.pem",
    "serve verifier --set verifier.sandbox.pool_template=fifo.json --set verifier.sandbox.backend=gvisor",
    "serve generation --set generation.openai.tokens_file=fifo.txt",
    "status --config fifo.toml",
    "plan show fifo.toml",
    "model import fifo.gguf --out x",
    "train my.toml --smoke64 --pass-rates fifo.jsonl",
    "data filter inputs.toml",
    "data filter steps.toml",
    "report fifo-run",
    "report compare fifo-run fifo-run",
    "pause --config fifo.toml",
    "eval compare fifo.json fifo.json",
    "reward-model pairs problems.jsonl fifo-evaluation --out x.jsonl",
    "reward-model train model fifo.jsonl --out r",
    "serve verifier --set verifier.audit_log=fifo.txt",
    "data stats fifo.jsonl",
    "sft --model model --data fifo.jsonl --name a",
    "sft import apps.jsonl --questions taco/train=fifo.jsonl --out q.jsonl",
    "self-play fifo.toml",
]


# Every command that makes a file or a folder, without the name.
MAKES_FILE = [
    "init model problems.jsonl --out",
    "data import apps apps.jsonl --out",
    "data filter filter.toml --out",
    "data synthesize seeds.jsonl --url http://127.0.0.1:1/v1 --model m --out",
    "grade samples.jsonl --problems problems.jsonl --out",
    "sft import apps.jsonl --out",
    "sft sample problems.jsonl --url http://127.0.0.1:1/v1 --model m --out",
    "reward-model pairs problems.jsonl fifo-evaluation --out",
    "report compare fifo-run fifo-run --to",
    "objectives compare nofile.batch --html",
]
MAKES_FOLDER = [
    "data export harbor problems.jsonl --out",
    "eval problems.jsonl --samples samples.jsonl --out",
    "model import policy.gguf --out",
    "export fifo-run --to",
    "runs backup --to",
    "sft my.toml --out",
    "reward-model train model apps.jsonl --out",
]


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Ends what waits for ever."""

    def ended(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("fifos")
    make_home(home)
    for ending in ("jsonl", "json", "toml", "txt", "pem", "zip", "parquet", "gguf"):
        os.mkfifo(home / f"fifo.{ending}")
    for folder, name in (
        ("fifo-run", "metrics.jsonl"),
        ("fifo-evaluation", "samples.jsonl"),
    ):
        (home / folder).mkdir()
        os.mkfifo(home / folder / name)
    step = '[[steps]]\nfilter = "pass_rate"\nabove = 0.1\nfile = "fifo.jsonl"\n'
    (home / "fifo-run" / "config.toml").touch()
    (home / "dangling").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(home):
        listener.bind("socket")
    if os.geteuid() == 0:
        os.mknod(home / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (home / "fifo-evaluation" / "verdicts.jsonl").touch()
    (home / "inputs.toml").write_text('name = "f"\ninputs = ["fifo.jsonl"]\n' + step)
    (home / "steps.toml").write_text('name = "f"\ninputs = ["problems.jsonl"]\n' + step)
    os.mkfifo(make_model(home / "fifo-model", model_type="qwen3") / "tokenizer_config.json")
    return home


@pytest.mark.parametrize("line", TYPED)
def test_every_command_refuses_a_named_pipe_at_once(home: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    with limit(60):
        ended = nouscoder(*line.split())
    assert ended.exit_code == 78, ended.output
    assert "it is a pipe, not a regular file" in ended.stderr, ended.output
    assert "Traceback" not in ended.output


@pytest.mark.parametrize("line", [*MAKES_FILE, *MAKES_FOLDER])
def test_an_output_that_is_no_file_or_folder_is_refused_and_stays(
    home: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe waited for a reader, and a device or a link was replaced by a file when the work was done."""
    monkeypatch.chdir(home)
    wanted = "file" if line in MAKES_FILE else "folder"
    other, kind = ("model", "a folder") if wanted == "file" else ("problems.jsonl", "a file")
    places = {"fifo.txt": "a pipe", "socket": "a socket", "null": "a device", other: kind}
    before = {path: path.lstat().st_mode for path in home.iterdir()}
    for name in ("dangling", *places):
        if name == "null" and not Path("null").exists():
            continue  # only root makes devices
        with limit(60):
            ended = nouscoder(*line.split(), name)
        said = f"{name} is {places[name]}, not a {wanted}: " if name in places else f"{name} is a link to nowhere"
        assert ended.exit_code == 78, ended.output
        assert f"nouscoder: {said}" in ended.stderr, ended.output
        assert "Traceback" not in ended.output
    assert {path: path.lstat().st_mode for path in home.iterdir()} == before


def test_a_refused_evaluation_leaves_nothing_in_a_folder_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    tests = {"type": "stdin", "cases": [{"input": "", "output": "1"}]}
    Path("p.jsonl").write_text(json.dumps({"problem_id": "p", "prompt": "Add.", "tests": tests}) + "\n")
    assert nouscoder("eval", "p.jsonl", "--samples", "nofile.jsonl", "--out", "there").exit_code == 78
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["p.jsonl", "there"]


def test_each_option_that_names_a_new_place_is_in_the_table() -> None:
    found = set()

    def look(command: Any, words: tuple[str, ...]) -> None:
        for name, below in getattr(command, "commands", {}).items():
            look(below, (*words, name))
        for option in command.params:
            if {"--out", "--to", "--html"} & {*option.opts}:
                found.add((*words, option.opts[0]))

    look(typer.main.get_command(app), ())
    tabled = [line.split() for line in (*MAKES_FILE, *MAKES_FOLDER)]
    missing = [words for words in found if not any({*words} <= {*line} | {"run"} for line in tabled)]
    assert not missing


def test_sockets_and_devices_are_refused_and_open_pipes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s.zip")
        for name in ("s.zip", "/dev/zero", "/dev/tty"):
            if Path(name).exists():
                with pytest.raises(NoRegularFile, match="not a regular file"):
                    regular(Path(name))
        with pytest.raises(ValueError, match="it is a socket"):
            list(packages_at(Path("s.zip"), "task.toml"))
    assert regular(Path("/dev/null")).read_bytes() == b""
    read, write = os.pipe()
    os.write(write, b"text")
    os.close(write)
    assert stat.S_ISFIFO(os.fstat(read).st_mode)
    with opened(Path(f"/dev/fd/{read}")) as file:
        assert file.read() == b"text"
    os.close(read)


def test_a_problem_file_that_is_an_open_pipe_is_refused_because_it_is_read_twice(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"{}\n")
    os.close(write)
    for name in (f"/dev/fd/{read}", "-"):
        with pytest.raises(Unusable, match=r"not a regular file|give a file"):
            list(read_referenced(Path(name)))
    os.close(read)
