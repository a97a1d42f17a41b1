"""The configuration of a run: one typed tree, read from TOML or JSON, changed by `--set a.b=c`.

Unknown keys fail. Each fault is one sentence, with the nearest known key. A run begins with a recipe of configs/, or
with what run/starter.py writes for `nouscoder init`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, Field, ValidationError, model_validator

from nouscoder.config.broker import OF_A_STAGE, BrokerSection
from nouscoder.config.generation import GenerationSection, InterpreterSection, ToolsSection
from nouscoder.config.learner import LearnerSection, SftSection
from nouscoder.config.overrides import changes_of_stages, put
from nouscoder.config.recipe import RecipeSection
from nouscoder.config.run import (
    DemoSection,
    EvaluationSection,
    MutualTlsSection,
    PlanSection,
    PolicySection,
    ProblemsSection,
    RunSection,
    SelfPlaySection,
    merged,
)
from nouscoder.config.verifier import VerifierSection
from nouscoder.domain.policy import WeightTransfer
from nouscoder.domain.staleness import StalePolicy
from nouscoder.errors import did_you_mean, plain_fault, why_unreadable
from nouscoder.formats.json_values import json_weight
from nouscoder.input_file import regular
from nouscoder.sections import TAGS, ConfigError, Section, keys_of, kinds_with, place_paths

# Keys that had another name before: old name -> name. The old ones are still read, so that the folders of earlier runs
# and the files of users go on.
MOVED = {
    "run.evaluate_every_batches": "evaluation.every_batches",
    "run.evaluation_limit_s": "evaluation.limit_s",
    "run.end_at_pass_at_1": "evaluation.end_at_pass_at_1",
    "run.end_after_no_gain": "evaluation.end_after_no_gain",
    "problems.held_out_samples": "evaluation.samples",
}


class Config(Section):
    """A whole run, as `nouscoder train` reads it and runs/NAME/config.toml records it."""

    run: RunSection = RunSection()
    problems: ProblemsSection = ProblemsSection()
    policy: PolicySection = PolicySection()
    broker: BrokerSection = BrokerSection()
    generation: GenerationSection = Field(default_factory=GenerationSection)
    verifier: VerifierSection = VerifierSection()
    learner: LearnerSection = Field(default_factory=LearnerSection)
    evaluation: EvaluationSection = EvaluationSection()
    tls: MutualTlsSection = MutualTlsSection()
    demo: DemoSection = DemoSection()
    sft: SftSection = SftSection()
    self_play: SelfPlaySection = SelfPlaySection()
    plan: PlanSection = PlanSection()
    recipe: RecipeSection = RecipeSection()

    @model_validator(mode="before")
    @classmethod
    def _by_new_names(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not _moved_in(given):
            return given
        tree = {name: dict(section) if isinstance(section, dict) else section for name, section in given.items()}
        for old in _moved_in(tree):
            section, name = old.split(".")
            new_section, new_name = MOVED[old].split(".")
            if isinstance(tree.setdefault(new_section, {}), dict):
                tree[new_section][new_name] = tree[section].pop(name)
        return tree

    def _faults(self) -> Iterator[str]:
        openai, transfer = self.generation.openai, self.generation.vllm.weight_transfer
        if self.tls.certificate and not self.verifier.tls.certificate:
            yield "tls is how the run's evaluations call the verifier too: give verifier.tls as well"
        if self.tls.certificate and openai.http and not openai.tls.certificate:
            yield "tls encrypts all connections of the run: give generation.openai.tls as well"
        yield from self._faults_of_tools()
        if self.broker.stale_policy is StalePolicy.KEEP and not self.learner.corrects_other_policies:
            yield "broker.stale_policy keep needs importance weights: choose a learner.correction.kind other than none"
        yield from self._faults_of_probabilities()
        if self.tls.certificate and transfer is not WeightTransfer.FILES:
            yield (
                f"tls encrypts all connections of the run, and generation.vllm.weight_transfer {transfer} does not:"
                " take files"
            )
        if self.learner.lora.publishes_adapters and transfer is not WeightTransfer.FILES:
            yield (
                "learner.lora.publication adapter publishes no whole weights, which generation.vllm.weight_transfer"
                f" {transfer} sends: take files"
            )
        if transfer is WeightTransfer.NCCL and self.learner.device.partition(":")[0] != "cuda":
            yield (
                f'generation.vllm.weight_transfer nccl needs CUDA, and learner.device is "{self.learner.device}":'
                " take gloo"
            )
        if self.policy.router_replay and self.generation.engine not in ("auto", "torch"):
            yield "policy.router_replay needs generation.engine torch: no other engine records experts"
        if self.learner.compile and self.policy.router_replay:
            yield "learner.compile does not know the recorded experts of policy.router_replay: set it to false"
        yield from self._faults_of_stages()

    def _faults_of_tools(self) -> Iterator[str]:
        """A slow tool must answer before its rollout's lease is lost, and the verifier must have the interpreters."""
        environment, tools = self.generation.environment, self.verifier.tools
        if isinstance(environment, ToolsSection) and environment.tool_limit_s >= self.broker.sampling_progress_s:
            yield (
                f"generation.environment.tool_limit_s {environment.tool_limit_s:g} must be less than"
                f" broker.sampling_progress_s {self.broker.sampling_progress_s:g}, or waiting costs leases"
            )
        if not isinstance(environment, InterpreterSection):
            return
        if not tools.sessions:
            yield "generation.environment.kind interpreter needs verifier.tools.sessions of 1 or more"
        if environment.calls > tools.calls:
            yield f"generation.environment.calls {environment.calls} must not exceed verifier.tools.calls {tools.calls}"
        if environment.tool_limit_s <= tools.call_s:
            yield (
                f"generation.environment.tool_limit_s {environment.tool_limit_s:g} must be more than"
                f" verifier.tools.call_s {tools.call_s:g}, or slow code gets no answer"
            )

    def _faults_of_probabilities(self) -> Iterator[str]:
        """vLLM reports the probability after truncation, and the learner computes it without."""
        trains = self.run.total_batches > 0 and not self.plan.stages
        sampling = self.generation.sampling
        if self.generation.engine != "vllm":
            return
        for key, wanted in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
            if trains and getattr(sampling, key) != wanted:
                yield (
                    f"generation.sampling.{key} must be {wanted} for training with the vllm engine: it reports the"
                    f" probabilities after this cut; evaluations may have another evaluation.{key}"
                )
        if sampling.stop:
            yield (
                "generation.sampling.stop needs generation.engine torch, because vLLM runs without a tokenizer here:"
                " take stop_token_ids"
            )

    def _faults_of_stages(self) -> Iterator[str]:
        is_external, stages = self.run.services == "external", self.plan.stages
        if stages and is_external and not (self.broker.redis_url or self.broker.redis_url_file):
            yield "a plan with external services keeps its stage in Redis: set broker.redis_url_file"
        if self.pass_rates_of_stage is not None and not stages and "/" not in self.run.name:
            yield "broker.curriculum.pass_rates names a stage, and there is no plan"
        if stages and "/" in self.run.name:
            yield "run.name of a plan is without a slash"
        for index, stage in enumerate(stages):
            here = f"in plan.stages, {stage.name}:"
            if is_external and "verifier" in stage.changes:
                yield f"{here} external services have one verifier for all stages"
            try:
                named = self.of_stage(index).pass_rates_of_stage
            except ValidationError as error:
                yield f"{here} {'; '.join(sentences(error, Config))}"
                return
            if named is not None and is_external:
                yield f"{here} an external broker has no folder of a stage"
            if named is not None and named not in [before.name for before in stages[:index]]:
                yield f"{here} broker.curriculum.pass_rates {OF_A_STAGE}{named}: no stage before it has that name"

    @property
    def shares_device(self) -> bool:
        """Whether the engine and the learner of a local run use the same GPU."""
        engine, learner = (each.device.replace("cuda:0", "cuda") for each in (self.generation, self.learner))
        return self.run.services == "local" and engine == learner != "cpu"

    @property
    def step_fault(self) -> str:
        """Why the batches cannot be divided into the learner's steps; "" if they can."""
        steps, num_groups = self.learner.steps_per_batch, self.broker.batch_size // self.broker.group_size
        if steps <= num_groups:
            return ""
        return f"learner.steps_per_batch is {steps}, but a batch has {num_groups} groups: each step needs a whole group"

    @property
    def pass_rates_of_stage(self) -> str | None:
        """The stage whose pass rates the curriculum takes; None when it names none."""
        named: str = getattr(self.broker.curriculum, "pass_rates", "")
        return named.removeprefix(OF_A_STAGE) if named.startswith(OF_A_STAGE) else None

    def of_stage(self, index: int) -> Config:
        """The configuration of this stage's run, counted from 0. Raises ValidationError when its changes are faulty."""
        stage = self.plan.stages[index]
        tree = merged(self.model_dump(mode="json", by_alias=True, exclude={"plan"}), stage.changes)
        tree["run"] = {**tree["run"], "name": f"{self.run.name}/{index + 1:02d}-{stage.name}"}
        return Config.model_validate(tree)

    def stage_run(self, index: int) -> Config:
        """The same, with absolute paths of its inputs: those whose default is in the run folder are in the plan's.

        Pass rates of a stage are those in its folder (data/pass_rates.py).
        """
        stage = self.of_stage(index).with_inputs_of(self)
        if stage.pass_rates_of_stage is None:
            return stage
        names = [each.name for each in self.plan.stages]
        path = str(self.of_stage(names.index(stage.pass_rates_of_stage)).run.folder)
        return stage.with_pass_rates(path)

    def changed(self, **sections: Mapping[str, Any]) -> Config:
        """A copy with other values in these sections. They are not checked."""
        changes = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=changes)

    def with_pass_rates(self, path: str) -> Config:
        """The same, with this file or folder of pass rates in the curriculum."""
        return self.changed(broker={"curriculum": self.broker.curriculum.model_copy(update={"pass_rates": path})})

    def with_inputs_of(self, other: Config) -> Config:
        """The same with absolute paths of its inputs. Those whose default is in the run folder are in `other`'s."""
        inputs = {name: other.in_run_folder(getattr(self.problems, name)) for name in ("train", "held_out")}
        return self.changed(problems=inputs, policy={"path": other.in_run_folder(self.policy.path)})

    def stage_named(self, run: str) -> int | None:
        """The stage whose run has this name; None when there is none."""
        names = [f"{self.run.name}/{index + 1:02d}-{stage.name}" for index, stage in enumerate(self.plan.stages)]
        return names.index(run) if run in names else None

    @property
    def asked_run(self) -> str:
        """The run that external services must serve to answer; empty for services that the run starts itself."""
        return self.run.name if self.run.services == "external" else ""

    @property
    def evaluating(self) -> Config:
        """The configuration as it is for evaluations: with their context and sampling in `generation`."""
        return self.model_copy(update={"generation": self.evaluation.of(self.generation)})

    @property
    def evaluation_seed(self) -> int:
        """The seed of the samples of evaluations."""
        return self.run.seed if self.evaluation.seed < 0 else self.evaluation.seed

    @property
    def engine_tokens(self) -> int:
        """The tokens of prompt and completion that the engine is started for: those of training and of evaluations."""
        return max(self.generation.engine_tokens, self.evaluating.generation.max_tokens_total)

    @property
    def total_steps(self) -> int:
        """Optimizer steps in the whole run."""
        return self.run.total_batches * self.learner.steps_per_batch

    def in_run_folder(self, path: Path) -> Path:
        """`path` itself when absolute, else inside the run folder."""
        return path if path.is_absolute() else self.run.folder / path


