"""The checks of a local run and of a fine-tuning before any process starts and before the run folder is made.

All faults are reported together, each in one sentence with its key. The index of the problems is built here, because
building it is the check of the problem file; the broker finds it ready.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from nouscoder.atomic_files import is_taken, whole_or_gone
from nouscoder.config import Config, ConfigError, DecayKind, EnvironmentSection, VerifierSection
from nouscoder.config.broker import EpochsCurriculum
from nouscoder.config.devices import device_fault, has_gpu, no_gpu_in_torch
from nouscoder.data.check import CheckedFile, check_file, library_fault_here
from nouscoder.data.problem_index import all_held_out, in_languages, index_folder, open_index
from nouscoder.domain.problem import Problem
from nouscoder.domain.prompt import PromptSettings, PromptText
from nouscoder.errors import NousCoderError, did_you_mean, for_terminal
from nouscoder.extras import MODEL_LIBRARIES, require
from nouscoder.policy_folder.compose import with_yarn
from nouscoder.policy_folder.engine_choice import missing_engine, shared_device_fault, with_engine
from nouscoder.policy_folder.inspection import (
    HubUnavailable,
    downloaded,
    engine_faults,
    faults_of,
    has_chat_template,
    is_hub_id,
)
from nouscoder.policy_folder.prompt_file import PromptFileUnusable, prompt_lines, with_date, with_recorded_prompt
from nouscoder.rpc.addresses import require_free
from nouscoder.run.asked_of_models import adapter_faults, adapter_lines, token_faults
from nouscoder.run.held_out import leak_lines
from nouscoder.run.languages import grades_here, left_out_sentences, missing_here, with_languages
from nouscoder.run.sinks.targets import missing_packages
from nouscoder.run.token_limits import left_out_lines, length_faults, position_faults, prompt_faults
from nouscoder.run.users_code import users_code_faults
from nouscoder.sections import PathKind, keys_of
from nouscoder.verifier.judges.users_comparators import load_comparators

_REDIS_TIMEOUT_S = 5.0
_MOST_FAULTS = 20  # of a problem file in one message
_NOT_HERE, _OF_ANSWERS = "is not installed", ("language:", "other_languages:")


async def checked(config: Config) -> Config:
    """The configuration of a run that can start, with its policy of a hub. Raises ConfigError with all faults.

    An index of the problems that was made for a run which cannot start is removed.
    """
    with whole_or_gone(index_folder(config)):
        return await asyncio.to_thread(_checked, config)


def checked_fine_tuning(config: Config) -> Config:
    """The same of a fine-tuning. Raises ConfigError with all faults."""
    faults = [] if config.sft.train else ["sft.train: name a file of examples, or a run folder"]
    faults += _first_checkpoint_faults(config)
    if config.sft.out and is_taken(Path(config.sft.out)):
        faults.append(f"sft.out: {config.sft.out} exists already: give another folder")
    try:
        config = with_policy_folder(config)
        faults += _policy_faults(config, of_fine_tuning=True)
    except (HubUnavailable, PromptFileUnusable) as error:
        faults.append(f"policy.path: {error}")
    _raise(lambda: [*faults, *_file_faults(config, of_fine_tuning=True), *device_faults(config, of_fine_tuning=True)])
    _raise(lambda: adapter_faults(config))
    say_unused_gpu(config, of_fine_tuning=True)
    return config


def checked_plan(config: Config, begun: Collection[int] = ()) -> Config:
    """The configuration of a plan whose stages can all start, with its policy of a hub. `begun` ones are not checked.

    Raises ConfigError with the faults of all stages: before a model is fetched, those that need none.
    """
    require_training()
    if _is_on_a_hub(config):
        _raise_of_stages(config, begun, lambda stage, _: _faults_without_a_model(stage))
    try:
        config = with_policy_folder(config)
    except (HubUnavailable, PromptFileUnusable) as error:
        raise ConfigError(f"policy.path: {error}") from error
    runs = map(config.stage_run, range(len(config.plan.stages)))
    with whole_or_gone(*map(index_folder, runs)):
        _raise_of_stages(config, begun, lambda stage, positions: _all_faults(with_engine_here(stage), positions))
    say_unused_gpu(config)
    return config


def _raise_of_stages(config: Config, begun: Collection[int], find: Callable[[Config, int | None], list[str]]) -> None:
    """Raises ConfigError: each fault once, with the stages that have it. `find` gets a stage and its positions."""
    faults: dict[str, list[str]] = {}
    folder, positions = config.in_run_folder(config.policy.path), None
    for index, stage in enumerate(config.plan.stages):
        run, found = config.stage_run(index), list[str]()
        if (named := config.of_stage(index).pass_rates_of_stage) is not None:
            earlier = config.stage_run([one.name for one in config.plan.stages].index(named))
            found += fault_of("broker.curriculum.pass_rates", partial(_require_common_problems, run, earlier))
            run = run.changed(broker={"curriculum": EpochsCurriculum()})  # the other stage makes what it needs
        if stage.yarn.factor:
            positions = stage.yarn.positions
            if (folder / "config.json").is_file():
                found += fault_of("yarn", partial(with_yarn, folder, stage.yarn.factor, stage.yarn.original_tokens))
        for fault in [] if index in begun else [*found, *find(run, positions)]:
            faults.setdefault(fault, []).append(run.run.name)
    _raise(lambda: [f"stage {', '.join(names)}: {fault}" for fault, names in faults.items()])


def _require_common_problems(run: Config, earlier: Config) -> None:
    """Raises ConfigError when a stage has no pass rate of this one's problems. Wrong files are reported elsewhere."""
    found = list[set[str]]()
    with suppress(NousCoderError):
        for each in (run, earlier):
            with closing(open_index(each)) as index:
                found.append({*index.problem_ids})
    if len(found) == 2 and found[0].isdisjoint(found[1]):
        raise ConfigError(f"{earlier.run.name} trains on none of its problems, so it has no pass rate of them")


