"""`nouscoder demo`, `train`, `init`, `prepare-run` and `model`: one run, from its inputs to its end."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nouscoder.cli.options import SetOption, new, only_with, say
from nouscoder.config import load_config
from nouscoder.run.supervisor import wait_passively


class EngineChoice(StrEnum):
    """The engines that sample from a policy; auto chooses when a run starts."""

    AUTO = "auto"
    TORCH = "torch"
    VLLM = "vllm"


# The demo's policy is tiny and trains in float32: compiling it would take longer than sampling, vLLM would take most of
# the memory, and its own choice of a data type is bfloat16.
_SMALL_VLLM = (
    "generation.vllm.enforce_eager=true",
    "generation.vllm.dtype=float32",
    f"generation.vllm.kv_cache_memory_bytes={256 * 1024**2}",
)


def demo(
    seed: Annotated[int, typer.Option(min=0, help="seed of problems, policy and sampling")] = 0,
    name: Annotated[str | None, typer.Option(help="name of the run folder; default demo-SEED")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue an earlier run of this name")] = False,
    real: Annotated[
        bool, typer.Option("--real", help="a real language model, SmolLM2-135M-Instruct: about a quarter of an hour")
    ] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="with --real: on a GPU, with configs/smollm2-135m.toml")] = False,
    engine: Annotated[
        EngineChoice | None,
        typer.Option(help="the engine of generation; default: torch, or with --resume that of the run"),
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Train a small policy with real services and real sandboxes: about five minutes on two cores."""
    from nouscoder.demo.run import computes_in_bfloat16, demo_run

    only_with("--real: the policy of the plain demo is too small for a GPU", real, "--gpu")
    recipe = "smollm2-135m" if gpu else "demo-real" if real else "demo"
    own = _SMALL_VLLM if engine is EngineChoice.VLLM and not real else ()
    chosen = [] if engine is None and resume else [f"generation.engine={(engine or EngineChoice.TORCH).value}"]
    if real and not resume and computes_in_bfloat16():
        chosen += ["generation.dtype=bfloat16", "learner.dtype=bfloat16"]
    values = [*chosen, *own, *(overrides or [])]
    raise typer.Exit(asyncio.run(demo_run(seed=seed, name=name, resume=resume, overrides=values, recipe=recipe)))


def train(
    config_file: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="configuration of the run, TOML or JSON")
    ] = None,
    recipe: Annotated[str, typer.Option(metavar="NAME", help="one of `nouscoder recipes`, in place of CONFIG")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="continue an earlier run of this name")] = False,
    smoke64: Annotated[
        bool, typer.Option("--smoke64", help="only test whether the reward rises on 64 problems; exit code 0 or 1")
    ] = False,
    pass_rates: Annotated[
        Path | None,
        typer.Option(help="for --smoke64: file of pass rates of the first policy; default: they are measured"),
    ] = None,
    smoke_batches: Annotated[
        int, typer.Option(min=0, help="for --smoke64: batches to train; 0: so many that each third has each problem")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="for --smoke64: print the result as JSON")] = False,
    overrides: SetOption = None,
) -> None:
    """Train with service processes of this machine, or with running services if run.services is "external".

    With --resume, values that CONFIG or --set say anew are taken where a run can change them, and refused by name where
    not; more run.total_batches continue a finished run.

    A configuration with plan.stages runs its stages one after the other. With --smoke64 it trains on 64 problems that
    the first policy solves sometimes, and says whether the reward rises.

    With --recipe the run has the recipe's name, its model of a hub, and the problem files that its data commands make
    in the working directory; --set changes each.
    """
    from nouscoder.config.recipe import recipe_path
    from nouscoder.config.tree import moved_keys, read_given
    from nouscoder.logs import configure_logs
    from nouscoder.run.deployment import deployment
    from nouscoder.run.loop import train as run_training
    from nouscoder.run.plan import train_plan

    if (config_file is None) is not bool(recipe):
        raise typer.BadParameter("give CONFIG or --recipe NAME")
    only_with("--smoke64", smoke64, "--pass-rates", "--smoke-batches", "--json")
    values, folder = overrides or [], None
    if recipe:
        config_file, folder = recipe_path(recipe), Path.cwd()
        values = [f'run.name="{recipe}"', *load_config(config_file).recipe.inputs(), *values]
    config, given = load_config(config_file, values, folder), read_given(config_file, values, folder)
    for line in moved_keys(given):
        say(line, err=True)
    if deployment(config).json_logs:
        configure_logs("train")
    if smoke64:
        from nouscoder.run.smoke import SmokeTest
        from nouscoder.run.smoke import smoke64 as run_smoke64

        test = SmokeTest(smoke_batches, pass_rates)
        raise typer.Exit(asyncio.run(run_smoke64(config, test, resume=resume, as_json=as_json, given=given)))
    train_all = train_plan if config.plan.stages else run_training
    raise typer.Exit(asyncio.run(train_all(config, resume=resume, given=given)))