def _moved_in(tree: Mapping[str, Any]) -> list[str]:
    """The old names in a tree of sections."""
    sections = {old: tree.get(old.split(".")[0]) for old in MOVED}
    return [old for old, section in sections.items() if isinstance(section, dict) and old.split(".")[1] in section]


def moved_keys(given: Given) -> list[str]:
    """A sentence for each key that was given by its old name."""
    stages = [stage for tree in (given.file, given.sets) for stage in changes_of_stages(tree)]
    places = [(given.file, ""), (given.sets, ""), *((stage, " in a stage") for stage in stages)]
    found = [(old, where) for tree, where in places for old in _moved_in(tree)]
    return [f"{old}{where} is {MOVED[old]} now: the old name is still read" for old, where in dict.fromkeys(found)]


def load_config(path: Path | None, overrides: Iterable[str] = (), folder: Path | None = None) -> Config:
    """Read a file and apply overrides `a.b=value`, where value is TOML, or a bare string when it is not.

    A file whose name ends in .json is JSON, any other is TOML. Relative paths of the file start at `folder`, by default
    its own, those of an override at the working directory (sections.py). Raises ConfigError with a sentence for each
    fault.
    """
    tree = with_overrides(read_given(path, folder=folder).file, overrides, place="" if path is None else f"{path}: ")
    return Config.model_validate(tree)


