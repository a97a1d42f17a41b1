"""The driver of a plan: stages in order, each from the chosen policy, and the same end after a stop at any point."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from nouscoder.config import Config, ConfigError, load_config
from nouscoder.config.broker import PassRatesCurriculum
from nouscoder.config.tree import Given, read_given
from nouscoder.data.pass_rates import PassCount, read_pass_rates
from nouscoder.domain.curriculum import CurriculumState, ProblemStatistics
from nouscoder.learner.model.synthetic import random_policy, write_policy_folder
from nouscoder.learner.publication.publisher import PolicyPublisher, StagedPolicy
from nouscoder.policy_folder.compose import compose_policy, with_yarn
from nouscoder.run import plan, preflight
from nouscoder.run.evaluation_files import drop_worse, keep_weights, recorded_evaluations, weights_folder
from nouscoder.run.folder import RunChanged, RunFolder, RunFolderError
from nouscoder.run.local_services import KeptGeneration
from nouscoder.run.view import PlainView, View

PROBLEM = {"problem_id": "p", "prompt": "x", "tests": {"type": "stdin", "cases": [{"input": "1", "output": "1"}]}}
PLAN = """
[run]
name = "mine"
[problems]
train = "p.jsonl"
held_out = "p.jsonl"
[policy]
path = "model"
[generation]
max_tokens_total = 64
sampling.max_new_tokens = 32
[[plan.stages]]
name = "a"
[[plan.stages]]
name = "b"
from = "best"
[[plan.stages]]
name = "c"
yarn.factor = 2.0
yarn.original_tokens = 256
set.generation.max_tokens_total = 512
set.run.total_batches = 0
"""
# pass@1 of versions 0, 2 and 4 of each stage: the best of a is version 2, the last of b is version 4.
SCORES = {"a": (0.1, 0.5, 0.3), "b": (0.5, 0.6, 0.7), "c": (0.7,)}


class Stopped(BaseException):
    """The process is killed."""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A plan of three stages on a tiny policy."""
    write_policy_folder(tmp_path / "model", random_policy(0))
    (tmp_path / "p.jsonl").write_text(json.dumps(PROBLEM) + "\n")
    (tmp_path / "mine.toml").write_text(PLAN)
    return load_config(tmp_path / "mine.toml", [f'run.root="{tmp_path / "runs"}"'])


def publish(run: Path, version: int, seed: int) -> None:
    PolicyPublisher(run / "policies", 1).write(StagedPolicy.of(random_policy(seed), version, version))


async def imitated_run(
    folder: RunFolder, config: Config, view: View, started_s: float, generation: KeptGeneration | None = None
) -> None:
    """What a run leaves on the disk: evaluations, the best policy, the last policy, the summary."""
    name = config.run.name[-1]
    for number, score in enumerate(SCORES[name]):
        record = {"policy_version": 2 * number, "pass_at_1": score}
        if number == 0:
            folder.write_json("evaluation_before.json", record)
            continue
        publish(folder.path, 2 * number, seed=ord(name) + number)
        if number == 1:
            keep_weights(folder.path, 2)
            folder.write_json("evaluations/00000002.json", record)
            drop_worse(folder.path)
        else:
            folder.write_json("evaluation_after.json", record)
    folder.write_json("summary.json", {"name": config.run.name})


def view() -> View:
    return PlainView(Console(quiet=True))


async def go(config: Config) -> None:
    """Start or resume the plan."""
    resume = (config.run.folder / "config.toml").exists()
    opened = await plan._open(config, resume=resume)
    folder, recorded = opened.folder, opened.config
    try:
        await plan.run_stages(folder, recorded, view())
    finally:
        folder.close()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def assert_end(config: Config) -> None:
    """Stage b began with version 2 of a, stage c with version 4 of b and with YaRN."""
    root = config.run.folder
    expected = random_policy(ord("a") + 1).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in weights(root / "02-b/policy").items())
    expected = random_policy(ord("b") + 2).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in weights(root / "03-c/policy").items())
    model = json.loads((root / "03-c/policy/config.json").read_text())
    assert model["max_position_embeddings"] == 512
    states = json.loads((root / "plan.json").read_text())["stages"]
    assert [(stage["finished"], stage["best_version"]) for stage in states] == [(True, 2), (True, 4), (True, 0)]


async def test_each_stage_begins_with_the_chosen_policy(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "run_loop", imitated_run)
    await go(config)
    assert_end(config)
    with pytest.raises(RunFolderError, match="holds a run already"):
        await plan._open(config, resume=False)


