"""A command in an environment without its extra answers with one sentence that names the extra, and makes no folder.

Each environment is a process that cannot find the packages that an extra of pyproject.toml does not bring.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.main import get_command

from nouscoder.cli.app import app
from nouscoder.extras import extra_of

PROJECT = Path(__file__).parents[2]
EXTRAS: dict[str, list[str]] = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
# A use of each command. What they name is not there, so each ends at once, or is told what it lacks.
USES = {
    "demo": "demo --set run.root=runs",
    "init": "init model problems.jsonl --out new.toml",
    "train": "train my.toml",
    "prepare-run": "prepare-run nofile.toml",
    "serve": "serve {service} --config my.toml",
    "grade": "grade nofile.jsonl",
    "export": "export runs/x --to y",
    "status": "status --config nofile.toml",
    "why-stalled": "why-stalled --config nofile.toml",
    "pause": "pause --config nofile.toml",
    "resume": "resume --config nofile.toml",
    "drain": "drain --config nofile.toml",
    "self-play": "self-play my.toml",
    "tokens new": "tokens new bob",
    "dead-letters list": "dead-letters list --config nofile.toml",
    "dead-letters show": "dead-letters show 1 --config nofile.toml",
    "dead-letters requeue": "dead-letters requeue 1 --config nofile.toml",
    "dead-letters drop": "dead-letters drop 1 --config nofile.toml",
    "batch drop": "batch drop 1 --config nofile.toml",
    "eval run": "eval problems.jsonl --policy model --n 1",
    "eval compare": "eval compare a b",
    "sft run": "sft --model model --data examples.jsonl --name zz",
    "sft sample": "sft sample nofile.jsonl --url http://127.0.0.1:1/v1 --model m --out s.jsonl",
    "sft import": "sft import nofile.jsonl --out x.jsonl",
    "runs list": "runs list --config my.toml",
    "runs rm": "runs rm nope --yes --config my.toml",
    "runs backup": "runs backup --to backups --config my.toml",
    "runs restore": "runs restore backups/nope --config my.toml",
    "logs": "logs --cluster",
    "pages": "pages --cluster",
    "report run": "report runs/x",
    "report compare": "report compare runs/x runs/y",
    "objectives compare": "objectives compare runs/x/batches/1.batch",
    "plan show": "plan show my.toml",
    "recipes show": "recipes show nope",
    "model import": "model import x.gguf --out y",
    "bench verifier": "bench verifier",
    "bench broker": "bench broker",
    "bench learner": "bench learner",
    "bench generation": "bench generation",
    "bench chaos": "bench chaos",
    "data inspect": "data inspect nofile.jsonl",
    "data import": "data import apps apps.jsonl --out a.parquet",
    "data export": "data export harbor nofile.jsonl",
    "data filter": "data filter nofile.toml",
    "data synthesize": "data synthesize nofile.jsonl --url http://127.0.0.1:1/v1 --model m",
    "data stats": "data stats nope",
    "data schema": "data schema",
    "reward-model pairs": "reward-model pairs nofile.jsonl ev",
    "reward-model train": "reward-model train model pairs.jsonl",
    "reward-model eval": "reward-model eval model",
}
ASKS_THE_MACHINE = {"doctor", "prepare"}  # they take seconds, and have tests of their own
MY_TOML = """
[run]
name = "r"
root = "runs"
[policy]
path = "model"
[problems]
train = "problems.jsonl"
held_out_share = 0.1
"""
# Hides packages from the imports of this process; `blocked` and `lines` are read from stdin.
HIDING = """
import contextlib, importlib, importlib.machinery as machinery, io, json, os, sys, traceback
blocked, lines = json.load(sys.stdin)

class Environment:  # the finder of sys.path, which finds neither these packages nor their metadata
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in blocked["modules"]:
            return machinery.PathFinder.find_spec(name, path, target)
    @staticmethod
    def find_distributions(*context):
        found = machinery.PathFinder.find_distributions(*context)
        return (one for one in found if one.name.lower() not in blocked["distributions"])

sys.meta_path = [Environment if one is machinery.PathFinder else one for one in sys.meta_path]
"""
# Runs each command line in this process; [command line, exit code, what it wrote] a line.
COMMANDS = """
from nouscoder.__main__ import main
for line in lines:
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        sys.argv = ["nouscoder", *line.split()]
        try:
            main()
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):
                out.write(code)
        except BaseException:
            traceback.print_exc()
    print(json.dumps([line, code, out.getvalue()]), file=sys.__stdout__)
"""
# Imports each module; [module, 0, ""] a line.
IMPORTS = """
for line in lines:
    importlib.import_module(line)
    print(json.dumps([line, 0, ""]))
"""
# What the pods of a run load: the services, the coordinator, and what makes the demo's policy.
OF_PODS = [
    *("nouscoder.learner.core", "nouscoder.generation.process", "nouscoder.run.loop", "nouscoder.run.preflight"),
    *("nouscoder.demo.prepare", "nouscoder.demo.warmstart", "nouscoder.report.page"),
]


def requires_of(name: str) -> list[str]:
    """What the distribution requires. Without a GPU deploy/setup-venv leaves out triton and NVIDIA's libraries."""
    try:
        return requires(name) or []
    except PackageNotFoundError:
        if name.startswith(("triton", "nvidia", "cuda")):
            return []
        raise