def _raise(find: Callable[[], list[str]]) -> None:
    if faults := find():
        raise ConfigError("\n".join(faults))


def require_training() -> None:
    """Raises ExtraMissing when this installation lacks a package that the services of a run import."""
    require("demo", "redis", *MODEL_LIBRARIES)


def _checked(config: Config) -> Config:
    require_training()
    if _is_on_a_hub(config):
        _raise(lambda: _faults_without_a_model(config))
    try:
        config = with_policy_folder(config)
    except (HubUnavailable, PromptFileUnusable) as error:
        raise ConfigError("\n".join([f"policy.path: {error}", *_faults_without_a_model(config)])) from error
    with suppress(NousCoderError):  # problems that cannot be read are reported below
        config = with_languages(config)
    _raise(lambda: _all_faults(config))
    say_unused_gpu(config)
    return config


def _all_faults(config: Config, positions: int | None = None) -> list[str]:
    """What keeps the run from its start. `positions`: of its policy, where the folder does not say so yet (YaRN)."""
    with suppress(NousCoderError):
        config = with_languages(config)
    faults = [*_policy_faults(config), *_faults_without_a_model(config), *position_faults(config, positions)]
    for check in (missing_engine, _shared_device_faults):
        faults += check(config)
    faults = faults or [*_language_faults(config), *prompt_faults(config)]
    return faults or [*adapter_faults(config), *token_faults(config)]


def _faults_without_a_model(config: Config) -> list[str]:
    """Those that are found before gigabytes of a model are fetched from a hub."""
    with suppress(NousCoderError):
        config = with_languages(config)
    faults = list[str]()
    for check in (
        *(_file_faults, _first_checkpoint_faults, _problem_faults, length_faults),
        *(device_faults, missing_packages, address_faults, _redis_faults, users_code_faults),
    ):
        faults += check(config)
    if config.run.total_batches and config.step_fault:
        faults.append(config.step_fault)
    return faults or [*_curriculum_faults(config)]


