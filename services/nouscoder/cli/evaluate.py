"""`nouscoder eval`: pass@k of a model on problems, and the comparison of two such evaluations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from nouscoder.cli import evaluate_options as options
from nouscoder.cli.options import ConfigOption, JsonOption, RunByDefault, SetOption, json_fields
from nouscoder.errors import Unusable

eval_app = typer.Typer(cls=RunByDefault, no_args_is_help=True)


@eval_app.callback()
def _eval() -> None:
    """pass@k of a model on problems. `eval PROBLEMS ...` is `eval run PROBLEMS ...`."""


@eval_app.command("run")
def eval_run(
    problems: options.ProblemsArgument,
    url: options.UrlOption = "",
    model: options.ModelOption = "",
    policy: options.PolicyOption = "",
    yarn_factor: options.YarnFactorOption = 0.0,
    yarn_original: options.YarnOriginalOption = 0,
    samples: options.SamplesOption = None,
    out: options.OutOption = None,
    num_samples: options.NumSamplesOption = 8,
    temperature: options.TemperatureOption = 0.6,
    top_p: options.TopPOption = 0.95,
    max_tokens: options.MaxTokensOption = 32_768,
    seed: options.SeedOption = 0,
    prompt: options.PromptOption = "plain",
    extra: options.ExtraOption = "{}",
    profile: options.ProfileOption = None,
    window: options.WindowOption = "",
    since: options.SinceOption = "",
    until: options.UntilOption = "",
    at_once: options.AtOnceOption = 16,
    verifier: options.VerifierOption = None,
    token: options.TokenOption = None,
    ca: options.CaOption = None,
    all_tests: options.AllTestsOption = False,
    as_json: JsonOption = False,
    config_file: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Sample a model on problems, grade the samples, and report pass@k. Run again, it continues where it stopped."""
    from nouscoder.config import load_config
    from nouscoder.evaluation.evaluate import EvaluationRequest, evaluate
    from nouscoder.evaluation.samples import SamplingSettings
    from nouscoder.evaluation.summary import summary_text

    if url and not model:
        raise Unusable("--url needs --model, the name of the model at the server")
    checkpoint = _checkpoint(policy, yarn_factor, yarn_original)
    if checkpoint:
        model = checkpoint.model(model)
    settings = SamplingSettings(
        model, num_samples, temperature, top_p, max_tokens, seed, _prompt_format(prompt), json_fields("--extra", extra)
    )
    folder = out or _folder(model, samples)
    dates, profiles = _window(window, since, until), tuple(profile or ())
    request = EvaluationRequest(
        problems, folder, settings, url, samples, dates, profiles, at_once, verifier, token, ca, all_tests, checkpoint
    )
    record = evaluate(request, load_config(config_file, overrides or []))
    typer.echo(json.dumps(record) if as_json else summary_text(record, folder))


@eval_app.command("compare")
def eval_compare(
    a: Annotated[Path, typer.Argument(help="folder of an evaluation")],
    b: Annotated[Path, typer.Argument(help="folder of another one, of the same problems")],
    profile: Annotated[str, typer.Option(help="whose verdicts count; default: A's first")] = "",
    as_json: JsonOption = False,
) -> None:
    """Compare two evaluations problem by problem: exact test, paired bootstrap, and the problems that differ."""
    from nouscoder.evaluation.compare import compare

    found = compare(a, b, profile)
    typer.echo(json.dumps(found.record()) if as_json else found.text())


def _folder(model: str, samples: Path | None) -> Path:
    """Where an evaluation goes that is given no folder."""
    name = model or (samples.stem if samples else "samples")
    return Path("evaluations") / re.sub(r"[^\w.-]+", "_", name)


def _checkpoint(policy: str, yarn_factor: float, yarn_original: int) -> Any:
    from nouscoder.evaluation.checkpoint import Checkpoint

    if policy:
        return Checkpoint.named(policy, yarn_factor, yarn_original)
    if yarn_factor or yarn_original:
        raise Unusable("--yarn-factor and --yarn-original-tokens need --policy; a server has a context of its own")
    return None


def _window(name: str, since: str, until: str) -> Any:
    from nouscoder.evaluation.problems import Window, window_named

    if name and (since or until):
        raise Unusable("give either --window, or --since and --until")
    return window_named(name) if name else Window(since, until)


def _prompt_format(name: str) -> Any:
    from nouscoder.evaluation.prompts import PromptFormat

    try:
        return PromptFormat(name)
    except ValueError:
        raise Unusable(f"--prompt {name!r} is none of {', '.join(PromptFormat)}") from None