def with_overrides(tree: dict[str, Any], overrides: Iterable[str], place: str = "") -> dict[str, Any]:
    """The tree of a configuration with the values of `--set`. Raises ConfigError for a faulty one, with the `place`."""
    for override in (overrides := [*overrides]):
        put(tree, override, Config)
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        of_sets = tuple(override.partition("=")[0] + ":" for override in overrides)  # no fault of the file
        said = sentences(error, Config)
        raise ConfigError("\n".join(each if each.startswith(of_sets) else place + each for each in said)) from error
    return tree


@dataclass(frozen=True, slots=True)
class Given:
    """What a person gave, unchecked, with absolute paths: the values of a file, and those of `--set`."""

    file: dict[str, Any] = field(default_factory=dict)
    sets: dict[str, Any] = field(default_factory=dict)


NOTHING_GIVEN = Given()


def read_given(path: Path | None, overrides: Iterable[str] = (), folder: Path | None = None) -> Given:
    """What `load_config` reads for the same arguments. Raises ConfigError."""
    file: dict[str, Any] = {} if path is None else read_tree(path)
    if path is not None:
        folder = folder or path.absolute().parent
        for tree in (file, *changes_of_stages(file)):
            place_paths(tree, Config, folder)
            for old in _moved_in(tree):
                section, name = MOVED[old].split(".")
                if name in (tree[section] if isinstance(tree.get(section), dict) else ()):
                    raise ConfigError(f"{path}: {old} is {MOVED[old]} now, and both are given: remove {old}")
    sets: dict[str, Any] = {}
    for override in overrides:
        put(sets, override, Config, file)
    return Given(file, sets)