def _is_on_a_hub(config: Config) -> bool:
    return not config.in_run_folder(config.policy.path).exists() and is_hub_id(str(config.policy.path))


def with_policy_folder(config: Config) -> Config:
    """The configuration with the folder of its policy, with what that says of its prompt, the date, and its engine.

    A policy that is on a hub is downloaded. Raises HubUnavailable and PromptFileUnusable.
    """
    if _is_on_a_hub(config):
        config = config.changed(policy={"path": downloaded(str(config.policy.path))})
    folder = config.in_run_folder(config.policy.path)
    return with_engine_here(with_date(with_recorded_prompt(config, folder), folder))


def with_engine_here(config: Config) -> Config:
    """The configuration with the engine that samples from its policy here; why it is that one is said on stderr."""
    config, why = with_engine(config, config.in_run_folder(config.policy.path), beside_learner=True)
    if why:
        sys.stderr.write(for_terminal(f"{why}\n"))
    return config


def _policy_faults(config: Config, *, of_fine_tuning: bool = False) -> Iterator[str]:
    folder = config.in_run_folder(config.policy.path)
    if not folder.exists():
        model = config.recipe.base_model
        how = f"; the recipe's is fetched with: --set policy.path={model}" if model else ""
        yield f"policy.path: {_missing(config, config.policy.path)}{how}"
        return
    found = faults_of(folder) or ([] if of_fine_tuning else engine_faults(folder, config.generation.engine))
    yield from (f"policy.path: {fault}" for fault in found)
    if config.generation.environment.prompt_as == "messages" and not found and not has_chat_template(folder):
        yield f'generation.environment.prompt_as is "messages", but {folder} has no chat template: take "text"'


def _file_faults(config: Config, *, of_fine_tuning: bool = False) -> Iterator[str]:
    """Files that the configuration names besides problems and policy: those of [sft], or all others."""
    for key in keys_of(Config):
        if key.place is not PathKind.INPUT or (key.path[0] == "sft") is not of_fine_tuning:
            continue
        value: object = config
        for part in key.path:
            value = getattr(value, part, "")
        for path in value if isinstance(value, tuple) else (value,):
            if path and not Path(str(path)).exists():
                yield f"{key.name}: {_missing(config, Path(str(path)))}"


def _first_checkpoint_faults(config: Config) -> Iterator[str]:
    """The learner checks the rest, because only it may load torch."""
    first = config.learner.first_checkpoint
    if first and Path(first).exists() and not (Path(first) / "manifest.json").is_file():
        yield f"learner.first_checkpoint: {first} is not a checkpoint: it has no manifest.json"


def _problem_faults(config: Config) -> Iterator[str]:
    problems = config.problems
    train = config.in_run_folder(problems.train)
    if not train.is_file():
        yield f"problems.train: {_missing(config, problems.train)}"
        if config.recipe.data:  # a line of its own, so that a plan says it once
            yield "\n  ".join(["the recipe's problems are made with:", *config.recipe.data])
    else:
        faults = [*fault_of("problems.train", lambda: require_gradable(train, _section(config)))]
        yield from (faults := faults or [*fault_of("problems.train", lambda: _check_index(config))])
        if faults and problems.held_out_share and not config.evaluation.problems:
            return  # the held-out problems are in the same file
    if config.evaluation.problems:
        if Path(config.evaluation.problems).exists():  # else it is reported with the other files
            yield from fault_of("evaluation.problems", lambda: _check_held_out(config))
    elif not problems.held_out_share and not config.in_run_folder(problems.held_out).is_file():
        yield f"problems.held_out: {_missing(config, problems.held_out)}; or set problems.held_out_share"
    elif not problems.held_out_share or train.is_file():
        yield from fault_of("problems.held_out", lambda: _check_held_out(config))


def _check_index(config: Config) -> None:
    with closing(open_index(config)) as index:
        num_problems = len(index.problem_ids)
    if not num_problems:
        kept = config.problems.languages and f": none is in problems.languages, {', '.join(config.problems.languages)}"
        raise ConfigError(f"no problem is left to train on{_because_of_languages(config, 'training') or kept or ''}")