def brought_by(extra: str) -> set[str]:
    """The distributions that the extra installs, with their own dependencies."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in EXTRAS[extra]]
    while waiting:
        needed = waiting.pop()
        name = canonicalize_name(needed.name)
        wanted = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if name == "nouscoder":
            waiting += [Requirement(text) for one in needed.extras for text in EXTRAS[one]]
        elif wanted and name not in found:
            found.add(name)
            for text in requires_of(name):
                own = Requirement(text)
                if own.marker is None or any(own.marker.evaluate({"extra": one}) for one in ("", *needed.extras)):
                    waiting.append(Requirement(text.partition(";")[0]))
    return found


def answers(extra: str, folder: Path, lines: list[str], process: str = COMMANDS) -> dict[str, tuple[int, str]]:
    """What the process answers to each line where only this extra is installed."""
    there = brought_by(extra) | {"nouscoder"}
    owners = {module: {canonicalize_name(one) for one in names} for module, names in packages_distributions().items()}
    modules = [module for module, names in owners.items() if not names & there]
    distributions = sorted({name for names in owners.values() for name in names} - there)
    given = json.dumps([{"modules": modules, "distributions": distributions}, lines])
    done = subprocess.run(
        [sys.executable, "-c", HIDING + process], cwd=folder, input=given, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {line: (code, text) for line, code, text in map(json.loads, done.stdout.splitlines())}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with files that pass the checks of commands as far as these come."""
    (tmp_path / "my.toml").write_text(MY_TOML)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3", "eos_token_id": 1}')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    row = {"task_id": "p", "prompt": "Add.", "tests": {"type": "stdin", "cases": [{"input": "1", "output": "2"}]}}
    (tmp_path / "problems.jsonl").write_text(json.dumps(row) + "\n")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "examples.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    return tmp_path


def all_commands() -> list[str]:
    """Every command, without the words of groups alone."""
    found: list[str] = []
    waiting: list[tuple[str, Any]] = [("", get_command(app))]
    while waiting:
        words, command = waiting.pop()
        children = getattr(command, "commands", {})
        found += [] if children else [words]
        waiting += [(f"{words} {name}".strip(), child) for name, child in children.items()]
    return found


def test_the_uses_are_those_of_all_commands() -> None:
    assert {*USES} | ASKS_THE_MACHINE == {*all_commands()}


@pytest.mark.timeout(900)  # seconds of work, but many imports on a busy machine
@pytest.mark.parametrize(
    ("extra", "lacking"),
    [
        ("cli", "train eval grade serve data demo"),
        pytest.param(
            "verifier", "train demo sft self-play runs reward-model objectives bench", marks=pytest.mark.heavy
        ),
        pytest.param("broker", "train demo sft eval", marks=pytest.mark.heavy),
        pytest.param("data", "train demo sft", marks=pytest.mark.heavy),
    ],
)
def test_a_missing_extra_is_one_sentence(extra: str, lacking: str, home: Path) -> None:
    there = {"cli": (), "broker": ("broker",)}.get(extra, ("verifier",))  # a service that is installed makes its folder
    services = [name for name in ("broker", "generation", "learner", "verifier") if name not in there]
    lines = [use.format(service=name) for use in USES.values() for name in (services if "{" in use else ("",))]
    found = answers(extra, home, lines)
    told: set[str] = set()
    for line, (code, text) in found.items():
        assert "Traceback" not in text, f"{line}: {text[-2000:]}"
        if names := re.search(r"^nouscoder: .*?(\w+) is not installed.*: pip install '.*\[([a-z,-]+)\]'", text, re.M):
            told.add(line.split()[0])
            assert code, line
            assert len(text.strip().splitlines()) == 1, text
            assert names[1] not in {*packages_distributions()} or extra not in names[2].split(","), text
    assert told >= {*lacking.split()}, found
    assert not [*home.glob("runs/*"), *home.glob("evaluations/*"), *home.glob("a.*")]


@pytest.mark.timeout(900)
@pytest.mark.heavy
def test_the_pods_of_a_run_need_only_the_extra_of_their_image(tmp_path: Path) -> None:
    """The images of learner and generation have these packages and no others: the learner's pod had no httpx."""
    assert list(answers("learner", tmp_path, OF_PODS, IMPORTS)) == OF_PODS


def test_every_package_that_the_code_imports_is_of_an_extra() -> None:
    """So the table of modules that come with another distribution cannot go stale."""
    source = "\n".join(file.read_text() for file in (PROJECT / "services").rglob("*.py") if "v1" not in file.parts)
    imported = {*re.findall(r"^[ \t]*(?:import|from) (\w+)", source, re.M)}
    theirs = imported & {*packages_distributions()} - {"nouscoder", "_pytest"}
    assert {"torch", "grpc", "yaml", "redis"} <= theirs
    assert [name for name in sorted(theirs) if not extra_of(name)] == []
