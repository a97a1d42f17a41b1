"""A full disk is one sentence and exit code 74: on stdout and in files, by torch's own writers too. On a real tmpfs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from tests.command_line import nouscoder
from tests.domain.test_report_compare import write_run
from tests.openai_mock import MockServer, completion, serving
from tests.services.gguf_file import tiny_llama, write_gguf
from tests.services.test_cli_sft import write_examples
from tests.services.test_learner_storage import save, trained_trainer
from tests.services.test_objectives_compare import recorded_run
from tests.services.test_reward_model import pairs_of
from tests.services.test_wrong_inputs import make_home

from nouscoder.atomic_files import StorageError, whole_file
from nouscoder.cli.app import app
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
from nouscoder.learner.state.checkpoint_store import CheckpointStore, Progress

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
REAL = str(ROOT / "tests" / "data" / "leetcode_200.jsonl.gz")
COMMANDS = [
    ("--help",),
    ("--version",),
    ("recipes",),
    ("recipes", "show", "deepcoder-14b"),
    ("objectives",),
    ("data", "schema"),
    ("data", "import", "list"),
    ("data", "stats", REAL),
    ("tokens", "new", "someone"),
    ("data", "inspect", REAL),
    ("data", "inspect", REAL, "--json"),
]

ROW = {"problem_id": 1, "question": "q", "input_output": json.dumps({"inputs": ["1" * 90_000], "outputs": ["2"]})}
# `in` has the files of a newcomer. Each command runs in the folder of a disk that is full, with files of its own there.
ON_A_FULL_DISK = [
    "init in/model in/problems.jsonl --out my.toml",
    "train in/my.toml --set run.root='HERE/runs'",
    "demo --set run.root='HERE/runs'",
    "prepare-run in/my.toml --only problems --set problems.train='HERE/p.jsonl' --set problems.held_out='HERE/h.jsonl'",
    "data import apps in/apps.jsonl --out new.parquet",
    "data import apps in/apps.jsonl --out new.jsonl",
    "data filter in/filter.toml --out new.parquet",
    "data export harbor in/problems.jsonl --out harbor",
    "sft import in/ocr.jsonl --out examples.jsonl",
    "grade in/answers.jsonl --out verdicts.jsonl",
    "grade in/samples.jsonl --problems problems.jsonl",
    "eval in/problems.jsonl --samples in/samples.jsonl --out evaluated",
    "eval problems.jsonl --samples in/samples.jsonl --out evaluated",
    "report done",
    "report compare done other --to both.html",
    "export more/runs/mine --to new/exported",
    "model import more/tiny.gguf --out new/imported",
    "sft --model more/policy --data more/examples.jsonl --name tiny --set run.root='HERE/runs'",
    "sft --model more/policy --data more/examples.jsonl --name tuned --set run.root='HERE/more' --out new/tuned",
    "sft sample problems.jsonl --url URL --model m --n 1 --out new/sampled.jsonl",
    "reward-model pairs more/echo.jsonl more/evaluated --rejected-above=-1 --out new/pairs.jsonl",
    "reward-model train more/policy more/pairs.jsonl --out new/rewards",
    "reward-model train more/policy more/pairs.jsonl --save-every-steps 1 --out new/rewards",
    "data synthesize more/seeds.jsonl --url URL --model m --out made.parquet",
    "objectives compare more/runs/mine/batches/00000000.batch --html new/page.html",
    "runs backup --set run.root='HERE/more/runs' --to new/backups",
    "runs restore more/backups/20261129-030000 --set run.root='HERE/runs' --set run.name=mine",
    "self-play in/my.toml --set run.root='HERE/runs' --set problems.held_out=in/problems.jsonl"
    " --set problems.held_out_share=0 --set run.total_batches=4 --set self_play.max_new_tokens=64",
]
# What writes no file, or only in folders of its own below the system's temporary one.
NO_FILES = {
    *("recipes show", "plan show", "data stats", "data inspect", "data schema", "eval compare"),
    *("tokens new", "status", "why-stalled", "doctor", "logs", "pages", "pause", "resume", "drain", "batch drop"),
    *("dead-letters list", "dead-letters show", "dead-letters requeue", "dead-letters drop", "reward-model eval"),
    *("runs list", "runs rm"),
    *(f"bench {name}" for name in ("verifier", "broker", "learner", "generation", "chaos")),
    # Services, and the caches of the grading service: tests of their own.
    *("serve", "prepare"),
}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB. `test_on_full_disks` runs the tests that need one, apart: others count mounts."""
    if "OWN_MOUNTS" not in os.environ:
        pytest.skip("it runs in a mount namespace of its own, by test_on_full_disks")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_on_full_disks() -> None:
    apart = ["unshare", "--mount", "--propagation", "private"]
    if subprocess.run([*apart, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    tests = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-k",
        "disk and not on_full_disks",
        __file__,
    ]
    done = subprocess.run(
        [*apart, sys.executable, *tests],
        env={**os.environ, "OWN_MOUNTS": "1"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_output_that_cannot_be_written_is_one_line(words: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nouscoder", *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.stderr == "nouscoder: the output cannot be written: No space left on device\n"
    assert done.returncode == 74


def test_torch_on_a_full_disk_leaves_one_sentence_and_no_file(small: Path) -> None:
    state = {"a": torch.zeros(200_000)}
    with (
        pytest.raises(StorageError, match=r"the disk is full: .*state.pt was not written"),
        whole_file(small / "state.pt") as file,
    ):
        torch.save(state, file)
    assert not list(small.iterdir())


def test_a_checkpoint_on_a_full_disk_keeps_the_one_before(small: Path) -> None:
    store, trainer = CheckpointStore(small, keep=5), trained_trainer()
    steps: list[int] = []

    def save_until_it_is_full() -> None:
        for step in range(2, 40, 2):
            steps.append(step)
            save(store, trainer, Progress(step, step // 2 - 1))

    with pytest.raises(StorageError, match=r"the disk is full: .* was not written"):
        save_until_it_is_full()
    newest = store.newest()
    assert (None if newest is None else newest.progress.step) == (steps[-1] - 2 or None)
    assert not list(small.glob("*.part"))


def commands(command: Any, path: str = "") -> Iterator[str]:
    for name, one in getattr(command, "commands", {}).items():
        yield from commands(one, f"{path} {name}")
    if not hasattr(command, "commands"):
        yield path.strip()


def test_every_command_that_writes_is_tried_with_a_full_disk() -> None:
    known = set(commands(typer.main.get_command(app)))
    tried = {
        name for name in known for line in ON_A_FULL_DISK if f"{line} ".startswith(f"{name.removesuffix(' run')} ")
    }
    assert known - tried - NO_FILES == set()
    assert known >= NO_FILES


def everything(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On another disk: a policy, a run with a batch, its backup, an evaluation, pairs, examples, a GGUF file."""
    if "OWN_MOUNTS" not in os.environ:
        pytest.skip("it runs in a mount namespace of its own, by test_on_full_disks")
    home = tmp_path_factory.mktemp("more")
    write_policy_folder(home / "policy", random_policy(0))
    (home / "runs").mkdir()
    asyncio.run(recorded_run(home / "runs"))
    (home / "runs" / "mine" / "evaluation_before.json").write_text('{"policy_version": 0, "pass_at_1": 0.5}')
    shutil.copytree(home / "runs" / "mine", home / "backups" / "20261129-030000" / "mine")
    write_gguf(home / "tiny.gguf", tiny_llama())
    write_examples(home / "examples.jsonl", 24)
    (home / "pairs.jsonl").write_text("".join(pair.model_dump_json() + "\n" for pair in pairs_of(8, 1)))
    tests = {"type": "stdin", "cases": [{"input": "1", "output": "1"}]}
    (home / "echo.jsonl").write_text(json.dumps({"problem_id": "e", "prompt": "Echo.", "tests": tests}) + "\n")
    codes = ("print(input())", "print(0)")
    (home / "given.jsonl").write_text("".join(json.dumps({"task_id": "e", "solution": one}) + "\n" for one in codes))
    given = ("--samples", home / "given.jsonl", "--all-tests", "--out", home / "evaluated")
    assert nouscoder("eval", home / "echo.jsonl", *given).exit_code == 0
    (home / "seeds.jsonl").write_text(json.dumps({"seed_id": "a", "text": "t"}) + "\n")
    return home


@pytest.fixture
def full(small: Path, more: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the small file system, with a problem file and a run, and not one byte of room."""
    home = small.parent / "in"
    home.mkdir()
    make_home(home)
    (home / "apps.jsonl").write_text(json.dumps(ROW) + "\n")
    (home / "filter.toml").write_text(
        'name = "f"\ninputs = ["problems.jsonl"]\n[[steps]]\nfilter = "num_tests"\nat_least = 1\n'
    )
    tests = {"type": "stdin", "cases": [{"input": "", "output": ""}]}
    (home / "answers.jsonl").write_text(json.dumps({"code": "print()", "tests": tests}) + "\n")
    (home / "samples.jsonl").write_text(
        "".join(json.dumps({"task_id": f"p{n}", "solution": "print()"}) + "\n" for n in range(40))
    )
    fields = {"input": "say 1", "output": "<think>x</think>print(1)", "solution": "print(1)", "id": "a"}
    (home / "ocr.jsonl").write_text(json.dumps({**fields, "dataset": "d", "split": "s", "index": "0"}) + "\n")
    place = small / "place"
    place.mkdir()
    (place / "problems.jsonl").write_bytes((home / "problems.jsonl").read_bytes())
    for name in ("done", "other"):
        write_run(place / name)
    (place / "in").symlink_to(home)
    (place / "more").symlink_to(more)
    with (small / "fill").open("wb") as fill, suppress(OSError):
        while True:
            os.write(fill.fileno(), b"0" * 4096)
    monkeypatch.chdir(place)
    return place


@pytest.mark.parametrize("line", ON_A_FULL_DISK)
def test_a_command_on_a_full_disk_says_one_sentence_and_leaves_nothing(line: str, full: Path) -> None:
    before = everything(full)
    with serving(MockServer(lambda _: completion("```python\nprint()\n```"))) as teacher:
        words = line.replace("HERE", str(full)).replace("URL", teacher.url).split()
        ended = nouscoder(*(word.replace("'", '"') for word in words))
    assert ended.exit_code == 74, ended.output
    said = [each for each in ended.stderr.splitlines() if each.startswith("nouscoder: ")]
    assert len(said) == 1, ended.output
    assert "Traceback" not in ended.output
    after = everything(full)  # what a synthesis was answered stays beside it, for the same command
    assert {name: text for name, text in after.items() if ".evidence" not in name} == before
