"""The configuration tree: closed, typed, with one sentence for every fault."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from nouscoder.config import Config, ConfigError, RunSection, SamplingSection, Section, dump_config, load_config
from nouscoder.config.tree import read_given
from nouscoder.domain.guards import BatchFigures, Thresholds
from nouscoder.domain.rollout import Sampling


def test_the_temperature_goes_linearly_to_its_last_value_and_stays_there() -> None:
    """AceReason-Nemotron's second code stage: from 0.6 to 1.0."""
    ramp = ("temperature=0.6", "final_temperature=1.0", "ramp_batches=4")
    sampling = load_config(None, [f"generation.sampling.{one}" for one in ramp]).generation.sampling
    assert [sampling.temperature_at(version) for version in (0, 1, 2, 4, 9)] == pytest.approx([0.6, 0.7, 0.8, 1.0, 1.0])
    plain = load_config(None, ["generation.sampling.temperature=0.6"]).generation.sampling
    assert [plain.temperature_at(version) for version in (0, 9)] == [0.6, 0.6]


def test_defaults_survive_a_round_trip_through_toml(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(dump_config(Config()))
    assert load_config(file) == Config(run=RunSection(root=Path("runs").resolve()))


def test_relative_paths_start_at_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an override start at the working directory; a default input stays in the run folder."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.jsonl").touch()
    (tmp_path / "elsewhere" / "model").mkdir(parents=True)
    file = tmp_path / "mine" / "my.toml"
    file.write_text(
        '[problems]\ntrain = "a.jsonl"\n[run]\nroot = "out"\nverifier_token_file = "token"\n'
        '[generation]\ncache = "/c"\n'
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(file, ["policy.path=model", "verifier.sandbox.site_packages=['lib']"])
    assert config.problems.train == tmp_path / "mine" / "a.jsonl"
    assert config.run.root == tmp_path / "mine" / "out"
    assert config.run.verifier_token_file == str(tmp_path / "mine" / "token")
    assert config.generation.cache == "/c"
    assert config.policy.path == tmp_path / "elsewhere" / "model"
    assert config.verifier.sandbox.site_packages == (tmp_path / "elsewhere" / "lib",)
    assert config.in_run_folder(config.problems.held_out) == tmp_path / "mine/out/run/problems/held_out.jsonl"


def test_a_default_that_is_not_beside_the_file_starts_at_the_run_folder_and_a_hub_id_stays(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('[policy]\npath = "Org/Model-1.5B"\n[problems]\ntrain = "problems/train.jsonl"\n')
    config = load_config(file)
    assert config.policy.path == Path("Org/Model-1.5B")
    assert config.in_run_folder(config.problems.train) == config.run.folder / "problems/train.jsonl"


def test_all_faults_of_a_file_are_reported_together(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[runn]\nseed = 1\n[run]\nsed = 1\nseed = -1\n[learner]\nbatch_size = 3\n")
    with pytest.raises(ConfigError) as fault:
        load_config(file)
    assert str(fault.value).splitlines() == [
        f"{file}: run.seed: must be greater than or equal to 0 (given: -1)",
        f"{file}: unknown key run.sed: did you mean run.seed?",
        f"{file}: unknown key learner.batch_size: did you mean broker.batch_size or sft.batch_size?",
        f"{file}: unknown key runn: did you mean run?",
    ]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            ["broker.curriculum.size=3"],
            "broker.curriculum.size is a key for name=subset, and not for name=epochs",
        ),
        (
            ["broker.curriculum.name=subset", "broker.curriculum.size=3", "broker.curriculum.parts=3"],
            "broker.curriculum.parts is a key for name=potential, and not for name=subset",
        ),
        (["broker.curriculum.sise=3"], "unknown key broker.curriculum.sise: did you mean broker.curriculum.size?"),
    ],
)
def test_a_key_of_another_kind_is_named_with_its_kind(given: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, given)
    assert str(error.value) == sentence