def read_tree(path: Path) -> dict[str, Any]:
    """What a configuration file says, unchecked; null in JSON means the default. Raises ConfigError."""
    try:
        text = regular(path).read_text(encoding="utf-8-sig")
        if not text.strip():
            raise ConfigError(f"{path} is empty: nouscoder init writes a configuration")
        is_json = path.suffix == ".json"
        if is_json:
            json_weight(text)  # for a key that is there twice
        tree = _without_nulls(json.loads(text)) if is_json else tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {why_unreadable(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} cannot be read: it holds no sections")
    return tree


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    return value


def dump_config(config: Config) -> str:
    """The configuration as TOML, every value written out. `run.root` is absolute, so that the file may lie anywhere."""
    tree = config.model_dump(mode="json", by_alias=True)
    tree["run"]["root"] = str(config.run.root.resolve())
    return tomli_w.dumps(tree)


def sentences(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """The faults of a configuration in the order of its keys."""
    return [_sentence(fault, model) for fault in error.errors(include_url=False)]


def _sentence(fault: Any, model: type[BaseModel]) -> str:
    loc = [str(part) for part in fault["loc"] if not str(part).startswith(TAGS)]
    where = ".".join(loc) or "configuration"
    if fault["type"] == "extra_forbidden":
        chosen = [str(part) for part in fault["loc"] if str(part).startswith(TAGS)]
        if chosen and (kinds := kinds_with(model, loc)):
            return f"{where} is a key for {' or '.join(kinds)}, and not for {chosen[-1]}"
        return f"unknown key {where}{_nearest(loc, model)}"
    if fault["type"] == "string_pattern_mismatch":
        return f"{where}: expected: {_description(loc, model)} (given: {fault['input']!r:.80})"
    message, given = plain_fault(fault["msg"]), fault["input"]
    if section := re.match(r"a section whose (\w+) must be one of (.*)", message):
        if not isinstance(given, dict):
            return f"{where} is a section: set {where}.{section[1]}, one of {section[2]} (given: {given!r:.80})"
        where, message, given = f"{where}.{section[1]}", f"must be one of {section[2]}", given.get(section[1])
    if where == "configuration" or isinstance(given, dict):
        return f"{where}: {message}"
    choices = re.findall(r"[\w-]+", message) if re.match("must be ('|one of )", message) else []
    return f"{where}: {message} (given: {given!r:.80}){did_you_mean(str(given), choices)}"


def _description(loc: list[str], model: type[BaseModel]) -> str:
    """What the key is. `loc` may have the index of a section in a list, which keys do not have."""
    path = tuple(part for part in loc if not part.isdigit())
    return next((key.field.description or "" for key in keys_of(model) if key.path == path), "another text")


def _nearest(loc: list[str], model: type[BaseModel]) -> str:
    """A key of the same name elsewhere; else the nearest name in the same section; else the nearest of all keys."""
    keys = [key.path for key in keys_of(model)]
    namesakes = [".".join(path) for path in keys if path[-1] == loc[-1]]
    if namesakes:
        return f": did you mean {' or '.join(namesakes[:3])}?"
    section = tuple(loc[:-1])
    siblings = {path[len(section)] for path in keys if path[: len(section)] == section and len(path) > len(section)}
    near = did_you_mean(loc[-1], siblings)
    if near and section:
        return near.replace("mean ", f"mean {'.'.join(section)}.")
    return near or did_you_mean(".".join(loc), [".".join(path) for path in keys if did_you_mean(loc[-1], [path[-1]])])