def _section(config: Config) -> VerifierSection | None:
    return config.verifier if grades_here(config) else None


def require_gradable(file: Path, here: VerifierSection | None) -> None:
    """Raises ConfigError with the problems that no answer of could be graded, and Unusable for a file of another form.

    Languages of answers that this machine lacks are none: those problems are left out (run/languages.py). `here`: how
    this machine grades; None where another one does.
    """
    stat = file.stat()
    load_comparators(here.comparators if here else ())
    checked = _checked_file(file, stat.st_size, stat.st_mtime_ns, here is not None)
    lacking = library_fault_here(here, checked.libraries, f"{checked.num_problems} problems") if here else ""
    faults = [one for one in checked.faults if not (_NOT_HERE in one.fault and one.fault.startswith(_OF_ANSWERS))]
    if len(faults) == 1 and not lacking:
        raise ConfigError(f"{file}, {faults[0]}")
    if faults or lacking:
        told = replace(checked, faults=tuple(faults)).text(_MOST_FAULTS)
        raise ConfigError("\n".join(filter(None, (lacking and f"{file}: {lacking}", told))))


@lru_cache(8)  # the stages of a plan have the same files
def _checked_file(file: Path, _size: int, _mtime_ns: int, here: bool) -> CheckedFile:
    return check_file(file, here=here)


def _check_held_out(config: Config) -> None:
    problems = config.problems
    if config.evaluation.problems or not problems.held_out_share:  # else they are in the training file
        file = config.evaluation.problems or config.in_run_folder(problems.held_out)
        require_gradable(Path(file), _section(config))
    if not in_languages(config, all_held_out(config)):
        raise ConfigError(f"no problem is left to evaluate on{_because_of_languages(config, 'held-out')}")


def _curriculum_faults(config: Config) -> Iterator[str]:
    """What keeps the broker from choosing among the problems that are left."""
    from nouscoder.broker.curriculum import open_curriculum  # it imports Redis' client

    with closing(open_index(config)) as index:
        try:
            open_curriculum(config, index.problem_ids)
        except NousCoderError as error:
            yield str(error) if str(error).startswith("broker.curriculum") else f"broker.curriculum: {error}"


_GET_LANGUAGES = "nouscoder doctor says how to get it"


def _because_of_languages(config: Config, which: str) -> str:
    with suppress(NousCoderError):  # of the other file, which is reported by its own check
        for sentence in left_out_sentences(config):
            if which in sentence:
                return f": {sentence}; {_GET_LANGUAGES}"
    return ""


def _language_faults(config: Config) -> Iterator[str]:
    if missing := missing_here(config):
        yield f"problems.languages: {missing} is not on this machine, and problems need it: {_GET_LANGUAGES}"


def notes_of(config: Config) -> list[str]:
    """What is to be said before a run starts: of its prompt, of problems that are left out, of its learning rate."""
    folder = config.in_run_folder(config.policy.path)
    return [
        *prompt_lines(config.generation.environment, folder),
        *misled_lines(config.generation.environment, all_held_out(config)),
        *left_out_lines(config),
        *decay_lines(config),
        *leak_lines(config),
        *adapter_lines(config),
    ]


def misled_lines(environment: EnvironmentSection, held_out: Sequence[Problem]) -> list[str]:
    """What is to be said of held-out problems that the form of the prompt asks wrongly; those of training are alike."""
    asking = environment.record(PromptSettings)
    misled = [one for one in held_out if asking.misleads(PromptText.of(one))]
    return [
        f"{len(misled)} of {len(held_out)} held-out problems, such as {one.problem_id}, have no starter code and"
        f" {one.tests.type} tests, and the form {asking.prompt_form} asks them to read stdin: import the set again, or"
        ' take generation.environment.prompt_form "plain"'
        for one in misled[:1]
    ]


