"""A run goes on with new values, or after its end: which are taken, which are refused, and what the disk says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nouscoder.config import Config, ConfigError, load_config
from nouscoder.config.learner import LearnerSection
from nouscoder.config.tree import read_given
from nouscoder.learner.state.batch_settings import BatchSettings
from nouscoder.run.evaluation_files import drop_worse, recorded_evaluations
from nouscoder.run.folder import RunChanged, RunFolder
from nouscoder.run.local_services import rewrite_addresses
from nouscoder.run.resume import HISTORY, OF_A_RUN, Resumed, continue_finished, note_given, reopened, resumed, take

FILE = """
[run]
total_batches = 30
[learner]
learning_rate = 1e-5
[broker]
batch_size = 64
"""


class Home:
    """A user's configuration, and the run that it began."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / "my.toml"
        self.file.write_text(FILE)

    def load(self, *sets: str) -> Config:
        return load_config(self.file, [f'run.root="{self.root / "runs"}"', *sets])

    def begin(self, *sets: str) -> None:
        """As `nouscoder train my.toml`, up to the services."""
        folder = RunFolder.create(self.load(*sets))
        note_given(folder, read_given(self.file, sets))
        rewrite_addresses(folder, self.load(*sets))
        folder.close()

    def resume(self, *sets: str) -> Resumed:
        """As `nouscoder train my.toml --resume`, up to the services."""
        folder, recorded = RunFolder.reopen(self.load(*sets).run.folder)
        given = read_given(self.file, [f'run.root="{self.root / "runs"}"', *sets])
        try:
            run = resumed(folder.path, recorded, given)
            continue_finished(folder, run)
            take(folder, run, given, 7)
        finally:
            folder.close()
        return run

    @property
    def run(self) -> Path:
        return self.root / "runs" / "run"

    @property
    def recorded(self) -> Config:
        return load_config(self.run / "config.toml")

    def history(self) -> list[dict[str, object]]:
        file = self.run / HISTORY
        return [json.loads(line)["changes"] for line in file.read_text().splitlines()] if file.exists() else []

    def finish(self, steps: int = 120) -> None:
        """What a run leaves at its end."""
        for name, version, score in (("before", 0, 0.1), ("after", steps // 4, 0.3)):
            record = {"policy_version": version, "pass_at_1": score}
            (self.run / f"evaluation_{name}.json").write_text(json.dumps(record))
        (self.run / "summary.json").write_text(json.dumps({"steps": steps}))
        for folder, file in ((f"policies/{steps // 4:08d}", "model.safetensors"), (f"checkpoints/{steps:08d}", "a")):
            (self.run / folder).mkdir(parents=True)
            (self.run / folder / file).write_text(folder)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def contents(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_a_new_value_is_taken_listed_and_noted_and_lasts(home: Home) -> None:
    home.begin("broker.pipeline_k=2")
    run = home.resume("learner.learning_rate=1e-6", "run.total_batches=40")
    assert run.lines == ["resuming with run.total_batches 30 -> 40, learner.learning_rate 1e-5 -> 1e-6"]
    assert home.history() == [{"run.total_batches": [30, 40], "learner.learning_rate": [1e-5, 1e-6]}]
    assert home.recorded == run.config

    again = home.resume()  # after another crash, and the file still has the old values
    assert again.lines == []
    assert (again.config.learner.learning_rate, again.config.run.total_batches) == (1e-6, 40)
    assert again.config.broker.pipeline_k == 2
    assert len(home.history()) == 1


def test_an_edit_of_the_file_is_a_new_value_and_so_is_what_it_says_no_longer(home: Home) -> None:
    home.begin()
    home.file.write_text(FILE.replace("30", "35").replace("learning_rate = 1e-5", ""))
    assert home.resume("broker.lease_s=20").changes == {
        "run.total_batches": (30, 35),
        "learner.learning_rate": (1e-5, Config().learner.learning_rate),
        "broker.lease_s": (10.0, 20.0),
    }
    assert home.resume().changes == {}


def test_a_run_keeps_the_layers_of_its_adapters_when_nobody_names_them(home: Home) -> None:
    names = ("q_proj", "v_proj")  # as the default of an earlier release, which the run's folder records
    home.begin("learner.lora.rank=4", f"learner.lora.target_modules={json.dumps(names)}")
    assert home.resume("learner.learning_rate=1e-6").config.learner.lora.target_modules == names
    with pytest.raises(RunChanged, match=r"learner\.lora"):
        home.resume("learner.lora.target_modules=[]")


def test_another_objective_in_the_file_comes_with_all_its_keys(home: Home) -> None:
    objective = "[learner.objective]\nname = {}\nclip_low = 0.1\n"
    home.file.write_text(FILE + objective.format('"dapo"'))
    home.begin()
    home.file.write_text(FILE + objective.format('"grpo"'))
    run = home.resume()
    assert run.config.learner.objective.model_dump()["name"] == "grpo"
    assert run.config.learner.objective.model_dump()["clip_low"] == 0.1


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("run.seed=5", "run.seed is 5, but the run in .* began with 0: put it back"),
        ("broker.batch_size=128", "broker.batch_size is 128, but"),
        ("policy.path=/elsewhere", "policy.path is '/elsewhere', but"),
        ("policy.path=Org/Model", "policy.path is 'Org/Model', but"),
        ("generation.sampling.max_new_tokens=5", "generation.sampling.max_new_tokens is 5, but"),
        ("generation.environment.prompt_as=text", "generation.environment.prompt_as is 'text', but"),
        ("broker.redis_url=redis://elsewhere:6379/0", "broker.redis_url is 'redis://elsewhere:6379/0', but"),
        ("run.services=external", "run.services is 'external', but"),
    ],
)
def test_what_a_run_cannot_change_is_refused_by_name_and_nothing_changes(home: Home, value: str, sentence: str) -> None:
    home.begin()
    before = contents(home.run)
    with pytest.raises(RunChanged, match=sentence):
        home.resume("learner.learning_rate=1e-6", value)
    assert contents(home.run) == before


def test_all_refused_values_are_named_together_and_faulty_ones_are_faults(home: Home) -> None:
    home.begin()
    with pytest.raises(RunChanged, match=r"(?s)run.seed is 5.*learner.steps_per_batch is 3"):
        home.resume("run.seed=5", "learner.steps_per_batch=3")
    with pytest.raises(ConfigError, match="broker: batch_size 64 must be a multiple of group_size 5"):
        home.resume("broker.group_size=5")
    assert {"run.seed", "broker.redis_url", "generation.max_tokens_total"} <= set(OF_A_RUN)


def test_what_only_looks_new_is_not(home: Home) -> None:
    cached = home.root / "models--Org--Model" / "snapshots" / "1"
    home.file.write_text(FILE + '[policy]\npath = "Org/Model"\n')
    home.begin(f"policy.path={cached}", "learner.learning_rate=3e-5")
    same = ("policy.path=Org/Model", "learner.learning_rate=0.00003", "run.name=run", "broker.grpc=127.0.0.1:1")
    assert home.resume(*same).changes == {}


def test_what_changes_the_last_bits_waits_until_no_step_must_be_computed_again(home: Home) -> None:
    home.begin()
    (home.run / "metrics.jsonl").write_text("{}\n{}\n{}\n")
    (home.run / "checkpoints" / "00000001").mkdir(parents=True)
    with pytest.raises(RunChanged, match=r"learner.threads cannot be 4 now: .* 2 steps that no checkpoint holds"):
        home.resume("learner.threads=4")
    (home.run / "checkpoints" / "00000003").mkdir()
    assert home.resume("learner.threads=4").config.learner.threads == 4


def test_a_finished_run_goes_on_with_more_batches_and_keeps_its_last_policy(home: Home) -> None:
    home.begin()
    home.finish()
    run = home.resume("run.total_batches=40")
    assert run.lines == ["resuming with run.total_batches 30 -> 40"]
    assert not (home.run / "summary.json").exists()
    assert not (home.run / "evaluation_after.json").exists()
    assert [each.policy_version for each in recorded_evaluations(home.run)] == [0, 30]
    drop_worse(home.run)
    kept = contents(home.run / "kept")
    assert sorted(kept.values()) == ["checkpoints/00000120", "policies/00000030"], "the best so far"
    assert home.resume().changes == {}


def test_a_finished_run_stays_finished_and_says_so(home: Home) -> None:
    home.begin()
    home.finish()
    before = contents(home.run)
    for sets in (["learner.learning_rate=1e-6"], ["run.total_batches=20"]):
        with pytest.raises(RunChanged, match=r"finished after 30 batches: .* set run.total_batches above 30 to go on"):
            home.resume(*sets)
    assert contents(home.run) == before
    assert home.resume('run.pages="127.0.0.1:0"').changes
    assert (home.run / "summary.json").exists()


def test_a_run_that_ended_early_goes_on_without_its_bound(home: Home) -> None:
    home.begin("evaluation.every_batches=5", "evaluation.end_at_pass_at_1=0.2")
    home.finish(steps=40)
    assert home.resume().changes == {}
    assert (home.run / "summary.json").exists()
    home.resume("evaluation.end_at_pass_at_1=0")
    assert not (home.run / "summary.json").exists()


@pytest.mark.parametrize(
    ("sets", "edit", "new"),
    [
        ((), lambda text: text, ""),
        (("learner.threads=2",), lambda text: text, ""),
        (("learner.threads=3",), lambda text: text, "learner.threads"),
        ((), lambda text: text.replace("30", "31"), "run.total_batches"),
    ],
)
def test_what_takes_no_new_values_names_them(
    home: Home, sets: tuple[str, ...], edit: Callable[[str], str], new: str
) -> None:
    home.begin("learner.threads=2")
    home.file.write_text(edit(FILE))
    if not new:
        reopened(home.run, read_given(home.file, sets), "it")[0].close()
        return
    with pytest.raises(RunChanged, match=f"it takes no new values with --resume: put back {new}, or"):
        reopened(home.run, read_given(home.file, sets), "it")


def test_a_batch_keeps_every_rate_of_its_first_training(tmp_path: Path) -> None:
    settings = BatchSettings(tmp_path)
    first = LearnerSection(learning_rate=1e-5, matrix_learning_rate=0.02)
    settings.fix(0, first)
    now = LearnerSection(learning_rate=1e-6, matrix_learning_rate=0.01)
    assert settings.fix(0, now) == first
    assert settings.fix(1, now) == now
