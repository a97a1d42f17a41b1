"""What newcomers typed: each wrong input gets one sentence that names what is wrong, an exit code, and no traceback.

One process answers all command lines (`answers`), so a line costs milliseconds. It may read only what the modes of
files allow, also when root runs the tests.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from nouscoder.config import VerifierSection
from nouscoder.http_server.listener import start_http
from nouscoder.verifier.api.rest import DrainState, make_app
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.fake import FakeSandbox

# Command line, exit code, a part of the sentence.
TYPED = [
    # Files and names.
    ("grade nofile.jsonl", 78, "nofile.jsonl cannot be read: No such file or directory"),
    ("grade empty.jsonl", 78, "empty.jsonl holds no submission"),
    ("grade problems.csv --problems problems.jsonl --out problems.csv", 78, "is the input itself"),
    ("grade samples.jsonl --problems nofile.jsonl", 78, "nofile.jsonl cannot be read"),
    ("grade samples.jsonl --resume", 78, "--resume needs --out FILE"),
    (
        "grade samples.jsonl --problems problems.jsonl --server http://127.0.0.1:1 --ca nofile.pem",
        78,
        "--ca nofile.pem",
    ),
    ("data inspect .", 78, "cannot be read: Is a directory"),
    ("data inspect problems.csv", 78, "problems.csv, line 1: not JSON"),
    ("data inspect nofile.jsonl", 78, "nofile.jsonl cannot be read"),
    ("data import apps nofile.parquet --out x.parquet", 78, "nofile.parquet does not exist"),
    ("data import appz apps.jsonl --out x.parquet", 78, "there is no format 'appz': did you mean apps?"),
    ("data import apps apps.jsonl --out x.jsonl", 78, "--out x.jsonl must end in .parquet"),
    ("data import apps apps.jsonl --out my.toml/x.parquet", 74, "my.toml"),
    ("data import apps hub:nosuch --out x.parquet", 78, "hub:"),
    ("data filter nofile.toml", 78, "nofile.toml cannot be read"),
    ("data filter filter.toml", 78, "'num_test' is not a filter: did you mean num_tests?"),
    ("data stats nope", 69, "has not answered"),
    ("data synthesize problems.jsonl --url http://127.0.0.1:1/v1 --model m", 78, "seed_id"),
    # Services.
    ("serve verifier --http 127.0.0.1:{busy} --grpc 127.0.0.1:0", 78, "Address already in use"),
    ("serve verifier --http localhost", 78, "'localhost' is not of the form host:port"),
    ("serve verifier --http 127.0.0.1:80a", 78, "'127.0.0.1:80a' is not of the form host:port"),
    ("serve verifier --set verifier.slots=abc", 78, "unknown key verifier.slots: did you mean"),
    ("serve verifier --set verifier.sandbox.backend=docker", 78, "must be 'local'"),
    ("serve verifier --config nofile.toml", 78, "nofile.toml does not exist"),
    ("serve verifyer", 2, "'verifyer' is not one of"),
    ("serve broker --config nofile.toml", 78, "nofile.toml does not exist"),
    # A configuration.
    ("train", 2, "give CONFIG or --recipe NAME"),
    ("train nofile.toml", 78, "nofile.toml does not exist"),
    ("train --recipe deepcoder", 78, "did you mean deepcoder-14b?"),
    ("train broken.toml", 78, "broken.toml cannot be read: Invalid value"),
    ("train problems.csv", 78, "problems.csv cannot be read"),
    ("train my.toml --set 'run.name=a b'", 78, "run.name: expected: name of the run"),
    ("train my.toml --set broker.batch_size=17", 78, "batch_size 17 must be a multiple of group_size"),
    ("train my.toml --set run.total_batches=abc", 78, "run.total_batches: must be a valid integer (given: 'abc')"),
    ("train my.toml --set nonsense", 78, "--set 'nonsense' is not of the form a.b=value"),
    ("train my.toml --set run.nmae=x", 78, "unknown key run.nmae: did you mean run.name?"),
    ("train my.toml --set broker.curriculum.size=3", 78, "is a key for name=subset, and not for name=epochs"),
    ("train my.toml --set generation.device=cuda", 78, 'generation.device is "cuda"'),
    ("train my.toml --set generation.engine=vllm", 78, "vLLM is not installed"),
    ("train my.toml --set problems.train=nofile.jsonl", 78, "problems.train:"),
    ("train my.toml --set problems.train=problems.csv", 78, "problems.csv, line 1: not JSON"),
    ("train my.toml --set evaluation.problems=model", 78, "evaluation.problems:"),
    (
        "train my.toml --set broker.curriculum.name=pass_rates --set broker.curriculum.pass_rates=solved.jsonl",
        78,
        "broker.curriculum pass_rates leaves no problem",
    ),
    (
        "train my.toml --set broker.curriculum.name=subset --set broker.curriculum.size=500",
        78,
        "broker.curriculum.size is 500",
    ),
    ("train my.toml --set learner.first_checkpoint=model", 78, "it has no manifest.json"),
    ("train my.toml --resume", 78, "there is no run to resume in"),
    ("train my.toml --set policy.path=notok", 78, "notok has no tokenizer"),
    ("train my.toml --set policy.path=nocfg", 78, "nocfg has no config.json"),
    ("train my.toml --set policy.path=badcfg", 78, "it has no model_type"),
    ("train my.toml --set policy.path=bert", 78, "model.safetensors"),
    ("train my.toml --set policy.path=modle", 78, "did you mean model?"),
    ("train my.toml --set policy.path=locked", 74, "locked"),
    ("train my.toml --set policy.path=unreadable", 78, "unreadable/model.safetensors"),
    # A new configuration.
    ("init notok problems.jsonl --out new.toml", 78, "notok has no tokenizer"),
    ("init nocfg problems.jsonl --out new.toml", 78, "nocfg has no config.json"),
    ("init badcfg problems.jsonl --out new.toml", 78, "it has no model_type"),
    ("init bert problems.jsonl --out new.toml", 78, "model.safetensors"),
    ("init bert-whole problems.jsonl --out new.toml --engine torch", 78, "bert"),
    ("init modle problems.jsonl --out new.toml", 78, "did you mean model?"),
    ("init policy.gguf problems.jsonl --out new.toml", 78, "nouscoder model import"),
    ("init unreadable problems.jsonl --out new.toml", 78, "unreadable/model.safetensors"),
    ("init locked problems.jsonl --out new.toml", 74, "locked"),
    ("init model nofile.jsonl --out new.toml", 78, "nofile.jsonl does not exist"),
    ("init model problems.csv --out new.toml", 78, "problems.csv, line 1: not JSON"),
    ("init model empty.jsonl --out new.toml", 78, "empty.jsonl holds no problem"),
    ("init model model --out new.toml", 78, "Is a directory"),
    ("init model problems.jsonl --out my.toml", 78, "my.toml exists already"),
    ("init model problems.jsonl --out nowhere/new.toml", 78, "nowhere/new.toml cannot be written"),
    ("init Qwen/Qwen3-0.6B nofile.jsonl --out new.toml", 78, "nofile.jsonl does not exist"),
    # Evaluations, policies and runs.
    ("eval problems.jsonl", 2, "give one of --url (with --model), --policy and --samples"),
    ("eval problems.jsonl --url http://127.0.0.1:1/v1", 2, "--url needs --model"),
    ("eval problems.jsonl --policy notok --n 1 --max-tokens 10", 78, "notok has no tokenizer"),
    ("eval problems.jsonl --policy unreadable --n 1", 78, "unreadable/model.safetensors"),
    ("eval nofile.jsonl --samples samples.jsonl", 78, "nofile.jsonl cannot be read"),
    ("eval problems.jsonl --samples nofile.jsonl", 78, "nofile.jsonl cannot be read"),
    ("eval compare a b", 78, "a has no report.json"),
    ("export runs/nope --to x", 78, "runs/nope is not a run folder"),
    ("report runs/nope", 78, "there is no folder runs/nope"),
    ("report compare runs/nope runs/nope", 78, "there is no folder runs/nope"),
    ("status --config runs/nope/config.toml", 78, "runs/nope/config.toml does not exist"),
    ("runs rm nope", 1, "Aborted"),
    ("sft import nofile.parquet --out x.jsonl", 78, "nofile.parquet"),
    ("model import nofile.gguf --out x", 78, "nofile.gguf"),
    ("plan show nofile.toml", 78, "nofile.toml does not exist"),
    ("recipes show nope", 78, "there is no recipe 'nope'"),
    ("tokens new ''", 78, "name"),
    ("--nonsense", 2, "No such option"),
    ("trian my.toml", 2, "No such command 'trian'"),
]
# Commands that load torch first.
TYPED_WITH_TORCH = [
    ("sft --model model --data examples.jsonl --name zz --out model", 78, "model exists already"),
    ("sft --model model --data nofile --name zz", 78, "nofile does not exist"),
    ("sft --model notok --data examples.jsonl --name zz", 78, "notok has no tokenizer"),
    ("objectives compare runs/my/batches/1.batch", 78, "is not runs/NAME/batches/NUMBER.batch of a run folder"),
    ("reward-model train model nofile.jsonl", 78, "nofile.jsonl"),
]
ONE = {"type": "stdin", "cases": [{"input": "", "output": ""}]}
# Path, body, status, detail.
SENT: list[tuple[str, object, int, str]] = [
    ("grade", {"language": "pythn", "code": "x", "tests": ONE}, 422, "language: 'pythn' is not installed; these are:"),
    ("grade", {"language": "kotlin", "code": "x", "tests": ONE}, 422, "language: 'kotlin' is not installed"),
    ("grade", {"code": "x", "test": ONE}, 422, "tests: Field required"),
    ("grade", "{bad", 422, "body: not JSON"),
    ("grade", {"code": "x", "tests": {"type": "stdin", "cases": []}}, 422, "tests.cases: must have at least 1"),
    ("grade", {"code": "x", "tests": {**ONE, "type": "stdio"}}, 422, "tests.type: 'stdio' is none of stdin, call"),
    ("grade", {"code": "x", "tests": {"type": "math", "answer": "1"}}, 422, "tests.cases: Field required"),
    ("grade", {"tests": ONE}, 422, "body: give exactly one of code and completion"),
    (
        "grade",
        {"code": "x", "tests": {"type": "stdin", "cases": [{"inputs": "", "output": ""}]}},
        422,
        "tests.cases[0].input: Field required",
    ),
    ("grade", {"code": "x", "limits": {"wall_time_s": 9999}, "tests": ONE}, 422, "limits.wall_time_s: must be at most"),
    ("grad", {}, 404, "Not Found"),
    ("jobs", {}, 501, "this service keeps no jobs"),
]
HEADER = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
PROCESS = """
import contextlib, io, json, shlex, sys, traceback
from nouscoder.__main__ import main
for line in json.load(sys.stdin):
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        sys.argv = ["nouscoder", *shlex.split(line)]
        try:
            main()
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
    print(json.dumps([code, out.getvalue()]), file=sys.__stdout__, flush=True)