def test_overrides_are_toml_values_or_bare_strings() -> None:
    config = load_config(None, ["learner.learning_rate=1e-3", "run.name=mine", "broker.pipeline_k=2"])
    assert (config.learner.learning_rate, config.run.name, config.broker.pipeline_k) == (1e-3, "mine", 2)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("learner.lr=1", "unknown key learner.lr"),
        ("nonsense.x=1", "unknown key nonsense"),
        ("run.seed=-1", "run.seed: "),
        ("broker.batch_size=30", "must be a multiple of group_size 8"),
        ("learner.objective=ppo3", "learner.objective is a section: set learner.objective.name"),
        ("learner.objective.name=ppo3", "learner.objective.name: must be one of dapo, grpo.*: did you mean ppo"),
        ("learner.objective.divisor_tokens=8", "learner.objective: .*divisor_tokens is for aggregation fixed_divisor"),
        ("learner.objective.dual_clip=1.1", "learner.objective: .*dual_clip must be above"),
        ("learner.correction.floor=0.5", "learner.correction: .*floor is for kind token_masked"),
        ('learner.objective={name = "ppo", proximal = "sampler"}', "set correction.kind to none"),
        ("learner.schedule.decay=cosine", "learner.schedule: .*cosine needs decay_steps"),
        ("learner.schedule.floor=0.1", "learner.schedule: .*for decay cosine"),
        ('learner.advantage={estimator = "group_mean", ddof = 1}', "ddof and epsilon have no effect"),
        ("broker.reward.rule=callable", "broker.reward: .*entry_point is for rule callable"),
        ("broker.reward.overlong=soft", "broker.reward: .*buffer_tokens is for overlong soft"),
        ("learner.objective.clip_hihg=0.3", "unknown key learner.objective.clip_hihg"),
        ("learner.clip_high=0.3", "unknown key learner.clip_high"),
        ("learner.lora.publication=adapter", "learner.lora: .*publication adapter needs adapters: set rank"),
        (
            'learner={policy_deltas = true, lora = {rank = 2, publication = "adapter"}}',
            "learner: .*policy_deltas is for whole weights",
        ),
        ("generation.vllm.on_update=abort", "generation.vllm.on_update: "),
        ("run.name=../evil", "run.name: "),
        ("run.name", "not of the form"),
        ("run.seed.deep=1", "run.seed: "),
    ],
)
def test_a_bad_value_is_named(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(None, [override])


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("run.name=/bad-name", "run.name: expected: name of the run, of its folder .* \\(given: '/bad-name'\\)"),
        (
            "broker.reward.entry_point=mine",
            "broker.reward.entry_point: expected: for callable: package.module:function",
        ),
        ('plan.stages=[{name = "a/b"}]', "plan.stages.0.name: expected: name of the stage: letters"),
    ],
)
def test_a_value_of_another_form_is_answered_with_what_the_key_is(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        load_config(None, [override])
    assert "pattern" not in str(raised.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("generation.engine=openai", r"generation\.engine: .*takes no weights.*nouscoder eval PROBLEMS --url URL"),
        ("generation.zero_mismatch=true", r"zero_mismatch is refused: .*generation\.vllm\.batch_invariant"),
        ("generation.vllm.enable_lora=true", "enable_lora is refused: .*merged into the weights"),
        ("generation.vllm.speculative_config={}", "speculative_config is refused: the draft model would not learn"),
        ("generation.vllm.quantization=fp8", "quantization is refused: rounded weights"),
        ("generation.vllm.kv_cache_dtype=fp8", "kv_cache_dtype is refused: rounded weights or keys and values"),
        (
            "generation.vllm.weight_transfer=sparse_nccl",
            "sparse_nccl is refused: take gloo, nccl or ipc and set learner",
        ),
        ("generation.vllm.data_parallel_size=2", "data_parallel_size is refused: .*start a second generation service"),
    ],
)
def test_a_setting_that_is_not_safe_for_training_is_refused_with_the_reason(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        load_config(None, [override])
    assert "Value error" not in str(raised.value)


def test_batch_invariant_kernels_exist_only_for_vllm_on_a_gpu() -> None:
    wanted = "generation.vllm.batch_invariant=true"
    on_gpu = load_config(None, [wanted, "generation.engine=vllm", "generation.device=cuda"])
    assert on_gpu.generation.vllm.batch_invariant
    for elsewhere in (["generation.engine=vllm"], ["generation.device=cuda"], []):
        with pytest.raises(ConfigError, match="needs the vllm engine on a GPU: the sums"):
            load_config(None, [wanted, *elsewhere])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["gloo"], "weight_transfer gloo needs the vllm engine: other engines read the files"),
        (["nccl", "generation.engine=vllm"], 'nccl needs CUDA, and device is "cpu": take gloo'),
        (
            ["nccl", "generation.engine=vllm", "generation.device=cuda"],
            'nccl needs CUDA, and learner.device is "cpu": take gloo',
        ),
        (
            ["nccl", "generation.engine=vllm", "generation.device=cuda", "generation.vllm.tensor_parallel_size=2"],
            "nccl needs tensor_parallel_size 1: NCCL may wait for ever",
        ),
        (
            [
                *("gloo", "generation.engine=vllm", "tls.certificate=a", "tls.key=b", "tls.ca=c"),
                *("verifier.tls.certificate=a", "verifier.tls.key=b"),
            ],
            "tls encrypts all connections of the run, and generation.vllm.weight_transfer gloo does not: take files",
        ),
        (
            ["gloo", "generation.engine=vllm", "learner.lora.rank=4", "learner.lora.publication=adapter"],
            "learner.lora.publication adapter publishes no whole weights, which generation.vllm.weight_transfer gloo",
        ),
    ],
)
def test_a_transfer_of_weights_that_cannot_work_is_refused_with_the_reason(changes: list[str], sentence: str) -> None:
    transfer, *others = changes
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load_config(None, [f"generation.vllm.weight_transfer={transfer}", *others])


