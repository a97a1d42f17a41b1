"""The end of a run, its folder, its report and its pages say which problems gave no training, and why."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.command_line import nouscoder
from tests.services.conftest import BrokerRig

from nouscoder.broker.core import Broker
from nouscoder.data.problems import save_problems
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import StdinCase, StdinTests
from nouscoder.domain.verdict import VerdictKind
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
from nouscoder.report.page import write_report
from nouscoder.report.untrained import FILE, read_untrained, untrained
from nouscoder.run.pages import FILES

pytestmark = pytest.mark.alone

FATES = (
    VerdictKind.ACCEPTED,
    VerdictKind.WRONG_ANSWER,
    VerdictKind.INTERNAL_ERROR,
    None,
    None,
)  # None: half of a group


async def test_each_problem_that_gave_no_training_has_its_cause(
    new_broker: Callable[..., Broker], broker_rig: BrokerRig, tmp_path: Path
) -> None:
    """A run of these problems ended with "balanced", and nothing said that six of eight gave no training."""
    in_cpp = Problem("c", "In C++.", StdinTests((StdinCase("1", "2"),)), languages=("cpp",))
    left_out = Problem("not-in-subset", "More.", in_cpp.tests)
    save_problems(tmp_path / "train.jsonl", [*broker_rig.problems, in_cpp, left_out])
    save_problems(tmp_path / "held.jsonl", [Problem("held", "New.", in_cpp.tests), in_cpp])
    subset = json.dumps([one.problem_id for one in broker_rig.problems])
    config = broker_rig.config(
        *(f'problems.train="{tmp_path}/train.jsonl"', f'problems.held_out="{tmp_path}/held.jsonl"'),
        *("broker.max_regrades=1", f'run.root="{tmp_path}"', 'problems.languages=["python"]', "run.total_batches=1"),
        *('broker.curriculum.name="subset"', f"broker.curriculum.problem_ids={subset}"),
    )
    broker = new_broker(config=config)
    await broker.publish_policy(broker_rig.manifest(0))
    asked = []
    for fate in FATES:
        (problem,) = {item.task.problem_id for item in await broker_rig.sample(broker, 4)}
        asked.append(problem)
        for _ in range(2):
            await broker_rig.grade(broker, lambda name, fate=fate: fate or broker_rig.mixed(name))  # type: ignore[misc]
    (never,) = {one.problem_id for one in broker_rig.problems} - {*asked}
    config.run.folder.mkdir()
    rewards = {asked[3]: [0.1 + 0.2, 0.3], asked[4]: [0.0, 1.0]}
    (config.run.folder / "rewards.jsonl").write_text(json.dumps({"step": 1, "batch_id": 0, "rewards": rewards}) + "\n")

    said = await broker.operations.dead_letters(), await broker.status()
    found = untrained(config, await broker.read_curriculum(), *said)
    assert found.num_problems == 8
    assert found.by_cause == {
        "in a language that problems.languages lacks": ["c"],
        "filtered: every answer was accepted": [asked[0]],
        "filtered: no answer was accepted": [asked[1]],
        "not graded: internal_error": [asked[2]],
        "in batches with equal rewards alone, so without an advantage": [asked[3]],
        "not reached before the end": [never],
        "left out by broker.curriculum": ["not-in-subset"],
    }
    assert found.not_measured == {"in a language that problems.languages lacks": ["c"]}

    folder = config.run.folder
    (folder / "config.toml").touch()
    (folder / FILE).write_text(json.dumps(asdict(found)))
    assert read_untrained(folder) == found
    lines = found.lines(folder)
    assert lines[0] == f"7 of 8 training problems gave no training, all in {folder}/untrained.json:"
    assert f"  1 not graded: internal_error: {asked[2]}" in lines
    counts = {cause: len(names) for cause, names in found.by_cause.items()}
    (folder / "summary.json").write_text(json.dumps({"name": "x", "untrained": counts}))
    assert FILE in FILES
    assert "7 of 8 training problems gave no training" in write_report(folder).read_text()
    assert f"  1 not reached before the end: {never}" in nouscoder("report", str(folder)).stdout
    assert json.loads(nouscoder("report", str(folder), "--json").stdout)["untrained"] == asdict(found)


@pytest.mark.parametrize("is_filtered", [True, False])
async def test_problems_whose_answers_never_hold_code_are_counted_apart(
    is_filtered: bool, new_broker: Callable[..., Broker], broker_rig: BrokerRig, tmp_path: Path
) -> None:
    """They were "no answer was accepted", as problems that are too hard."""
    save_problems(tmp_path / "train.jsonl", broker_rig.problems)
    save_problems(tmp_path / "held.jsonl", broker_rig.problems[:1])
    config = broker_rig.config(
        *(f'problems.train="{tmp_path}/train.jsonl"', f'problems.held_out="{tmp_path}/held.jsonl"'),
        *(f'run.root="{tmp_path}"', f"broker.drop_zero_variance={str(is_filtered).lower()}"),
    )
    broker = new_broker(config=config)
    await broker.publish_policy(broker_rig.manifest(0))
    asked = []
    kinds = iter([VerdictKind.NO_CODE] * 6 + [VerdictKind.WRONG_ANSWER] * 2)
    for _ in range(2):
        (problem,) = {item.task.problem_id for item in await broker_rig.sample(broker, 4)}
        asked.append(problem)
        await broker_rig.grade(broker, lambda _: next(kinds))
    config.run.folder.mkdir()
    rewards = {} if is_filtered else {name: [-1.0] * 4 for name in asked}
    (config.run.folder / "rewards.jsonl").write_text(json.dumps({"rewards": rewards}) + "\n")
    state = await broker.read_curriculum()
    assert {one.problem_id: one.no_code for one in state.problems} == {asked[0]: 4, asked[1]: 2}
    found = untrained(config, state, (), await broker.status())
    assert found.by_cause["no answer held code"] == [asked[0]]
    cause = (
        "filtered: no answer was accepted"
        if is_filtered
        else "in batches with equal rewards alone, so without an advantage"
    )
    assert found.by_cause[cause] == [asked[1]]


@pytest.mark.heavy
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_run_that_ends_early_says_what_gave_no_training(is_stopped: bool, tmp_path: Path) -> None:
    """It wrote no untrained.json, and said nothing but why it ended."""
    write_policy_folder(tmp_path / "policy", random_policy(0))
    tests = StdinTests((StdinCase("1", "2"),))
    for file in ("train.jsonl", "held.jsonl"):
        save_problems(tmp_path / file, [Problem(name, f"Add {name}.", tests) for name in ("one", "two")])
    (tmp_path / "run.toml").write_text("# every value is given by --set\n")
    values = ["policy.path=policy", "problems.train=train.jsonl", "problems.held_out=held.jsonl", "run.name=x"]
    values += ["broker.group_size=2", "broker.batch_size=4", "learner.steps_per_batch=1", "run.total_batches=2"]
    values += ["generation.threads=1", "learner.threads=1", "generation.sampling.max_new_tokens=8"]
    values += ["generation.max_tokens_total=64"]
    values += [f"run.max_filtered_batches={1000000 if is_stopped else 2}"]
    command = [
        sys.executable,
        "-m",
        "nouscoder",
        "train",
        "run.toml",
        *(part for one in values for part in ("--set", one)),
    ]
    run = tmp_path / "runs" / "x"
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            said = []
            for line in process.stdout or ():
                said.append(line)
                if is_stopped and re.search("filtered [1-9]", line):
                    process.send_signal(signal.SIGTERM)
            assert process.wait(60) == (130 if is_stopped else 78), said
        finally:
            process.kill()
    found = read_untrained(run)
    assert found is not None, said
    assert found.by_cause["no answer held code"], said
    assert f"2 of 2 training problems gave no training, all in {run}/untrained.json:" in "".join(said)


# Packages that the learner's image lacks, where the coordinator of an external run works.
ABSENT = "redis networkx websockets httpx sortedcontainers pytest obstore opentelemetry cachetools uvloop"
ENDS = f"""
import json, sys
from types import SimpleNamespace
sys.modules.update(dict.fromkeys({ABSENT!r}.split()))
import nouscoder.learner.process, nouscoder.run.loop, nouscoder.run.languages
from nouscoder.config import load_config
from nouscoder.domain.curriculum import CurriculumState
from nouscoder.report.untrained import untrained
status = SimpleNamespace(num_problems=2, left_out_problems=0, refused_reason="")
print(json.dumps(dict(untrained(load_config(None, sys.argv[1:]), CurriculumState(), (), status).by_cause)))
"""


def test_a_run_ends_in_an_image_without_the_packages_of_broker_and_grader(tmp_path: Path) -> None:
    tests = StdinTests((StdinCase("1", "2"),))
    save_problems(tmp_path / "train.jsonl", [Problem("a", "Add one.", tests), Problem("b", "Add two.", tests)])
    save_problems(tmp_path / "held.jsonl", [Problem("held", "New.", tests)])
    files = f"problems.train={tmp_path}/train.jsonl", f"problems.held_out={tmp_path}/held.jsonl"
    command = [sys.executable, "-c", ENDS, *files, f"run.root={tmp_path}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {"not reached before the end": ["a", "b"]}