@pytest.mark.parametrize("stage", ["a", "b", "c"])
@pytest.mark.parametrize("after_its_end", [False, True])
async def test_a_plan_that_is_killed_in_a_stage_has_the_same_end(
    config: Config, monkeypatch: pytest.MonkeyPatch, stage: str, after_its_end: bool
) -> None:
    ran: list[str] = []
    killed: list[str] = []

    async def run(
        folder: RunFolder, config: Config, view: View, started_s: float, generation: KeptGeneration | None = None
    ) -> None:
        kill = config.run.name.endswith(stage) and not killed
        if kill and not after_its_end:
            killed.append(stage)
            raise Stopped
        ran.append(config.run.name)
        await imitated_run(folder, config, view, started_s)
        if kill:
            killed.append(stage)
            raise Stopped

    monkeypatch.setattr(plan, "run_loop", run)
    with pytest.raises(Stopped):
        await go(config)
    await go(config)
    assert_end(config)
    assert ran == ["mine/01-a", "mine/02-b", "mine/03-c"]


async def test_a_stage_takes_the_pass_rates_of_the_one_before(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken: list[dict[str, PassCount]] = []

    async def run(
        folder: RunFolder, config: Config, view: View, started_s: float, generation: KeptGeneration | None = None
    ) -> None:
        curriculum = config.broker.curriculum
        if isinstance(curriculum, PassRatesCurriculum):
            taken.append(read_pass_rates(Path(curriculum.pass_rates)))
        if len(taken) == 1 and folder.path.name == "02-b":
            raise Stopped
        state = CurriculumState(3, (ProblemStatistics("p", groups=1, sampled=8, accepted=5),))
        folder.write_json("curriculum.json", state.to_json())
        await imitated_run(folder, config, view, started_s)

    monkeypatch.setattr(plan, "run_loop", run)
    rated = 'from = "best"\nset.broker.curriculum = {name = "pass_rates", pass_rates = "stage://a"}'
    (tmp_path / "mine.toml").write_text(PLAN.replace('from = "best"', rated))
    config = load_config(tmp_path / "mine.toml", [f'run.root="{tmp_path / "runs"}"'])
    with pytest.raises(Stopped):
        await go(config)
    await go(config)
    assert_end(config)
    assert taken == [{"p": PassCount(5, 8)}] * 2, "before and after the kill"


async def test_a_kill_while_the_policy_of_a_stage_is_made_leaves_nothing_that_is_used(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "run_loop", imitated_run)
    real = compose_policy

    def killed_after(to: Path, first: Path, weights: Path, **options: Any) -> None:
        """Stage b's policy is made from other weights, and the process ends before config.toml."""
        real(to, first, first)
        raise Stopped

    monkeypatch.setattr(plan, "compose_policy", killed_after)
    with pytest.raises(Stopped):
        await go(config)
    assert not (config.run.folder / "02-b/config.toml").exists()
    monkeypatch.setattr(plan, "compose_policy", real)
    await go(config)
    assert_end(config)


async def test_faults_of_later_stages_are_reported_before_the_first_begins(config: Config, tmp_path: Path) -> None:
    text = PLAN.replace('from = "best"', 'from = "best"\nset.problems.train = "missing.jsonl"')
    (tmp_path / "mine.toml").write_text(text)
    faulty = load_config(tmp_path / "mine.toml", [f'run.root="{tmp_path / "runs"}"'])
    with pytest.raises(Exception, match=r"stage mine/02-b: problems\.train: .*missing\.jsonl does not exist"):
        await plan._open(faulty, resume=False)
    assert not faulty.run.folder.exists()


def test_an_engine_is_started_for_the_stages_that_can_share_it(config: Config, tmp_path: Path) -> None:
    text = PLAN.replace('from = "best"', 'from = "best"\nset.generation.max_tokens_total = 128')
    (tmp_path / "mine.toml").write_text(text)
    more = load_config(tmp_path / "mine.toml", [f'run.root="{tmp_path / "runs"}"'])

    def engine_tokens(config: Config) -> list[int]:
        stages = [config.stage_run(index) for index in range(3)]
        made = [plan.with_engine_tokens(config, index, stage) for index, stage in enumerate(stages)]
        return [stage.generation.engine_tokens for stage in made]

    assert engine_tokens(config) == [64, 64, 512]
    assert engine_tokens(more) == [128, 128, 512], "YaRN needs another engine"
    own = load_config(tmp_path / "mine.toml", ["generation.engine_tokens_total=100"])
    assert engine_tokens(own) == [100, 128, 512], "the configuration's own number stays"


@pytest.mark.parametrize("scores", [(0.1, 0.3, 0.2, 0.3), (0.5, 0.4, 0.4, 0.1), (0.1, 0.2, 0.3, 0.4)])
def test_the_best_evaluated_policy_is_always_on_the_disk(config: Config, scores: tuple[float, ...]) -> None:
    """Also when the process ends between two of the three steps of an evaluation; others are removed."""
    folder = RunFolder.create(config)
    try:
        folder.write_json("evaluation_before.json", {"policy_version": 0, "pass_at_1": scores[0]})
        for number, score in enumerate(scores[1:], 1):
            version = 10 * number
            publish(folder.path, version, seed=version)
            keep_weights(folder.path, version)
            assert_best_is_there(config)
            folder.write_json(f"evaluations/{version:08d}.json", {"policy_version": version, "pass_at_1": score})
            assert_best_is_there(config)
            drop_worse(folder.path)
            publish(folder.path, version + 1, seed=99)  # the learner removes the older one
            assert_best_is_there(config)
        kept = [*folder.path.glob("kept/*")]
        best = 10 * scores.index(max(scores))
        assert [int(path.name) for path in kept] == ([best] if best else [])
    finally:
        folder.close()


def assert_best_is_there(config: Config) -> None:
    evaluations = recorded_evaluations(config.run.folder)
    best = min(evaluations, key=lambda each: (-each.pass_at_1, each.policy_version)).policy_version
    assert (weights_folder(config, best) / "model.safetensors").is_file()


@pytest.mark.parametrize("old_form", [False, True])
def test_yarn_is_read_by_transformers_from_both_forms_of_the_configuration(tmp_path: Path, old_form: bool) -> None:
    write_policy_folder(tmp_path / "model", random_policy(0))
    file = tmp_path / "model/config.json"
    if old_form:
        tree = json.loads(file.read_text())
        tree["rope_theta"] = tree.pop("rope_parameters")["rope_theta"]
        file.write_text(json.dumps(tree | {"rope_scaling": None}))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    changed = with_yarn(tmp_path / "model", 2.5, 256)
    compose_policy(tmp_path / "long", tmp_path / "model", tmp_path / "model", config=changed)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "long")
    assert model.config.max_position_embeddings == 640
    rope = model.config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 2.5, 256)
    assert rope["rope_theta"] == plain.config.rope_parameters["rope_theta"]
    tokens = torch.arange(3, 35)[None]
    assert not torch.equal(model(tokens).logits, plain(tokens).logits)