"""
# Root reads every file; without these capabilities it reads what the modes allow.
AS_MODES_ALLOW = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()


def make_model(folder: Path, **config: object) -> Path:
    """A folder that looks like a model's."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1, "max_position_embeddings": 4096, **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(HEADER)) + HEADER + b"\0" * 4)
    return folder


def make_home(home: Path) -> None:
    """The files of a newcomer."""
    make_model(home / "model", model_type="qwen3")
    (make_model(home / "notok", model_type="qwen3") / "tokenizer.json").unlink()
    (make_model(home / "nocfg") / "config.json").unlink()
    make_model(home / "badcfg")
    (make_model(home / "bert", model_type="bert") / "model.safetensors").unlink()
    make_model(home / "bert-whole", model_type="bert")
    (make_model(home / "unreadable", model_type="qwen3") / "model.safetensors").chmod(0)
    make_model(home / "locked", model_type="qwen3").chmod(0)
    rows = [{"task_id": f"p{n}", "prompt": "Add.", "tests": {**ONE}} for n in range(40)]
    files: dict[str, list[dict[str, Any]]] = {
        "problems": rows,
        "samples": [{"task_id": "p1", "completion": "x"}],
        "examples": [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
        "solved": [{"problem_id": row["task_id"], "passed": 8, "sampled": 8} for row in rows],
        "apps": [{"problem_id": 1, "question": "q", "input_output": '{"inputs": ["1"], "outputs": ["2"]}'}],
        "empty": [],
    }
    for name, records in files.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (home / "problems.csv").write_text("prompt,tests\nAdd.,x\n")
    (home / "policy.gguf").write_bytes(b"GGUF")
    (home / "broken.toml").write_text("[run]\nname = ")
    (home / "filter.toml").write_text('name = "f"\ninputs = ["problems.jsonl"]\n[[steps]]\nfilter = "num_test"\n')
    (home / "my.toml").write_text(
        '[run]\nname = "r"\nroot = "runs"\n[policy]\npath = "model"\n'
        '[problems]\ntrain = "problems.jsonl"\nheld_out_share = 0.2\n'
        '[broker.curriculum]\nname = "epochs"\n'
    )


def answers_of(home: Path, typed: list[tuple[str, int, str]]) -> dict[str, tuple[int, str]]:
    """What each command line answers: exit code and text. `home` gets the files of a newcomer, and no others."""
    make_home(home)
    before = {*home.rglob("*")}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "TERM": "dumb"}
    with socket.create_server(("127.0.0.1", 0)) as busy:
        lines = [line.replace("{busy}", str(busy.getsockname()[1])) for line, _, _ in typed]
        command = [*AS_MODES_ALLOW, sys.executable, "-c", PROCESS]
        given = json.dumps(lines)
        done = subprocess.run(
            command, cwd=home, env=environment, input=given, capture_output=True, text=True, timeout=850
        )
    (home / "locked").chmod(0o700)
    assert done.returncode == 0, done.stderr[-3000:]
    made = {path.relative_to(home).parts[0] for path in {*home.rglob("*")} - before}
    assert made <= {"problems.jsonl.index"}  # a cache
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {line: (code, text) for (line, _, _), (code, text) in zip(typed, found, strict=True)}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    return answers_of(tmp_path_factory.mktemp("newcomer"), TYPED)