def test_nccl_runs_between_a_learner_and_a_sampler_on_gpus() -> None:
    on_gpus = ["generation.engine=vllm", "generation.device=cuda", "learner.device=cuda:1"]
    config = load_config(None, ["generation.vllm.weight_transfer=nccl", *on_gpus])
    assert config.generation.vllm.weight_transfer == "nccl"


def test_training_with_truncated_probabilities_is_refused_for_vllm() -> None:
    truncated = ["generation.sampling.top_p=0.9"]
    assert load_config(None, truncated).generation.sampling.top_p == 0.9
    with pytest.raises(ConfigError, match=r"generation\.sampling\.top_p must be 1"):
        load_config(None, [*truncated, "generation.engine=vllm"])


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[run]\nseed = 1\n")
    with pytest.raises(ConfigError, match="seed is a value, not a section"):
        load_config(file, ["run.seed.deep=1"])


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "missing.toml")
    for name, text in (("broken.toml", "a = "), ("broken.json", "{"), ("list.json", "[]")):
        broken = tmp_path / name
        broken.write_text(text)
        with pytest.raises(ConfigError, match=rf"{name} cannot be read"):
            load_config(broken)


def test_json_is_supported_and_null_means_the_default(tmp_path: Path) -> None:
    tree = Config(run=RunSection(name="mine", seed=3)).model_dump(mode="json")
    tree["learner"]["learning_rate"] = None
    tree["demo"] = None
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tree))
    assert load_config(file) == Config(run=RunSection(name="mine", seed=3, root=tmp_path / "runs"))


def sections(model: type[BaseModel], path: str = "") -> list[tuple[str, type[BaseModel]]]:
    """Every section of the tree, by its path."""
    found: list[tuple[str, type[BaseModel]]] = [(path, model)]
    for name, field in model.model_fields.items():
        for choice in (field.annotation, *map(unannotated, get_args(field.annotation))):
            if isinstance(choice, type) and issubclass(choice, BaseModel):
                found += sections(choice, f"{path}.{name}" if path else name)
    return found


def unannotated(choice: Any) -> Any:
    """A choice of a union without its tag."""
    return getattr(choice, "__origin__", choice)