def init(
    model: Annotated[
        str, typer.Argument(help="the policy's Hugging Face folder, or ORGANISATION/MODEL; default: a name to edit")
    ] = "",
    problems: Annotated[str, typer.Argument(help="the problem file; default: a name to edit")] = "",
    out: Annotated[Path, new("file", "the new configuration")] = Path("my.toml"),
    engine: Annotated[EngineChoice, typer.Option(help="the engine of generation")] = EngineChoice.AUTO,
    overrides: SetOption = None,
) -> None:
    """Write a commented configuration for a model folder and a problem file; `nouscoder train` runs it.

    It has the values of --set too.
    """
    from nouscoder.config.tree import with_overrides
    from nouscoder.policy_folder.engine_choice import vllm_is_installed
    from nouscoder.policy_folder.inspection import context_tokens, is_hub_id
    from nouscoder.policy_folder.prompt_file import recorded_prompt
    from nouscoder.run.starter import starter, starter_inputs, write_starter

    policy, problem_file = starter_inputs(out, model, problems, engine.value)
    folder = out.absolute().parent / policy
    recorded = recorded_prompt(folder)
    prompt = None if recorded is None else asdict(recorded)
    values = starter(policy, problem_file, out.stem, context_tokens(folder), engine.value, prompt)
    write_starter(out, with_overrides(values, overrides or []))
    if not folder.exists() and is_hub_id(policy):
        say(f"{policy} is no folder here: the run fetches it from a hub, and checks it then")
    if engine is EngineChoice.VLLM and not vllm_is_installed():
        say("warning: vLLM is not installed here: begin the run where it is (docs/operating.md)", err=True)
    say(f"{out} is written; begin the run with: nouscoder train {shlex.quote(str(out))}")


class Part(StrEnum):
    """The inputs that `prepare-run` can make separately."""

    PROBLEMS = "problems"


def prepare_run(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="configuration of the run, TOML or JSON")],
    only: Annotated[Part | None, typer.Option(help="make only this")] = None,
    overrides: SetOption = None,
) -> None:
    """Make the missing inputs of a run: the demo's problems and a warm-started policy."""
    from rich.console import Console

    from nouscoder.demo.prepare import prepare_run as prepare_the_run
    from nouscoder.logs import configure_logs
    from nouscoder.run.deployment import deployment
    from nouscoder.run.view import View, open_view

    config = load_config(config_file, overrides or [])
    wait_passively()
    in_logs = deployment(config).json_logs
    if in_logs:
        configure_logs("prepare-run")
    with View() if in_logs else open_view(Console()) as view:
        asyncio.run(prepare_the_run(config, only_problems=only is Part.PROBLEMS, view=view))
        made = config.in_run_folder(config.problems.train if only else config.policy.path)
        view.settle()
        view.say(f"the run is prepared: {made} is there")


model_app = typer.Typer(no_args_is_help=True, help="Folders of models.")


class WeightType(StrEnum):
    """The types in which a folder may hold weights."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


@model_app.command("import")
def model_import(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="the model, quantised or not")],
    out: Annotated[Path, new("folder", "the new Hugging Face folder")],
    dtype: Annotated[WeightType, typer.Option(help="type of the weights in it")] = WeightType.BFLOAT16,
) -> None:
    """Make a Hugging Face folder of a GGUF file: weights, tokenizer, chat template, end tokens."""
    from nouscoder.policy_folder.gguf import import_gguf

    num_weights = import_gguf(file.absolute(), out, dtype.value)
    begin = f"nouscoder init {shlex.quote(str(out))} PROBLEMS.jsonl"
    say(f"{out} is written: {num_weights:,} weights; begin a run with: {begin}")