def check(answer: tuple[int, str], code: int, sentence: str) -> None:
    """One sentence, this exit code, no traceback."""
    found, text = answer
    assert "Traceback" not in text
    assert found == code, text
    said = [each for each in text.splitlines() if sentence in each]
    assert len(said) == 1, text
    # Beside it is a log record, or the usage of the command.
    others = [each for each in text.splitlines() if each and each not in said and not each.startswith("{")]
    assert len(others) <= (6 if code == 2 else 1), text
    assert code == 2 or re.match(r"nouscoder: |.*Aborted", said[0]), text


@pytest.mark.timeout(900)  # the first one waits for all; seconds of work, but many imports on a busy machine
@pytest.mark.parametrize(("line", "code", "sentence"), TYPED, ids=[line for line, _, _ in TYPED])
def test_a_wrong_command_gets_one_sentence(
    answers: dict[str, tuple[int, str]], line: str, code: int, sentence: str
) -> None:
    check(answers[line], code, sentence)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_wrong_command_that_loads_torch_gets_one_sentence(tmp_path: Path) -> None:
    answers = answers_of(tmp_path, TYPED_WITH_TORCH)
    for line, code, sentence in TYPED_WITH_TORCH:
        check(answers[line], code, sentence)


async def test_a_wrong_request_gets_one_sentence() -> None:
    """The grading API names the field."""
    registry = CollectorRegistry()
    grader = Grader(FakeSandbox({}), VerifierMetrics(registry), VerifierSection())
    async with AsyncExitStack() as stack:
        app = make_app(grader, registry, DrainState(), 200_000)
        url = "http://" + await start_http(app, "127.0.0.1:0", stack)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        for path, body, status, detail in SENT:
            content = body if isinstance(body, str) else json.dumps(body)
            answer = await http.post(f"/v1/{path}", content=content)
            assert answer.status_code == status, answer.text
            assert detail in answer.json()["detail"], (detail, answer.text)
        assert (await http.get("/v1/grade")).status_code == 405


def test_the_table_has_the_inputs_of_the_walk() -> None:
    assert len({line for line, _, _ in [*TYPED, *TYPED_WITH_TORCH]}) + len(SENT) >= 85