def test_every_key_has_a_description() -> None:
    assert [path for path, _ in sections(Config)].count("learner.objective") == 9, (
        "every section of a union is looked at"
    )
    silent = [
        f"{path}.{name}"
        for path, model in sections(Config)[1:]
        for name, field in model.model_fields.items()
        if not field.description and not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["broker.redis_url=redis://a", "broker.redis_url_file=/b"], "give redis_url or redis_url_file, not both"),
        (["tls.certificate=/a", "tls.key=/b"], "give certificate, key and ca together"),
        (["run.services=cloud"], "run.services: "),
        (["generation.policy_from=disk"], "generation.policy_from: "),
        (["generation.policy_patience_s=0"], "generation.policy_patience_s: "),
    ],
)
def test_contradictory_settings_are_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(None, overrides)


def test_the_domain_gets_records_with_the_values_of_the_keys_of_the_same_names() -> None:
    sampling = SamplingSection(temperature=0.5, top_p=0.9, max_new_tokens=7)
    assert sampling.record(Sampling, seed=3) == Sampling(0.5, 0.9, 7, 3)
    assert sampling.record(Sampling, seed=3, max_new_tokens=9).max_new_tokens == 9
    assert Config().run.guards.record(Thresholds).length_drift == Config().run.guards.length_drift


def test_a_record_with_a_field_that_is_no_key_is_not_made() -> None:
    with pytest.raises(AttributeError, match="entropy"):
        Config().run.guards.record(BatchFigures)


STAGES = """
[run]
name = "mine"
sinks = ["wandb"]
[[plan.stages]]
name = "short"
set.run.total_batches = 4
[[plan.stages]]
name = "long"
set.broker.curriculum = {name = "subset", size = 4}
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    (tmp_path / "mine.toml").write_text(STAGES)
    return tmp_path / "mine.toml"


@pytest.mark.parametrize("of_long", ["1", "long"])
def test_set_reaches_a_stage_by_index_and_by_name(
    plan_file: Path, of_long: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = [
        *("plan.stages.0.run.total_batches=7", f"plan.stages.{of_long}.from=best", "run.sinks.0=mlflow"),
        *(f"plan.stages.{of_long}.yarn.factor=2.0", f"plan.stages.{of_long}.yarn.original_tokens=64"),
        *(f"plan.stages.{of_long}.broker.curriculum.size=2", f"plan.stages.{of_long}.set.problems.train=mine.toml"),
    ]
    config = load_config(plan_file, sets)
    short, long = (config.of_stage(index) for index in range(2))
    assert (short.run.total_batches, long.run.total_batches) == (7, 30)
    assert (config.plan.stages[1].start, config.plan.stages[1].yarn.positions) == ("best", 128)
    assert getattr(long.broker.curriculum, "size", None) == 2
    assert long.problems.train == plan_file, "a path starts at the working folder"
    assert config.run.sinks == ("mlflow",)
    given = read_given(plan_file, sets).sets
    assert given["plan"]["stages"]["0"] == {"set": {"run": {"total_batches": 7}}}
    assert given["run"]["sinks"] == ["mlflow"], "a list of values is set as a whole"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("plan.stages.2.run.total_batches=1", r"no stage is 2 \(stages: 0 short, 1 long\)"),
        ("plan.stages.lon.run.total_batches=1", r"no stage is lon: did you mean long\? \(stages: 0 short, 1 long\)"),
        ("plan.stages.0.yran.factor=2.0", r"a stage has no key yran: did you mean yarn\?"),
        (
            "plan.stages.0.learner.lerning_rate=1",
            r"plan.stages, short: unknown key .*mean learner.learning_r",
        ),
        (
            "plan.stages.long.learning_rate=1",
            r"plan.stages, long: unknown key learning_rate: did you mean l",
        ),
        ("plan.stages.0.run.name=x", "a stage cannot set run.name"),
        ("plan.stages.0.run.sinks.0=wandb", "the file gives 0 elements of this list: set it as a whole"),
        ("run.sinks.1=wandb", "run.sinks.1: the file gives 1 elements of this list: set it as a whole"),
    ],
)
def test_a_faulty_set_of_a_stage_or_an_element_is_one_sentence(plan_file: Path, override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(plan_file, [override])