def decay_lines(config: Config) -> list[str]:
    """What is to be said of a learning rate that reaches its lowest value before the run ends."""
    schedule, steps = config.learner.schedule, config.total_steps
    if schedule.decay is not DecayKind.COSINE or schedule.decay_steps >= steps:
        return []
    rate = f"{schedule.floor * config.learner.learning_rate:g}"
    return [
        f"warning: learner.schedule.decay_steps is {schedule.decay_steps}, but the run has {steps} steps"
        f" (run.total_batches * learner.steps_per_batch): the learning rate is {rate} in the"
        f" {steps - schedule.decay_steps} steps after it"
    ]


def device_faults(config: Config, *, of_fine_tuning: bool = False) -> Iterator[str]:
    """The devices of the configuration that this machine certainly has not."""
    for key, device in _devices(config, of_fine_tuning):
        if fault := device_fault(key, device):
            yield fault


def address_faults(config: Config) -> Iterator[str]:
    """The addresses of a person's own at which nobody can listen now; those of gRPC are sockets of the run."""
    given = {"run.pages": config.run.pages, "generation.openai.http": config.generation.openai.http}
    for key, address in given.items():
        if address:
            yield from fault_of(key, partial(require_free, address))


def say_unused_gpu(config: Config, *, of_fine_tuning: bool = False) -> None:
    """Write to stderr that a GPU is here and not used, if it is so."""
    unused = [key for key, device in _devices(config, of_fine_tuning) if device == "cpu"]
    if unused and has_gpu():
        are = "are" if len(unused) > 1 else "is"
        why = no_gpu_in_torch() or f"{' and '.join(unused)} {are} cpu: auto or cuda would use it"
        sys.stderr.write(f"this machine has a GPU, and {why}\n")


def _devices(config: Config, of_fine_tuning: bool) -> list[tuple[str, str]]:
    generation = [] if of_fine_tuning else [("generation.device", config.generation.device)]
    return [("learner.device", config.learner.device), *generation]


def _shared_device_faults(config: Config) -> Iterator[str]:
    if config.generation.engine == "vllm" and (fault := shared_device_fault(config)):
        yield fault


def _redis_faults(config: Config) -> Iterator[str]:
    from nouscoder.broker.redis_address import configured_url, without_password
    from nouscoder.broker.redis_server import RedisServerError, find_redis_binary, is_own
    from nouscoder.learner.state.run_files import FILE, read_run_id

    if config.broker.redis_url_file and not Path(config.broker.redis_url_file).is_file():
        return  # reported with the other files
    url = configured_url(config.broker)
    if not url or is_own(url, config.run.folder / "redis"):
        yield from fault_of("broker.redis_url", find_redis_binary, RedisServerError)
        return
    import redis

    try:
        with redis.Redis.from_url(
            url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S
        ) as client:
            found, identity = client.hmget(f"nouscoder:{{{config.run.name}}}:meta", "run_id", "identity")
    except (redis.RedisError, ValueError) as error:
        yield f"broker.redis_url: {without_password(url)} cannot be used: {error}"
        return
    if found and found.decode() != read_run_id(config.run.folder / FILE):
        yield (
            f"broker.redis_url: {without_password(url)} holds another run of the name {config.run.name}, in"
            f" {json.loads(identity)['folder']}: give this run another run.name, or try `nouscoder runs rm`"
        )


def fault_of(key: str, check: Callable[[], object], errors: type[Exception] = NousCoderError) -> Iterator[str]:
    """The error of `check` as a fault of `key`, if there is one."""
    try:
        check()
    except errors as error:
        yield f"{key}: {error}"


def _missing(config: Config, path: Path) -> str:
    where = "" if path.is_absolute() else ", and the folder of the configuration has no file of that name"
    return no_such(config.in_run_folder(path), where)


def no_such(path: Path, where: str = "") -> str:
    """A message that the path does not exist, with the nearest name in its folder."""
    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    names = [name for name in names if did_you_mean(path.stem, [Path(name).stem])]  # a common suffix is not enough
    return f"{path} does not exist{where}{did_you_mean(path.name, names)}"