def values_of(*sets: str, root: Path) -> Given:
    return read_given(root / "mine.toml", [f'run.root="{root / "runs"}"', *sets])


async def test_a_resumed_plan_takes_new_values_of_the_stages_to_come(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def stopped_in_b(
        folder: RunFolder, config: Config, view: View, started_s: float, generation: KeptGeneration | None = None
    ) -> None:
        if config.run.name.endswith("b"):
            raise Stopped
        await imitated_run(folder, config, view, started_s)

    monkeypatch.setattr(plan, "run_loop", stopped_in_b)
    begun = values_of("plan.stages.c.evaluation.samples=3", root=tmp_path)
    opened = await plan._open(load_config(tmp_path / "mine.toml", _sets(begun)), resume=False, given=begun)
    with pytest.raises(Stopped):
        await plan.run_stages(opened.folder, opened.config, view())
    opened.folder.close()

    async def resume(*sets: str) -> tuple[Config, Sequence[str]]:
        opened = await plan._open(config, resume=True, given=values_of(*sets, root=tmp_path))
        opened.folder.close()
        return opened.config, opened.notes

    with pytest.raises(RunChanged, match=r"plan\.stages\.0\.set\.run\.total_batches: stage a is finished, so"):
        await resume("plan.stages.0.run.total_batches=9")
    with pytest.raises(RunChanged, match=r"broker.group_size is 4, but the run in .*02-b began with 8"):
        await resume("plan.stages.b.broker.group_size=4")
    with pytest.raises(
        ConfigError, match=r"stage mine/03-c: generation\.max_tokens_total 4096 is more than the 512 pos"
    ):
        await resume("plan.stages.c.generation.max_tokens_total=4096")
    now, notes = await resume("plan.stages.c.evaluation.temperature=0.5", "plan.stages.b.run.total_batches=40")
    assert [*notes] == [
        "resuming with plan.stages.1.set.run.total_batches null -> 40, plan.stages.2.set.evaluation.temperature null"
        " -> 0.5"
    ]
    last = now.of_stage(2)
    assert (last.evaluation.samples, last.evaluation.temperature, last.run.total_batches) == (3, 0.5, 0)
    (tmp_path / "mine.toml").write_text(PLAN.replace("set.generation.max_tokens_total = 512", "").strip())
    now, _ = await resume()
    assert now.of_stage(2).generation.max_tokens_total == 64, "the file says it no longer"


def _sets(given: Given) -> list[str]:
    """The same overrides for `load_config`."""
    return [f'run.root="{given.sets["run"]["root"]}"', "plan.stages.c.evaluation.samples=3"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ("set.generation.max_tokens_total = 4096", "generation.max_tokens_total 4096 is more than the 256 positions"),
        ("set.evaluation.max_tokens_total = 4096", "evaluation.max_tokens_total 4096 is more than the 256 positions"),
        ("set.generation.sampling.max_new_tokens = 64", "max_new_tokens 64 must be less than .*max_tokens_total 64"),
        ('set.learner.device = "cuda"', 'learner.device is "cuda", and this machine has no GPU'),
        ("set.learner.steps_per_batch = 99", "learner.steps_per_batch is 99, but a batch has"),
        ('set.evaluation.problems = "gone.jsonl"', r"evaluation.problems: .*gone\.jsonl does not exist"),
        (
            "yarn = {factor = 2.0, original_tokens = 999}",
            "b: yarn: .* has 256 positions, so YaRN cannot start from 999",
        ),
        ("yarn = {factor = 2.0, original_tokens = 64}", "b: generation.max_tokens_total 200 is more than the 128 pos"),
        ('set.problems.languages = ["cobolt"]', "cobolt"),
        ('set.learner.first_checkpoint = "p.jsonl"', "learner.first_checkpoint: .* is not a checkpoint"),
        ('set.generation.environment = {kind = "agent"}', "environment.kind agent needs openai.http"),
        ('set.broker.curriculum = {name = "subset", problem_ids = ["q"]}', "b: broker.curriculum"),
        (
            'set.problems.train = "q.jsonl"\nset.broker.curriculum = {name = "pass_rates", pass_rates = "stage://a"}',
            "b: broker.curriculum.pass_rates: mine/01-a trains on none of its problems",
        ),
        ('set.run.sinks = ["wandb"]', "b: .*wandb"),
        ('set.learner.lora = {rank = 4, target_modules = ["k_porj"]}', "b: learner.lora.target_modules: .*k_porj"),
    ],
)
async def test_what_a_later_stage_cannot_do_is_said_before_the_first_begins(
    config: Config, tmp_path: Path, changes: str, sentence: str
) -> None:
    if "yarn" in changes:
        changes += "\nset.generation.max_tokens_total = 200"
    (tmp_path / "q.jsonl").write_text(json.dumps(PROBLEM | {"problem_id": "q"}) + "\n")
    (tmp_path / "mine.toml").write_text(PLAN.replace('from = "best"', f'from = "best"\n{changes}'))

    async def begin() -> None:
        await plan._open(load_config(tmp_path / "mine.toml", [f'run.root="{tmp_path / "runs"}"']), resume=False)

    with pytest.raises(ConfigError, match=f"(?s){sentence}") as refused:
        await begin()
    assert not (tmp_path / "runs").exists()
    assert "02-b" in str(refused.value) or "in plan.stages, b" in str(refused.value)


async def test_a_plan_without_its_problems_asks_no_hub(config: Config, tmp_path: Path) -> None:
    """All that is missing of each stage is said at once, and nothing is fetched."""
    sets = [
        'policy.path="Org/Model-14B"',
        'problems.train="gone.jsonl"',
        "plan.stages.c.evaluation.problems=away.jsonl",
        'recipe.data=["nouscoder data filter rust"]',
    ]
    sets.append("plan.stages.b.learner.steps_per_batch=99")
    faulty = load_config(tmp_path / "mine.toml", [f'run.root="{tmp_path / "runs"}"', *sets])

    def fetched(name: str) -> Path:
        raise AssertionError(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "downloaded", fetched)
        with pytest.raises(ConfigError) as refused:
            await plan._open(faulty, resume=False)
    said = str(refused.value)
    assert "stage mine/01-a, mine/02-b, mine/03-c: problems.train" in said
    assert "away.jsonl does not exist" in said
    assert said.count("data filter rust") == 1
    assert "steps_per_batch is 99" in said
